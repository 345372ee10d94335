"""How tensor parallelism divides the heads of a layer among ranks."""

from __future__ import annotations

from ..errors import ConfigError


def per_rank(name: str, num_heads: int, tensor_parallel_size: int) -> int:
    """Return the heads that one rank has.

    With more ranks than heads, several ranks have a copy of the same head.

    Args:
        name: What the heads are called in the message.
        num_heads: Heads in all, at least 1.
        tensor_parallel_size: Ranks, at least 1.

    Raises:
        ConfigError: The heads cannot be dealt out evenly.

    Example:
        >>> per_rank("num_key_value_heads", 8, 4), per_rank("num_key_value_heads", 2, 4)
        (2, 1)
    """
    if num_heads % tensor_parallel_size == 0:
        return num_heads // tensor_parallel_size
    if tensor_parallel_size % num_heads == 0:
        return 1
    raise ConfigError(
        f"{name} must divide tensor_parallel_size ({tensor_parallel_size}), or be "
        f"divided by it, got {num_heads}"
    )

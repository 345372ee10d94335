"""The arrays of which a layer's state consists, by the kind of layer."""

from __future__ import annotations

from typing import NamedTuple

from ..errors import ConfigError
from .model_config import ModelConfig
from .sharding import per_rank


class StateShapes(NamedTuple):
    """The shapes of the arrays of one layer's state on one rank.

    Attributes:
        conv: What a convolution has to remember, its last inputs, one fewer than its
            kernel is wide: `[num_channels, kernel_size - 1]`; None without one.
        recurrent: The recurrent state; None, if the layer only convolves.
    """

    conv: tuple[int, ...] | None
    recurrent: tuple[int, ...] | None


def state_shapes(config: ModelConfig, tensor_parallel_size: int) -> StateShapes:
    """Return the shapes of the arrays of one layer's state on one rank.

    Args:
        config: The model's config.
        tensor_parallel_size: Ranks that share the layer, at least 1.

    Raises:
        ConfigError: The config does not say how large a state is, or the ranks cannot
            share it evenly.
    """
    if config.linear_attn_config is not None or config.linear_num_key_heads is not None:
        return _delta_net(config, tensor_parallel_size)
    if config.mamba_d_state is not None:
        if (config.mamba_n_heads or config.num_heads) is not None:
            return _mamba2(config, tensor_parallel_size)
        return _mamba1(config, tensor_parallel_size)
    if config.conv_L_cache is not None:
        channels = _divide("hidden_size", config.hidden_size, tensor_parallel_size)
        return StateShapes((channels, config.conv_L_cache - 1), None)
    if config.model_type.startswith("minimax"):
        return _lightning(config, tensor_parallel_size)
    raise ConfigError(
        f"config must say how large a state is, got none of linear_num_key_heads, "
        f"mamba_d_state and conv_L_cache for {config.model_type or 'the model'}"
    )


def _delta_net(config: ModelConfig, ranks: int) -> StateShapes:
    """Gated delta networks (Yang et al., 2024, arXiv:2412.06464) and KDA."""
    kimi = config.linear_attn_config
    if kimi is not None:
        num_k = num_v = kimi.num_heads
        k_dim = v_dim = kimi.head_dim
        kernel_size = kimi.short_conv_kernel_size
    else:
        num_k = _given("linear_num_key_heads", config.linear_num_key_heads)
        k_dim = _given("linear_key_head_dim", config.linear_key_head_dim)
        num_v = config.linear_num_value_heads or num_k
        v_dim = config.linear_value_head_dim or k_dim
        kernel_size = config.linear_conv_kernel_dim
    num_k = per_rank("linear_num_key_heads", num_k, ranks)
    num_v = per_rank("linear_num_value_heads", num_v, ranks)
    channels = 2 * num_k * k_dim + num_v * v_dim  # queries, keys, values
    return StateShapes((channels, kernel_size - 1), (num_v, k_dim, v_dim))


def _mamba2(config: ModelConfig, ranks: int) -> StateShapes:
    """Mamba-2 (Dao and Gu, 2024, arXiv:2405.21060)."""
    all_heads = _given("mamba_n_heads", config.mamba_n_heads or config.num_heads)
    state_dim = _given("mamba_d_state", config.mamba_d_state)
    head_dim = config.mamba_d_head
    if head_dim is None and config.mamba_n_heads is None:  # no attention has heads
        head_dim = config.head_dim
    if head_dim is None:
        hidden_size = _given("hidden_size", config.hidden_size)
        head_dim = config.mamba_expand * hidden_size // all_heads
    num_heads = per_rank("mamba_n_heads", all_heads, ranks)
    num_groups = per_rank("mamba_n_groups", config.mamba_n_groups, ranks)
    channels = num_heads * head_dim + 2 * num_groups * state_dim
    conv = (channels, config.mamba_d_conv - 1)
    return StateShapes(conv, (num_heads, head_dim, state_dim))


def _mamba1(config: ModelConfig, ranks: int) -> StateShapes:
    """Mamba (Gu and Dao, 2023, arXiv:2312.00752)."""
    state_dim = _given("mamba_d_state", config.mamba_d_state)
    inner = config.mamba_expand * _given("hidden_size", config.hidden_size)
    # Without attention there is no other use for this field, and it is exact.
    if config.num_attention_heads is None and isinstance(config.intermediate_size, int):
        inner = config.intermediate_size
    channels = _divide("the width of the state", inner, ranks)
    return StateShapes((channels, config.mamba_d_conv - 1), (channels, state_dim))


def _lightning(config: ModelConfig, ranks: int) -> StateShapes:
    """Lightning attention (Qin et al., 2024, arXiv:2401.04658)."""
    all_heads = config.num_attention_heads
    if not isinstance(all_heads, int) or not all_heads:
        raise ConfigError(f"num_attention_heads must be a number, got {all_heads}")
    head_dim = config.head_dim or _given("hidden_size", config.hidden_size) // all_heads
    num_heads = per_rank("num_attention_heads", all_heads, ranks)
    return StateShapes(None, (num_heads, head_dim, head_dim))


def _given(name: str, value: int | None) -> int:
    if value is None:
        raise ConfigError(f"config must have {name} for the state of a layer")
    return value


def _divide(name: str, value: int | None, ranks: int) -> int:
    whole = _given(name, value)
    if whole % ranks:
        raise ConfigError(
            f"{name} must be a multiple of tensor_parallel_size ({ranks}), got {whole}"
        )
    return whole // ranks

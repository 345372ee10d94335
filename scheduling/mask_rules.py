"""What a layer's mask lets a query see, asked of the model and not of its config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch

from radixkv.mem_cache.errors import ConfigError

MaskFunction: TypeAlias = Callable[[int, int, torch.Tensor, torch.Tensor], torch.Tensor]
"""``function(batch, head, query positions, key positions)``: what is seen, as bools."""

_FAR: Final = 1 << 20
"""A position behind every window of today's models, if a rule names none."""


@dataclass(frozen=True, slots=True)
class MaskRule:
    """Stands for a mask in a model's forward: what would have made it.

    Attributes:
        function: What a query sees.
        local_size: Positions of the window or of the chunk, if there is one.
    """

    function: MaskFunction
    local_size: int | None


@dataclass(frozen=True, slots=True)
class Reach:
    """How far back a query sees; all that comes before it, if neither is given.

    Attributes:
        window: Positions that it sees, its own included.
        chunk: It sees from the last multiple of this on.
    """

    window: int | None = None
    chunk: int | None = None


def mask_rule(
    *,
    mask_function: MaskFunction,
    local_size: int | None = None,
    **others: object,
) -> MaskRule:
    """Hand the rule of a mask on, in the place of the mask; transformers calls this.

    Args:
        mask_function: What a query sees.
        local_size: Positions of the window or of the chunk, if there is one.
        **others: What the mask would be made for; positions are the step's affair.
    """
    return MaskRule(mask_function, local_size)


def reach_of(rule: MaskRule, device: torch.device | str = "cpu") -> Reach:
    """Find out how far back a rule lets a query see, by asking far out.

    Args:
        rule: What a layer was given as its mask.
        device: Where the model is.

    Raises:
        ConfigError: It is neither causal, nor a window, nor chunks.

    Complexity: O(window or chunk).
    """
    size = rule.local_size
    if size is None:
        # Which keys show a window that is not named: the first, and those around.
        query = torch.tensor([_FAR], device=device)
        keys = torch.tensor([0, 1, _FAR // 2, _FAR - 1, _FAR, _FAR + 1], device=device)
        if torch.equal(_seen(rule, query, keys), keys[None] <= query):
            return Reach()
    else:
        # Chunks of this size begin at the first of these queries, and at the last.
        queries = torch.tensor([4 * size, 5 * size - 1, 5 * size], device=device)
        keys = torch.arange(2 * size, 5 * size + 2, device=device)
        seen = _seen(rule, queries, keys)
        back = queries[:, None] - keys
        if torch.equal(seen, (back >= 0) & (back < size)):
            return Reach(window=size)
        chunks = queries[:, None] // size == keys // size
        if torch.equal(seen, (back >= 0) & chunks):
            return Reach(chunk=size)
    raise ConfigError(
        "attention must be causal, all of it or in windows or chunks, got a mask "
        f"that is none of these (of size {size})"
    )


def _seen(rule: MaskRule, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return what queries see of keys, bool `[num_queries, num_keys]`."""
    seen = torch.as_tensor(rule.function(0, 0, queries[:, None], keys[None]))
    return seen.bool().expand(len(queries), len(keys))

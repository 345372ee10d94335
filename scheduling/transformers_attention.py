"""What transformers calls in the place of its own attention and masks."""

from __future__ import annotations

from typing import Final

import torch

from radixkv.mem_cache.errors import ConfigError

from .mask_rules import MaskRule, mask_rule
from .models import TransformersObject, import_transformers
from .step_cache import current_step

ATTENTION: Final = "radixkv_paged"
"""The name of `paged_attention` in transformers' attention interface."""

UNMASKED: Final = "radixkv_paged_unmasked"
"""The same for models that compute with masks, and so must be given none."""

_CHANGES: Final = frozenset({"s_aux", "sinks", "position_bias"})
"""Options of a layer that change its attention, which nothing here computes."""

_HARMLESS: Final = frozenset({"dropout", "sliding_window", "position_ids"})
"""Options that do not: there is no dropout, and of windows the mask tells."""


def register_attention() -> None:
    """Make the attention and the mask rule known to transformers.

    Raises:
        ConfigError: transformers is not installed.
    """
    transformers = import_transformers()
    for name in (ATTENTION, UNMASKED):
        transformers.AttentionInterface.register(name, paged_attention)
    # Without a mask function, transformers builds no mask.
    transformers.AttentionMaskInterface.register(ATTENTION, mask_rule)


def paged_attention(
    module: TransformersObject,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: MaskRule | torch.Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attend as the step that is under way does.

    Args:
        module: The attention layer.
        query: `[1, num_q_heads, num_tokens, head_dim]`.
        key: K as the layer's cache returned it, or as the layer has changed it.
        value: V, the same.
        attention_mask: The rule of the layer's mask, or a mask that it made itself.
        scaling: Factor on the scores, ``head_dim ** -0.5`` if not given.
        softcap: Bound of the scores; none if not given.
        **kwargs: Other options of the layer; those that change attention are refused.

    Returns:
        The attention output `[1, num_tokens, num_q_heads, v_head_dim]`, and no weights.

    Raises:
        ConfigError: The model was called without a step, or needs another attention.
    """
    step = current_step()
    if step is None:
        raise ConfigError(
            f"attention {ATTENTION!r} works only inside TransformersRunner; "
            "model.set_attn_implementation('sdpa') gives the model back"
        )
    unsupported = [
        name
        for name, option in kwargs.items()
        if (name in _CHANGES and option is not None)
        or (name not in _HARMLESS and isinstance(option, (float, torch.Tensor)))
    ]
    if unsupported:
        raise ConfigError(
            "attention must be causal, with a window or a soft cap or not, got "
            f"{type(module).__name__} with {unsupported}"
        )
    attended = step.attend(
        module,
        query,
        key,
        value,
        attention_mask,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=softcap,
    )
    return attended, None

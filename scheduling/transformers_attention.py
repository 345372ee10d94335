"""The attention function that sends a transformers model's K and V to our pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from radixkv.mem_cache import KVPool
from radixkv.mem_cache.errors import ConfigError

from .attention_backends import AttentionBackend
from .models import TransformersObject

ATTENTION = "radixkv_paged"
"""The name of `paged_attention` in transformers' attention interface."""

_UNSUPPORTED = ("s_aux", "sinks", "position_bias")


@dataclass(frozen=True, slots=True, eq=False)
class StepMetadata:
    """What the attention layers must know of a step; a keyword of the model's forward.

    Attributes:
        pool: Where K and V live.
        slots: Slot of each new token, int64 `[num_tokens]`.
        attention: Who attends; it has taken the step.
        windows: Positions that a query sees, by layer; layers without a window are not
            in it.
    """

    pool: KVPool
    slots: torch.Tensor
    attention: AttentionBackend
    windows: Mapping[str, int]


def paged_attention(
    module: TransformersObject,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    step_metadata: StepMetadata | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Store K and V of a step's tokens and attend to their requests' pages.

    Args:
        module: The attention layer; its `layer_idx` is the layer of the pool.
        query: `[1, num_q_heads, num_tokens, head_dim]`.
        key: `[1, num_kv_heads, num_tokens, head_dim]`.
        value: `[1, num_kv_heads, num_tokens, v_head_dim]`.
        attention_mask: None; causality follows from the positions.
        scaling: Factor on the scores, ``head_dim ** -0.5`` if not given.
        softcap: Bound of the scores; none if not given.
        step_metadata: The step, as it was passed to the model.
        **kwargs: Other options of the layer. `sliding_window` must be what the config
            says; those that change attention are refused.

    Returns:
        The attention output `[1, num_tokens, num_q_heads, v_head_dim]`, and no weights.

    Raises:
        ConfigError: The model was called without a step, needs another attention, or
            another window than its config says.
    """
    if step_metadata is None:
        raise ConfigError(
            f"attention {ATTENTION!r} works only inside TransformersRunner; "
            "model.set_attn_implementation('sdpa') gives the model back"
        )
    unsupported = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if attention_mask is not None or unsupported:
        raise ConfigError(
            "attention must be causal, with a window or a soft cap or not, got "
            f"{type(module).__name__} with {unsupported or 'a mask'}"
        )
    layer = step_metadata.pool.layer(module.layer_idx)
    window = step_metadata.windows.get(layer.name)
    # Transformers puts windows into masks, of which there are none here. So what the
    # layer says and what its config says must agree, or it would see too much.
    if kwargs.get("sliding_window", window) != window:
        raise ConfigError(
            f"the window of {layer.name} must be {window}, as the config says, got "
            f"{kwargs['sliding_window']}"
        )
    layer.store(_unpack(key), _unpack(value), step_metadata.slots)
    attended = step_metadata.attention.attend(
        _unpack(query),
        layer,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=window,
        softcap=softcap,
    )
    return attended[None], None


def _unpack(states: torch.Tensor) -> torch.Tensor:
    """View `[1, num_heads, num_tokens, dim]` as `[num_tokens, num_heads, dim]`."""
    return states[0].transpose(0, 1)

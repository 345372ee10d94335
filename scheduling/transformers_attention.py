"""The attention function that sends a transformers model's K and V to our pool."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from radixkv.kernels import paged_attention_decode, paged_attention_extend
from radixkv.mem_cache import KVPool
from radixkv.mem_cache.errors import ConfigError

from .models import TransformersObject

ATTENTION = "radixkv_paged"
"""The name of `paged_attention` in transformers' attention interface."""

_UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "sinks", "position_bias")


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """What the attention layers must know of a step; a keyword of the model's forward.

    Attributes:
        pool: Where K and V live.
        page_table: Page ids, int32 `[max_num_requests + 1, max_pages_per_request]`.
        slots: Slot of each new token, int64 `[num_tokens]`.
        rows: Row of each request, int32 `[num_reqs]`, on the host.
        starts: First position to compute, int32 `[num_reqs]`, on the host.
        stops: End of the positions to compute, int32 `[num_reqs]`, on the host.
        is_decode: Whether every request computes one token.
    """

    pool: KVPool
    page_table: torch.Tensor
    slots: torch.Tensor
    rows: torch.Tensor
    starts: torch.Tensor
    stops: torch.Tensor
    is_decode: bool

    def attend(self, q: torch.Tensor, layer: int, scale: float) -> torch.Tensor:
        """Attend from the step's tokens to what is stored, `[num_tokens, heads, dim]`.

        Args:
            q: Queries, `[num_tokens, num_q_heads, head_dim]`.
            layer: Layer of the pool, which has the step's K and V already.
            scale: Factor on the scores.
        """
        k_buffer, v_buffer = self.pool.k_buffer(layer), self.pool.v_buffer(layer)
        if self.is_decode:
            return paged_attention_decode(
                q,
                k_buffer,
                v_buffer,
                self.page_table,
                self.rows,
                self.stops,
                page_size=self.pool.page_size,
                scale=scale,
            )
        return paged_attention_extend(
            q,
            k_buffer,
            v_buffer,
            self.page_table,
            self.rows,
            self.starts,
            self.stops,
            page_size=self.pool.page_size,
            scale=scale,
        )


def paged_attention(
    module: TransformersObject,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    step_metadata: StepMetadata | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Store K and V of a step's tokens and attend to their requests' pages.

    Args:
        module: The attention layer; its `layer_idx` is the layer of the pool.
        query: `[1, num_q_heads, num_tokens, head_dim]`.
        key: `[1, num_kv_heads, num_tokens, head_dim]`.
        value: `[1, num_kv_heads, num_tokens, head_dim]`.
        attention_mask: None; causality follows from the positions.
        scaling: Factor on the scores, ``head_dim ** -0.5`` if not given.
        step_metadata: The step, as it was passed to the model.
        **kwargs: Other options of the layer; those that change attention are refused.

    Returns:
        The attention output `[1, num_tokens, num_q_heads, head_dim]`, and no weights.

    Raises:
        ConfigError: The model was called without a step, or needs another attention.
    """
    if step_metadata is None:
        raise ConfigError(
            f"attention {ATTENTION!r} works only inside TransformersRunner; "
            "model.set_attn_implementation('sdpa') gives the model back"
        )
    if attention_mask is not None or any(
        kwargs.get(x) is not None for x in _UNSUPPORTED
    ):
        raise ConfigError(
            f"{type(module).__name__} needs a mask or one of {_UNSUPPORTED}, "
            "supported is plain causal attention"
        )
    layer = module.layer_idx
    step_metadata.pool.store(layer, _unpack(key), _unpack(value), step_metadata.slots)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return step_metadata.attend(_unpack(query), layer, scale)[None], None


def _unpack(states: torch.Tensor) -> torch.Tensor:
    """View `[1, num_heads, num_tokens, dim]` as `[num_tokens, num_heads, dim]`."""
    return states[0].transpose(0, 1)

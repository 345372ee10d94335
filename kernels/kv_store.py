"""Store K and V of a step's tokens to their slots."""

from __future__ import annotations

import torch


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Write the K and V of each token to its slot, in place.

    Defined by this loop, in any order::

        for i, slot in enumerate(slots):
            k_buffer[slot] = k[i]
            v_buffer[slot] = v[i]

    Values are converted to the buffers' dtype. A slot named twice, as padded tokens
    name the slots of the hold page, keeps the K of one of them and the V of one.

    Args:
        k: K of the tokens, `[num_tokens, num_kv_heads, head_dim]`.
        v: V of the tokens, `[num_tokens, num_kv_heads, v_head_dim]`.
        k_buffer: A layer's K, `[num_slots, num_kv_heads, head_dim]`; changed in place.
        v_buffer: A layer's V, `[num_slots, num_kv_heads, v_head_dim]`; changed in
            place.
        slots: Slot of each token, int64 `[num_tokens]`.
    """
    k_buffer.index_copy_(0, slots, k.to(k_buffer.dtype))
    v_buffer.index_copy_(0, slots, v.to(v_buffer.dtype))

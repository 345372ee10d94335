"""Paged attention for decode: one query a request, the newest token's."""

from __future__ import annotations

import torch

from .attention_extend import paged_attention_extend


def paged_attention_decode(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    stops: torch.Tensor,
    *,
    page_size: int,
    scale: float,
) -> torch.Tensor:
    """Attend from the position ``stop - 1`` of each request to its context.

    Equals `paged_attention_extend` with ``starts = stops - 1``; a device can do better,
    since every request has one query.

    Args:
        q: Queries, `[num_reqs, num_q_heads, head_dim]`.
        k_buffer: A layer's K, `[num_slots, num_kv_heads, head_dim]`.
        v_buffer: A layer's V, `[num_slots, num_kv_heads, v_head_dim]`.
        page_table: Page ids by row and column, int32
            `[num_rows, max_pages_per_request]`.
        rows: Row of each request, int32 `[num_reqs]`, on the host.
        stops: Length of each request with the new token, at least 1, int32
            `[num_reqs]`, on the host.
        page_size: Slots a page.
        scale: Factor on the scores, usually ``head_dim ** -0.5``.

    Returns:
        `[num_reqs, num_q_heads, v_head_dim]` in the dtype of `q`, to which K and V are
        converted.
    """
    return paged_attention_extend(
        q,
        k_buffer,
        v_buffer,
        page_table,
        rows,
        stops - 1,
        stops,
        page_size=page_size,
        scale=scale,
    )

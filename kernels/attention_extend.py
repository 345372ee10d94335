"""Paged attention for extend: a ragged batch of new tokens over cached prefixes."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


def paged_attention_extend(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    stops: torch.Tensor,
    *,
    page_size: int,
    scale: float,
) -> torch.Tensor:
    """Attend from the positions ``[start, stop)`` of each request to its context.

    The query at a position sees the positions up to and with its own, whose K and V are
    in the buffers already. Defined by this loop, `slots` being the slots of the
    positions of the request in `row`::

        for row, start, stop in zip(rows, starts, stops):
            for position in range(start, stop):
                k, v = k_buffer[slots[: position + 1]], v_buffer[slots[: position + 1]]
                for head in range(num_q_heads):
                    kv_head = head * num_kv_heads // num_q_heads
                    p = softmax(scale * k[:, kv_head] @ q[i, head])
                    out[i, head] = p @ v[:, kv_head]
                i += 1

    Args:
        q: Queries, request after request, `[num_tokens, num_q_heads, head_dim]`.
        k_buffer: A layer's K, `[num_slots, num_kv_heads, head_dim]`.
        v_buffer: A layer's V, `[num_slots, num_kv_heads, v_head_dim]`.
        page_table: Page ids by row and column, int32
            `[num_rows, max_pages_per_request]`.
        rows: Row of each request, int32 `[num_reqs]`, on the host.
        starts: First position of each request, int32 `[num_reqs]`, on the host.
        stops: End of the positions of each request, int32 `[num_reqs]`, on the host.
        page_size: Slots a page.
        scale: Factor on the scores, usually ``head_dim ** -0.5``.

    Returns:
        `[num_tokens, num_q_heads, v_head_dim]` in the dtype of `q`, to which K and V
        are converted.
    """
    out = q.new_empty(*q.shape[:2], v_buffer.shape[2])
    end = 0
    # One request at a time: a padded batch would copy and mask what nobody reads, and
    # garbage past the end of a short request could leak into it (0 * nan is nan).
    for row, start, stop in zip(
        rows.numpy().tolist(),
        starts.numpy().tolist(),
        stops.numpy().tolist(),
        strict=True,
    ):
        begin, end = end, end + stop - start
        pages = page_table[row, : -(-stop // page_size)]
        out[begin:end] = _attend(
            q[begin:end],
            _gather(k_buffer, pages, page_size)[:stop].to(q.dtype),
            _gather(v_buffer, pages, page_size)[:stop].to(q.dtype),
            scale,
        )
    return out


def _gather(buffer: torch.Tensor, pages: torch.Tensor, page_size: int) -> torch.Tensor:
    """Copy whole pages into one run of slots: fewer indices than slot by slot."""
    paged = buffer.view(-1, page_size, *buffer.shape[1:])
    return paged.index_select(0, pages).flatten(0, 1)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attend from the last ``len(q)`` positions of one request, `[tokens, heads, dim]`.

    The mask is left out where the fast kernels need none: without a prefix, and for a
    single query, which sees everything.
    """
    prefix_len = len(k) - len(q)
    mask = None
    if prefix_len > 0 and len(q) > 1:
        mask = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device)
        mask = mask.tril(prefix_len)
    out = scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=prefix_len == 0,
        scale=scale,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)

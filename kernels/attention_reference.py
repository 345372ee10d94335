"""Paged attention in torch: what the kernels must equal, and what runs on a CPU."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from .attention_options import AttentionOptions, as_pages, check_shapes


def paged_attention_extend_reference(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    stops: torch.Tensor,
    options: AttentionOptions,
) -> torch.Tensor:
    """Attend from the positions ``[start, stop)``; see `paged_attention_extend`."""
    k_pages = as_pages(k_buffer, options.page_size)
    v_pages = as_pages(v_buffer, options.page_size)
    check_shapes(q, k_pages, v_pages)
    out = q.new_zeros(*q.shape[:2], v_pages.shape[3])
    end = 0
    # One request at a time: a padded batch would copy and mask what nobody reads, and
    # garbage past the end of a short request could leak into it (0 * nan is nan).
    for row, start, stop in zip(
        rows.cpu().numpy().tolist(),
        starts.cpu().numpy().tolist(),
        stops.cpu().numpy().tolist(),
        strict=True,
    ):
        begin, end = end, end + stop - start
        if begin == end or stop == 0:
            continue
        # What has left the window may be anybody's by now.
        lowest = max(0, start - options.window + 1) if options.window else 0
        context = page_table[row], lowest, stop
        out[begin:end] = _attend(
            q[begin:end],
            _gather(k_pages, *context).to(q.dtype),
            _gather(v_pages, *context).to(q.dtype),
            options,
        )
    return out


def paged_attention_decode_reference(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    stops: torch.Tensor,
    options: AttentionOptions,
) -> torch.Tensor:
    """Attend from the positions ``stop - 1``; see `paged_attention_decode`."""
    return paged_attention_extend_reference(
        q, k_buffer, v_buffer, page_table, rows, stops - 1, stops, options
    )


def _gather(
    paged: torch.Tensor, table_row: torch.Tensor, lowest: int, stop: int
) -> torch.Tensor:
    """Copy the positions ``[lowest, stop)`` into one run of slots.

    Whole pages are copied, which takes fewer indices than slot by slot.
    """
    page_size = paged.shape[1]
    first = lowest // page_size
    pages = table_row[first : -(-stop // page_size)]
    # Not every device copies float8.
    as_stored = paged.view(torch.uint8) if paged.itemsize == 1 else paged
    copied = as_stored.index_select(0, pages).view(paged.dtype).flatten(0, 1)
    return copied[lowest - first * page_size : stop - first * page_size]


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    """Attend from the last ``len(q)`` positions of one request, `[tokens, heads, dim]`.

    The mask is left out where the fast kernels need none: without a prefix, and for a
    single query, which sees everything that was gathered.
    """
    prefix_len = len(k) - len(q)
    is_plain = options.window is None and options.softcap is None
    mask = None
    if len(q) > 1 and (prefix_len > 0 or not is_plain):
        mask = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device)
        mask = mask.tril(prefix_len)
        if options.window is not None:
            mask = mask.triu(prefix_len - options.window + 1)
    if options.softcap is not None:
        out = _attend_softly(q, k, v, mask, options.score_factor, options.softcap)
    else:
        out = scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            attn_mask=mask,
            is_causal=mask is None and len(q) > 1,
            scale=options.score_factor,
            enable_gqa=True,
        )[0].transpose(0, 1)
    return out if options.v_scale == 1 else out * float(options.v_scale)


def _attend_softly(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    factor: float,
    softcap: float,
) -> torch.Tensor:
    """Attend with capped scores, which the fast kernels of torch do not have.

    `factor` makes a score in units of the cap.
    """
    num_tokens, num_q_heads, head_dim = q.shape
    # No narrower than float32: the cap leaves scores that differ by little.
    dtype = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(dtype).view(num_tokens, k.shape[1], -1, head_dim)
    scores = torch.einsum("thgd,shd->hgts", grouped, k.to(dtype))
    scores = float(softcap) * torch.tanh(scores * factor)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    out = torch.einsum("hgts,shd->thgd", scores.softmax(-1), v.to(dtype))
    return out.reshape(num_tokens, num_q_heads, -1).to(q.dtype)

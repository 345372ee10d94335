"""Paged attention for extend: a ragged batch of new tokens over cached prefixes."""

from __future__ import annotations

import torch

from .attention_options import AttentionOptions
from .attention_reference import paged_attention_extend_reference
from .backend import Backend, pick_backend
from .checks import as_numbers, check_count, check_table


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
    window: int | None = None,
    softcap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    max_new_len: int | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Attend from the positions ``[start, stop)`` of each request to its context.

    The query at a position sees the positions up to and with its own, the last `window`
    of them if there is a window. Their K and V are in the buffers already. Defined by
    this loop, `slots` being the slots of the positions of the request in `row`::

        for row, start, stop in zip(rows, starts, stops):
            for position in range(start, stop):
                seen = slots[: position + 1]
                if window is not None:
                    seen = seen[-window:]
                for head in range(num_q_heads):
                    kv_head = head * num_kv_heads // num_q_heads
                    k = k_scale * k_buffer[seen, kv_head]
                    v = v_scale * v_buffer[seen, kv_head]
                    scores = scale * k @ q[i, head]
                    if softcap is not None:
                        scores = softcap * tanh(scores / softcap)
                    out[i, head] = softmax(scores) @ v
                i += 1

    Nothing else is read: a slot that no query sees may hold anything, nan too, and
    pages that have left the window may be somebody else's.

    The kernel is FlashAttention-2 (Dao 2023, arXiv 2307.08691) over pages (Kwon et al.
    2023, arXiv 2309.06180), in one launch for the whole batch; other than there, the
    rows of a program are the tokens of a request times the heads that share K and V.
    A request's result does not depend on the others in its batch.

    Args:
        q: Queries, request after request, `[num_tokens, num_q_heads, head_dim]`.
        k_buffer: A layer's K by page, `[num_pages + 1, page_size, num_kv_heads,
            head_dim]`, or by slot, `[num_slots, num_kv_heads, head_dim]`; with any
            strides.
        v_buffer: A layer's V, like its K, but with `v_head_dim` numbers a head; may be
            a part of K, as in MLA.
        page_table: Page ids by row and column, int32
            `[num_rows, max_pages_per_request]`.
        rows: Row of each request, int32 `[num_reqs]`.
        starts: First position of each request, int32 `[num_reqs]`.
        stops: End of the positions of each request, int32 `[num_reqs]`. Tokens past
            those of all requests are padded ones, and get zeros.
        page_size: Slots a page.
        scale: Factor on the scores, usually ``head_dim ** -0.5``.
        window: Positions that a query sees, its own included; all if not given.
        softcap: Bound of the scores; none if not given.
        k_scale: Factor on what is stored as K, as of a float8 pool.
        v_scale: Factor on what is stored as V.
        max_new_len: The most tokens that a request computes, if they are few, as when
            drafts are verified: then programs are smaller.
        backend: Which implementation; see `pick_backend`.

    Returns:
        `[num_tokens, num_q_heads, v_head_dim]` in the dtype of `q`, to which K and V
        are converted.

    Raises:
        BackendUnavailableError: The backend cannot run on the device of `q`.
        ConfigError: There is no such backend, or it does not take such tensors or
            options.
    """
    options = AttentionOptions(page_size, scale, window, softcap, k_scale, v_scale)
    check_table(page_table, page_size)
    rows, starts, stops = as_numbers(rows=rows, starts=starts, stops=stops)
    if max_new_len is not None:
        check_count("max_new_len", max_new_len)
    if pick_backend(backend, q.device) == "reference":
        return paged_attention_extend_reference(
            q, k_buffer, v_buffer, page_table, rows, starts, stops, options
        )
    from .attention_tiling import extend_tiling, kernel_inputs
    from .triton.attention_extend import attention_extend_kernel

    inputs = kernel_inputs(q, k_buffer, v_buffer, page_table, options)
    tiling = extend_tiling(inputs, max_new_len)
    out = q.new_empty(*q.shape[:2], v_buffer.shape[-1])
    if len(q) == 0:
        return out
    # Each request with tokens has at most one block that is not full, and so have the
    # padded tokens.
    num_ragged = min(len(rows), len(q)) + 1
    num_blocks = len(q) * inputs.group_size + num_ragged * (tiling.block_m - 1)
    num_blocks //= tiling.block_m
    attention_extend_kernel[num_blocks, inputs.num_kv_heads](
        inputs.q,
        inputs.k,
        inputs.v,
        page_table,
        rows,
        starts,
        stops,
        out,
        len(rows),
        len(q),
        inputs.v_scale,
        *inputs.numbers,
        **inputs.constants,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    return out

"""Paged attention for decode: one query a request, the newest token's."""

from __future__ import annotations

from typing import Any

import torch

from .attention_options import AttentionOptions
from .attention_reference import paged_attention_decode_reference
from .attention_tiling import KernelInputs, decode_tiling, kernel_inputs
from .backend import Backend, pick_backend
from .checks import as_numbers, check_count, check_table
from .errors import ConfigError

MIN_SPLIT = 256
"""Positions below which a context is not split: two parts would cost more."""

MAX_SPLIT = 8192
"""Positions above which it is, even if there is enough to do without."""


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
    window: int | None = None,
    softcap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    max_stop: int | None = None,
    num_splits: int | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Attend from the position ``stop - 1`` of each request to its context.

    Equals `paged_attention_extend` with ``starts = stops - 1``, except that a request
    without context, of ``stop = 0``, gets zeros.

    A device has more to do at a time than one query gives: so the kernel cuts each
    context into parts, which run side by side, and a second launch adds them up, as in
    Flash-Decoding (Dao, Haziza, Massa and Sizov 2023). The number of parts changes the
    last bits of a result; with a given one, a request's result does not depend on the
    others in its batch.

    Args:
        q: Queries, `[num_reqs, num_q_heads, head_dim]`.
        k_buffer: A layer's K by page, `[num_pages + 1, page_size, num_kv_heads,
            head_dim]`, or by slot, `[num_slots, num_kv_heads, head_dim]`; with any
            strides.
        v_buffer: A layer's V, like its K, but with `v_head_dim` numbers a head; may be
            a part of K, as in MLA.
        page_table: Page ids by row and column, int32
            `[num_rows, max_pages_per_request]`.
        rows: Row of each request, int32 `[num_reqs]`; row 0 for a padded one.
        stops: Length of each request with the new token, int32 `[num_reqs]`.
        page_size: Slots a page.
        scale: Factor on the scores, usually ``head_dim ** -0.5``.
        window: Positions that a query sees, its own included; all if not given.
        softcap: Bound of the scores; none if not given.
        k_scale: Factor on what is stored as K, as of a float8 pool.
        v_scale: Factor on what is stored as V.
        max_stop: No length is greater; if not given, what the table has room for.
        num_splits: Parts at most; as many as keep the device busy if not given.
        backend: Which implementation; see `pick_backend`.

    Returns:
        `[num_reqs, num_q_heads, v_head_dim]` in the dtype of `q`, to which K and V are
        converted.

    Raises:
        BackendUnavailableError: The backend cannot run on the device of `q`.
        ConfigError: There is no such backend, or it does not take such tensors or
            options.
    """
    options = AttentionOptions(page_size, scale, window, softcap, k_scale, v_scale)
    check_table(page_table, page_size)
    rows, stops = as_numbers(rows=rows, stops=stops)
    if len(q) != len(rows):
        raise ConfigError(f"q must be as many as rows, {len(rows)}, got {len(q)}")
    if num_splits is not None:
        check_count("num_splits", num_splits, minimum=1)
    if max_stop is not None:
        check_count("max_stop", max_stop)
    if pick_backend(backend, q.device) == "reference":
        return paged_attention_decode_reference(
            q, k_buffer, v_buffer, page_table, rows, stops, options
        )
    inputs = kernel_inputs(q, k_buffer, v_buffer, page_table, options)
    if num_splits is None:
        longest = page_table.shape[1] * page_size if max_stop is None else max_stop
        longest = longest if window is None else min(longest, window)
        num_splits = _choose_num_splits(inputs, longest)
    return _launch(inputs, page_table, rows, stops, num_splits)


def _launch(
    inputs: KernelInputs,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    stops: torch.Tensor,
    num_splits: int,
) -> torch.Tensor:
    """Launch the kernel of the parts, and the one that adds them up."""
    from .triton.attention_decode import (
        attention_decode_kernel,
        attention_reduce_kernel,
    )

    q, constants = inputs.q, inputs.constants
    num_reqs, num_q_heads = q.shape[:2]
    out = q.new_empty(num_reqs, num_q_heads, constants["V_HEAD_DIM"])
    if num_reqs == 0:
        return out
    parts = q.new_empty(*out.shape[:2], num_splits, out.shape[2], dtype=torch.float32)
    # Of each part, the highest score and the sum of weights.
    weights = q.new_empty(*out.shape[:2], num_splits, 2, dtype=torch.float32)
    tiling = decode_tiling(inputs)
    attention_decode_kernel[num_reqs, inputs.num_head_blocks(tiling), num_splits](
        q,
        inputs.k,
        inputs.v,
        page_table,
        rows,
        stops,
        parts,
        weights,
        num_splits,
        *inputs.numbers,
        **constants,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        MIN_SPLIT=MIN_SPLIT,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    attention_reduce_kernel[num_reqs, num_q_heads](
        parts,
        weights,
        stops,
        out,
        num_splits,
        inputs.v_scale,
        inputs.window,
        V_HEAD_DIM=constants["V_HEAD_DIM"],
        BLOCK_DV=constants["BLOCK_DV"],
        BLOCK_N=tiling.block_n,
        MIN_SPLIT=MIN_SPLIT,
        HAS_WINDOW=constants["HAS_WINDOW"],
        BLOCK_SPLITS=16,
    )
    return out


def _choose_num_splits(inputs: KernelInputs, longest: int) -> int:
    """Return the number of parts that keeps a device busy.

    Args:
        inputs: What the kernel takes.
        longest: Positions of the longest context.
    """
    num_programs = len(inputs.q) * inputs.num_head_blocks(decode_tiling(inputs))
    # A few for each, so that they end at about the same time.
    wanted = 4 * num_processors(inputs.q.device) // max(1, num_programs)
    at_least, at_most = -(-longest // MAX_SPLIT), -(-longest // MIN_SPLIT)
    return max(1, min(max(wanted, at_least), at_most))


def num_processors(device: torch.device) -> int:
    """Return the processors of a GPU, each of which runs some programs at a time."""
    if device.type != "cuda":
        return 1
    cuda: Any = torch.cuda  # the type of what follows is partial
    count: int = cuda.get_device_properties(device).multi_processor_count
    return count

"""The kernels of paged attention for decode: the parts of contexts, then their sums."""

from __future__ import annotations

from .attention_tiles import attend_tiles, load_rows
from .language import Pointer, Scalar, constexpr, device_function, jit, tl


@device_function
def split_context(
    stop: Scalar,
    window: Scalar,
    num_splits: Scalar,
    BLOCK_N: constexpr,
    MIN_SPLIT: constexpr,
    HAS_WINDOW: constexpr,
) -> Scalar:
    """Return the first position that is read, where its tile begins, and a part's size.

    Only the request's own length counts, and `num_splits`: which batch it is in does
    not change its result.
    """
    lowest = 0
    if HAS_WINDOW:
        lowest = tl.maximum(stop - window, 0)
    begin = lowest // BLOCK_N * BLOCK_N
    tiles = tl.cdiv(tl.cdiv(stop - begin, num_splits), BLOCK_N)
    return lowest, begin, tl.maximum(tiles * BLOCK_N, MIN_SPLIT)


@jit(
    do_not_specialize=[
        "stride_q_token",
        "stride_q_head",
        "stride_table_row",
        "num_splits",
        "window",
    ],
    do_not_specialize_on_alignment=["q_ptr", "page_table_ptr", "rows_ptr", "stops_ptr"],
)
def attention_decode_kernel(
    q_ptr: Pointer,
    k_ptr: Pointer,
    v_ptr: Pointer,
    page_table_ptr: Pointer,
    rows_ptr: Pointer,
    stops_ptr: Pointer,
    parts_ptr: Pointer,
    weights_ptr: Pointer,
    num_splits: Scalar,
    stride_q_token: Scalar,
    stride_q_head: Scalar,
    stride_k_page: Scalar,
    stride_k_slot: Scalar,
    stride_k_head: Scalar,
    stride_v_page: Scalar,
    stride_v_slot: Scalar,
    stride_v_head: Scalar,
    stride_table_row: Scalar,
    score_scale: Scalar,
    softcap: Scalar,
    window: Scalar,
    PAGE_SIZE: constexpr,
    GROUP_SIZE: constexpr,
    HEAD_DIM: constexpr,
    V_HEAD_DIM: constexpr,
    DIM_MAIN: constexpr,
    DIM_REST: constexpr,
    BLOCK_DV: constexpr,
    BLOCK_M: constexpr,
    BLOCK_N: constexpr,
    V_IS_IN_K: constexpr,
    HAS_SOFTCAP: constexpr,
    HAS_WINDOW: constexpr,
    MIN_SPLIT: constexpr,
) -> None:
    """Let heads of one query attend to one part of their context.

    A program is a request, `BLOCK_M` heads of a group, which share K and V, and a part.
    It writes the result of the part alone, its highest score and its sum of weights.
    Not the logarithm of both: of scores of a million, that would lose the sum.
    """
    request = tl.program_id(0)
    stop = tl.load(stops_ptr + request)
    lowest, begin, size = split_context(
        stop, window, num_splits, BLOCK_N, MIN_SPLIT, HAS_WINDOW
    )
    split = tl.program_id(2)
    begin += split * size
    if begin >= stop:
        return
    blocks_per_group = tl.cdiv(GROUP_SIZE, BLOCK_M)
    kv_head = (tl.program_id(1) // blocks_per_group).to(tl.int64)
    rows = tl.program_id(1) % blocks_per_group * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = rows < GROUP_SIZE
    heads = kv_head * GROUP_SIZE + rows
    table_row = tl.load(rows_ptr + request).to(tl.int64)
    q_ptrs = q_ptr + request.to(tl.int64) * stride_q_token + heads * stride_q_head
    q_main = load_rows(q_ptrs, is_row, HEAD_DIM, 0, DIM_MAIN)
    q_rest = q_main
    if DIM_REST > 0:
        q_rest = load_rows(q_ptrs, is_row, HEAD_DIM, DIM_MAIN, DIM_REST)

    acc, peak, total = attend_tiles(
        q_main,
        q_rest,
        tl.zeros([BLOCK_M, BLOCK_DV], tl.float32),
        tl.full([BLOCK_M], float("-inf"), tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        tl.zeros([BLOCK_M], tl.int32) + stop - 1,
        begin,
        tl.minimum(begin + size, stop),
        lowest,
        page_table_ptr + table_row * stride_table_row,
        k_ptr + kv_head * stride_k_head,
        v_ptr + kv_head * stride_v_head,
        stride_k_page,
        stride_k_slot,
        stride_v_page,
        stride_v_slot,
        score_scale,
        softcap,
        window,
        PAGE_SIZE,
        HEAD_DIM,
        V_HEAD_DIM,
        DIM_MAIN,
        DIM_REST,
        BLOCK_DV,
        BLOCK_N,
        V_IS_IN_K,
        HAS_SOFTCAP,
        False,  # `lowest` is the whole window of a single query
        True,
    )

    num_q_heads = tl.num_programs(1) // blocks_per_group * GROUP_SIZE
    out_rows = (request.to(tl.int64) * num_q_heads + heads) * num_splits + split
    v_dims = tl.arange(0, BLOCK_DV)
    tl.store(
        parts_ptr + out_rows[:, None] * V_HEAD_DIM + v_dims[None, :],
        acc / total[:, None],
        mask=is_row[:, None] & (v_dims < V_HEAD_DIM)[None, :],
    )
    tl.store(weights_ptr + 2 * out_rows, peak, mask=is_row)
    tl.store(weights_ptr + 2 * out_rows + 1, total, mask=is_row)


@jit(
    do_not_specialize=["num_splits", "window"],
    do_not_specialize_on_alignment=["stops_ptr"],
)
def attention_reduce_kernel(
    parts_ptr: Pointer,
    weights_ptr: Pointer,
    stops_ptr: Pointer,
    out_ptr: Pointer,
    num_splits: Scalar,
    v_scale: Scalar,
    window: Scalar,
    V_HEAD_DIM: constexpr,
    BLOCK_DV: constexpr,
    BLOCK_N: constexpr,
    MIN_SPLIT: constexpr,
    HAS_WINDOW: constexpr,
    BLOCK_SPLITS: constexpr,
) -> None:
    """Add up the parts of a request's head; a request without context gets zeros."""
    request = tl.program_id(0)
    stop = tl.load(stops_ptr + request)
    _, begin, size = split_context(
        stop, window, num_splits, BLOCK_N, MIN_SPLIT, HAS_WINDOW
    )
    row = request.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    v_dims = tl.arange(0, BLOCK_DV)
    is_dim = v_dims < V_HEAD_DIM
    acc = tl.zeros([BLOCK_DV], tl.float32)
    peak = float("-inf")
    total = 0.0
    # Parts past the end of the context were not written.
    num_parts = tl.cdiv(stop - begin, size)
    for first in range(0, num_parts, BLOCK_SPLITS):
        splits = first + tl.arange(0, BLOCK_SPLITS)
        is_part = splits < num_parts
        parts = row * num_splits + splits
        pairs = weights_ptr + 2 * parts
        peaks = tl.load(pairs, mask=is_part, other=float("-inf"))
        totals = tl.load(pairs + 1, mask=is_part, other=0.0)
        values = tl.load(
            parts_ptr + parts[:, None] * V_HEAD_DIM + v_dims[None, :],
            mask=is_part[:, None] & is_dim[None, :],
            other=0.0,
        )
        new_peak = tl.maximum(peak, tl.max(peaks, 0))
        decay = tl.exp2(peak - new_peak)
        weights = totals * tl.exp2(peaks - new_peak)
        peak = new_peak
        total = total * decay + tl.sum(weights, 0)
        acc = acc * decay + tl.sum(values * weights[:, None], 0)
    out = acc / tl.where(stop > 0, total, 1.0) * v_scale
    tl.store(
        out_ptr + row * V_HEAD_DIM + v_dims,
        out.to(out_ptr.dtype.element_ty),
        mask=is_dim,
    )

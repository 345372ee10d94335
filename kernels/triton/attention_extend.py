"""The kernel of paged attention for extend."""

from __future__ import annotations

from .attention_tiles import attend_tiles, load_rows
from .language import Pointer, Scalar, constexpr, device_function, jit, tl


@device_function
def find_request(
    block: Scalar,
    starts_ptr: Pointer,
    stops_ptr: Pointer,
    num_reqs: Scalar,
    GROUP_SIZE: constexpr,
    BLOCK_M: constexpr,
    BLOCK_REQS: constexpr,
) -> Scalar:
    """Return the request of a block of rows, the block's number there, and a token.

    The token is the first of the request. A block past the last one belongs to request
    `num_reqs`. Counting here costs less than to launch what counts before.
    """
    request = 0
    num_blocks = 0
    first_token = 0
    end = 0
    for first in range(0, num_reqs, BLOCK_REQS):
        i = first + tl.arange(0, BLOCK_REQS)
        starts = tl.load(starts_ptr + i, mask=i < num_reqs, other=0)
        lengths = tl.load(stops_ptr + i, mask=i < num_reqs, other=0) - starts
        blocks = tl.cdiv(lengths * GROUP_SIZE, BLOCK_M)
        is_before = (i < num_reqs) & (end + tl.cumsum(blocks, 0) <= block)
        request += tl.sum(is_before.to(tl.int32), 0)
        num_blocks += tl.sum(tl.where(is_before, blocks, 0), 0)
        first_token += tl.sum(tl.where(is_before, lengths, 0), 0)
        end += tl.sum(blocks, 0)
    return request, block - num_blocks, first_token


@jit(
    do_not_specialize=[
        "stride_q_token",
        "stride_q_head",
        "stride_table_row",
        "num_reqs",
        "num_tokens",
        "window",
    ],
    do_not_specialize_on_alignment=[
        "q_ptr",
        "page_table_ptr",
        "rows_ptr",
        "starts_ptr",
        "stops_ptr",
    ],
)
def attention_extend_kernel(
    q_ptr: Pointer,
    k_ptr: Pointer,
    v_ptr: Pointer,
    page_table_ptr: Pointer,
    rows_ptr: Pointer,
    starts_ptr: Pointer,
    stops_ptr: Pointer,
    out_ptr: Pointer,
    num_reqs: Scalar,
    num_tokens: Scalar,
    v_scale: Scalar,
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
    BLOCK_REQS: constexpr = 128,
) -> None:
    """Let `BLOCK_M` rows of one request attend; a row is a token and a head of a group.

    A program is a block of rows and a head of K and V. The rows of a request are its
    tokens times the `GROUP_SIZE` heads that share it, so K and V are read once for all
    of them, and a few tokens fill a block.
    """
    request, block, first_token = find_request(
        tl.program_id(0),
        starts_ptr,
        stops_ptr,
        num_reqs,
        GROUP_SIZE,
        BLOCK_M,
        BLOCK_REQS,
    )
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    tokens = (first_token + rows // GROUP_SIZE).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    heads = kv_head * GROUP_SIZE + rows % GROUP_SIZE
    v_dims = tl.arange(0, BLOCK_DV)
    out_rows = tokens * tl.num_programs(1) * GROUP_SIZE + heads
    out_ptrs = out_ptr + out_rows[:, None] * V_HEAD_DIM + v_dims[None, :]
    is_v_dim = (v_dims < V_HEAD_DIM)[None, :]
    if request >= num_reqs:
        # Padded tokens: garbage here would go on to the layers above.
        is_padding = (tokens < num_tokens)[:, None] & is_v_dim
        tl.store(out_ptrs, 0.0, mask=is_padding)
        return
    start = tl.load(starts_ptr + request)
    stop = tl.load(stops_ptr + request)
    table_row = tl.load(rows_ptr + request).to(tl.int64)
    pages_ptr = page_table_ptr + table_row * stride_table_row
    k_ptr += kv_head * stride_k_head
    v_ptr += kv_head * stride_v_head

    is_row = rows < (stop - start) * GROUP_SIZE
    # Rows past the end count as the last ones: a row that sees nothing is 0 / 0.
    positions = tl.minimum(start + rows // GROUP_SIZE, stop - 1)
    q_ptrs = q_ptr + tokens * stride_q_token + heads * stride_q_head
    q_main = load_rows(q_ptrs, is_row, HEAD_DIM, 0, DIM_MAIN)
    q_rest = q_main
    if DIM_REST > 0:
        q_rest = load_rows(q_ptrs, is_row, HEAD_DIM, DIM_MAIN, DIM_REST)

    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    first_position = start + block * BLOCK_M // GROUP_SIZE
    last_position = start + (block * BLOCK_M + BLOCK_M - 1) // GROUP_SIZE
    stop = tl.minimum(last_position + 1, stop)
    if HAS_WINDOW:
        lowest = tl.maximum(first_position - window + 1, 0)
        begin = lowest // BLOCK_N * BLOCK_N
        border = begin
    else:
        # Most tiles are seen by every row, and need no mask.
        lowest = 0
        begin = 0
        border = (first_position + 1) // BLOCK_N * BLOCK_N
    for has_mask in tl.static_range(HAS_WINDOW, 2):
        acc, peak, total = attend_tiles(
            q_main,
            q_rest,
            acc,
            peak,
            total,
            positions,
            border if has_mask else begin,
            stop if has_mask else border,
            lowest,
            pages_ptr,
            k_ptr,
            v_ptr,
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
            HAS_WINDOW,
            has_mask,
        )

    out = acc / total[:, None] * v_scale
    out = out.to(out_ptr.dtype.element_ty)
    tl.store(out_ptrs, out, mask=is_row[:, None] & is_v_dim)

"""What both attention kernels do: read a context tile by tile, with an online softmax.

A program has `BLOCK_M` rows of queries, which share a head of K and V, and reads that
head's keys `BLOCK_N` at a time, as in FlashAttention-2 (Dao 2023, arXiv 2307.08691),
but from pages that lie anywhere, as in PagedAttention (Kwon et al. 2023, arXiv
2309.06180). The softmax is computed on the way (Milakov and Gimelshein 2018, arXiv
1805.02867): a row keeps the highest score so far (`peak`), the sum of ``2 ** (score -
peak)`` (`total`) and the sum of V with these weights (`acc`); a higher peak scales both
down. Scores are in units of log2: that is the exponential which GPUs have.

The dims of a head of K come in two parts, `DIM_MAIN`, a power of two, and `DIM_REST`,
zero or a power of two that covers what is left: 576 is 512 + 64, and 80 is 64 + 16,
where the next power of two would nearly double both.
"""

from __future__ import annotations

from .language import Pointer, Scalar, constexpr, device_function, tl


@device_function
def load_rows(
    q_ptrs: Pointer,
    is_row: Scalar,
    HEAD_DIM: constexpr,
    FIRST: constexpr,
    NUM_DIMS: constexpr,
) -> Scalar:
    """Load `NUM_DIMS` dims of rows of queries, from `FIRST` on; zero past the end."""
    dims = FIRST + tl.arange(0, NUM_DIMS)
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    return tl.load(q_ptrs[:, None] + dims[None, :], mask=mask, other=0.0)


@device_function
def load_keys(
    k_ptrs: Pointer,
    is_key: Scalar,
    HEAD_DIM: constexpr,
    FIRST: constexpr,
    NUM_DIMS: constexpr,
    dtype: constexpr,
) -> Scalar:
    """Load `NUM_DIMS` dims of keys, from `FIRST` on, one key a column."""
    dims = FIRST + tl.arange(0, NUM_DIMS)
    mask = is_key[None, :] & (dims < HEAD_DIM)[:, None]
    return to_dtype(tl.load(k_ptrs[None, :] + dims[:, None], mask=mask, other=0), dtype)


@device_function
def to_dtype(x: Scalar, dtype: constexpr) -> Scalar:
    """Convert numbers of a buffer; bytes are float8 e4m3.

    By hand, since not every GPU has an instruction for e4m3: its bits are those of a
    float16 that is 256 times smaller, subnormal numbers included. Its nan reads as 480:
    to look for it would take half as many instructions again.
    """
    if x.dtype == tl.int8:
        # The shift brings the sign, of which a signed byte has many, to bits 15 and 14.
        bits = (x.to(tl.int16) << 7) & -0x4001
        x = bits.to(tl.float16, bitcast=True) * 256.0
    return x.to(dtype)


@device_function
def tanh(x: Scalar) -> Scalar:
    """Return the hyperbolic tangent, to the last few bits of float32 wherever it is.

    From 0.5 on it is ``(1 - t) / (1 + t)`` with ``t = exp(-2 * x)``, which never
    overflows. Near zero that would lose what it subtracts: there it is an odd
    polynomial, whose coefficients were fitted to the least relative error, 1.5e-8.
    """
    small = tl.minimum(tl.maximum(x, -0.5), 0.5)
    square = small * small
    series = -0.053045485 + square * 0.017241476
    series = -0.33333144 + square * (0.13325879 + square * series)
    near_zero = small + small * square * series
    size = tl.abs(x)
    t = tl.exp(-2 * size)
    far = (1 - t) / (1 + t)
    return tl.where(size < 0.5, near_zero, tl.where(x < 0, -far, far))


@device_function
def attend_tiles(
    q_main: Scalar,
    q_rest: Scalar,
    acc: Scalar,
    peak: Scalar,
    total: Scalar,
    positions: Scalar,
    begin: Scalar,
    end: Scalar,
    lowest: Scalar,
    pages_ptr: Pointer,
    k_ptr: Pointer,
    v_ptr: Pointer,
    stride_k_page: Scalar,
    stride_k_slot: Scalar,
    stride_v_page: Scalar,
    stride_v_slot: Scalar,
    score_scale: Scalar,
    softcap: Scalar,
    window: Scalar,
    PAGE_SIZE: constexpr,
    HEAD_DIM: constexpr,
    V_HEAD_DIM: constexpr,
    DIM_MAIN: constexpr,
    DIM_REST: constexpr,
    BLOCK_DV: constexpr,
    BLOCK_N: constexpr,
    V_IS_IN_K: constexpr,
    HAS_SOFTCAP: constexpr,
    HAS_WINDOW: constexpr,
    HAS_MASK: constexpr,
) -> Scalar:
    """Let rows attend to the positions ``[max(begin, lowest), end)`` of a request.

    What lies outside is not read: a stale slot may hold anything, and 0 * nan is nan.
    Without `HAS_MASK`, every row sees all positions, and they are whole tiles.

    Args:
        q_main: The rows' dims of `DIM_MAIN`, `[BLOCK_M, DIM_MAIN]`.
        q_rest: The rows' other dims, `[BLOCK_M, DIM_REST]`; unused if that is zero.
        acc: Sum of V so far, `[BLOCK_M, BLOCK_DV]`.
        peak: Highest score so far, `[BLOCK_M]`.
        total: Sum of weights so far, `[BLOCK_M]`.
        positions: Position of each row, `[BLOCK_M]`.
        begin: Where the first tile begins.
        end: End of the positions.
        lowest: First position that may be read.
        pages_ptr: The request's row of the page table.
        k_ptr: K of the head.
        v_ptr: V of the head.
        stride_k_page: Numbers from a page of K to the next.
        stride_k_slot: Numbers from a slot of K to the next.
        stride_v_page: Numbers from a page of V to the next.
        stride_v_slot: Numbers from a slot of V to the next.
        score_scale: Factor on ``q @ k``; see `attention_tiling`.
        softcap: The soft cap, in units of log2.
        window: Positions that a row sees.
        PAGE_SIZE: Slots a page.
        HEAD_DIM: Numbers a head of K.
        V_HEAD_DIM: Numbers a head of V.
        DIM_MAIN: See above.
        DIM_REST: See above.
        BLOCK_DV: `V_HEAD_DIM` or the next power of two.
        BLOCK_N: Keys of a tile.
        V_IS_IN_K: Whether V is the first part of K, as in absorbed MLA.
        HAS_SOFTCAP: Whether scores are capped.
        HAS_WINDOW: Whether rows see a window only.
        HAS_MASK: Whether there is a position that some row does not see.

    Returns:
        `acc`, `peak` and `total`.
    """
    v_dims = tl.arange(0, BLOCK_DV)
    keys = begin + tl.arange(0, BLOCK_N)
    # Page ids are loaded a tile ahead, so that loads of K and V need not wait for them.
    next_pages = tl.load(
        pages_ptr + keys // PAGE_SIZE, mask=(keys >= lowest) & (keys < end), other=0
    )
    for first in range(begin, end, BLOCK_N):
        # A page times its stride passes 2**31 in a large pool.
        pages = next_pages.to(tl.int64)
        keys = first + tl.arange(0, BLOCK_N)
        ahead = keys + BLOCK_N
        next_pages = tl.load(pages_ptr + ahead // PAGE_SIZE, mask=ahead < end, other=0)
        offsets = (keys % PAGE_SIZE).to(tl.int64)
        if HAS_MASK:
            is_key = (keys >= lowest) & (keys < end)
        else:
            is_key = tl.full([BLOCK_N], True, tl.int1)

        k_ptrs = k_ptr + pages * stride_k_page + offsets * stride_k_slot
        k_main = load_keys(k_ptrs, is_key, HEAD_DIM, 0, DIM_MAIN, q_main.dtype)
        scores = tl.dot(q_main, k_main, input_precision="ieee")
        if DIM_REST > 0:
            k_rest = load_keys(
                k_ptrs, is_key, HEAD_DIM, DIM_MAIN, DIM_REST, q_main.dtype
            )
            scores = tl.dot(q_rest, k_rest, scores, input_precision="ieee")
        scores *= score_scale
        if HAS_SOFTCAP:
            scores = softcap * tanh(scores)
        if HAS_MASK:
            is_seen = is_key[None, :] & (keys[None, :] <= positions[:, None])
            if HAS_WINDOW:
                is_seen &= keys[None, :] > positions[:, None] - window
            scores = tl.where(is_seen, scores, float("-inf"))

        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # A row that has seen nothing yet: -inf less -inf would be nan.
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        decay = tl.exp2(peak - shift)
        weights = tl.exp2(scores - shift[:, None])
        peak = new_peak
        total = total * decay + tl.sum(weights, 1)
        if V_IS_IN_K:
            v = tl.trans(k_main)
        else:
            v_ptrs = v_ptr + pages * stride_v_page + offsets * stride_v_slot
            mask = is_key[:, None] & (v_dims < V_HEAD_DIM)[None, :]
            v = tl.load(v_ptrs[:, None] + v_dims[None, :], mask=mask, other=0)
            v = to_dtype(v, q_main.dtype)
        acc = acc * decay[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return acc, peak, total

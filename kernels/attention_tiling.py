"""How paged attention is cut into programs, and what its kernels are launched with."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import torch

from .attention_options import AttentionOptions, as_pages, check_shapes
from .device_limits import device_limits
from .errors import ConfigError

DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of queries that the kernels take."""

FLOAT8: Final = torch.float8_e4m3fn
"""The one dtype of K and V that is narrower than these."""

MAX_HEAD_DIM: Final = 576
"""Numbers of the largest head of K that fits into shared memory: MLA's."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """The size of a program.

    Attributes:
        block_m: Rows of queries, a power of two; at least 16, as matrix units want.
        block_n: Keys at a time, a power of two.
        num_warps: Warps.
        num_stages: Tiles that are in use or on their way from memory, plus 1.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# By the most numbers of a head, for the data-centre GPUs: registers bound the first two
# sizes, shared memory the last: 163 KiB on an A100. Where there is less, as the 99 KiB
# of GPUs for desktops, `fit_shared_memory` makes them smaller.
EXTEND_TILINGS: Final = {
    64: Tiling(128, 64, num_warps=4, num_stages=3),
    128: Tiling(128, 64, num_warps=8, num_stages=3),
    256: Tiling(64, 32, num_warps=8, num_stages=3),
    MAX_HEAD_DIM: Tiling(32, 32, num_warps=8, num_stages=2),
}
DECODE_TILINGS: Final = {
    128: Tiling(32, 64, num_warps=4, num_stages=3),
    256: Tiling(32, 32, num_warps=4, num_stages=3),
    MAX_HEAD_DIM: Tiling(32, 32, num_warps=8, num_stages=2),
}


@dataclass(frozen=True, slots=True)
class KernelInputs:
    """What the kernels take of a call.

    Attributes:
        q: Queries, the numbers of a head in one piece.
        k: K by page; float8 as bytes.
        v: V by page; float8 as bytes.
        v_scale: Factor on what is stored as V.
        numbers: The strides of q, K, V and the page table, and how to make scores, in
            the order of the kernels' parameters.
        constants: What a compiled variant is made for, by name.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    v_scale: float
    numbers: tuple[int | float, ...]
    constants: dict[str, int | bool]

    @property
    def group_size(self) -> int:
        """Heads of queries that share a head of K and V."""
        return self.q.shape[1] // self.num_kv_heads

    @property
    def num_kv_heads(self) -> int:
        """Heads of K and V."""
        return self.k.shape[2]

    @property
    def window(self) -> int | float:
        """Positions that a query sees, or 0 for all; the last of the numbers."""
        return self.numbers[-1]

    @property
    def widest_dim(self) -> int:
        """Numbers of a head of K or V, as they lie in registers."""
        constants = self.constants
        k_dim = constants["DIM_MAIN"] + constants["DIM_REST"]
        return max(k_dim, constants["BLOCK_DV"])

    def num_head_blocks(self, tiling: Tiling) -> int:
        """Return the blocks of rows that the heads of one query make."""
        return self.num_kv_heads * -(-self.group_size // tiling.block_m)


def kernel_inputs(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    page_table: torch.Tensor,
    options: AttentionOptions,
) -> KernelInputs:
    """Check a call, and put it as the kernels take it.

    Raises:
        BackendUnavailableError: The device has no instructions for a dtype.
        ConfigError: A dtype or shape is none that the kernels take.
    """
    k, v = (as_pages(buffer, options.page_size) for buffer in (k_buffer, v_buffer))
    check_shapes(q, k, v)
    if q.dtype not in DTYPES or any(x.dtype not in (*DTYPES, FLOAT8) for x in (k, v)):
        raise ConfigError(
            f"backend 'triton' takes q in {DTYPES}, and K and V also in {FLOAT8}, got "
            f"{q.dtype}, {k.dtype} and {v.dtype}"
        )
    device_limits(q.device).check_dtypes(q.dtype, k.dtype, v.dtype)
    if any(x.stride(-1) != 1 for x in (k, v, page_table)):
        raise ConfigError(
            "backend 'triton' takes heads of K and V, and rows of the page table, that "
            "are in one piece each"
        )
    q = q if q.stride(-1) == 1 else q.contiguous()
    constants = _constants(k, v, options) | {"GROUP_SIZE": q.shape[1] // k.shape[2]}
    k, v = (x.view(torch.int8) if x.dtype == FLOAT8 else x for x in (k, v))
    strides = *q.stride()[:2], *k.stride()[:3], *v.stride()[:3], page_table.stride(0)
    numbers = *strides, *_score_numbers(options)
    inputs = KernelInputs(q, k, v, float(options.v_scale), numbers, constants)
    if inputs.widest_dim > MAX_HEAD_DIM:
        raise ConfigError(
            f"backend 'triton' takes heads of at most {MAX_HEAD_DIM} numbers of K and "
            f"512 of V, got {k.shape[3]} and {v.shape[3]}"
        )
    return inputs


def _score_numbers(options: AttentionOptions) -> tuple[float, float, int]:
    """Return the factor on ``q @ k``, the soft cap and the window, for the kernels.

    A score is in units of log2. A capped one is ``softcap * tanh(x)``: then the factor
    is that of ``x``.
    """
    factor = options.score_factor
    if options.softcap is None:
        return factor * math.log2(math.e), 1.0, options.window or 0
    return factor, float(options.softcap) * math.log2(math.e), options.window or 0


def _constants(
    k: torch.Tensor, v: torch.Tensor, options: AttentionOptions
) -> dict[str, int | bool]:
    head_dim, v_head_dim = k.shape[3], v.shape[3]
    dim_main = max(16, 1 << (head_dim.bit_length() - 1))
    block_dv = max(16, _power_of_2(v_head_dim))
    return {
        "PAGE_SIZE": options.page_size,
        "HEAD_DIM": head_dim,
        "V_HEAD_DIM": v_head_dim,
        "DIM_MAIN": dim_main,
        "DIM_REST": max(16, _power_of_2(head_dim - dim_main))
        if head_dim > dim_main
        else 0,
        "BLOCK_DV": block_dv,
        # In absorbed MLA, V is the first part of K: it is read once for both.
        "V_IS_IN_K": block_dv == dim_main
        and v.data_ptr() == k.data_ptr()
        and (v.dtype, v.stride()) == (k.dtype, k.stride()),
        "HAS_SOFTCAP": options.softcap is not None,
        "HAS_WINDOW": options.window is not None,
    }


def decode_tiling(inputs: KernelInputs) -> Tiling:
    """Choose the size of a program of decode, which waits for memory above all."""
    return _fit_device(_choose(DECODE_TILINGS, inputs, inputs.group_size), inputs)


def extend_tiling(inputs: KernelInputs, max_new_len: int | None) -> Tiling:
    """Choose the size of a program of extend, which computes above all.

    Args:
        inputs: What the kernel takes.
        max_new_len: The most tokens that a request computes; None for many.
    """
    max_rows = None if max_new_len is None else max_new_len * inputs.group_size
    tiling = _choose(EXTEND_TILINGS, inputs, max_rows)
    if inputs.k.itemsize == 1:
        # Every warp converts all bytes of a tile, in its registers.
        tiling = replace(tiling, block_n=32)
    return _fit_device(tiling, inputs)


def _choose(
    tilings: dict[int, Tiling], inputs: KernelInputs, max_rows: int | None
) -> Tiling:
    """Choose among tilings by the dims of a head, and fit it to dtype and rows."""
    is_wide = inputs.widest_dim > 256
    tiling = next(x for dim, x in tilings.items() if inputs.widest_dim <= dim)
    if inputs.q.dtype == torch.float32:
        block_m, block_n = max(16, tiling.block_m // 2), tiling.block_n // 2
        tiling = replace(tiling, block_m=block_m, block_n=block_n, num_stages=2)
    if is_amd():
        block_m = 16 if is_wide else tiling.block_m
        tiling = replace(tiling, block_m=block_m, num_stages=2)
    if max_rows is not None and max_rows < tiling.block_m:
        tiling = replace(tiling, block_m=max(16, _power_of_2(max_rows)))
    if tiling.block_m <= 32 and (is_amd() or not is_wide):
        tiling = replace(tiling, num_warps=4)
    return tiling


def _fit_device(tiling: Tiling, inputs: KernelInputs) -> Tiling:
    """Make a tiling smaller until the device of a launch has enough for it."""
    shared_bytes = device_limits(inputs.q.device).shared_bytes
    if shared_bytes is None:
        return tiling
    return fit_shared_memory(tiling, inputs, shared_bytes)


def fit_shared_memory(
    tiling: Tiling, inputs: KernelInputs, shared_bytes: int
) -> Tiling:
    """Make a tiling smaller until a program has room in so much shared memory.

    A tile less on its way costs least: the next K still comes while the weights are
    computed, and the next V after that. Then a tile has fewer keys, and at last a
    program fewer rows.

    Args:
        tiling: What is best where there is enough.
        inputs: What the kernel takes.
        shared_bytes: Shared memory that a program may have.

    Raises:
        ConfigError: The smallest program needs more.
    """
    while (needed := shared_bytes_of(tiling, inputs)) > shared_bytes:
        if tiling.num_stages > 2:
            tiling = replace(tiling, num_stages=tiling.num_stages - 1)
        elif tiling.block_n > 16:
            tiling = replace(tiling, block_n=tiling.block_n // 2)
        elif tiling.block_m > 16:
            tiling = replace(tiling, block_m=tiling.block_m // 2)
        else:
            raise ConfigError(
                f"backend 'triton' needs >= {needed} bytes of shared memory a program "
                f"for heads of {inputs.widest_dim} numbers in {inputs.q.dtype}, got a "
                f"GPU with {shared_bytes}"
            )
    return tiling


def shared_bytes_of(tiling: Tiling, inputs: KernelInputs) -> int:
    """Return the shared memory that a program takes at most, before Hopper.

    There are the queries, the tiles of K and V that are on their way, and the weights
    where several warps share a row. Tests hold it against what is compiled. From Hopper
    on, a tile more is kept, and there is more than twice the memory.
    """
    constants, item_bytes = inputs.constants, inputs.q.itemsize
    k_dim = constants["DIM_MAIN"] + constants["DIM_REST"]
    queries = tiling.block_m * k_dim * item_bytes
    weights = tiling.block_m * tiling.block_n * item_bytes
    kv_dims, transposed = k_dim + constants["BLOCK_DV"], 0
    if constants["V_IS_IN_K"]:
        kv_dims = k_dim
        transposed = tiling.block_n * constants["BLOCK_DV"] * item_bytes // 2
    tile = tiling.block_n * kv_dims * inputs.k.itemsize
    return (
        queries
        + (tiling.num_stages - 1) * tile
        + transposed
        + (weights if tiling.block_m < 128 else 0)
    )


def is_amd() -> bool:
    """Tell whether torch is built for AMD's GPUs, which have less shared memory."""
    return torch.version.hip is not None


def _power_of_2(number: int) -> int:
    """Return the least power of two that is not below a number."""
    return 1 << (number - 1).bit_length()

"""What `aot.py` compiles of paged attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, Final

import torch

from radixkv.kernels import (
    attention_tiling,
    paged_attention_decode,
    paged_attention_extend,
)
from radixkv.kernels.device_limits import DeviceLimits

SHARED_BYTES: Final = {
    "sm_80": 163 * 1024,
    "sm_86": 99 * 1024,
    "sm_89": 99 * 1024,
    "sm_90": 227 * 1024,
    "sm_120": 99 * 1024,
}
"""What a program may have of an NVIDIA GPU's shared memory."""


def is_amd() -> bool:
    """Tell for which GPU this compiles; torch is built for none."""
    driver: Any = import_module("triton.runtime").driver
    return driver.active.get_current_target().backend == "hip"


def limits_of_target(device: torch.device) -> DeviceLimits:
    """Return what the GPU has that this compiles for; the tensors are on the CPU."""
    driver: Any = import_module("triton.runtime").driver
    target = driver.active.get_current_target()
    if target.backend == "hip":
        return DeviceLimits()
    major, minor = divmod(target.arch, 10)
    shared_bytes = SHARED_BYTES.get(f"sm_{target.arch}")
    return DeviceLimits(shared_bytes=shared_bytes, capability=(major, minor))


def attention(
    is_decode: bool,
    head_dim: int = 128,
    v_head_dim: int | None = None,
    *,
    num_heads: tuple[int, int] = (32, 8),
    kv_dtype: torch.dtype = torch.bfloat16,
    num_reqs: int = 2,
    first: int = 0,
    **options: Any,  # noqa: ANN401
) -> None:
    """Launch an op on pages of 16 slots.

    V is the first part of K if it has another number of dims. All that differs from
    step to step begins `first` numbers into something larger.
    """
    # Not at the import: what names the launches goes on to run on this machine.
    attention_tiling.is_amd = is_amd
    attention_tiling.device_limits = limits_of_target
    shape = 4, 16, num_heads[1], head_dim
    k_buffer, v_buffer = (torch.zeros(shape, dtype=kv_dtype) for _ in range(2))
    if v_head_dim is not None:
        v_buffer = k_buffer[..., :v_head_dim]
    q = torch.zeros(first + num_reqs * num_heads[0] * head_dim, dtype=torch.bfloat16)
    numbers = torch.zeros(first + 3 * num_reqs, dtype=torch.int32)[first:]
    table = torch.zeros(8, first + 64, dtype=torch.int32)[:, first:]
    call: Any = paged_attention_decode if is_decode else paged_attention_extend
    call(
        q[first:].view(num_reqs, num_heads[0], head_dim),
        k_buffer,
        v_buffer,
        table,
        *numbers.split(num_reqs)[: 2 if is_decode else 3],
        page_size=16,
        scale=0.1,
        backend="triton",
        **options,
    )


def repeat(is_decode: bool) -> None:
    """Launch an op for many sizes of a batch, and many beginnings of its slices."""
    for num_reqs in (1, 2, 3, 8, 15, 16, 17, 32, 48):
        for first in range(5):
            attention(is_decode, num_reqs=num_reqs, first=first)
            if is_decode:
                attention(is_decode, num_reqs=num_reqs, max_stop=1000 * (first + 1))


SHAPES: Final[dict[str, dict[str, Any]]] = {
    "128": {},
    "64 of float8": {
        "head_dim": 64,
        "kv_dtype": torch.float8_e4m3fn,
        "window": 4096,
    },
    "256": {"head_dim": 256, "window": 4096, "softcap": 50.0},
    "256 plain": {"head_dim": 256},
    "mla": {"head_dim": 576, "v_head_dim": 512, "num_heads": (128, 1)},
}
REPEATED: Final = "128"
"""The shape that is launched again, for other batches."""

AGAIN: Final = "again"
OPS: Final = {"extend": False, "decode": True}

LAUNCHES: Final[dict[str, Callable[[], None]]] = {
    f"{name} {shape}": partial(attention, is_decode, **options)
    for shape, options in SHAPES.items()
    for name, is_decode in OPS.items()
} | {f"{name} {AGAIN}": partial(repeat, is_decode) for name, is_decode in OPS.items()}

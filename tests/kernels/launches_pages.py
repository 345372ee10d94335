"""What `aot.py` compiles of page tables, slots and pages.

Each launch is made for a batch of 2 first; the launches called "... again" are the same
for other batches, whose numbers are slices that begin elsewhere in an upload.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import torch

from radixkv.kernels import (
    PageBuffers,
    apply_page_table_delta,
    block_table,
    copy_pages,
    gather_pages,
    kv_indices,
    last_loc,
    scatter_pages,
    slot_mapping_decode,
    slot_mapping_extend,
    store_kv,
)

AGAIN: Final = " again"
PAGE_SIZE: Final = 16
TABLE: Final = torch.zeros(8, 64, dtype=torch.int32)


def numbers(count: int, first: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Return zeros that begin behind `first` others."""
    return torch.zeros(first + count, dtype=dtype)[first:]


def page_table_delta(num_reqs: int, first: int) -> None:
    apply_page_table_delta(
        TABLE,
        numbers(num_reqs, first),
        numbers(num_reqs, first + 1),
        numbers(num_reqs + 1, first + 2),
        numbers(num_reqs, first + 3),
        numbers(num_reqs, first),
        backend="triton",
    )


def extend(num_reqs: int, first: int) -> None:
    rows, starts, stops = (numbers(num_reqs, first + i) for i in range(3))
    slot_mapping_extend(
        TABLE,
        rows,
        starts,
        stops,
        page_size=PAGE_SIZE,
        num_tokens=num_reqs,
        backend="triton",
    )


def decode(num_reqs: int, first: int) -> None:
    rows, starts = numbers(num_reqs, first), numbers(num_reqs, first + 1)
    slot_mapping_decode(
        TABLE, rows, starts, page_size=PAGE_SIZE, num_tokens=first + 1, backend="triton"
    )
    last_loc(TABLE, rows, starts, page_size=PAGE_SIZE, backend="triton")


def indices(num_reqs: int, first: int) -> None:
    rows, stops = numbers(num_reqs, first), numbers(num_reqs, first + 1)
    kv_indices(
        TABLE, rows, stops, page_size=PAGE_SIZE, num_pages=num_reqs, backend="triton"
    )
    block_table(
        TABLE, rows, stops, page_size=PAGE_SIZE, width=1 + first, backend="triton"
    )


def pool(dtype: torch.dtype, dim: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the K and V of a layer in a pool whose layers of a page lie together."""
    pages = torch.zeros(64, 2, PAGE_SIZE, 8, dim).to(dtype)
    return pages[:, 0], pages[:, 1]


def store(dtype: torch.dtype, dim: int = 128) -> Callable[[int, int], None]:
    k_buffer, v_buffer = pool(dtype, dim)

    def launch(num_tokens: int, first: int) -> None:
        x = torch.zeros(first + num_tokens, 24, dim, dtype=torch.bfloat16)[first:]
        # K and V as a projection makes them, and as attention layers hold them.
        k, v = x[:, 8:16], x[:, 16:].transpose(0, 1).contiguous().transpose(0, 1)
        slots = numbers(num_tokens, first, torch.int64)
        scale = first / 7 + 1
        store_kv(k, v, k_buffer, v_buffer, slots, k_scale=scale, backend="triton")

    return launch


def store_without_v(num_tokens: int, first: int) -> None:
    """Store the one vector a token of latent attention."""
    x = torch.zeros(first + num_tokens, 1, 576, dtype=torch.bfloat16)[first:]
    buffer = torch.zeros(4, PAGE_SIZE, 1, 576, dtype=torch.bfloat16)
    slots = numbers(num_tokens, first, torch.int64)
    store_kv(x, x[..., :0], buffer, buffer[..., :0], slots, backend="triton")


def store_unaligned(num_tokens: int, first: int) -> None:
    """Store heads of 50 bytes."""
    x = torch.zeros(2, first + num_tokens, 3, 25, dtype=torch.float16)[:, first:]
    buffers = torch.zeros(2, 4, PAGE_SIZE, 3, 25)
    slots = numbers(num_tokens, first, torch.int64)
    store_kv(x[0], x[1], buffers[0], buffers[1], slots, backend="triton")


def store_to_large_pool(num_tokens: int, first: int) -> None:
    """Store to more than 2 GiB, of which nothing is touched here."""
    x = torch.zeros(2, first + num_tokens, 8, 128, dtype=torch.bfloat16)[:, first:]
    shape = (2, 2**17, PAGE_SIZE, 8, 128)
    buffers = torch.empty(shape, dtype=torch.bfloat16)
    slots = numbers(num_tokens, first, torch.int64)
    store_kv(x[0], x[1], buffers[0], buffers[1], slots, backend="triton")


PAGES: Final = PageBuffers(pool(torch.bfloat16))
SMALL_PAGES: Final = PageBuffers([torch.zeros(4, 3, dtype=torch.int64)])


def copy(num_copies: int, first: int) -> None:
    targets = range(first + 1, first + 1 + num_copies)
    copy_pages(PAGES, [0] * num_copies, targets, backend="triton")
    copy_pages(PAGES, [*targets[1:], targets[0]], targets, backend="triton")


def stage(pages: PageBuffers) -> Callable[[int, int], None]:
    def launch(num_pages: int, first: int) -> None:
        staging = torch.zeros(first + num_pages, pages.page_bytes, dtype=torch.uint8)
        page_ids = numbers(num_pages, first, torch.int64)
        gather_pages(pages, page_ids, staging[first:], backend="triton")
        scatter_pages(pages, page_ids, staging[first:], backend="triton")

    return launch


def repeated(launch: Callable[[int, int], None]) -> Callable[[], None]:
    """Return a launch for many sizes of a batch, and many beginnings of its slices."""

    def launch_again() -> None:
        for count in (1, 2, 3, 8, 15, 16, 17, 32, 48):
            for first in range(5):
                launch(count, first)

    return launch_again


def all_launches() -> Iterator[tuple[str, Callable[[], None]]]:
    ops = {
        "page-table delta": page_table_delta,
        "slots of extend": extend,
        "slots of decode": decode,
        "indices": indices,
        "store to bfloat16": store(torch.bfloat16),
        "store to fp8": store(torch.float8_e4m3fn),
        "store small heads": store(torch.bfloat16, dim=8),
        "store without V": store_without_v,
        "store unaligned": store_unaligned,
        "store to a large pool": store_to_large_pool,
        "copy": copy,
        "stage": stage(PAGES),
        "stage pages of 24 bytes": stage(SMALL_PAGES),
    }
    for name, op in ops.items():
        yield name, partial(op, 2, 0)
        yield name + AGAIN, repeated(op)


LAUNCHES: Final = dict(all_launches())

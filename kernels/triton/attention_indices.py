"""The kernels that list the pages of a step for attention libraries."""

from __future__ import annotations

from typing import Final

from .language import Pointer, Scalar, constexpr, jit, tl

BLOCK: Final = 256
"""Pages that a program lists at a time."""


@jit(
    do_not_specialize=["num_reqs", "num_pages"],
    do_not_specialize_on_alignment=["rows_ptr", "stops_ptr"],
)
def kv_indices_kernel(
    page_table_ptr: Pointer,
    rows_ptr: Pointer,
    stops_ptr: Pointer,
    indptr_ptr: Pointer,
    indices_ptr: Pointer,
    last_page_len_ptr: Pointer,
    num_reqs: Scalar,
    num_pages: Scalar,
    stride_row: Scalar,
    stride_column: Scalar,
    PAGE_SIZE: constexpr,
    BLOCK: constexpr = BLOCK,
) -> None:
    """List some pages of one request, or pad what comes after the last one."""
    request = tl.program_id(0)
    # Where the request's pages begin. Every program adds up what comes before, so that
    # it takes no launch of its own.
    begin = 0
    for first in range(0, request, BLOCK):
        before = first + tl.arange(0, BLOCK)
        stops = tl.load(stops_ptr + before, mask=before < request, other=0)
        begin += tl.sum((stops + PAGE_SIZE - 1) // PAGE_SIZE, axis=0)
    # All programs of a request write the same here.
    tl.store(indptr_ptr + request, begin)

    step = tl.num_programs(1) * BLOCK
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if request < num_reqs:
        stop = tl.load(stops_ptr + request)
        used = (stop + PAGE_SIZE - 1) // PAGE_SIZE
        last = tl.where(stop > 0, (stop - 1) % PAGE_SIZE + 1, PAGE_SIZE)
        tl.store(last_page_len_ptr + request, last)
        row = tl.load(rows_ptr + request).to(tl.int64)
        row_ptr = page_table_ptr + row * stride_row
        for first in range(0, used, step):
            columns = first + lane
            is_real = (columns < used) & (begin + columns < num_pages)
            pages = tl.load(row_ptr + columns * stride_column, mask=is_real, other=0)
            tl.store(indices_ptr + begin + columns, pages, mask=is_real)
    else:
        for first in range(begin, num_pages, step):
            places = first + lane
            nothing = tl.zeros([BLOCK], dtype=tl.int32)
            tl.store(indices_ptr + places, nothing, mask=places < num_pages)


@jit(
    do_not_specialize=["width"],
    do_not_specialize_on_alignment=["rows_ptr", "stops_ptr"],
)
def block_table_kernel(
    page_table_ptr: Pointer,
    rows_ptr: Pointer,
    stops_ptr: Pointer,
    table_ptr: Pointer,
    width: Scalar,
    stride_row: Scalar,
    stride_column: Scalar,
    PAGE_SIZE: constexpr,
    BLOCK: constexpr = BLOCK,
) -> None:
    """List some columns of one request."""
    request = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    used = (tl.load(stops_ptr + request) + PAGE_SIZE - 1) // PAGE_SIZE
    row_ptr = page_table_ptr + tl.load(rows_ptr + request).to(tl.int64) * stride_row
    is_used = (columns < used) & (columns < width)
    pages = tl.load(row_ptr + columns * stride_column, mask=is_used, other=0)
    tl.store(table_ptr + request * width + columns, pages, mask=columns < width)

"""The kernel of the page-table delta."""

from __future__ import annotations

from .language import Pointer, Scalar, constexpr, device_function, jit, tl


@device_function
def is_among(
    number: Scalar, numbers_ptr: Pointer, count: Scalar, BLOCK: constexpr
) -> Scalar:
    """Tell whether a number is among others in memory."""
    found = 0
    for first in range(0, count, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        numbers = tl.load(numbers_ptr + offsets, mask=offsets < count, other=-1)
        found |= tl.max((numbers == number).to(tl.int32), axis=0)
    return found != 0


@jit(
    do_not_specialize=["num_reqs", "num_forgotten"],
    do_not_specialize_on_alignment=[
        "rows_ptr",
        "page_starts_ptr",
        "page_indptr_ptr",
        "new_pages_ptr",
        "forgotten_rows_ptr",
    ],
)
def page_table_delta_kernel(
    page_table_ptr: Pointer,
    rows_ptr: Pointer,
    page_starts_ptr: Pointer,
    page_indptr_ptr: Pointer,
    new_pages_ptr: Pointer,
    forgotten_rows_ptr: Pointer,
    num_reqs: Scalar,
    num_forgotten: Scalar,
    width: Scalar,
    stride_row: Scalar,
    stride_column: Scalar,
    BLOCK: constexpr = 1024,
) -> None:
    """Write one row: of a request, or one that is only forgotten.

    A row that is forgotten and used again has one writer, the request's program: the
    other one leaves it alone. So there is no order to wait for.
    """
    pid = tl.program_id(0)
    if pid < num_reqs:
        row = tl.load(rows_ptr + pid)
        start = tl.load(page_starts_ptr + pid)
        begin = tl.load(page_indptr_ptr + pid)
        stop = start + tl.load(page_indptr_ptr + pid + 1) - begin
        if is_among(row, forgotten_rows_ptr, num_forgotten, BLOCK):
            first, last = 0, width
        else:
            first, last = start, stop
    else:
        row = tl.load(forgotten_rows_ptr + pid - num_reqs)
        start, begin, stop, first = 0, 0, 0, 0
        last = tl.where(is_among(row, rows_ptr, num_reqs, BLOCK), 0, width)

    row_ptr = page_table_ptr + row.to(tl.int64) * stride_row
    for column in range(first, last, BLOCK):
        columns = column + tl.arange(0, BLOCK)
        is_new = (columns >= start) & (columns < stop)
        pages = tl.load(new_pages_ptr + begin + columns - start, mask=is_new, other=0)
        tl.store(row_ptr + columns * stride_column, pages, mask=columns < last)

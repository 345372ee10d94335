"""The kernels of slot mapping."""

from __future__ import annotations

from typing import Final

from .language import Pointer, Scalar, constexpr, jit, tl

BLOCK: Final = 1024
"""Tokens that a program maps at a time."""


@jit(
    do_not_specialize=["num_reqs", "num_tokens"],
    do_not_specialize_on_alignment=["rows_ptr", "starts_ptr", "stops_ptr"],
)
def slot_mapping_extend_kernel(
    page_table_ptr: Pointer,
    rows_ptr: Pointer,
    starts_ptr: Pointer,
    stops_ptr: Pointer,
    slots_ptr: Pointer,
    num_reqs: Scalar,
    num_tokens: Scalar,
    stride_row: Scalar,
    stride_column: Scalar,
    PAGE_SIZE: constexpr,
    BLOCK: constexpr = BLOCK,
) -> None:
    """Map some tokens of one request, or pad what comes after the last one."""
    request = tl.program_id(0)
    # Where the request's tokens begin. Every program adds up what comes before, so that
    # it takes no launch of its own.
    begin = 0
    for first in range(0, request, BLOCK):
        before = first + tl.arange(0, BLOCK)
        is_before = before < request
        starts = tl.load(starts_ptr + before, mask=is_before, other=0)
        stops = tl.load(stops_ptr + before, mask=is_before, other=0)
        begin += tl.sum(stops - starts, axis=0)

    step = tl.num_programs(1) * BLOCK
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if request < num_reqs:
        start = tl.load(starts_ptr + request)
        stop = tl.load(stops_ptr + request)
        row = tl.load(rows_ptr + request).to(tl.int64)
        row_ptr = page_table_ptr + row * stride_row
        for first in range(start, stop, step):
            positions = first + lane
            is_real = (positions < stop) & (begin + positions - start < num_tokens)
            columns = positions // PAGE_SIZE
            pages = tl.load(row_ptr + columns * stride_column, mask=is_real, other=0)
            slots = pages.to(tl.int64) * PAGE_SIZE + positions % PAGE_SIZE
            tl.store(slots_ptr + begin + positions - start, slots, mask=is_real)
    else:
        for first in range(begin, num_tokens, step):
            tokens = first + lane
            nothing = tl.zeros([BLOCK], dtype=tl.int64)
            tl.store(slots_ptr + tokens, nothing, mask=tokens < num_tokens)


@jit(
    do_not_specialize=["num_slots", "num_tokens", "shift"],
    do_not_specialize_on_alignment=["rows_ptr", "starts_ptr"],
)
def slot_mapping_decode_kernel(
    page_table_ptr: Pointer,
    rows_ptr: Pointer,
    starts_ptr: Pointer,
    slots_ptr: Pointer,
    num_slots: Scalar,
    num_tokens: Scalar,
    shift: Scalar,
    stride_row: Scalar,
    stride_column: Scalar,
    PAGE_SIZE: constexpr,
    BLOCK: constexpr = BLOCK,
) -> None:
    """Map `num_tokens` positions of each request from ``start + shift`` on.

    A position below 0 has slot -1.
    """
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_real = tokens < num_slots
    requests = tokens // num_tokens
    starts = tl.load(starts_ptr + requests, mask=is_real, other=0)
    positions = starts + shift + tokens % num_tokens
    rows = tl.load(rows_ptr + requests, mask=is_real, other=0).to(tl.int64)
    pages = tl.load(
        page_table_ptr + rows * stride_row + positions // PAGE_SIZE * stride_column,
        mask=is_real & (positions >= 0),
        other=0,
    )
    slots = pages.to(tl.int64) * PAGE_SIZE + positions % PAGE_SIZE
    slots = tl.where(positions < 0, -1, slots)
    tl.store(slots_ptr + tokens, slots, mask=is_real)

"""Slot mapping: the slot of each token that a step computes (`out_cache_loc`)."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from .backend import Backend, pick_backend
from .checks import as_numbers, check_count, check_table


def slot_mapping_extend(
    page_table: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    stops: torch.Tensor,
    *,
    page_size: int,
    num_tokens: int,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Return the slots of the positions ``[start, stop)`` of each request.

    Defined by this loop::

        slots = []
        for row, start, stop in zip(rows, starts, stops):
            for position in range(start, stop):
                page = page_table[row, position // page_size]
                slots.append(page * page_size + position % page_size)
        slots += [0] * (num_tokens - len(slots))

    Args:
        page_table: Page ids by row and column, int32
            `[num_rows, max_pages_per_request]`.
        rows: Row of each request, int32 `[num_reqs]`.
        starts: First position of each request, int32 `[num_reqs]`.
        stops: End of the positions of each request, int32 `[num_reqs]`.
        page_size: Slots a page.
        num_tokens: Tokens of the step, which the host knows without a look at the
            device. More than the requests have are padded tokens, of slot 0.
        backend: Which implementation; see `pick_backend`.

    Returns:
        Slots, int64 `[num_tokens]`, request after request, on the table's device.

    Raises:
        BackendUnavailableError: The backend cannot run on the table's device.
        ConfigError: There is no such backend, a tensor has another shape or dtype, or
            a size is out of range.
    """
    check_table(page_table, page_size)
    check_count("num_tokens", num_tokens)
    rows, starts, stops = as_numbers(rows=rows, starts=starts, stops=stops)
    if pick_backend(backend, page_table.device) == "reference":
        return slot_mapping_extend_reference(
            page_table,
            rows,
            starts,
            stops,
            page_size=page_size,
            num_tokens=num_tokens,
        )
    from .triton.slot_mapping import BLOCK, slot_mapping_extend_kernel

    slots = _empty_slots(page_table, num_tokens)
    # A request with many tokens is the work of several programs; one more than there
    # are requests pads.
    num_splits = min(max(-(-num_tokens // BLOCK), 1), 8)
    slot_mapping_extend_kernel[(len(rows) + 1, num_splits)](
        page_table,
        rows,
        starts,
        stops,
        slots,
        len(rows),
        num_tokens,
        *page_table.stride(),
        PAGE_SIZE=page_size,
    )
    return slots


def slot_mapping_extend_reference(
    page_table: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    stops: torch.Tensor,
    *,
    page_size: int,
    num_tokens: int,
) -> torch.Tensor:
    """Return the slots of ``[start, stop)``; see `slot_mapping_extend`."""
    lengths = (stops - starts).long()
    ends = lengths.cumsum(0)
    tokens = torch.arange(num_tokens, device=page_table.device)
    # The request of each token; one past the last for padded tokens.
    requests = torch.searchsorted(ends, tokens, right=True)
    is_real = requests < len(rows)
    # What to add to a token's place in the batch to get its position in its request.
    shifts = pad(starts - (ends - lengths), (0, 1))
    positions = (tokens + shifts[requests]) * is_real
    token_rows = pad(rows.long(), (0, 1))[requests]
    pages = page_table[token_rows, positions // page_size]
    # The product passes 2**31 in a large pool, so it is taken in int64.
    return (pages.long() * page_size + positions % page_size) * is_real


def slot_mapping_decode(
    page_table: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    *,
    page_size: int,
    num_tokens: int = 1,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Return the slots of the next `num_tokens` positions of each request.

    Equals `slot_mapping_extend` with ``stops = starts + num_tokens``.

    Args:
        page_table: Page ids by row and column, int32
            `[num_rows, max_pages_per_request]`.
        rows: Row of each request, int32 `[num_reqs]`.
        starts: First position of each request, int32 `[num_reqs]`.
        page_size: Slots a page.
        num_tokens: Tokens a request, more than 1 for drafts.
        backend: Which implementation; see `pick_backend`.

    Returns:
        Slots, int64 `[num_reqs * num_tokens]`, request after request, on the table's
        device.

    Raises:
        BackendUnavailableError: The backend cannot run on the table's device.
        ConfigError: There is no such backend, a tensor has another shape or dtype, or
            a size is out of range.
    """
    check_table(page_table, page_size)
    check_count("num_tokens", num_tokens)
    rows, starts = as_numbers(rows=rows, starts=starts)
    if pick_backend(backend, page_table.device) == "reference":
        return slot_mapping_decode_reference(
            page_table, rows, starts, page_size=page_size, num_tokens=num_tokens
        )
    return _map_positions(
        page_table, rows, starts, page_size, num_tokens=num_tokens, shift=0
    )


def slot_mapping_decode_reference(
    page_table: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    *,
    page_size: int,
    num_tokens: int = 1,
) -> torch.Tensor:
    """Return the slots of the next positions; see `slot_mapping_decode`."""
    return slot_mapping_extend_reference(
        page_table,
        rows,
        starts,
        starts + num_tokens,
        page_size=page_size,
        num_tokens=len(rows) * num_tokens,
    )


def last_loc(
    page_table: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    *,
    page_size: int,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Return the slot of the last prefix token of each request.

    Defined by this loop::

        for row, start in zip(rows, starts):
            page = page_table[row, (start - 1) // page_size]
            slot = page * page_size + (start - 1) % page_size
            slots.append(slot if start > 0 else -1)

    Args:
        page_table: Page ids by row and column, int32
            `[num_rows, max_pages_per_request]`.
        rows: Row of each request, int32 `[num_reqs]`.
        starts: Length of each request's prefix, int32 `[num_reqs]`.
        page_size: Slots a page.
        backend: Which implementation; see `pick_backend`.

    Returns:
        Slots, int64 `[num_reqs]`, on the table's device; -1 where there is no prefix.

    Raises:
        BackendUnavailableError: The backend cannot run on the table's device.
        ConfigError: There is no such backend, a tensor has another shape or dtype, or
            the size is out of range.
    """
    check_table(page_table, page_size)
    rows, starts = as_numbers(rows=rows, starts=starts)
    if pick_backend(backend, page_table.device) == "reference":
        return last_loc_reference(page_table, rows, starts, page_size=page_size)
    return _map_positions(page_table, rows, starts, page_size, num_tokens=1, shift=-1)


def last_loc_reference(
    page_table: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    *,
    page_size: int,
) -> torch.Tensor:
    """Return the slot of the last prefix token; see `last_loc`."""
    has_prefix = starts > 0
    last = (starts - 1) * has_prefix
    slots = slot_mapping_decode_reference(page_table, rows, last, page_size=page_size)
    return slots.where(has_prefix, -1)


def _map_positions(
    page_table: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    page_size: int,
    *,
    num_tokens: int,
    shift: int,
) -> torch.Tensor:
    """Launch the kernel for the same number of positions of each request."""
    from .triton.slot_mapping import BLOCK, slot_mapping_decode_kernel

    slots = _empty_slots(page_table, len(rows) * num_tokens)
    if len(slots) > 0:
        slot_mapping_decode_kernel[(-(-len(slots) // BLOCK),)](
            page_table,
            rows,
            starts,
            slots,
            len(slots),
            num_tokens,
            shift,
            *page_table.stride(),
            PAGE_SIZE=page_size,
        )
    return slots


def _empty_slots(page_table: torch.Tensor, count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.int64, device=page_table.device)

"""Slot mapping: the slot of each token that a step computes (`out_cache_loc`)."""

from __future__ import annotations

import torch


def slot_mapping_extend(
    page_table: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    stops: torch.Tensor,
    *,
    page_size: int,
) -> torch.Tensor:
    """Return the slots of the positions ``[start, stop)`` of each request.

    Defined by this loop::

        for row, start, stop in zip(rows, starts, stops):
            for position in range(start, stop):
                page = page_table[row, position // page_size]
                slots.append(page * page_size + position % page_size)

    Args:
        page_table: Page ids by row and column, int32
            `[num_rows, max_pages_per_request]`.
        rows: Row of each request, int32 `[num_reqs]`, on the host.
        starts: First position of each request, int32 `[num_reqs]`, on the host.
        stops: End of the positions of each request, int32 `[num_reqs]`, on the host.
        page_size: Slots a page.

    Returns:
        Slots, int64 `[num_tokens]`, request after request, on the table's device.
    """
    lengths = stops.long() - starts
    # What to add to a token's place in the batch to get its position in its request.
    shifts = starts - (lengths.cumsum(0) - lengths)
    token_rows = rows.long().repeat_interleave(lengths)
    positions = torch.arange(len(token_rows)) + shifts.repeat_interleave(lengths)
    token_rows = token_rows.to(page_table.device)
    positions = positions.to(page_table.device)
    pages = page_table[token_rows, positions // page_size]
    # The product passes 2**31 in a large pool, so it is taken in int64.
    return pages.long() * page_size + positions % page_size


def slot_mapping_decode(
    page_table: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    *,
    page_size: int,
    num_tokens: int = 1,
) -> torch.Tensor:
    """Return the slots of the next `num_tokens` positions of each request.

    Equals `slot_mapping_extend` with ``stops = starts + num_tokens``; a device can do
    better, since every request has the same number of tokens.

    Args:
        page_table: Page ids by row and column, int32
            `[num_rows, max_pages_per_request]`.
        rows: Row of each request, int32 `[num_reqs]`, on the host.
        starts: First position of each request, int32 `[num_reqs]`, on the host.
        page_size: Slots a page.
        num_tokens: Tokens a request, more than 1 for drafts.

    Returns:
        Slots, int64 `[num_reqs * num_tokens]`, request after request, on the table's
        device.
    """
    return slot_mapping_extend(
        page_table, rows, starts, starts + num_tokens, page_size=page_size
    )

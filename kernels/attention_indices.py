"""Where a step's K and V lie, in the forms that attention libraries take."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from .backend import Backend, pick_backend
from .checks import as_numbers, check_count, check_table


@dataclass(frozen=True, slots=True, eq=False)
class KVIndices:
    """The pages of each request, ragged, as FlashInfer takes them.

    Attributes:
        kv_indptr: Bounds of each request's part of `kv_indices`, int32
            `[num_reqs + 1]`.
        kv_indices: Page ids, request after request, int32 `[num_pages]`.
        last_page_len: Slots in use of each request's last page, ``1..page_size``, int32
            `[num_reqs]`. With no page it is `page_size`, so that a request has
            ``(pages - 1) * page_size + last_page_len`` tokens in any case.
    """

    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    last_page_len: torch.Tensor


def kv_indices(
    page_table: torch.Tensor,
    rows: torch.Tensor,
    stops: torch.Tensor,
    *,
    page_size: int,
    num_pages: int,
    backend: Backend = "auto",
) -> KVIndices:
    """Return the pages of each request, one after another, and their bounds.

    Defined by this loop::

        indptr, indices, last_page_len = [0], [], []
        for row, stop in zip(rows, stops):
            indices += page_table[row, : ceil(stop / page_size)]
            indptr.append(len(indices))
            last_page_len.append((stop - 1) % page_size + 1)
        indices += [0] * (num_pages - len(indices))

    Args:
        page_table: Page ids by row and column, int32
            `[num_rows, max_pages_per_request]`.
        rows: Row of each request, int32 `[num_reqs]`.
        stops: Length of each request, int32 `[num_reqs]`.
        page_size: Slots a page.
        num_pages: Pages of all requests, which the host knows without a look at the
            device; more are padded with page 0.
        backend: Which implementation; see `pick_backend`.

    Returns:
        The pages, on the table's device.

    Raises:
        BackendUnavailableError: The backend cannot run on the table's device.
        ConfigError: There is no such backend, a tensor has another shape or dtype, or
            a size is out of range.
    """
    check_table(page_table, page_size)
    check_count("num_pages", num_pages)
    rows, stops = as_numbers(rows=rows, stops=stops)
    if pick_backend(backend, page_table.device) == "reference":
        return kv_indices_reference(
            page_table, rows, stops, page_size=page_size, num_pages=num_pages
        )
    from .triton.attention_indices import BLOCK, kv_indices_kernel

    indptr, indices, last_page_len = (
        torch.empty(count, dtype=torch.int32, device=page_table.device)
        for count in (len(rows) + 1, num_pages, len(rows))
    )
    # A request with many pages is the work of several programs; one more than there are
    # requests writes the last bound, and pads.
    num_splits = min(max(-(-num_pages // BLOCK), 1), 8)
    kv_indices_kernel[(len(rows) + 1, num_splits)](
        page_table,
        rows,
        stops,
        indptr,
        indices,
        last_page_len,
        len(rows),
        num_pages,
        *page_table.stride(),
        PAGE_SIZE=page_size,
    )
    return KVIndices(indptr, indices, last_page_len)


def kv_indices_reference(
    page_table: torch.Tensor,
    rows: torch.Tensor,
    stops: torch.Tensor,
    *,
    page_size: int,
    num_pages: int,
) -> KVIndices:
    """Return the pages of each request; see `kv_indices`."""
    ends = ((stops + page_size - 1) // page_size).cumsum(0)
    indptr = pad(ends, (1, 0))
    places = torch.arange(num_pages, device=page_table.device)
    # The request of each place; one past the last for padding.
    requests = torch.searchsorted(ends, places, right=True)
    is_real = requests < len(rows)
    columns = (places - indptr[requests]) * is_real
    pages = page_table[pad(rows.long(), (0, 1))[requests], columns] * is_real
    # A remainder has the sign of the divisor, so that it is right for 0 too.
    return KVIndices(indptr.int(), pages, (stops - 1) % page_size + 1)


def block_table(
    page_table: torch.Tensor,
    rows: torch.Tensor,
    stops: torch.Tensor,
    *,
    page_size: int,
    width: int,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Return the pages of each request as a dense table, as FlashAttention takes it.

    Defined by this loop::

        for i, (row, stop) in enumerate(zip(rows, stops)):
            for column in range(width):
                is_used = column < ceil(stop / page_size)
                table[i, column] = page_table[row, column] if is_used else 0

    Args:
        page_table: Page ids by row and column, int32
            `[num_rows, max_pages_per_request]`.
        rows: Row of each request, int32 `[num_reqs]`.
        stops: Length of each request, int32 `[num_reqs]`.
        page_size: Slots a page.
        width: Columns of the result, `max_pages_per_request` at most.
        backend: Which implementation; see `pick_backend`.

    Returns:
        Page ids, int32 `[num_reqs, width]`, on the table's device.

    Raises:
        BackendUnavailableError: The backend cannot run on the table's device.
        ConfigError: There is no such backend, a tensor has another shape or dtype, or
            a size is out of range.
    """
    check_table(page_table, page_size)
    check_count("width", width, maximum=page_table.shape[1])
    rows, stops = as_numbers(rows=rows, stops=stops)
    if pick_backend(backend, page_table.device) == "reference":
        return block_table_reference(
            page_table, rows, stops, page_size=page_size, width=width
        )
    from .triton.attention_indices import BLOCK, block_table_kernel

    table = torch.empty((len(rows), width), dtype=torch.int32, device=page_table.device)
    if table.numel() > 0:
        block_table_kernel[(len(rows), -(-width // BLOCK))](
            page_table,
            rows,
            stops,
            table,
            width,
            *page_table.stride(),
            PAGE_SIZE=page_size,
        )
    return table


def block_table_reference(
    page_table: torch.Tensor,
    rows: torch.Tensor,
    stops: torch.Tensor,
    *,
    page_size: int,
    width: int,
) -> torch.Tensor:
    """Return the pages of each request as a dense table; see `block_table`."""
    table = page_table[:, :width].index_select(0, rows)
    num_pages = (stops + page_size - 1) // page_size
    return table * (torch.arange(width, device=table.device) < num_pages[:, None])

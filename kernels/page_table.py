"""The page-table delta: what is new in the rows of running requests."""

from __future__ import annotations

from itertools import pairwise

import torch

from .backend import Backend, pick_backend
from .checks import as_numbers, check_table
from .errors import ConfigError


def apply_page_table_delta(
    page_table: torch.Tensor,
    rows: torch.Tensor,
    page_starts: torch.Tensor,
    page_indptr: torch.Tensor,
    new_pages: torch.Tensor,
    forgotten_rows: torch.Tensor,
    *,
    backend: Backend = "auto",
) -> None:
    """Write the new page ids of a step into the page table, in place.

    Defined by these loops, in this order::

        for row in forgotten_rows:
            page_table[row] = 0
        for i in range(num_reqs):
            pages = new_pages[page_indptr[i] : page_indptr[i + 1]]
            page_table[rows[i], page_starts[i] : page_starts[i] + len(pages)] = pages

    One launch, whatever the batch. The tensors of numbers may be slices of one upload.

    Args:
        page_table: Page ids by row and column, int32
            `[num_rows, max_pages_per_request]`; changed in place.
        rows: Row of each request, all different, int32 `[num_reqs]`.
        page_starts: Column at which each request's new pages begin, int32
            `[num_reqs]`.
        page_indptr: Bounds of each request's part of `new_pages`, int32
            `[num_reqs + 1]`.
        new_pages: Page ids, int32 `[num_new_pages]`.
        forgotten_rows: Rows to zero first, int32 `[num_forgotten]`.
        backend: Which implementation; see `pick_backend`.

    Raises:
        BackendUnavailableError: The backend cannot run on the table's device.
        ConfigError: There is no such backend, or a tensor has another shape or dtype.
    """
    check_table(page_table, page_size=1)
    rows, page_starts = as_numbers(rows=rows, page_starts=page_starts)
    (page_indptr,) = as_numbers(page_indptr=page_indptr)
    (new_pages,) = as_numbers(new_pages=new_pages)
    (forgotten_rows,) = as_numbers(forgotten_rows=forgotten_rows)
    if len(page_indptr) != len(rows) + 1:
        raise ConfigError(
            f"page_indptr must be one more than rows, {len(rows) + 1}, got "
            f"{len(page_indptr)}"
        )
    if pick_backend(backend, page_table.device) == "reference":
        apply_page_table_delta_reference(
            page_table, rows, page_starts, page_indptr, new_pages, forgotten_rows
        )
        return
    num_reqs, num_forgotten = len(rows), len(forgotten_rows)
    if num_reqs + num_forgotten == 0:
        return
    from .triton.page_table import page_table_delta_kernel

    page_table_delta_kernel[(num_reqs + num_forgotten,)](
        page_table,
        rows,
        page_starts,
        page_indptr,
        new_pages,
        forgotten_rows,
        num_reqs,
        num_forgotten,
        page_table.shape[1],
        *page_table.stride(),
    )


def apply_page_table_delta_reference(
    page_table: torch.Tensor,
    rows: torch.Tensor,
    page_starts: torch.Tensor,
    page_indptr: torch.Tensor,
    new_pages: torch.Tensor,
    forgotten_rows: torch.Tensor,
) -> None:
    """Write the new page ids of a step; see `apply_page_table_delta`."""
    for row in forgotten_rows.cpu().numpy().tolist():
        page_table[row] = 0
    for row, start, (begin, end) in zip(
        rows.cpu().numpy().tolist(),
        page_starts.cpu().numpy().tolist(),
        pairwise(page_indptr.cpu().numpy().tolist()),
        strict=True,
    ):
        # Most requests of a decode step have no new page.
        if begin < end:
            page_table[row, start : start + end - begin] = new_pages[begin:end]

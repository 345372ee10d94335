"""The page-table delta: what is new in the rows of running requests."""

from __future__ import annotations

from itertools import pairwise

import torch


def apply_page_table_delta(
    page_table: torch.Tensor,
    rows: torch.Tensor,
    page_starts: torch.Tensor,
    page_indptr: torch.Tensor,
    new_pages: torch.Tensor,
    forgotten_rows: torch.Tensor,
) -> None:
    """Write the new page ids of a step into the page table, in place.

    Defined by these loops, in this order::

        for row in forgotten_rows:
            page_table[row] = 0
        for i in range(num_reqs):
            pages = new_pages[page_indptr[i] : page_indptr[i + 1]]
            page_table[rows[i], page_starts[i] : page_starts[i] + len(pages)] = pages

    Args:
        page_table: Page ids by row and column, int32
            `[num_rows, max_pages_per_request]`; changed in place.
        rows: Row of each request, int32 `[num_reqs]`, on the host.
        page_starts: Column at which each request's new pages begin, int32
            `[num_reqs]`, on the host.
        page_indptr: Bounds of each request's part of `new_pages`, int32
            `[num_reqs + 1]`, on the host.
        new_pages: Page ids, int32 `[num_new_pages]`.
        forgotten_rows: Rows to zero first, int32, on the host.
    """
    for row in forgotten_rows.numpy().tolist():
        page_table[row] = 0
    for row, start, (begin, end) in zip(
        rows.numpy().tolist(),
        page_starts.numpy().tolist(),
        pairwise(page_indptr.numpy().tolist()),
        strict=True,
    ):
        # Most requests of a decode step have no new page.
        if begin < end:
            page_table[row, start : start + end - begin] = new_pages[begin:end]

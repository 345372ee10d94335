"""The request table: which pages each running request uses, position by position."""

from __future__ import annotations

from typing import Final

import numpy as np

from .errors import RequestStateError
from .sizes import as_size

PADDING_ROW: Final = 0
"""The row of padded requests: all hold pages, never handed out."""


class RequestTable:
    """Rows of page ids, one for each running request.

    Column ``c`` of a row is the page of the positions ``[c * page_size, (c + 1) *
    page_size)``. Row 0 is the padding row. Pages are copied in and out as raw bytes, as
    the radix tree holds them.
    """

    def __init__(self, max_num_requests: int, max_pages_per_request: int) -> None:
        """Make a table with all rows free.

        Args:
            max_num_requests: Rows that can be taken at a time, at least 1.
            max_pages_per_request: Columns, at least 1.

        Raises:
            ConfigError: A number is out of range.
        """
        self._max_num_requests = as_size("max_num_requests", max_num_requests)
        width = as_size("max_pages_per_request", max_pages_per_request)
        self.pages = np.zeros((self._max_num_requests + 1, width), dtype=np.int32)
        self._row_bytes = 4 * width
        # Writing bytes through a flat view costs half of an array assignment.
        self._flat = self.pages.data.cast("B")
        self.free_all()

    @property
    def max_num_requests(self) -> int:
        """Rows that can be taken at a time."""
        return self._max_num_requests

    @property
    def num_free_rows(self) -> int:
        """Rows that `alloc` can hand out now."""
        return len(self._free_rows)

    def alloc(self) -> int | None:
        """Take a free row, or return ``None`` if there is none."""
        return self._free_rows.popitem()[0] if self._free_rows else None

    def free(self, row: int) -> None:
        """Give a row back that `alloc` handed out; what it lists means nothing now.

        Raises:
            RequestStateError: The row is free already, or never was handed out.
        """
        if row in self._free_rows or not 1 <= row <= self._max_num_requests:
            raise RequestStateError(f"row {row} is not in use")
        self._free_rows[row] = None

    def free_all(self) -> None:
        """Take every row back: equal to a fresh table."""
        self.pages.fill(0)
        # A stack whose members can be looked up: a dict keeps its order.
        self._free_rows = dict.fromkeys(range(self._max_num_requests, 0, -1))

    def free_rows(self) -> list[int]:
        """List the free rows."""
        return list(self._free_rows)

    def read(self, row: int, start: int, stop: int) -> bytes:
        """Copy the columns ``[start, stop)`` of a row, the bytes of int32."""
        at = row * self._row_bytes
        return bytes(self._flat[at + 4 * start : at + 4 * stop])

    def write(self, row: int, start: int, pages: bytes) -> None:
        """Write page ids into a row, from column `start` on.

        Args:
            row: A row that `alloc` handed out.
            start: First column.
            pages: The bytes of int32 page ids; they must fit in the row.
        """
        at = row * self._row_bytes + 4 * start
        self._flat[at : at + len(pages)] = pages

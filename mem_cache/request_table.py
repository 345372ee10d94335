"""The request table: which pages each running request uses, position by position."""

from __future__ import annotations

from typing import Final

from mypy_extensions import mypyc_attr

from .errors import RequestStateError
from .packed_numbers import Packed
from .sizes import Integer, as_integer, as_size

PADDING_ROW: Final = 0
"""The row of padded requests: it lists no page, and is never handed out."""


@mypyc_attr(allow_interpreted_subclasses=True)
class RequestTable:
    """Rows of page ids, one for each running request.

    A row is the bytes of int32 page ids, as the radix tree holds them. Its number ``c``
    is the page of the positions ``[c * page_size, (c + 1) * page_size)``; it is as long
    as its request has pages. Row 0 is the padding row.

    Attributes:
        rows: What each row lists, by its number. A row in use is its request's to
            write.
    """

    def __init__(self, max_num_requests: Integer) -> None:
        """Make a table with all rows free.

        Args:
            max_num_requests: Rows that can be taken at a time, at least 1.

        Raises:
            ConfigError: The number is out of range.
        """
        self._max_num_requests = as_size("max_num_requests", max_num_requests)
        self.free_all()

    @property
    def max_num_requests(self) -> int:
        """Rows that can be taken at a time."""
        return self._max_num_requests

    @property
    def num_free_rows(self) -> int:
        """Rows that `alloc` can hand out now."""
        return len(self._free_rows)

    def alloc(self, pages: Packed = b"") -> int | None:
        """Take a free row, or return ``None`` if there is none.

        Args:
            pages: What it lists first, the bytes of int32.
        """
        if not self._free_rows:
            return None
        row = self._free_rows.popitem()[0]
        self.rows[row] = bytearray(pages)
        return row

    def free(self, row: Integer) -> None:
        """Give a row back that `alloc` handed out; it lists nothing now.

        Raises:
            ConfigError: `row` is no integer.
            RequestStateError: The row is free already, or never was handed out.
        """
        at = as_integer("row", row)
        if at in self._free_rows or not 1 <= at <= self._max_num_requests:
            raise RequestStateError(f"row {at} is not in use")
        self.rows[at].clear()
        self._free_rows[at] = None

    def free_all(self) -> None:
        """Take every row back: equal to a fresh table."""
        self.rows = [bytearray() for _ in range(self._max_num_requests + 1)]
        # A stack whose members can be looked up: a dict keeps its order.
        self._free_rows = dict.fromkeys(range(self._max_num_requests, 0, -1))

    def free_rows(self) -> list[int]:
        """List the free rows."""
        return list(self._free_rows)

"""The running requests: their rows, their own pages, and what workers know of them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import numpy as np
from numpy.typing import NDArray

from .allocator import TokenToKVPoolAllocator
from .errors import LengthError, RequestStateError
from .kv_cache_info import KVCacheInfo
from .payload import pack_payload
from .radix_node import PAGE_ID_BYTES
from .request_kv import RequestKV
from .request_table import RequestTable
from .sizes import num_pages_for


class RunningRequests:
    """Which requests run, and which pages each of them uses and owns.

    Attributes:
        num_held_pages: Pages that requests own outside the tree. For reading.
    """

    def __init__(
        self,
        allocator: TokenToKVPoolAllocator,
        table: RequestTable,
        max_context_len: int,
    ) -> None:
        """Start without requests.

        Args:
            allocator: Takes back the pages that requests own.
            table: Lists the pages that requests use.
            max_context_len: Longest sequence of a request, in tokens.
        """
        self._allocator = allocator
        self._table = table
        self._max_context_len = max_context_len
        self._requests: dict[int, RequestKV] = {}
        self._forgotten_rows: dict[int, None] = {}
        self.num_held_pages = 0

    def __len__(self) -> int:
        """Count the running requests."""
        return len(self._requests)

    def __iter__(self) -> Iterator[RequestKV]:
        """Iterate over the running requests."""
        return iter(self._requests.values())

    def open(self, namespace: Hashable, priority: int) -> RequestKV | None:
        """Give a new request a row; ``None`` if all are taken."""
        row = self._table.alloc()
        if row is None:
            return None
        request = RequestKV(row, namespace, priority, self)
        self._requests[row] = request
        return request

    def close(self, request: RequestKV) -> None:
        """Take back a request's own pages and its row."""
        self.drop_tail(request, request.protected_len)
        row = request.req_pool_idx
        request.owner = None
        del self._requests[row]
        self._forgotten_rows[row] = None
        self._table.free(row)

    def forget_rows(self, rows: list[int]) -> None:
        """Tell the workers with the next message that `rows` were given back."""
        self._forgotten_rows = dict.fromkeys([*rows, *self._forgotten_rows])

    def begin_with(self, request: RequestKV, pages: bytes) -> None:
        """List pages of the tree as the prefix of a new request.

        Args:
            request: A request without pages.
            pages: Page ids, the bytes of int32.
        """
        self._table.write(request.req_pool_idx, 0, pages)
        request.num_pages = len(pages) // PAGE_ID_BYTES
        cached_len = request.num_pages * self._allocator.page_size
        request.protected_len = cached_len
        request.committed_len = cached_len
        request.allocated_len = cached_len

    def count_new_pages(self, requests: list[RequestKV], lens: list[int]) -> list[int]:
        """Check the lengths of a batch, and count the pages that each request needs.

        Raises:
            LengthError: A length does not go forward, or too far.
            RequestStateError: A request is named twice.
        """
        if len(requests) != len(lens):
            raise LengthError(
                f"need one length a request, got {len(lens)} for {len(requests)}"
            )
        page_size = self._allocator.page_size
        max_len = self._max_context_len
        needed: list[int] = []
        for request, new_len in zip(requests, lens):  # noqa: B905 - faster when compiled
            if not request.committed_len < new_len <= max_len:
                raise LengthError(
                    f"a new length must be in {request.committed_len + 1}..{max_len}, "
                    f"got {new_len}"
                )
            num_new = -(-new_len // page_size) - request.num_pages
            needed.append(num_new if num_new > 0 else 0)
        if len(requests) > 1 and len(set(requests)) < len(requests):
            raise RequestStateError("a batch must name each request once")
        return needed

    def hand_out(
        self,
        requests: list[RequestKV],
        lens: list[int],
        needed: list[int],
        pages: bytes,
    ) -> KVCacheInfo:
        """Give new pages to the requests of a batch, and tell the workers.

        Args:
            requests: The batch, checked.
            lens: Total length of each request after the step.
            needed: New pages of each request.
            pages: As many page ids, the bytes of int32.
        """
        table = self._table
        rows: list[int] = []
        starts: list[int] = []
        page_starts: list[int] = []
        page_indptr = [0]
        parts: list[bytes] = []
        taken = num_sent = 0
        for request, new_len, num_new in zip(requests, lens, needed):  # noqa: B905 - as above
            row = request.req_pool_idx
            num_known = request.num_known_pages
            rows.append(row)
            starts.append(request.committed_len)
            page_starts.append(num_known)
            num_pages = request.num_pages
            if num_known < num_pages:
                parts.append(table.read(row, num_known, num_pages))
            if num_new:
                end = taken + num_new * PAGE_ID_BYTES
                part = pages[taken:end]
                parts.append(part)
                table.write(row, num_pages, part)
                taken = end
                num_pages += num_new
                request.num_pages = num_pages
            if num_known < num_pages:
                num_sent += num_pages - num_known
                request.num_known_pages = num_pages
                request.has_run = True
            if new_len > request.allocated_len:
                request.allocated_len = new_len
            page_indptr.append(num_sent)
        self.num_held_pages += taken // PAGE_ID_BYTES
        forgotten = self._forgotten_rows
        if forgotten:
            self._forgotten_rows = {}
        head = [*rows, *starts, *lens, *page_starts, *page_indptr]
        payload = pack_payload(head, b"".join(parts), list(forgotten))
        return KVCacheInfo(len(rows), num_sent, payload)

    def drop_tail(self, request: RequestKV, new_len: int) -> None:
        """Free a request's own pages behind the one that ``new_len - 1`` is in."""
        kept = num_pages_for(new_len, self._allocator.page_size)
        if kept < request.num_pages:
            dropped = self._table.read(request.req_pool_idx, kept, request.num_pages)
            self._allocator.give_back(dropped)
            self.num_held_pages -= request.num_pages - kept
            if request.quota is not None:
                request.quota.num_held_pages -= request.num_pages - kept
            request.num_pages = kept
            request.num_known_pages = min(request.num_known_pages, kept)
        request.committed_len = min(request.committed_len, new_len)
        request.allocated_len = new_len

    def own_pages(self, request: RequestKV, stop: int) -> bytes:
        """Return the page ids of ``[protected_len, stop)``, the bytes of int32.

        Args:
            request: A running request.
            stop: End of the positions, page aligned.
        """
        page_size = self._allocator.page_size
        return self._table.read(
            request.req_pool_idx, request.protected_len // page_size, stop // page_size
        )

    def hand_over(self, request: RequestKV, stop: int, known: bytes) -> None:
        """Make the pages of ``[protected_len, stop)`` the tree's.

        Args:
            request: A running request.
            stop: End of the positions, page aligned.
            known: Page ids that the tree had for the first of them, the bytes of int32;
                the request's own are duplicates.
        """
        column = request.protected_len // self._allocator.page_size
        if known:
            row = request.req_pool_idx
            end = column + len(known) // PAGE_ID_BYTES
            duplicates = self._table.read(row, column, end)
            # First the row, then the free: no row ever lists a free page.
            self._table.write(row, column, known)
            self._allocator.give_back(duplicates)
            request.num_known_pages = min(request.num_known_pages, column)
        num_pages = stop // self._allocator.page_size - column
        self.num_held_pages -= num_pages
        if request.quota is not None:
            request.quota.num_held_pages -= num_pages
        request.protected_len = stop

    def add_page(self, request: RequestKV, page: bytes, new_len: int) -> None:
        """Give a request that ends at a page border the start of its next page.

        Args:
            request: A running request.
            page: A page of its own, the bytes of int32.
            new_len: Its length, in tokens, with what that page will hold.
        """
        self._table.write(request.req_pool_idx, request.num_pages, page)
        request.num_pages += 1
        request.committed_len = new_len
        request.allocated_len = new_len
        self.num_held_pages += 1

    def rename_pages(self, new_ids: NDArray[np.int32]) -> None:
        """Take note that all pages have new ids; workers are told what changed.

        Args:
            new_ids: The id of each page by its old one, int32 `[num_pages + 1]`.
        """
        for request in self:
            row = self._table.pages[request.req_pool_idx, : request.num_pages]
            changed = np.flatnonzero(new_ids[row] != row)
            if len(changed):
                row[:] = new_ids[row]
                request.num_known_pages = min(request.num_known_pages, int(changed[0]))

    def slots(self, request: RequestKV, start: int, stop: int) -> NDArray[np.int64]:
        """Return the slots of the positions ``[start, stop)``, int64."""
        page_size = self._allocator.page_size
        positions = np.arange(start, stop, dtype=np.int64)
        pages = self._table.pages[request.req_pool_idx][positions // page_size]
        slots: NDArray[np.int64] = pages.astype(np.int64) * page_size
        return slots + positions % page_size

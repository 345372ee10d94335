"""The running requests: their rows, their own pages, and what workers know of them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .allocator import TokenToKVPoolAllocator
from .errors import LengthError, RequestStateError
from .hit_counters import HitCounters
from .radix_node import PAGE_ID_BYTES, RadixNode
from .request_kv import RequestKV
from .request_table import RequestTable
from .step_builder import StepBuilder

if TYPE_CHECKING:
    from .quota import Quota


class RunningRequests:
    """Which requests run, and which pages each of them uses and owns.

    Attributes:
        max_context_len: Longest sequence of a request, in tokens. For reading.
        num_held_pages: Pages that requests own outside the tree. For reading.
    """

    def __init__(
        self,
        allocator: TokenToKVPoolAllocator,
        table: RequestTable,
        max_context_len: int,
        hits: HitCounters,
    ) -> None:
        """Start without requests.

        Args:
            allocator: Takes back the pages that requests own.
            table: Lists the pages that requests use.
            max_context_len: Longest sequence of a request, in tokens.
            hits: Counts each request, with its first pages.
        """
        self._allocator = allocator
        self._table = table
        self.max_context_len = max_context_len
        self._requests: dict[int, RequestKV] = {}
        self._forgotten_rows: dict[int, None] = {}
        self._hits = hits
        self.num_held_pages = 0

    def __len__(self) -> int:
        """Count the running requests."""
        return len(self._requests)

    def __iter__(self) -> Iterator[RequestKV]:
        """Iterate over the running requests."""
        return iter(self._requests.values())

    def open(
        self, namespace: Hashable, priority: int, node: RadixNode | None, pages: bytes
    ) -> RequestKV:
        """Give a new request a row; one must be free.

        Args:
            namespace: What separates its prefix from others'.
            priority: Raises the priority of what it publishes.
            node: The tree node that its lease is on.
            pages: The tree's pages that it begins with, the bytes of int32.
        """
        row = self._table.alloc(pages)
        assert row is not None  # one was free
        cached_len = len(pages) // PAGE_ID_BYTES * self._allocator.page_size
        request = RequestKV(
            row, namespace, priority, self, node, self._table.rows[row], cached_len
        )
        self._requests[row] = request
        return request

    def close(self, request: RequestKV) -> None:
        """Take back a request's own pages and its row."""
        self._free_tail(request, request.protected_len // self._allocator.page_size)
        row = request.req_pool_idx
        request.owner = None
        del self._requests[row]
        self._forgotten_rows[row] = None
        self._table.free(row)

    def let_go(self) -> None:
        """Forget all requests, which refer to this: their cache is gone."""
        for request in self._requests.values():
            request.owner = None
        self._requests.clear()

    def forget_rows(self, rows: list[int]) -> None:
        """Tell the workers with the next message that `rows` were given back."""
        self._forgotten_rows = dict.fromkeys([*rows, *self._forgotten_rows])

    def count_new_pages(
        self, step: StepBuilder, requests: list[RequestKV], lens: list[int]
    ) -> int:
        """Check what is to be added to a step, and count the pages that it needs.

        Raises:
            LengthError: A length does not go forward, or too far.
            RequestStateError: A request is named twice, or one that is in the step was
                given back.
        """
        if len(requests) != len(lens):
            raise LengthError(
                f"need one length a request, got {len(lens)} for {len(requests)}"
            )
        page_size = self._allocator.page_size
        max_len = self.max_context_len
        num_pages = 0
        for request, new_len in zip(requests, lens):  # noqa: B905 - faster when compiled
            if not request.committed_len < new_len <= max_len:
                raise LengthError(
                    f"a new length must be in {request.committed_len + 1}..{max_len}, "
                    f"got {new_len}"
                )
            num_new = -(-new_len // page_size) - len(request.pages) // PAGE_ID_BYTES
            if num_new > 0:
                num_pages += num_new
        named = step.requests
        if len(requests) > 1 and len(set(requests)) < len(requests):
            raise RequestStateError("a batch must name each request once")
        if named:
            if not named.isdisjoint(requests):
                raise RequestStateError("a step must name each request once")
            if not self._forgotten_rows.keys().isdisjoint(step.rows):
                raise RequestStateError("a request was given back within the step")
        return num_pages

    def claims(self, requests: list[RequestKV], lens: list[int]) -> dict[Quota, int]:
        """Return the new pages of a batch that count for quotas."""
        page_size = self._allocator.page_size
        claims: dict[Quota, int] = {}
        for request, new_len in zip(requests, lens, strict=True):
            quota = request.quota
            num_new = -(-new_len // page_size) - len(request.pages) // PAGE_ID_BYTES
            if quota is not None and num_new > 0:
                claims[quota] = claims.get(quota, 0) + num_new
        return claims

    def grow(
        self,
        step: StepBuilder,
        requests: list[RequestKV],
        lens: list[int],
        pages: bytes,
    ) -> None:
        """Give new pages to some requests, and add them to a step.

        Args:
            step: What the workers will be told.
            requests: They were checked.
            lens: Total length of each after the step.
            pages: As many page ids as they need, the bytes of int32.
        """
        page_size = self._allocator.page_size
        page_starts = step.page_starts
        page_indptr = step.page_indptr
        num_sent = page_indptr[-1]
        num_bytes = len(pages)
        taken = 0
        if self._forgotten_rows:
            step.forgotten_rows += self._forgotten_rows
            self._forgotten_rows = {}
        step.requests.update(requests)
        step.rows += [request.req_pool_idx for request in requests]
        step.starts += [request.committed_len for request in requests]
        step.stops += lens
        for request, new_len in zip(requests, lens):  # noqa: B905 - as above
            row = request.pages
            num_pages = num_before = len(row) // PAGE_ID_BYTES
            new_pages = b""
            if taken < num_bytes:  # somebody still gets some
                num_new = -(-new_len // page_size) - num_pages
                if num_new > 0:
                    end = taken + num_new * PAGE_ID_BYTES
                    # Compiled code would copy what it need not cut.
                    whole = taken == 0 and end == num_bytes
                    new_pages = pages if whole else pages[taken:end]
                    row += new_pages
                    taken = end
                    num_pages += num_new
            if new_len > request.allocated_len:
                request.allocated_len = new_len
            num_known = request.num_known_pages
            num_unknown = num_pages - num_known
            if num_unknown:
                if num_known == num_before:
                    step.pages.append(new_pages)
                else:
                    step.pages.append(bytes(row[num_known * PAGE_ID_BYTES :]))
                num_sent += num_unknown
                request.num_known_pages = num_pages
                if not request.has_run:
                    request.has_run = True
                    self._hits.count(request)
            page_starts.append(num_known)
            page_indptr.append(num_sent)
        self.num_held_pages += taken // PAGE_ID_BYTES

    def drop_tail(self, request: RequestKV, new_len: int) -> None:
        """Free a request's own pages behind the one that ``new_len - 1`` is in."""
        self._free_tail(request, -(-new_len // self._allocator.page_size))
        request.committed_len = min(request.committed_len, new_len)
        request.allocated_len = new_len

    def _free_tail(self, request: RequestKV, num_kept: int) -> None:
        """Free all pages of a request but the first `num_kept`, which are its own."""
        tail = request.pages[num_kept * PAGE_ID_BYTES :]
        if not tail:
            return
        num_pages = len(tail) // PAGE_ID_BYTES
        self._allocator.give_back(tail)
        self.num_held_pages -= num_pages
        if request.quota is not None:
            request.quota.num_held_pages -= num_pages
        del request.pages[num_kept * PAGE_ID_BYTES :]
        request.num_known_pages = min(request.num_known_pages, num_kept)

    def own_pages(self, request: RequestKV, stop: int) -> bytes:
        """Return the page ids of ``[protected_len, stop)``, the bytes of int32.

        Args:
            request: A running request.
            stop: End of the positions, page aligned.
        """
        page_size = self._allocator.page_size
        first = request.protected_len // page_size * PAGE_ID_BYTES
        # To add to bytes gives bytes, faster than `bytes` itself.
        return b"" + request.pages[first : stop // page_size * PAGE_ID_BYTES]

    def hand_over(self, request: RequestKV, stop: int, known: bytes) -> None:
        """Make the pages of ``[protected_len, stop)`` the tree's.

        Args:
            request: A running request.
            stop: End of the positions, page aligned.
            known: Page ids that the tree had for the first of them, the bytes of int32;
                the request's own are duplicates.
        """
        page_size = self._allocator.page_size
        if known:
            column = request.protected_len // page_size
            first = column * PAGE_ID_BYTES
            end = first + len(known)
            duplicates = request.pages[first:end]
            # First the row, then the free: no row ever lists a free page.
            request.pages[first:end] = known
            self._allocator.give_back(duplicates)
            request.num_known_pages = min(request.num_known_pages, column)
        num_pages = (stop - request.protected_len) // page_size
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
        request.pages += page
        request.committed_len = new_len
        request.allocated_len = new_len
        self.num_held_pages += 1

    def rename_pages(self, new_ids: NDArray[np.int32]) -> None:
        """Take note that all pages have new ids; workers are told what changed.

        Args:
            new_ids: The id of each page by its old one, int32 `[num_pages + 1]`.
        """
        for request in self:
            row = np.frombuffer(request.pages, np.int32)
            changed = np.flatnonzero(new_ids[row] != row)
            if len(changed):
                row[:] = new_ids[row]
                request.num_known_pages = min(request.num_known_pages, int(changed[0]))

    def slots(self, request: RequestKV, start: int, stop: int) -> NDArray[np.int64]:
        """Return the slots of the positions ``[start, stop)``, int64."""
        page_size = self._allocator.page_size
        positions = np.arange(start, stop, dtype=np.int64)
        # A copy, as no row can grow while an array shows it.
        row = np.frombuffer(bytes(request.pages), np.int32)
        slots: NDArray[np.int64] = row[positions // page_size].astype(np.int64)
        return slots * page_size + positions % page_size

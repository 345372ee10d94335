"""The memory manager: allocator, request table and pool of one process."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from .allocator import TokenToKVPoolAllocator
from .errors import ConfigError, PoolSizeError, RequestStateError
from .page_copies import PageCopies
from .request_table import RequestTable
from .sizes import Integer, as_size

if TYPE_CHECKING:
    from .kv_pool import KVPool


@runtime_checkable
class PagePool(Protocol):
    """What has as many pages as a cache may have, such as a `KVPool`."""

    @property
    def num_pages(self) -> int:
        """Usable pages, ``1..num_pages``."""
        ...


class MemoryManager:
    """The composition root of a process that owns KV memory.

    The allocator is the only holder of the state of pages; the methods here delegate to
    it. On the engine side there is no pool. Where the process has one, `kv_pool`, a
    resize keeps it in step; it is then the only pool that the cache is for, as workers
    elsewhere would not be told of the pages that moved. Pools that others resize are
    joined: the cache never has more pages than one of them.

    Attributes:
        allocator: Which pages are free, and the page size.
        request_table: Which pages each running request uses.
        page_copies: Which pages must be copied before the next step.
        kv_pool: The K and V buffers, if this process has them.
        max_context_len: Longest sequence of a request, in tokens.
    """

    def __init__(
        self,
        num_pages: Integer,
        page_size: Integer,
        *,
        max_num_requests: Integer,
        max_context_len: Integer,
        kv_pool: KVPool | None = None,
    ) -> None:
        """Make the memory of one process, everything free.

        Args:
            num_pages: Usable pages, ``1..num_pages``; page 0 comes on top.
            page_size: Slots a page, at least 1.
            max_num_requests: Requests that can run at a time, at least 1.
            max_context_len: Longest sequence of a request, in tokens, at least 1.
            kv_pool: The K and V buffers, if this process has them, of the same sizes:
                a resize of the cache resizes them.

        Raises:
            ConfigError: A number is out of range, or the pool has other sizes.
        """
        self.allocator = TokenToKVPoolAllocator(num_pages, page_size)
        self.max_context_len = as_size("max_context_len", max_context_len)
        self.request_table = RequestTable(max_num_requests)
        self.page_copies = PageCopies(self.allocator)
        if kv_pool is not None:
            sizes = (kv_pool.num_pages, kv_pool.page_size)
            if sizes != (self.num_pages, self.page_size):
                raise ConfigError(
                    "kv_pool must have the same (num_pages, page_size), "
                    f"{(self.num_pages, self.page_size)}, got {sizes}"
                )
        self.kv_pool = kv_pool
        self._is_attached = False
        # Weak, as is whom the cache is for: both hold the cache.
        self._pools: list[weakref.ref[PagePool]] = []
        self._scheduler: weakref.ref[object] | None = None

    def join(self, pool: PagePool) -> None:
        """Take note of a worker's pool, which a growth must not go beyond.

        `Engine` does so for the pool of its runner. The pool is forgotten when nobody
        else holds it.

        Args:
            pool: It may be resized at any time; `kv_pool` need not be told.
        """
        if pool is not self.kv_pool and pool not in self._joined():
            self._pools.append(weakref.ref(pool))

    def check_growth(self, num_pages: int) -> None:
        """Refuse more pages than a pool has that was joined.

        Raises:
            PoolSizeError: Grow that pool first.
        """
        if num_pages <= self.num_pages:
            return
        most = min((pool.num_pages for pool in self._joined()), default=num_pages)
        if num_pages > most:
            raise PoolSizeError(num_pages, most)

    def _joined(self) -> list[PagePool]:
        """Return the pools that are still there, and forget the others."""
        pools = [pool for ref in self._pools if (pool := ref()) is not None]
        self._pools = [weakref.ref(pool) for pool in pools]
        return pools

    def claim(self, scheduler: object) -> None:
        """Let a scheduler, and no other, have the rows and pages from now on.

        Args:
            scheduler: It has them until it is gone, or gives them up by `unclaim`.

        Raises:
            RequestStateError: Another scheduler has them.
        """
        other = self._scheduler and self._scheduler()
        if other is not None and other is not scheduler:
            raise RequestStateError(
                "a cache must have one scheduler, got a second one: close the first, "
                "or drop it"
            )
        self._scheduler = weakref.ref(scheduler)

    def unclaim(self, scheduler: object) -> None:
        """Let another scheduler have the rows and pages, if this one has them."""
        if self._scheduler is not None and self._scheduler() is scheduler:
            self._scheduler = None

    def attach(self) -> None:
        """Take note that a cache manages this memory from now on.

        Raises:
            ConfigError: Another cache does already: two would each count the other's
                pages as lost.
        """
        if self._is_attached:
            raise ConfigError("memory must belong to one cache, got a second one")
        self._is_attached = True

    @property
    def num_pages(self) -> int:
        """Usable pages, free or not."""
        return self.allocator.num_pages

    @property
    def page_size(self) -> int:
        """Slots a page."""
        return self.allocator.page_size

    @property
    def max_num_requests(self) -> int:
        """Requests that can run at a time."""
        return self.request_table.max_num_requests

    def resize(self, num_pages: Integer) -> None:
        """Change the number of usable pages of the allocator, and of a pool.

        A pool makes the pending page copies before it is cut, so its steps so far must
        be done.

        Raises:
            ConfigError: `num_pages` is out of range.
            PoolSizeError: A pool that was joined has fewer.
            PagesInUseError: A page above the new end is in use.
        """
        end = as_size("num_pages", num_pages)
        self.check_growth(end)
        pool = self.kv_pool
        # At no time may the allocator hand out pages that the pool does not have.
        if pool is not None and end > self.num_pages:
            pool.resize(end)
        self.allocator.resize(end)
        if pool is not None and end < pool.num_pages:
            copies = self.page_copies.take()
            if copies:
                pool.copy_pages(list(copies.values()), list(copies))
            pool.resize(end)

"""The memory manager: allocator, request table and pool of one process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .allocator import TokenToKVPoolAllocator
from .errors import ConfigError
from .page_copies import PageCopies
from .request_table import RequestTable
from .sizes import Integer, as_size

if TYPE_CHECKING:
    from .kv_pool import KVPool


class MemoryManager:
    """The composition root of a process that owns KV memory.

    The allocator is the only holder of the state of pages; the methods here delegate to
    it. On the engine side there is no pool. Where the process has one, a resize keeps
    it in step; it is then the only pool that the cache is for, as workers elsewhere
    would not be told of the pages that moved.

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
            kv_pool: The K and V buffers, if this process has them, of the same sizes.

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
            PagesInUseError: A page above the new end is in use.
        """
        end = as_size("num_pages", num_pages)
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

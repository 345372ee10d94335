"""Page copies that the workers have not been told of yet."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .allocator import TokenToKVPoolAllocator
from .kv_cache_info import KVCacheInfo, chain_copies


class PageCopies:
    """Which pages the next message copies, and from where.

    Until then nothing is written on the workers. So a source is always named as what it
    holds *before* the message, however often it has changed hands since: all sources
    are read before anything is written. A page that moved twice, or moved and was
    shared then, needs one copy and no order.

    Attributes:
        pending: Source page by target page; empty when there is nothing to do, which
            the hot path asks first.
    """

    __slots__ = ("_allocator", "pending")

    def __init__(self, allocator: TokenToKVPoolAllocator) -> None:
        """Start with nothing to copy.

        Args:
            allocator: Tells which pages are in use.
        """
        self._allocator = allocator
        self.pending: dict[int, int] = {}

    def add(self, copies: Mapping[int, int]) -> None:
        """Copy pages, all at a time; what was pending for their targets is replaced.

        Args:
            copies: Source page by target page. A source that is itself a pending target
                stands for what is copied there.
        """
        chain_copies(self.pending, copies)

    def drop(self, handed_out: bytes) -> None:
        """Take note that pages were handed out, to be computed: nothing goes there.

        Args:
            handed_out: Page ids, the bytes of int32.
        """
        for page in np.frombuffer(handed_out, np.int32).tolist():
            self.pending.pop(page, None)

    def take(self) -> dict[int, int]:
        """Return what is pending and still of use; then nothing is pending.

        Of no use is what would be copied to a page that is free by now.

        Returns:
            Source page by target page.
        """
        copies = self.pending
        self.pending = {}
        # A page that is in use by now either had the same owner all the time, or was
        # handed out, or was the target of a newer copy, which replaced the older.
        is_in_use = self._allocator.is_in_use
        return {to: source for to, source in copies.items() if is_in_use(to)}

    def recall(self, info: KVCacheInfo) -> None:
        """Take note that the copies of a message were not made: they are pending.

        Args:
            info: The last message; of several, the newest comes first.
        """
        unmade = info.copies
        chain_copies(unmade, self.pending)
        self.pending = unmade

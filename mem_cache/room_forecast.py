"""The room that there would be, if some requests ended and another one began."""

from __future__ import annotations

from enum import StrEnum

from .allocator import TokenToKVPoolAllocator
from .quota import Quota
from .radix_key import RadixKey
from .radix_node import RadixNode
from .radix_tree import RadixTree
from .request_kv import RequestKV
from .tokens import TOKEN_BYTES


class Obstacle(StrEnum):
    """What keeps a request from being admitted."""

    ROW = "row"
    """All rows of the request table are taken."""
    QUOTA = "quota"
    """It would push its namespace above its ceiling."""
    PAGES = "pages"
    """Too little is free or can be evicted, and is not reserved for others."""


class RoomForecast:
    """The pages of a cache after some requests ended and another one began.

    Leases are given back and taken as the tree would do it, but only counted: nothing
    changes. `end` costs what the end of a request costs, `begin` what a match costs.

    Attributes:
        num_pages: Pages that would be free or evictable, if there were no floors.
    """

    def __init__(self, tree: RadixTree, allocator: TokenToKVPoolAllocator) -> None:
        """Start with what there is now.

        Args:
            tree: What is cached.
            allocator: Knows how many pages are free, and their size.
        """
        self._tree = tree
        self._allocator = allocator
        self._num_leases_back: dict[RadixNode, int] = {}
        self._more_in_use: dict[Quota, int] = {}
        self._more_evictable: dict[Quota, int] = {}
        self.num_pages = allocator.num_free_pages + tree.num_evictable_pages

    def end(self, request: RequestKV) -> None:
        """Reckon with the end of a request, which publishes what it has computed.

        Args:
            request: A running request; each once, and all of them before `begin`.
        """
        page_size = self._allocator.page_size
        num_shared = request.protected_len // page_size
        num_held = request.num_pages - num_shared
        self.num_pages += num_held
        node = request.node
        if request.quota is not None:
            num_published = request.committed_len // page_size - num_shared
            if node is None or node.root.is_stale:
                num_published = 0
            self._move(request.quota, -num_held, num_published)
        while node is not None:
            num_back = self._num_leases_back.get(node, 0) + 1
            self._num_leases_back[node] = num_back
            if num_back < node.lock_ref:
                return  # at a root at the latest: it is protected for ever
            num_pages = node.num_pages
            self.num_pages += num_pages
            self._move(node.root.quota, -num_pages, num_pages)
            node = node.parent

    def begin(self, key: RadixKey) -> int:
        """Reckon with the start of a request, which protects what it finds.

        Args:
            key: Its tokens. It finds whole pages, of all but the last of them.

        Returns:
            The pages that it finds.
        """
        page_bytes = self._allocator.page_size * TOKEN_BYTES
        end = (len(key) - 1) * TOKEN_BYTES // page_bytes * page_bytes
        path, matched = self._tree.find(key.namespace, key.raw, end)
        num_found = matched // page_bytes
        rest = num_found
        for node in path:
            num_pages = min(rest, node.num_pages)
            rest -= num_pages
            if node.lock_ref == self._num_leases_back.get(node, 0):
                self.num_pages -= num_pages
                self._move(node.root.quota, num_pages, -num_pages)
        return num_found

    def num_pages_in_use(self, quota: Quota) -> int:
        """Return the pages of a namespace that running requests would use."""
        num_pages = quota.num_protected_pages + quota.num_held_pages
        return num_pages + self._more_in_use.get(quota, 0)

    def num_evictable_pages(self, quota: Quota) -> int:
        """Return the pages of a namespace that no running request would use."""
        return quota.num_evictable_pages + self._more_evictable.get(quota, 0)

    def _move(self, quota: Quota | None, in_use: int, evictable: int) -> None:
        if quota is not None:
            for counts, more in (
                (self._more_in_use, in_use),
                (self._more_evictable, evictable),
            ):
                counts[quota] = counts.get(quota, 0) + more

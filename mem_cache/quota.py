"""What one namespace is sure of, what it may use, and what it uses."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from .errors import QuotaError
from .radix_node import RadixNode
from .request_kv import RequestKV


class Quota:
    """Floor, ceiling and use of one namespace, in pages.

    What is below a stale root is nobody's use: it goes first for everybody.

    Attributes:
        namespace: Whose it is.
        num_floor_pages: Others evict nothing that leaves it with less.
        num_ceiling_pages: It allocates nothing that gives it more; ``None`` for no
            bound.
        num_tree_pages: In the tree, needed by running requests or not.
        num_evictable_pages: In the tree, and needed by no running request.
        num_held_pages: Owned by its running requests outside the tree.
        num_own_pages: Pages that its own allocation may evict still, whatever the
            floor; 0 but in the middle of one.
    """

    __slots__ = (
        "namespace",
        "num_ceiling_pages",
        "num_evictable_pages",
        "num_floor_pages",
        "num_held_pages",
        "num_own_pages",
        "num_tree_pages",
    )

    def __init__(self, namespace: Hashable) -> None:
        """Start without bounds and without use."""
        self.namespace = namespace
        self.num_floor_pages = 0
        self.num_ceiling_pages: int | None = None
        self.num_tree_pages = 0
        self.num_evictable_pages = 0
        self.num_held_pages = 0
        self.num_own_pages = 0

    @property
    def num_used_pages(self) -> int:
        """All that counts for its floor and its ceiling."""
        return self.num_tree_pages + self.num_held_pages

    @property
    def num_spare_pages(self) -> int:
        """Pages that it may lose now, if as many are evictable."""
        return max(self.num_own_pages, self.num_used_pages - self.num_floor_pages)

    @property
    def num_excess_pages(self) -> int:
        """Pages above its ceiling."""
        if self.num_ceiling_pages is None:
            return 0
        return max(0, self.num_used_pages - self.num_ceiling_pages)

    @property
    def num_protected_pages(self) -> int:
        """In the tree, and needed by a running request."""
        return self.num_tree_pages - self.num_evictable_pages

    def count(
        self, nodes: Iterable[RadixNode], requests: Iterable[RequestKV], page_size: int
    ) -> None:
        """Count what the namespace uses, from nothing.

        Args:
            nodes: All of its nodes, none of them stale.
            requests: All of its running requests.
            page_size: Tokens a page.
        """
        self.num_tree_pages = self.num_evictable_pages = self.num_held_pages = 0
        for node in nodes:
            self.num_tree_pages += node.num_pages
            if not node.lock_ref:
                self.num_evictable_pages += node.num_pages
        for request in requests:
            shared = request.protected_len // page_size
            self.num_held_pages += request.num_pages - shared

    def faults(
        self, nodes: Iterable[RadixNode], requests: Iterable[RequestKV], page_size: int
    ) -> list[str]:
        """Compare all counters with a recount; see `count`."""
        recount = Quota(self.namespace)
        recount.count(nodes, requests, page_size)
        counters = {
            "tree": (self.num_tree_pages, recount.num_tree_pages),
            "evictable": (self.num_evictable_pages, recount.num_evictable_pages),
            "held": (self.num_held_pages, recount.num_held_pages),
            "own": (self.num_own_pages, 0),
        }
        return [
            f"{name} of namespace {self.namespace!r}: counter {counter}, "
            f"recount {expected} ({counter - expected:+d} pages)"
            for name, (counter, expected) in counters.items()
            if counter != expected
        ]

    def check_ceiling(self, num_new_pages: int) -> None:
        """Refuse an allocation that would pass the ceiling, whatever is evicted.

        Raises:
            QuotaError: It would.
        """
        ceiling = self.num_ceiling_pages
        needed = self.num_protected_pages + self.num_held_pages
        if ceiling is not None and needed + num_new_pages > ceiling:
            raise QuotaError(
                self.namespace,
                ceiling,
                needed=num_new_pages,
                evictable=self.num_evictable_pages,
                protected=self.num_protected_pages,
                held=self.num_held_pages,
            )


def requests_of(namespace: Hashable, requests: Iterable[RequestKV]) -> list[RequestKV]:
    """Return those requests that were admitted in a namespace, in any epoch."""
    same = {namespace: None}  # equal in the way that keys are
    return [request for request in requests if request.namespace in same]

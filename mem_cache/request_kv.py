"""The handle of a running request."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from .hit_report import NO_HIT, Hit, HitReport, report_of
from .radix_node import PAGE_ID_BYTES, RadixNode

if TYPE_CHECKING:
    from .quota import Quota


class RequestKV:
    """What the cache keeps for a running request; the scheduler only holds it.

    ==================================  =======  ====================================
    positions                           owner    meaning
    ==================================  =======  ====================================
    ``[0, protected_len)``              tree     shared pages, page aligned
    ``[protected_len, committed_len)``  request  computed, not yet published
    ``[committed_len, allocated_len)``  request  allocated, not computed yet
    ==================================  =======  ====================================

    Everything here is for reading; only the cache writes it.

    Attributes:
        req_pool_idx: The request's row in the request table.
        namespace: What separates its prefix from others'.
        priority: Raises the priority of what it publishes.
        protected_len: Positions in pages of the tree, in tokens.
        committed_len: Positions with computed K and V, in tokens.
        allocated_len: Positions with a slot, in tokens.
        owner: Who runs it; ``None`` after its release.
        node: The tree node that its lease is on; ``None`` without a tree.
        quota: What bounds its namespace, if anything does.
        computed_len: Positions that were computed before it was retracted, in tokens.
        has_run: Whether it ever got pages to compute in.
        hit: What `hit_report` is made from, when somebody asks for it.
        awaited: The tokens that it was admitted with, if it may publish some of their
            pages still: other requests may wait for these. Raw bytes, else empty.
        pages: Its row of the request table: the pages of `allocated_len`, the bytes of
            int32.
        num_known_pages: Leading pages of its row that the workers know.
    """

    __slots__ = (
        "allocated_len",
        "awaited",
        "committed_len",
        "computed_len",
        "has_run",
        "hit",
        "namespace",
        "node",
        "num_known_pages",
        "owner",
        "pages",
        "priority",
        "protected_len",
        "quota",
        "req_pool_idx",
    )

    def __init__(
        self,
        req_pool_idx: int,
        namespace: Hashable,
        priority: int,
        owner: object,
        node: RadixNode | None,
        pages: bytearray,
        cached_len: int,
    ) -> None:
        """Make the handle of a request that begins with pages of the tree.

        Args:
            req_pool_idx: See above, as for those that follow.
            namespace: What separates its prefix from others'.
            priority: Raises the priority of what it publishes.
            owner: Who runs it.
            node: The tree node that its lease is on.
            pages: Its row of the request table.
            cached_len: All three lengths at first, in tokens.
        """
        self.owner: object | None = owner
        self.req_pool_idx = req_pool_idx
        self.namespace = namespace
        self.priority = priority
        self.protected_len = cached_len
        self.committed_len = cached_len
        self.allocated_len = cached_len
        self.computed_len = 0
        self.has_run = False
        self.hit: Hit | HitReport = NO_HIT
        self.awaited = b""
        self.node: RadixNode | None = node
        self.quota: Quota | None = None
        self.pages = pages
        self.num_known_pages = 0

    @property
    def num_pages(self) -> int:
        """Pages of its row."""
        return len(self.pages) // PAGE_ID_BYTES

    @property
    def hit_report(self) -> HitReport | None:
        """Why its hit is what it is; ``None`` if the cache does not explain."""
        return report_of(self.hit)

    def __repr__(self) -> str:
        """Show the row and the lengths."""
        return (
            f"RequestKV(req_pool_idx={self.req_pool_idx}, "
            f"protected_len={self.protected_len}, "
            f"committed_len={self.committed_len}, allocated_len={self.allocated_len})"
        )

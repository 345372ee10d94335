"""A node of the radix tree."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .quota import Quota

PAGE_ID_BYTES: Final = 4
"""Bytes of one page id in a node or a row."""


NO_CHILDREN: Final[dict[bytes, RadixNode]] = {}
"""What every leaf has, never written: most nodes are leaves, and a dict is large."""


class RadixNode:
    """A run of whole pages that follows its parent's tokens.

    Tokens and page ids are two byte strings of int32 numbers: comparing is one
    `memcmp`, a slice is a copy, so no slice keeps a large array alive.

    Attributes:
        key: Token ids of the run, a positive multiple of the page size.
        pages: Page ids of the run.
        parent: The node before it; a root is its own parent.
        root: The empty node above its namespace; a root is its own.
        children: Nodes after it, by the bytes of their first page.
        lock_ref: Leases on this node plus its protected children. Above 0, the node is
            protected.
        num_hits: Admissions that used the node.
        created: Logical time of its first publication.
        last_use: Logical time of its last release, one tick for every release.
        priority: Highest priority of the requests that published through it.
        older: Its neighbour in a `RecencyIndex`, which alone may touch this.
        newer: The other one.
        place: Where its end is for a `GhostIndex`, which alone may touch this.
    """

    __slots__ = (
        "children",
        "created",
        "key",
        "last_use",
        "lock_ref",
        "newer",
        "num_hits",
        "older",
        "pages",
        "parent",
        "place",
        "priority",
        "root",
    )

    root: RadixRoot

    def __init__(self, key: bytes, pages: bytes, parent: RadixNode) -> None:
        """Make a childless, unprotected node."""
        self.key = key
        self.pages = pages
        self.parent = parent
        if parent is not self:  # a root has set it; a compiled one would leak the first
            self.root = parent.root
        self.children: dict[bytes, RadixNode] = NO_CHILDREN
        self.lock_ref = 0
        self.num_hits = 0
        self.created = 0
        self.last_use = 0
        self.priority = 0
        self.older: RadixNode | None = None
        self.newer: RadixNode | None = None
        self.place = 0

    def __repr__(self) -> str:
        """Show sizes and locks, not the tokens."""
        return (
            f"{type(self).__name__}(num_pages={self.num_pages}, "
            f"lock_ref={self.lock_ref}, num_children={len(self.children)})"
        )

    @property
    def num_pages(self) -> int:
        """Pages of the run."""
        return len(self.pages) // PAGE_ID_BYTES


class NamespaceCounters:
    """What one namespace was admitted; see `NamespaceStats` for each of them."""

    __slots__ = ("num_admitted_requests", "num_cached_tokens", "num_prompt_tokens")

    def __init__(self) -> None:
        """Start at 0."""
        self.num_admitted_requests = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0

    def count(self, num_tokens: int, num_cached_tokens: int) -> None:
        """Count one admission."""
        self.num_admitted_requests += 1
        self.num_prompt_tokens += num_tokens
        self.num_cached_tokens += num_cached_tokens


class RadixRoot(RadixNode):
    """The empty node above a namespace; it is protected for ever.

    Attributes:
        namespace: What separates its keys from those of every other root.
        is_stale: Whether its epoch is over: it matches nobody, and goes first.
        quota: What bounds its namespace; with one, it stays when nothing is below it.
        counters: What its namespace was admitted so far.
    """

    __slots__ = ("counters", "is_stale", "namespace", "quota")

    def __init__(self, namespace: Hashable) -> None:
        """Make a root without children."""
        self.root = self
        super().__init__(b"", b"", self)
        self.namespace = namespace
        self.is_stale = False
        self.quota: Quota | None = None
        self.counters = NamespaceCounters()
        self.lock_ref = 1

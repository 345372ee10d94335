"""A node of the radix tree."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Final, TypeAlias
from weakref import ref

from .namespaces import Namespaces
from .sharded_dict import ShardedDict
from .untracked import untracked

if TYPE_CHECKING:
    from .quota import Quota

PAGE_ID_BYTES: Final = 4
"""Bytes of one page id in a node or a row."""

Children: TypeAlias = "dict[bytes, RadixNode] | ShardedDict[bytes, RadixNode]"
"""Nodes by the bytes of their first page; sharded if there are many."""

NO_CHILDREN: Final[dict[bytes, RadixNode]] = {}
"""What every leaf has, never written: most nodes are leaves, and a dict is large."""


@untracked(acyclic=True)
class RadixNode:
    """A run of whole pages that follows its parent's tokens.

    Tokens and page ids are two byte strings of int32 numbers: comparing is one
    `memcmp`, a slice is a copy, so no slice keeps a large array alive.

    The cyclic collector does not see nodes. They hold nothing but bytes, numbers and
    each other, and whoever takes them out of a tree breaks the cycles between them.

    Attributes:
        key: Token ids of the run, a positive multiple of the page size.
        pages: Page ids of the run.
        children: Nodes after it, by the bytes of their first page.
        parent: The node before it; a root is its own parent.
        root: The empty node above its namespace; a root is its own.
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

    key: bytes
    pages: bytes
    children: Children
    parent: RadixNode
    root: RadixRoot
    lock_ref: int = 0
    num_hits: int = 0
    created: int = 0
    last_use: int = 0
    priority: int = 0
    older: RadixNode | None = None
    newer: RadixNode | None = None
    place: int = 0

    def __init__(self, key: bytes, pages: bytes, children: Children) -> None:
        """Make an unprotected node, of which `parent` and `root` are to be set."""
        self.key = key
        self.pages = pages
        self.children = children

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


@untracked(acyclic=True)
class NamespaceCounters:
    """What one namespace was admitted; see `NamespaceStats` for each of them."""

    num_admitted_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0

    def count(self, num_tokens: int, num_cached_tokens: int) -> None:
        """Count one admission."""
        self.num_admitted_requests += 1
        self.num_prompt_tokens += num_tokens
        self.num_cached_tokens += num_cached_tokens


@untracked(acyclic=True)
class RadixRoot(RadixNode):
    """The empty node above a namespace; it is protected for ever.

    Attributes:
        is_stale: Whether its epoch is over: it matches nobody, and goes first.
        has_quota: Whether something bounds its namespace.
        counters: What its namespace was admitted so far; ``None`` if nobody counts.
        namespaces: Where the tree keeps what the root stands for; ``None`` for a root
            that is in no tree.
    """

    counters: NamespaceCounters | None = None
    is_stale: bool = False
    has_quota: bool = False
    namespaces: ref[Namespaces] | None = None

    @property
    def namespace(self) -> Hashable:
        """What separates its keys from those of every other root."""
        namespaces = None if self.namespaces is None else self.namespaces()
        return None if namespaces is None else namespaces.names.get(self)

    @property
    def quota(self) -> Quota | None:
        """What bounds its namespace; with one, it stays when nothing is below it."""
        if not self.has_quota or self.namespaces is None:
            return None
        namespaces = self.namespaces()
        return None if namespaces is None else namespaces.quotas.get(self)

    @quota.setter
    def quota(self, quota: Quota | None) -> None:
        assert self.namespaces is not None  # it is in a tree
        namespaces = self.namespaces()
        assert namespaces is not None  # which is there still
        self.has_quota = quota is not None
        if quota is None:
            namespaces.quotas.pop(self, None)
        else:
            namespaces.quotas[self] = quota


def make_node(key: bytes, pages: bytes, parent: RadixNode) -> RadixNode:
    """Make a childless, unprotected node that its parent does not know yet."""
    node = RadixNode(key, pages, NO_CHILDREN)
    node.parent = parent
    node.root = parent.root
    return node


def make_root(namespaces: ref[Namespaces] | None = None) -> RadixRoot:
    """Make a root without children.

    It refers to itself: `detach` it when it goes.
    """
    root = RadixRoot(b"", b"", NO_CHILDREN)
    root.parent = root.root = root
    root.lock_ref = 1
    if namespaces is not None:
        root.namespaces = namespaces
        root.counters = NamespaceCounters()
    return root


NOWHERE: Final = make_root()
"""What a root that went has in its own place, and a node after its tree."""

NOWHERE.lock_ref = 1 << 40  # protected, whoever gives a lease back after that


def detach(root: RadixRoot) -> None:
    """Let a root go that has no children."""
    root.parent = root.root = NOWHERE


def take_apart(root: RadixRoot) -> None:
    """Break all references between the nodes below a root. O(nodes).

    Each of them is freed as soon as nobody else holds it, one after the other: freeing
    a long chain from its end would be as many calls inside of each other.
    """
    nodes: list[RadixNode] = [root]
    while nodes:
        node = nodes.pop()
        nodes.extend(node.children.values())
        node.children = NO_CHILDREN
        node.older = node.newer = None
        node.parent = node.root = NOWHERE

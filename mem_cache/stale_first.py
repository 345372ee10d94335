"""Epochs: what was cached before weights or adapters were reloaded goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator

from .eviction import EvictionIndex
from .radix_node import RadixNode, RadixRoot
from .radix_tree import RadixTree


class StaleFirst(EvictionIndex):
    """The nodes below stale roots, then those of another index in its order.

    Nothing matches or publishes below a stale root: what is unprotected there stays so,
    and the tree only shrinks. So ending an epoch need not touch a node. Those that were
    unprotected by then stay in the other index until a walk over their root comes to
    them, children before parents; it goes on as far as eviction asks it to. Those that
    running requests release later wait in a queue, behind all walks.

    Attributes:
        inner: The index that the rest is ordered by; holds the same nodes as before
            where it is replaced.
    """

    def __init__(self, inner: EvictionIndex) -> None:
        """Put stale nodes before those of `inner`, the index of a whole tree."""
        self.grows_leaves = inner.grows_leaves
        self.inner = inner
        # By root, the oldest epoch first; such a dictionary finds its first in O(1).
        self._walks: OrderedDict[RadixRoot, Iterator[RadixNode]] = OrderedDict()
        self._next: RadixNode | None = None  # where the first walk has come to
        self._released: OrderedDict[RadixNode, None] = OrderedDict()

    def retire(self, root: RadixRoot) -> None:
        """Let what is below a stale root go first. O(1)."""
        if root.children:
            self._walks[root] = _postorder(root)

    def release(self, node: RadixNode) -> None:
        """Take note that `node` is no longer protected; O(1) if it is stale."""
        if node.root.is_stale:
            self._released[node] = None
        else:
            self.inner.release(node)

    def protect(self, node: RadixNode) -> None:
        """Take note that `node` is protected, or gone."""
        root = node.root
        if not root.is_stale:
            self.inner.protect(node)
            return
        # It is gone, since nobody locks it again; its parent lists it still.
        if node in self._released:
            del self._released[node]
        else:
            self.inner.protect(node)
        if node is self._next:
            self._next = None
        if node.parent is root and len(root.children) == 1:
            self._walks.pop(root, None)  # it would keep what is gone alive

    def expose(self, node: RadixNode) -> None:
        """Take note that the unprotected `node` lost its last child."""
        if node not in self._released:
            self.inner.expose(node)

    def rerank(self, node: RadixNode) -> None:
        """Put `node` where it belongs now, if it is there: its level has changed."""
        self.inner.rerank(node)

    def forgive(self) -> None:
        """Forget that the policy failed."""
        self.inner.forgive()

    def check(self) -> None:
        """Refuse to evict if the other index does.

        Raises:
            PolicyError: The policy failed.
        """
        self.inner.check()

    def first(self) -> RadixNode | None:
        """Return the leaf that goes next, stale or not.

        Complexity: A walk visits every node once, and copies a list of its children;
        it passes the nodes that requests of the old epoch still need.
        """
        if self._next is None and self._walks:
            self._next = self._walk_on()
        if self._next is not None:
            return self._next
        if self._released:
            return next(iter(self._released))
        return self.inner.first()

    def order(self) -> Iterator[RadixNode]:
        """Iterate over all evictable nodes in the order in which they would go.

        Changes nothing; the walks that it does are others than that of `first`.

        Raises:
            PolicyError: The policy failed.
        """
        self.check()
        yield from self._stale_order()
        for node in self.inner.order():
            if not node.root.is_stale:
                yield node

    def __contains__(self, node: object) -> bool:
        """Tell whether the index holds `node`."""
        return node in self._released or node in self.inner

    def __iter__(self) -> Iterator[RadixNode]:
        """Iterate over the nodes that it holds, the next to go first."""
        for node in self._stale_order():
            if node in self:
                yield node
        for node in self.inner:
            if not node.root.is_stale:
                yield node

    def __len__(self) -> int:
        """Count the nodes that it holds."""
        return len(self._released) + len(self.inner)

    def holds(self, node: RadixNode) -> bool:
        """Tell whether it must hold `node`, for the integrity check."""
        if node in self._released:
            return node.root.is_stale and node.lock_ref == 0
        return self.inner.holds(node)

    def _stale_order(self) -> Iterator[RadixNode]:
        for root in self._walks:
            yield from filter(self._is_due, _postorder(root))
        yield from self._released

    def _walk_on(self) -> RadixNode | None:
        """Go on to the next node that goes; ``None`` if no walk finds another."""
        while self._walks:
            root, walk = next(iter(self._walks.items()))
            for node in walk:
                if self._is_due(node):
                    return node
            del self._walks[root]
        return None

    def _is_due(self, node: RadixNode) -> bool:
        """Tell whether a walk takes `node`: it is there, and was so unprotected."""
        return bool(node.pages) and not node.lock_ref and node not in self._released


def end_epoch(tree: RadixTree, namespace: Hashable) -> None:
    """Make all entries of a namespace stale, and the first to go. O(1).

    Args:
        tree: Its index is wrapped by a `StaleFirst`, if it is none.
        namespace: Unknown ones are no fault.
    """
    root = tree.retire(namespace)
    if root is None:
        return
    index = tree.index
    if not isinstance(index, StaleFirst):
        tree.index = index = StaleFirst(index)
    index.retire(root)


def _postorder(root: RadixNode) -> Iterator[RadixNode]:
    """Iterate over all nodes below `root`, children before parents, the oldest first.

    Nodes may be dropped meanwhile; those that a list was copied with come nevertheless.
    """
    stack = [(root, [*root.children.values()][::-1])]
    while True:
        node, children = stack[-1]
        if children:
            child = children.pop()
            stack.append((child, [*child.children.values()][::-1]))
            continue
        stack.pop()
        if not stack:
            return
        yield node

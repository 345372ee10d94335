"""The order of eviction where some nodes are retained: these go last."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .eviction import KeyedIndex, RankedIndex, RecencyIndex
from .eviction_policies import LRU
from .quota_index import QuotaIndex
from .radix_node import RadixNode
from .radix_tree import RadixTree
from .stale_first import StaleFirst

if TYPE_CHECKING:
    from .retention import Retention


class _Levels:
    """The levels of retained nodes, then those that another index had.

    Of its own, since an index with a method of itself would be a reference cycle.
    """

    def __init__(
        self, retention: Retention, other: Callable[[RadixNode], int] | None
    ) -> None:
        self._retention = retention
        self._other = other

    def of(self, node: RadixNode) -> int:
        """Return the level of a node."""
        level = self._retention.level(node)
        if not level and self._other is not None:
            level = self._other(node)
        return level


class RetentionIndex(KeyedIndex):
    """The order of another index, but retained nodes after all others.

    A grant ends while its node rests, which then goes to the place that its recency
    gives it. An index in which nodes stand as they were released cannot do that.
    """

    def __init__(self, other: RankedIndex, retention: Retention) -> None:
        """Take the place of an index.

        Args:
            other: Its nodes, its policy and its levels go on.
            retention: Its levels go before these.
        """
        if isinstance(other, KeyedIndex):
            policy, other_level = other.policy, other.level
        else:
            policy, other_level = LRU(), None
        super().__init__(policy, level=_Levels(retention, other_level).of)
        self._other = other
        self._retention = retention
        for node in other.drain():
            self.release(node)

    def check(self) -> None:
        """Drop the grants that are over, and refuse to evict in a wrong order.

        Raises:
            PolicyError: The policy failed.
        """
        # A policy that learns reports its failures to the index that it began with.
        self._other.check()
        super().check()  # before anything is dropped, since a refusal changes nothing
        self._retention.settle()
        super().check()

    def forgive(self) -> None:
        """Forget that the policy failed."""
        self._other.forgive()
        super().forgive()


def use_retention_index(tree: RadixTree, retention: Retention) -> None:
    """Put a `RetentionIndex` in the place of the index that a tree is ordered by.

    Args:
        tree: Whoever puts some nodes before others still does so.
        retention: Knows which nodes are retained.

    Complexity: O(nodes log nodes).
    """
    outer = tree.index
    inner = outer.inner if isinstance(outer, StaleFirst) else outer
    if isinstance(inner, QuotaIndex):
        inner.use(RetentionIndex(inner.shared, retention))
    else:
        assert isinstance(inner, (RecencyIndex, KeyedIndex))
        inner = RetentionIndex(inner, retention)
    if isinstance(outer, StaleFirst):
        outer.inner = inner
        outer.grows_leaves = inner.grows_leaves
    else:
        tree.index = inner

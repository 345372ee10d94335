"""The order of eviction, kept up to date by one of two indexes."""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from typing import Any, TypeAlias

from sortedcontainers import SortedKeyList

from .errors import ConfigError, PolicyError
from .eviction_policies import FIFO, FILO, LFU, LRU, MRU, SLRU, EvictionPolicy, Priority
from .radix_node import RadixNode

_Rank: TypeAlias = tuple[int, Any, int]
"""What leaves are compared by: their level, the policy's key, their last use."""


# It is no ABC, as compiled ABCs share what they remember of `isinstance`.
class EvictionIndex:
    """Keeps the evictable nodes of a tree in the order of their eviction."""

    grows_leaves: bool
    """Whether a leaf may grow in place: the order must not tell old pages from new."""

    @abstractmethod
    def release(self, node: RadixNode) -> None:
        """Take note that `node` is no longer protected; its descendants came before."""

    @abstractmethod
    def protect(self, node: RadixNode) -> None:
        """Take note that `node` is protected, or gone."""

    @abstractmethod
    def expose(self, node: RadixNode) -> None:
        """Take note that the unprotected `node` lost its last child."""

    @abstractmethod
    def rerank(self, node: RadixNode) -> None:
        """Put `node` where it belongs now, if it is there: its level has changed."""

    @abstractmethod
    def check(self) -> None:
        """Refuse to evict in an order that is not the policy's.

        Raises:
            PolicyError: The policy failed.
        """

    def forgive(self) -> None:
        """Forget failures: nothing is left of the nodes whose keys they concern."""

    @abstractmethod
    def first(self) -> RadixNode | None:
        """Return the leaf that goes next, or ``None`` if nothing is evictable."""

    @abstractmethod
    def order(self) -> Iterator[RadixNode]:
        """Iterate over all evictable nodes in the order in which they would go.

        That is, if nothing else happened meanwhile: a parent comes when the last of its
        children would be gone. Changes nothing.

        Raises:
            PolicyError: The policy failed.
        """

    @abstractmethod
    def __contains__(self, node: object) -> bool:
        """Tell whether the index holds `node`."""

    @abstractmethod
    def __iter__(self) -> Iterator[RadixNode]:
        """Iterate over the nodes that it holds, the next to go first."""

    @abstractmethod
    def __len__(self) -> int:
        """Count the nodes that it holds."""

    def drain(self) -> list[RadixNode]:
        """Take all nodes out, for an index that takes its place.

        Returns:
            The nodes, the next to go first.
        """
        nodes = list(self)
        for node in nodes:
            self.protect(node)
        return nodes

    @abstractmethod
    def holds(self, node: RadixNode) -> bool:
        """Tell whether it must hold `node`, for the integrity check."""


class RecencyIndex(EvictionIndex):
    """Least recently used first, exact and O(1).

    It holds *all* unprotected nodes in the order of their release. A child is always
    released before its parent, so the first node is always a leaf. The order is a ring
    through the nodes themselves, since a dictionary of them would be larger than they.
    """

    def __init__(self) -> None:
        """Make an empty index."""
        self.grows_leaves = True
        self._num_nodes = 0
        self._end = RadixNode(b"", b"", {})
        self._end.older = self._end.newer = self._end

    def __del__(self) -> None:
        """Break the ring, which no collector would find."""
        self._end.older = self._end.newer = None

    def release(self, node: RadixNode) -> None:
        """Append `node`. O(1)."""
        end = self._end
        last = end.older
        assert last is not None  # it is a ring
        node.older = last
        node.newer = last.newer
        last.newer = node
        end.older = node
        self._num_nodes += 1

    def protect(self, node: RadixNode) -> None:
        """Drop `node`, if it is there. O(1)."""
        older = node.older
        newer = node.newer
        if older is not None and newer is not None:
            older.newer = newer
            newer.older = older
            node.older = node.newer = None
            self._num_nodes -= 1

    def expose(self, node: RadixNode) -> None:
        """Do nothing: `node` is there already."""

    def rerank(self, node: RadixNode) -> None:
        """Do nothing: there are no levels."""

    def check(self) -> None:
        """Do nothing: recency cannot fail."""

    def first(self) -> RadixNode | None:
        """Return the least recently used leaf. O(1)."""
        node = self._end.newer
        return None if node is self._end else node

    def rank(self, node: RadixNode) -> int:
        """Return what a node is compared by, also with those of another index. O(1)."""
        return node.last_use

    def order(self) -> Iterator[RadixNode]:
        """Iterate over the unprotected nodes: they were released in this order."""
        return iter(self)

    def __contains__(self, node: object) -> bool:
        """Tell whether the index holds `node`. O(1)."""
        return isinstance(node, RadixNode) and node.newer is not None

    def __iter__(self) -> Iterator[RadixNode]:
        """Iterate over the unprotected nodes, the next to go first."""
        node = self._end.newer
        while node is not None and node is not self._end:
            yield node
            node = node.newer

    def __len__(self) -> int:
        """Count the unprotected nodes. O(1)."""
        return self._num_nodes

    def holds(self, node: RadixNode) -> bool:
        """Tell whether `node` is unprotected."""
        return node.lock_ref == 0


class KeyedIndex(EvictionIndex):
    """Lowest key first, ties by recency; O(log leaves) an operation.

    It holds the unprotected leaves.

    Attributes:
        policy: What keys come from.
        level: What goes before them, if anything does.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        *,
        level: Callable[[RadixNode], int] | None = None,
    ) -> None:
        """Make an empty index ordered by ``policy.key``.

        Args:
            policy: Asked once for each leaf that becomes evictable.
            level: Goes before the policy: everything of a lower level is evicted first.
                Call `rerank` where it changes.
        """
        # Pages of one node share one rank, so new pages must not join old ones, unless
        # only the last release counts: all pages of a leaf are released together.
        self.grows_leaves = level is None and type(policy) in (LRU, MRU)
        self.policy = policy
        self.level = level
        self._rank: dict[RadixNode, _Rank] = {}
        self._leaves = SortedKeyList(key=self._rank.__getitem__)
        # Leaves for which the policy failed. They are kept, since the failure comes in
        # the middle of an unlock, which must not stop half-way.
        self._unranked: OrderedDict[RadixNode, None] = OrderedDict()
        self._failure: Exception | None = None

    def release(self, node: RadixNode) -> None:
        """Add `node`, if it is a leaf."""
        if not node.children:
            self.expose(node)

    def protect(self, node: RadixNode) -> None:
        """Drop `node`, if it is there."""
        if node in self._rank:
            try:
                self._leaves.remove(node)
            except Exception as error:  # keys that do not order, such as sets
                self._forget_ranks(error)
            else:
                del self._rank[node]
                return
        self._unranked.pop(node, None)

    def expose(self, node: RadixNode) -> None:
        """Add `node`, a leaf."""
        try:
            self._rank[node] = self._rank_of(node)
            self._leaves.add(node)
        except Exception as error:  # whatever the caller's code raises
            self._rank.pop(node, None)
            self._unranked[node] = None
            self.fail(error)

    def rerank(self, node: RadixNode) -> None:
        """Put `node` where it belongs now, if it is there: its level has changed."""
        if node in self:
            self.protect(node)
            self.expose(node)

    def fail(self, error: Exception) -> None:
        """Take note that the policy failed: no eviction from the next one on."""
        self._failure = self._failure or error

    def forgive(self) -> None:
        """Forget that the policy failed."""
        self._failure = None

    def check(self) -> None:
        """Refuse to evict in an order that is not the policy's.

        Raises:
            PolicyError: The policy failed.
        """
        if self._failure is not None:
            raise self._error(self._failure)

    def first(self) -> RadixNode | None:
        """Return the leaf with the lowest rank."""
        return next(iter(self), None)

    def rank(self, node: RadixNode) -> _Rank:
        """Return what a node is compared by, also with those of another index."""
        rank = self._rank.get(node)
        return self._rank_of(node) if rank is None else rank

    def order(self) -> Iterator[RadixNode]:
        """Iterate over all evictable nodes in the order in which they would go.

        Parents wait in a heap until the last of their children would be gone. The first
        n nodes cost O(n log n), however many leaves there are. Changes nothing; a
        policy that learns from evictions may choose otherwise by then.

        Raises:
            PolicyError: The policy failed.
        """
        self.check()
        leaves = iter(self._leaves)
        leaf: RadixNode | None = next(leaves, None)
        # Invariant: no two of them have the same last use, so nodes are not compared.
        parents: list[tuple[_Rank, RadixNode]] = []
        num_gone: dict[RadixNode, int] = {}
        while leaf is not None or parents:
            try:
                # Compiled code would refuse a comparison that is no bool, as of numbers
                # of numpy, but not one of what may be anything.
                lowest: Any = parents[0][0] if parents else None
                if leaf is None or (parents and lowest < self._rank[leaf]):
                    node = heappop(parents)[1]
                else:
                    node, leaf = leaf, next(leaves, None)
                parent = node.parent
                num_gone[parent] = num_gone.get(parent, 0) + 1
                if parent.lock_ref == 0 and num_gone[parent] == len(parent.children):
                    heappush(parents, (self._rank_of(parent), parent))
            except Exception as error:  # whatever the caller's code raises
                raise self._error(error) from error
            yield node

    def __contains__(self, node: object) -> bool:
        """Tell whether the index holds `node`. O(1)."""
        return node in self._rank or node in self._unranked

    def __iter__(self) -> Iterator[RadixNode]:
        """Iterate over the evictable leaves, the next to go first."""
        yield from self._unranked
        yield from self._leaves

    def __len__(self) -> int:
        """Count the evictable leaves. O(1)."""
        return len(self._leaves) + len(self._unranked)

    def holds(self, node: RadixNode) -> bool:
        """Tell whether `node` is an unprotected leaf."""
        return node.lock_ref == 0 and not node.children

    def _rank_of(self, node: RadixNode) -> _Rank:
        key = self.policy.key(node)
        if key != key:
            raise ValueError(f"a key must equal itself, got {key!r}")
        level = 0 if self.level is None else self.level(node)
        return level, key, node.last_use

    def _forget_ranks(self, error: Exception) -> None:
        """Keep all leaves without any order, since no eviction will ask for it."""
        self.fail(error)
        self._unranked.update(dict.fromkeys(self._leaves))
        self._leaves.clear()
        self._rank.clear()

    def _error(self, failure: Exception) -> PolicyError:
        error = PolicyError(f"{self.policy!r} failed: {failure!r}")
        error.__cause__ = failure  # a compiled `from` does not
        return error


RankedIndex: TypeAlias = RecencyIndex | KeyedIndex
"""An index whose order is one of ranks, comparable with others of its kind."""


_POLICIES: dict[str, type[EvictionPolicy]] = {
    "lru": LRU,
    "lfu": LFU,
    "fifo": FIFO,
    "mru": MRU,
    "filo": FILO,
    "slru": SLRU,
    "priority": Priority,
}


def make_eviction_index(
    policy: str | EvictionPolicy,
    *,
    level: Callable[[RadixNode], int] | None = None,
) -> RankedIndex:
    """Return an empty index for a policy.

    Args:
        policy: ``"lru"``, ``"lfu"``, ``"fifo"``, ``"mru"``, ``"filo"``, ``"slru"``,
            ``"priority"``, or an `EvictionPolicy`.
        level: Goes before the policy; see `KeyedIndex`.

    Raises:
        ConfigError: The name is unknown, or the object has no `key`.
    """
    if isinstance(policy, str):
        if policy not in _POLICIES:
            names = ", ".join(_POLICIES)
            raise ConfigError(f"policy must be one of {names}, got {policy!r}")
        if policy == "lru" and level is None:
            return RecencyIndex()
        policy = _POLICIES[policy]()
    if isinstance(policy, type) or not callable(getattr(policy, "key", None)):
        raise ConfigError(
            f"policy must be an object with a method key(node), got {policy!r}"
        )
    return KeyedIndex(policy, level=level)

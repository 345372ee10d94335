"""Who goes first: eviction policies and the two indexes that keep their order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Protocol

from sortedcontainers import SortedKeyList

from .errors import ConfigError, PolicyError
from .radix_node import RadixNode


class EvictionPolicy(Protocol):
    """What decides the order of eviction; pass an object of your own class.

    Example:
        >>> class OldestFirst:
        ...     def key(self, node):
        ...         return node.created
    """

    def key(self, node: RadixNode) -> Any:  # noqa: ANN401 - whatever compares
        """Return a comparable value; the leaf with the lowest goes first.

        It is asked when a leaf becomes evictable, and must stay the same until the leaf
        is used again. `num_hits`, `created`, `last_use` and `priority` do; the pages
        and the neighbours of a node do not. Among equals, the least recently used goes
        first.

        If it fails, or its values do not compare, the leaf waits among the first to go,
        and every eviction is refused with a `PolicyError`.
        """
        ...


class LFU:
    """Evict what the fewest admissions used."""

    def key(self, node: RadixNode) -> int:
        """Return the number of admissions."""
        return node.num_hits


class Priority:
    """Evict what only requests of low priority published."""

    def key(self, node: RadixNode) -> int:
        """Return the highest priority."""
        return node.priority


class EvictionIndex(Protocol):
    """Keeps the evictable nodes of a tree in the order of their eviction."""

    grows_leaves: bool
    """Whether a leaf may grow in place: the order must not tell old pages from new."""

    def release(self, node: RadixNode) -> None:
        """Take note that `node` is no longer protected; its descendants came before."""
        ...

    def protect(self, node: RadixNode) -> None:
        """Take note that `node` is protected, or gone."""
        ...

    def expose(self, node: RadixNode) -> None:
        """Take note that the unprotected `node` lost its last child."""
        ...

    def check(self) -> None:
        """Refuse to evict in an order that is not the policy's.

        Raises:
            PolicyError: The policy failed.
        """
        ...

    def first(self) -> RadixNode | None:
        """Return the leaf that goes next, or ``None`` if nothing is evictable."""
        ...

    def __contains__(self, node: object) -> bool:
        """Tell whether the index holds `node`."""
        ...

    def __iter__(self) -> Iterator[RadixNode]:
        """Iterate over the nodes that it holds, the next to go first."""
        ...

    def __len__(self) -> int:
        """Count the nodes that it holds."""
        ...

    def holds(self, node: RadixNode) -> bool:
        """Tell whether it must hold `node`, for the integrity check."""
        ...


class RecencyIndex:
    """Least recently used first, exact and O(1).

    It holds *all* unprotected nodes in the order of their release. A child is always
    released before its parent, so the first node is always a leaf.
    """

    grows_leaves = True

    def __init__(self) -> None:
        """Make an empty index."""
        self._order: OrderedDict[RadixNode, None] = OrderedDict()

    def release(self, node: RadixNode) -> None:
        """Append `node`. O(1)."""
        self._order[node] = None

    def protect(self, node: RadixNode) -> None:
        """Drop `node`, if it is there. O(1)."""
        self._order.pop(node, None)

    def expose(self, node: RadixNode) -> None:
        """Do nothing: `node` is there already."""

    def check(self) -> None:
        """Do nothing: recency cannot fail."""

    def first(self) -> RadixNode | None:
        """Return the least recently used leaf. O(1)."""
        return next(iter(self._order), None)

    def __contains__(self, node: object) -> bool:
        """Tell whether the index holds `node`. O(1)."""
        return node in self._order

    def __iter__(self) -> Iterator[RadixNode]:
        """Iterate over the unprotected nodes, the next to go first."""
        return iter(self._order)

    def __len__(self) -> int:
        """Count the unprotected nodes. O(1)."""
        return len(self._order)

    def holds(self, node: RadixNode) -> bool:
        """Tell whether `node` is unprotected."""
        return node.lock_ref == 0


class KeyedIndex:
    """Lowest key first, ties by recency; O(log leaves) an operation.

    It holds the unprotected leaves.
    """

    # Pages of one node share one key, so new pages must not join old ones.
    grows_leaves = False

    def __init__(self, policy: EvictionPolicy) -> None:
        """Make an empty index ordered by ``policy.key``."""
        self._policy = policy
        self._rank: dict[RadixNode, tuple[Any, int]] = {}
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
            self._leaves.remove(node)
            del self._rank[node]
        else:
            self._unranked.pop(node, None)

    def expose(self, node: RadixNode) -> None:
        """Add `node`, a leaf."""
        try:
            key = self._policy.key(node)
            if key != key:
                raise ValueError(f"a key must equal itself, got {key!r}")
            self._rank[node] = (key, node.last_use)
            self._leaves.add(node)
        except Exception as error:  # whatever the caller's code raises
            self._rank.pop(node, None)
            self._unranked[node] = None
            self._failure = self._failure or error

    def check(self) -> None:
        """Refuse to evict in an order that is not the policy's.

        Raises:
            PolicyError: The policy failed.
        """
        if self._failure is not None:
            raise PolicyError(
                f"{self._policy!r} failed: {self._failure!r}"
            ) from self._failure

    def first(self) -> RadixNode | None:
        """Return the leaf with the lowest key."""
        return next(iter(self), None)

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


_POLICIES: dict[str, type[EvictionPolicy]] = {"lfu": LFU, "priority": Priority}


def make_eviction_index(policy: str | EvictionPolicy) -> EvictionIndex:
    """Return an empty index for a policy.

    Args:
        policy: ``"lru"``, ``"lfu"``, ``"priority"``, or an `EvictionPolicy`.

    Raises:
        ConfigError: The name is unknown, or the object has no `key`.
    """
    if isinstance(policy, str):
        if policy == "lru":
            return RecencyIndex()
        if policy not in _POLICIES:
            names = ", ".join(["lru", *_POLICIES])
            raise ConfigError(f"policy must be one of {names}, got {policy!r}")
        policy = _POLICIES[policy]()
    if isinstance(policy, type) or not callable(getattr(policy, "key", None)):
        raise ConfigError(
            f"policy must be an object with a method key(node), got {policy!r}"
        )
    return KeyedIndex(policy)

"""The order of eviction where namespaces have quotas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import merge
from typing import TYPE_CHECKING, Any

from .errors import PolicyError
from .eviction import EvictionIndex, KeyedIndex, RankedIndex, RecencyIndex
from .radix_node import RadixNode, RadixRoot

if TYPE_CHECKING:
    from .quota import Quota


class QuotaIndex(EvictionIndex):
    """One index for each namespace with a quota, and one that all others share.

    Who goes next is the lowest rank among the first of each, so the order is that of a
    single index, except that whoever is at its floor is passed over. Each operation
    costs what it costs in the index concerned; `first` asks every one.

    Attributes:
        shared: Holds the nodes of all namespaces without a quota.
    """

    def __init__(self, shared: RankedIndex) -> None:
        """Wrap an index that holds all nodes of a tree so far."""
        self.shared = shared
        self.grows_leaves = shared.grows_leaves
        self._parts: dict[Quota, RankedIndex] = {}
        self._stale_parts: dict[RadixRoot, RankedIndex] = {}
        self._failure: Exception | None = None

    def use(self, shared: RankedIndex) -> None:
        """Order all nodes in another way.

        Args:
            shared: Holds the nodes of the present `shared`; the other indexes are made
                like it.
        """
        self.shared = shared
        self.grows_leaves = shared.grows_leaves
        for quota, part in self._parts.items():
            self._parts[quota] = _like(shared, part.drain())
        for root, part in self._stale_parts.items():
            self._stale_parts[root] = _like(shared, part.drain())

    # Namespaces come and go -------------------------------------------------

    def add(self, quota: Quota, nodes: list[RadixNode]) -> None:
        """Move the unprotected nodes of a namespace into an index of their own."""
        for node in nodes:
            self.shared.protect(node)
        self._parts[quota] = _like(self.shared, sorted(nodes, key=_released_at))

    def remove(self, quota: Quota) -> None:
        """Move the nodes of a namespace back to the others, and all that are stale.

        Complexity: O(nodes of all without a quota), sorted.
        """
        nodes = self.shared.drain() + self._parts.pop(quota).drain()
        for part in self._stale_parts.values():
            nodes += part.drain()
        self._stale_parts.clear()
        for node in sorted(nodes, key=_released_at):
            self.shared.release(node)

    def retire(self, quota: Quota, root: RadixRoot) -> None:
        """Let a namespace begin anew; what it had is below a stale root. O(1)."""
        part = self._parts[quota]
        self._parts[quota] = _like(self.shared, ())
        if len(part):
            self._stale_parts[root] = part

    def first_of(self, quota: Quota) -> RadixNode | None:
        """Return the leaf of a namespace that goes next, whatever its floor."""
        return self._parts[quota].first()

    # An eviction index ------------------------------------------------------

    def release(self, node: RadixNode) -> None:
        """Take note that `node` is no longer protected; its descendants came before."""
        quota = node.root.quota
        if quota is not None:
            quota.num_evictable_pages += node.num_pages
        self._part_of(node).release(node)

    def protect(self, node: RadixNode) -> None:
        """Take note that `node` is protected, or gone."""
        root = node.root
        part = self._part_of(node)
        part.protect(node)
        if root.quota is not None:
            # A node that is gone has no pages left.
            root.quota.num_evictable_pages -= node.num_pages
        elif root.is_stale and part is not self.shared and not len(part):
            del self._stale_parts[root]

    def expose(self, node: RadixNode) -> None:
        """Take note that the unprotected `node` lost its last child."""
        self._part_of(node).expose(node)

    def check(self) -> None:
        """Refuse to evict in an order that is not the policy's.

        Raises:
            PolicyError: The policy failed.
        """
        for part in self._all_parts():
            part.check()
        self.first()  # compares keys of several indexes
        if self._failure is not None:
            raise _policy_error(self._failure)

    def forgive(self) -> None:
        """Forget that the policy failed."""
        for part in self._all_parts():
            part.forgive()
        self._failure = None

    def first(self) -> RadixNode | None:
        """Return the leaf that goes next, or ``None`` if nobody may lose a page.

        Complexity: O(namespaces with a quota).
        """
        first = self.shared.first()
        first_part = self.shared
        for quota, part in self._parts.items():
            if quota.num_spare_pages > 0:
                node = part.first()
                if node is None:
                    continue
                if first is None or self._goes_before(node, part, first, first_part):
                    first, first_part = node, part
        return first

    def order(self) -> Iterator[RadixNode]:
        """Iterate over all evictable nodes, as if there were no floors.

        Changes nothing.

        Raises:
            PolicyError: The policy failed.
        """
        self.check()
        orders = [_ranked(i, part) for i, part in enumerate(self._all_parts())]
        try:
            for _, _, node in merge(*orders):
                yield node
        except PolicyError:
            raise
        except Exception as error:  # whatever keys do that do not compare
            raise _policy_error(error) from error

    def rerank(self, node: RadixNode) -> None:
        """Put `node` where it belongs now, if it is there: its level has changed."""
        self._part_of(node).rerank(node)

    def __contains__(self, node: object) -> bool:
        """Tell whether the index holds `node`. O(1)."""
        return isinstance(node, RadixNode) and node in self._part_of(node)

    def __iter__(self) -> Iterator[RadixNode]:
        """Iterate over the nodes that it holds, the next to go first."""
        return (node for node in self.order() if node in self)

    def __len__(self) -> int:
        """Count the nodes that it holds."""
        return sum(len(part) for part in self._all_parts())

    def holds(self, node: RadixNode) -> bool:
        """Tell whether it must hold `node`, for the integrity check."""
        return self.shared.holds(node)

    def _part_of(self, node: RadixNode) -> RankedIndex:
        root = node.root
        if root.quota is not None:
            return self._parts[root.quota]
        if root.is_stale:
            return self._stale_parts.get(root, self.shared)
        return self.shared

    def _all_parts(self) -> list[RankedIndex]:
        return [self.shared, *self._parts.values(), *self._stale_parts.values()]

    def _goes_before(
        self,
        node: RadixNode,
        part: RankedIndex,
        other: RadixNode,
        other_part: RankedIndex,
    ) -> bool:
        """Compare two ranks; if that fails, so does the next `check`.

        This may be in the middle of an eviction, which must not stop half-way.
        """
        try:
            rank: Any = part.rank(node)
            return bool(rank < other_part.rank(other))
        except Exception as error:  # whatever the caller's code raises
            self._failure = self._failure or error
            return False


def _like(other: RankedIndex, nodes: Iterable[RadixNode]) -> RankedIndex:
    """Return an index with the order of another one, and these nodes."""
    index: RankedIndex = RecencyIndex()
    if isinstance(other, KeyedIndex):
        index = KeyedIndex(other.policy, level=other.level)
    for node in nodes:
        index.release(node)
    return index


def _released_at(node: RadixNode) -> int:
    return node.last_use


def _ranked(number: int, part: RankedIndex) -> Iterator[tuple[Any, int, RadixNode]]:
    # The number keeps equal ranks from comparing nodes.
    for node in part.order():
        yield part.rank(node), number, node


def _policy_error(failure: Exception) -> PolicyError:
    error = PolicyError(f"the keys of an eviction policy do not compare: {failure!r}")
    error.__cause__ = failure
    return error

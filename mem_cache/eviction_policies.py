"""Who goes first: the protocol of an eviction policy, and those that are built in."""

from __future__ import annotations

from typing import Any, Protocol

from .radix_node import RadixNode


class EvictionPolicy(Protocol):
    """What decides the order of eviction; pass an object of your own class.

    A policy that wants to learn may also have any of these methods; the cache calls
    them after the fact. Tokens and page ids are the bytes of int32.

    * ``used(nodes)``: an admission found this path, root's child first.
    * ``published(node, start)``: ``node.key[start:]`` is new; all of it if `start` is
      0.
    * ``evicted(node, key, pages)``: these tokens and pages were cut off the tail of
      `node`, which is gone if it has no key left.

    If a method fails, or keys do not compare, nothing is lost, but every eviction from
    the next one on is refused with a `PolicyError`.

    Example:
        >>> class PriorityThenUse:
        ...     def key(self, node):
        ...         return node.priority, node.num_hits
    """

    def key(self, node: RadixNode) -> Any:  # noqa: ANN401 - whatever compares
        """Return a comparable value; the leaf with the lowest goes first.

        It is asked when a leaf becomes evictable, and must stay the same until the leaf
        is used again. `num_hits`, `created`, `last_use` and `priority` do; the pages
        and the neighbours of a node do not. Among equals, the least recently used goes
        first.
        """
        ...


class LRU:
    """Evict what was released least recently."""

    def key(self, node: RadixNode) -> int:
        """Return a constant: among equals, recency decides."""
        return 0


class MRU:
    """Evict what was released most recently: for loops over more than fits."""

    def key(self, node: RadixNode) -> int:
        """Return the latest release first."""
        return -node.last_use


class FIFO:
    """Evict what was published first, however often it was used."""

    def key(self, node: RadixNode) -> int:
        """Return the time of the first publication."""
        return node.created


class FILO:
    """Evict what was published last."""

    def key(self, node: RadixNode) -> int:
        """Return the latest publication first."""
        return -node.created


class LFU:
    """Evict what the fewest admissions used."""

    def key(self, node: RadixNode) -> int:
        """Return the number of admissions."""
        return node.num_hits


class SLRU:
    """Evict what was used less than twice before the rest, each by recency.

    A segmented LRU after Karedla, Love and Wherry, "Caching Strategies to Improve Disk
    System Performance" (IEEE Computer 27, 1994); different from it: the protected
    segment has no size of its own, and nothing falls back from it.
    """

    def key(self, node: RadixNode) -> bool:
        """Tell whether the node is in the protected segment: at least two hits."""
        return node.num_hits >= 2


class Priority:
    """Evict what only requests of low priority published."""

    def key(self, node: RadixNode) -> int:
        """Return the highest priority."""
        return node.priority

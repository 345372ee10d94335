"""Lessons: policies that learn are told what happens in the tree."""

from __future__ import annotations

from collections.abc import Callable

from .eviction import EvictionIndex, KeyedIndex
from .radix_tree import RadixTree


class _Lesson:
    """One method of a policy that wants to learn, called for an event of the tree.

    The event comes in the middle of a change that must not stop half-way, so a failure
    waits for the next eviction.
    """

    __slots__ = ("_index", "_method")

    def __init__(self, method: Callable[..., object], index: KeyedIndex) -> None:
        self._method = method
        self._index = index

    def __call__(self, *event: object) -> None:
        try:
            self._method(*event)
        except Exception as error:  # whatever the caller's code raises
            self._index.fail(error)


def teach(index: EvictionIndex, tree: RadixTree) -> None:
    """Tell the policy of an index what happens in a tree, where it has a method for it.

    Args:
        index: Keeps the failures of its policy.
        tree: What the policy is told of.
    """
    if not isinstance(index, KeyedIndex):
        return
    policy = index.policy
    used = getattr(policy, "used", None)
    if callable(used):
        tree.on_used.append(_Lesson(used, index))
    published = getattr(policy, "published", None)
    if callable(published):
        tree.on_published.append(_Lesson(published, index))
    evicted = getattr(policy, "evicted", None)
    if callable(evicted):
        tree.on_evicted.append(_Lesson(evicted, index))

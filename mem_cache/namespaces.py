"""What the roots of a tree stand for."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .quota import Quota
    from .radix_node import RadixRoot


class Namespaces:
    """The names and the quotas of all roots of one tree.

    A namespace is an object of the caller's, and may lead back to the cache. The cyclic
    collector does not see what a root holds, so such a cache would never be freed if
    the root held its namespace. The tree holds it here, where the collector sees it,
    and roots have a weak reference to this.

    Attributes:
        names: What separates the keys of a root from those of all others.
        quotas: What bounds the namespace of a root, for those that something bounds.
    """

    __slots__ = ("__weakref__", "names", "quotas")

    def __init__(self) -> None:
        """Start without roots."""
        self.names: dict[RadixRoot, Hashable] = {}
        self.quotas: dict[RadixRoot, Quota] = {}

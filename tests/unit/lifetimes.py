"""Counts nodes that are alive; the collector, which does not see them, cannot."""

from __future__ import annotations

import sys

from radixkv.mem_cache.radix_node import NO_CHILDREN


def num_leaves_alive() -> int:
    """Nodes without children, in a tree or not: each refers to the same dictionary.

    A node that went refers to it still, unless it had children once.
    """
    return sys.getrefcount(NO_CHILDREN)

"""Who would be evicted next, page by page, without evicting anybody."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from .quota import Quota
from .radix_node import PAGE_ID_BYTES, RadixNode
from .radix_tree import RadixTree
from .tokens import TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class Victim:
    """A page that would be evicted.

    Attributes:
        namespace: Whose it is.
        prefix_len: Where it begins, in tokens: so much of its path stays.
        page: Page id.
    """

    namespace: Hashable
    prefix_len: int
    page: int


def list_victims(tree: RadixTree, num_pages: int, page_size: int) -> list[Victim]:
    """Return the pages that would be evicted for nobody in particular, in that order.

    From a namespace with a quota, no more than it may lose. Changes nothing.

    Args:
        tree: The cached prefixes.
        num_pages: How many; fewer are returned if fewer are evictable.
        page_size: Tokens a page.

    Raises:
        PolicyError: The policy failed.

    Complexity: O(pages + nodes above them), times O(log pages) for a keyed policy.
    """
    victims: list[Victim] = []
    if num_pages <= 0:
        return victims
    ends: dict[RadixNode, int] = {}
    spare: dict[Quota, int] = {}
    for node in tree.index.order():
        missing = min(num_pages - len(victims), node.num_pages)
        quota = node.root.quota
        if quota is not None:
            left = spare.get(quota, quota.num_spare_pages)
            missing = min(missing, left)
            spare[quota] = left - missing
        if not missing:
            continue
        tail = np.frombuffer(node.pages[-missing * PAGE_ID_BYTES :], np.int32)
        namespace = node.root.namespace
        start = _end_of(node, ends)
        for page in reversed(tail.tolist()):
            start -= page_size
            victims.append(Victim(namespace, start, page))
        if len(victims) == num_pages:
            break
    return victims


def _end_of(node: RadixNode, ends: dict[RadixNode, int]) -> int:
    """Return the tokens up to the end of `node`; `ends` has those known already."""
    path: list[RadixNode] = []
    while node.parent is not node and node not in ends:
        path.append(node)
        node = node.parent
    end = ends.get(node, 0)
    for below in reversed(path):
        end += len(below.key) // TOKEN_BYTES
        ends[below] = end
    return end

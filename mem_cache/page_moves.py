"""Moves pages out of the way of a shrink, while requests use them."""

from __future__ import annotations

import numpy as np

from .memory_manager import MemoryManager
from .radix_tree import RadixTree
from .running_requests import RunningRequests


def move_pages_below(
    last_page: int, memory: MemoryManager, tree: RadixTree, running: RunningRequests
) -> None:
    """Move every page in use above `last_page` to a free page at or below it.

    Tree and rows name the new pages at once; what is in them follows with the page
    copies of the next message, or of a pool in this process.

    Args:
        last_page: The new end; so many pages or fewer are in use.
        memory: Whose allocator, and whose page copies.
        tree: The cached prefixes.
        running: The running requests.

    Complexity: O(pages + nodes) if a page is in the way, else O(pages).
    """
    allocator = memory.allocator
    in_use = allocator.in_use()
    sources = in_use[in_use > last_page]
    if len(sources) == 0:
        return
    free = allocator.alloc(allocator.num_free_pages)
    assert free is not None  # as many are free
    # The lowest, in order, so that runs of neighbours stay runs.
    targets, rest = np.split(free, [len(sources)])
    allocator.free(np.concatenate([sources, rest[::-1]]))

    new_ids = np.arange(memory.num_pages + 1, dtype=np.int32)
    new_ids[sources] = targets
    for node in tree.nodes():
        node.pages = new_ids[np.frombuffer(node.pages, np.int32)].tobytes()
    running.rename_pages(new_ids)
    memory.page_copies.add(dict(zip(targets.tolist(), sources.tolist(), strict=True)))

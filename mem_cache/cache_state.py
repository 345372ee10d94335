"""The whole state of a cache as plain values, to compare it field by field."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from .errors import PolicyError
from .memory_manager import MemoryManager
from .quota import Quota
from .radix_node import RadixNode
from .radix_tree import RadixTree
from .request_kv import RequestKV
from .running_requests import RunningRequests


class Room(Protocol):
    """What keeps a state of its own beside the tree."""

    def state(self) -> dict[str, object]:
        """Return it as plain values to compare, each part by its name."""
        ...


def cache_state(
    memory: MemoryManager,
    tree: RadixTree,
    running: RunningRequests,
    rooms: Iterable[Room] = (),
) -> dict[str, object]:
    """Return everything that a refused call must leave as it is.

    Args:
        memory: The allocator and the request table.
        tree: The tree cache.
        running: The running requests.
        rooms: What else has a state.

    Returns:
        Each part of the state by its name. Equal dictionaries, equal states; nodes and
        requests are equal to themselves only.

    Complexity: O(pages + nodes).
    """
    table = memory.request_table
    try:
        tree.index.check()  # whoever looks drops what is over by now
        order = list(tree.index)
    except PolicyError:  # then every eviction is refused, whatever the order
        order = []
    state: dict[str, object] = {
        "capacity": memory.num_pages,
        "free list": memory.allocator.free_pages().tolist(),
        "free rows": table.free_rows(),
        "rows": [bytes(row) for row in table.rows],
        "requests": [_request_state(kv) for kv in running],
        "namespaces": [(root.namespace, root.is_stale) for root in tree.roots],
        "quotas": [_quota_state(root.quota) for root in tree.roots if root.quota],
        "nodes": [_node_state(node) for node in (*tree.roots, *tree.nodes())],
        "order of eviction": order,
        "page copies": list(memory.page_copies.pending.items()),
    }
    for room in rooms:
        state.update(room.state())
    return state


def _request_state(kv: RequestKV) -> tuple[object, ...]:
    return (
        kv,
        kv.req_pool_idx,
        kv.namespace,
        kv.priority,
        kv.protected_len,
        kv.committed_len,
        kv.allocated_len,
        kv.computed_len,
        kv.has_run,
        kv.hit,
        kv.node,
        kv.num_known_pages,
    )


def _quota_state(quota: Quota) -> tuple[object, ...]:
    return (
        quota.namespace,
        quota.num_floor_pages,
        quota.num_ceiling_pages,
        quota.num_tree_pages,
        quota.num_evictable_pages,
        quota.num_held_pages,
        quota.num_own_pages,
    )


def _node_state(node: RadixNode) -> tuple[object, ...]:
    # Keys and pages are not copied: bytes never change.
    return (
        node,
        node.key,
        node.pages,
        node.parent,
        node.lock_ref,
        node.num_hits,
        node.created,
        node.last_use,
        node.priority,
    )

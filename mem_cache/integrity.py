"""The integrity check: recounts a cache from its structures."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np

from .errors import IntegrityError
from .memory_manager import MemoryManager
from .radix_node import RadixNode
from .radix_tree import RadixTree
from .request_kv import RequestKV
from .running_requests import RunningRequests
from .sizes import num_pages_for
from .tokens import TOKEN_BYTES


def check_cache(
    memory: MemoryManager, tree: RadixTree, running: RunningRequests
) -> None:
    """Recount the law and every structure behind it. Costs O(pages + nodes).

    Args:
        memory: The allocator and the request table.
        tree: The tree cache.
        running: The running requests.

    Raises:
        IntegrityError: With a line for each fault: which quantity is off by how many
            pages (counter minus recount), which pages have two owners or none, and
            which nodes or rows are wrong.
    """
    requests = list(running)
    faults = [
        *_allocator_faults(memory),
        *_law_faults(memory, tree, requests, running.num_held_pages),
        *_owner_faults(memory, tree, requests),
        *_tree_faults(tree, requests, memory.page_size),
        *_row_faults(memory, requests),
    ]
    if faults:
        raise IntegrityError("\n".join(["the cache contradicts itself:", *faults]))


def _allocator_faults(memory: MemoryManager) -> list[str]:
    try:
        memory.allocator.check_integrity()
    except IntegrityError as error:
        return [str(error)]
    return []


def _held_columns(request: RequestKV, page_size: int) -> tuple[int, int]:
    return (
        request.protected_len // page_size,
        num_pages_for(request.allocated_len, page_size),
    )


def _law_faults(
    memory: MemoryManager,
    tree: RadixTree,
    requests: list[RequestKV],
    num_held_pages: int,
) -> list[str]:
    evictable = sum(node.num_pages for node in tree.nodes() if not node.lock_ref)
    protected = sum(node.num_pages for node in tree.nodes() if node.lock_ref)
    columns = [_held_columns(request, memory.page_size) for request in requests]
    held = sum(end - start for start, end in columns)
    free = memory.num_pages - len(memory.allocator.in_use())
    counters = {
        "free": (memory.allocator.num_free_pages, free),
        "evictable": (tree.num_evictable_pages, evictable),
        "protected": (tree.num_protected_pages, protected),
        "held": (num_held_pages, held),
    }
    faults = [
        f"{name}: counter {counter}, recount {recount} ({counter - recount:+d} pages)"
        for name, (counter, recount) in counters.items()
        if counter != recount
    ]
    total = free + evictable + protected + held
    if total != memory.num_pages:
        off = total - memory.num_pages
        faults.append(
            f"free {free} + evictable {evictable} + protected {protected} + held "
            f"{held} = {total}, capacity {memory.num_pages} ({off:+d} pages)"
        )
    return faults


def _owner_faults(
    memory: MemoryManager, tree: RadixTree, requests: list[RequestKV]
) -> list[str]:
    owners: defaultdict[int, list[str]] = defaultdict(list)
    for node in tree.nodes():
        for page in np.frombuffer(node.pages, np.int32).tolist():
            owners[page].append(repr(node))
    for request in requests:
        start, end = _held_columns(request, memory.page_size)
        row = memory.request_table.pages[request.req_pool_idx]
        for page in row[start:end].tolist():
            owners[page].append(repr(request))
    in_use = set(memory.allocator.in_use().tolist())
    for page in set(range(1, memory.num_pages + 1)) - in_use:
        owners[page].append("the free list")
    faults = [
        f"page {page} has {len(names)} owners: {', '.join(names)}"
        for page, names in sorted(owners.items())
        if len(names) > 1
    ]
    faults += [f"page {page} has no owner" for page in sorted(in_use - owners.keys())]
    foreign = sorted(page for page in owners if not 1 <= page <= memory.num_pages)
    return faults + [f"page {page} is foreign: {owners[page]}" for page in foreign]


def _tree_faults(
    tree: RadixTree, requests: list[RequestKV], page_size: int
) -> list[str]:
    page_bytes = page_size * TOKEN_BYTES
    leases = Counter(request.node for request in requests)
    faults: list[str] = []
    nodes: list[RadixNode] = [*tree.roots, *tree.nodes()]
    for node in nodes:
        is_root = node.parent is node
        if not is_root:
            if node.parent.children.get(node.key[:page_bytes]) is not node:
                faults.append(f"{node!r} is not its parent's child")
            if not node.pages or len(node.key) != node.num_pages * page_bytes:
                faults.append(f"{node!r} has a key of {len(node.key)} bytes")
        protected = sum(1 for child in node.children.values() if child.lock_ref)
        expected = leases.pop(node, 0) + protected + is_root
        if node.lock_ref != expected:
            off = node.lock_ref - expected
            faults.append(f"{node!r}: lock_ref is off by {off:+d}")
        if (node in tree.index) != tree.index.holds(node):
            faults.append(f"{node!r} is wrongly in or not in the eviction index")
    leases.pop(None, None)
    faults += [f"a lease is on {node!r}, outside the tree" for node in leases]
    if len(tree.index) > sum(node in tree.index for node in nodes):
        faults.append("the eviction index holds nodes outside the tree")
    first = tree.index.first()
    if first is not None and first.children:
        faults.append(f"{first!r} goes next, but has children")
    return faults


def _row_faults(memory: MemoryManager, requests: list[RequestKV]) -> list[str]:
    faults: list[str] = []
    for request in requests:
        path: list[bytes] = []
        node = request.node
        while node is not None and node.parent is not node:
            path.append(node.pages)
            node = node.parent
        pages = b"".join(reversed(path))
        row = request.req_pool_idx
        if memory.request_table.read(row, 0, len(pages) // 4) != pages:
            faults.append(f"{request!r}: its row does not list its tree path")
        if len(pages) // 4 * memory.page_size != request.protected_len:
            faults.append(f"{request!r}: protected_len does not fit its tree path")
        if not request.protected_len <= request.committed_len <= request.allocated_len:
            faults.append(f"{request!r}: its lengths are out of order")
        if request.num_pages != num_pages_for(request.allocated_len, memory.page_size):
            faults.append(f"{request!r}: num_pages does not fit its allocated_len")
    rows = [*memory.request_table.free_rows(), *(r.req_pool_idx for r in requests)]
    if sorted(rows) != list(range(1, memory.max_num_requests + 1)):
        faults.append("a row of the request table is lost, or has two owners")
    if memory.request_table.pages[0].any():
        faults.append("the padding row lists pages")
    return faults

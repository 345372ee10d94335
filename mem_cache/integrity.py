"""The integrity check: recounts a cache from its structures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from .errors import IntegrityError
from .memory_manager import MemoryManager
from .radix_node import PAGE_ID_BYTES, RadixNode
from .radix_tree import RadixTree
from .request_kv import RequestKV
from .request_table import PADDING_ROW
from .running_requests import RunningRequests
from .sizes import num_pages_for
from .tokens import TOKEN_BYTES

_FREE_LIST = "the free list"

_Owner: TypeAlias = str | RadixNode | RequestKV


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
            pages (counter minus recount), which pages have two owners or none and who
            they are, and which nodes or rows are wrong, with both sides of what does
            not fit.
    """
    requests = list(running)
    faults = [
        *_allocator_faults(memory),
        *_law_faults(memory, tree, requests, running.num_held_pages),
        *_owner_faults(memory, tree, requests),
        *_tree_faults(tree, requests, memory.page_size),
        *_request_faults(memory, requests),
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
    """Find the pages that do not have exactly one owner; names owners of those only."""
    owners, parts = _owners(memory, tree, requests)
    pages = np.concatenate(parts)
    ends = np.cumsum([len(part) for part in parts])
    is_foreign = (pages < 1) | (pages > memory.num_pages)
    counts = np.bincount(pages[~is_foreign], minlength=memory.num_pages + 1)
    named: defaultdict[int, list[str]] = defaultdict(list)
    wrong = np.flatnonzero(is_foreign | (counts[np.where(is_foreign, 0, pages)] > 1))
    for i in wrong.tolist():
        owner = owners[int(np.searchsorted(ends, i, side="right"))]
        named[int(pages[i])].append(_name(owner))
    faults: list[str] = []
    for page, names in sorted(named.items()):
        listed = ", ".join(names)
        if 1 <= page <= memory.num_pages:
            faults.append(f"page {page} has {len(names)} owners: {listed}")
        else:
            faults.append(f"page {page} is foreign, owned by {listed}")
    lost = np.flatnonzero(counts[1:] == 0) + 1
    return faults + [f"page {page} has no owner" for page in lost.tolist()]


def _owners(
    memory: MemoryManager, tree: RadixTree, requests: list[RequestKV]
) -> tuple[list[_Owner], list[NDArray[np.int32]]]:
    """List everybody who owns pages, and the pages of each."""
    owners: list[_Owner] = []
    parts: list[NDArray[np.int32]] = []
    for node in tree.nodes():
        owners.append(node)
        parts.append(np.frombuffer(node.pages, np.int32))
    for request in requests:
        start, end = _held_columns(request, memory.page_size)
        held = request.pages[start * PAGE_ID_BYTES : end * PAGE_ID_BYTES]
        owners.append(request)
        parts.append(np.frombuffer(held, np.int32))
    owners.append(_FREE_LIST)
    parts.append(memory.allocator.free_pages())
    return owners, parts


def _held_columns(request: RequestKV, page_size: int) -> tuple[int, int]:
    start = request.protected_len // page_size
    return start, max(start, num_pages_for(request.allocated_len, page_size))


def _tree_faults(
    tree: RadixTree, requests: list[RequestKV], page_size: int
) -> list[str]:
    page_bytes = page_size * TOKEN_BYTES
    leases: defaultdict[RadixNode | None, list[RequestKV]] = defaultdict(list)
    for request in requests:
        leases[request.node].append(request)
    nodes: list[RadixNode] = [*tree.roots, *tree.nodes()]
    faults: list[str] = []
    for node in nodes:
        faults += _node_faults(node, page_bytes)
        faults += _lock_faults(node, leases.pop(node, []))
        if (node in tree.index) != tree.index.holds(node):
            wrong = "in" if node in tree.index else "not in"
            faults.append(f"{_name(node)} is wrongly {wrong} the eviction index")
    leases.pop(None, None)
    faults += [
        f"{_name(request)} leases {node!r}, which is outside the tree"
        for node, leasing in leases.items()
        for request in leasing
    ]
    if len(tree.index) > sum(node in tree.index for node in nodes):
        faults.append("the eviction index holds nodes outside the tree")
    first = tree.index.first()
    if first is not None and first.children:
        faults.append(f"{_name(first)} goes next, but has children")
    return faults


def _node_faults(node: RadixNode, page_bytes: int) -> Iterator[str]:
    parent = node.parent
    if parent is node:
        return
    child = parent.children.get(node.key[:page_bytes])
    if child is not node:
        yield f"{_name(node)} is not its parent's child: {child!r} is, of {parent!r}"
    if not node.pages or len(node.key) != node.num_pages * page_bytes:
        yield (
            f"{_name(node)} has a key of {len(node.key)} bytes, "
            f"its pages need {node.num_pages * page_bytes}"
        )


def _lock_faults(node: RadixNode, leasing: list[RequestKV]) -> Iterator[str]:
    protected = sum(1 for child in node.children.values() if child.lock_ref)
    expected = len(leasing) + protected + (node.parent is node)
    if node.lock_ref != expected:
        names = ", ".join(_name(request) for request in leasing) or "nobody"
        yield (
            f"{_name(node)}: lock_ref is off by {node.lock_ref - expected:+d}; "
            f"leased by {names}, {protected} children are protected"
        )


def _request_faults(memory: MemoryManager, requests: list[RequestKV]) -> Iterator[str]:
    table = memory.request_table
    page_size = memory.page_size
    for request in requests:
        name = _name(request)
        pages = _path_pages(request.node)
        path_len = len(pages) // PAGE_ID_BYTES * page_size
        if request.protected_len != path_len:
            yield f"{name}: protected_len does not fit its tree path of {path_len}"
        if request.pages is not table.rows[request.req_pool_idx]:
            yield f"{name}: its pages are not those of its row"
        row = bytes(request.pages[: len(pages)])
        if row != pages:
            yield f"{name}: its row does not list its tree path: {_differ(row, pages)}"
        if not request.protected_len <= request.committed_len <= request.allocated_len:
            yield f"{name}: its lengths are out of order"
        num_pages = num_pages_for(request.allocated_len, page_size)
        if request.num_pages != num_pages:
            yield (
                f"{name}: num_pages does not fit its allocated_len: "
                f"{request.num_pages}, not {num_pages}"
            )
        if request.num_known_pages > request.num_pages:
            yield f"{name}: workers know {request.num_known_pages} pages of its row"


def _row_faults(memory: MemoryManager, requests: list[RequestKV]) -> Iterator[str]:
    table = memory.request_table
    owners: defaultdict[int, list[str]] = defaultdict(list)
    for row in table.free_rows():
        owners[row].append("the free rows")
    for request in requests:
        owners[request.req_pool_idx].append(_name(request))
    for row in range(1, memory.max_num_requests + 1):
        names = owners.pop(row, [])
        if not names:
            yield f"row {row} has no owner"
        elif len(names) > 1:
            yield f"row {row} has {len(names)} owners: {', '.join(names)}"
    for row, names in owners.items():
        yield f"row {row} is foreign, owned by {', '.join(names)}"
    padding = table.rows[PADDING_ROW]
    if padding:
        pages = np.frombuffer(bytes(padding), np.int32).tolist()
        yield f"the padding row lists pages {pages}"


def _path_pages(node: RadixNode | None) -> bytes:
    path: list[bytes] = []
    while node is not None and node.parent is not node:
        path.append(node.pages)
        node = node.parent
    return b"".join(reversed(path))


def _differ(row: bytes, path: bytes) -> str:
    """Say where two lists of pages differ first."""
    expected: list[int] = np.frombuffer(path, np.int32).tolist()
    listed: list[int | None] = list(np.frombuffer(row, np.int32).tolist())
    listed += [None] * (len(expected) - len(listed))  # the last row may end before
    column = next(at for at, page in enumerate(expected) if page != listed[at])
    return f"column {column} lists {listed[column]}, not page {expected[column]}"


def _name(owner: _Owner) -> str:
    """Name an owner so that it can be found: nodes by where they are."""
    if not isinstance(owner, RadixNode):
        return str(owner)
    end = 0
    node = owner
    while node.parent is not node:
        end += len(node.key) // TOKEN_BYTES
        node = node.parent
    start = end - len(owner.key) // TOKEN_BYTES
    return f"{owner!r} at {start}..{end} of namespace {owner.root.namespace!r}"

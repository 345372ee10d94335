"""A picture of a cache: what a tree view shows, as plain values."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from .prefix_cache import PrefixCache
from .radix_node import RadixNode, RadixRoot
from .radix_tree import RadixTree
from .request_kv import RequestKV
from .tokens import TOKEN_BYTES

Decode: TypeAlias = Callable[[list[int]], str]
"""Turns token ids into text, as the `decode` of a tokenizer."""

_NUM_IDS_SHOWN: Final = 6
_NUM_IDS_DECODED: Final = 24
_MAX_TEXT_LEN: Final = 60


@dataclass(frozen=True, slots=True)
class NodePicture:
    """A node.

    Attributes:
        depth: Branchings above it; 1 for the children of a root.
        is_chained: Whether it is the only child of the node before it: then both have
            the same depth, so that depth follows branching.
        start: Position of its first token.
        stop: End of its tokens.
        text: Its first tokens.
        num_pages: Pages of its tokens.
        lock_ref: Leases on it plus its protected children.
        last_use: Logical time of its last release.
        num_hits: Admissions that used it.
        priority: Highest priority of the requests that published through it.
        leased_by: Rows of the running requests whose cached prefix ends here.
        num_users: Running requests whose cached prefix ends here or goes on from here.
        is_next: Whether the next page to be evicted is its last.
    """

    depth: int
    is_chained: bool
    start: int
    stop: int
    text: str
    num_pages: int
    lock_ref: int
    last_use: int
    num_hits: int
    priority: int
    leased_by: tuple[int, ...]
    num_users: int
    is_next: bool


@dataclass(frozen=True, slots=True)
class HiddenNodes:
    """Nodes that are there, but not shown: some children of a node, and all below.

    Attributes:
        depth: That of the first of them.
        is_chained: Whether they are all that comes after the node before them.
        num_nodes: How many.
        size: Their tokens.
    """

    depth: int
    is_chained: bool
    num_nodes: int
    size: int

    @property
    def text(self) -> str:
        """What stands in their place."""
        return f"and {count(self.num_nodes, 'more node')}, {self.size:,} tokens"


@dataclass(frozen=True, slots=True)
class NamespacePicture:
    """All nodes of a namespace, or of an epoch of it that is over.

    Attributes:
        name: Its representation.
        is_stale: Whether its epoch is over.
        num_nodes: Nodes, shown or not.
        size: Their tokens.
        nodes: Parents before their children, siblings in the order of publication.
    """

    name: str
    is_stale: bool
    num_nodes: int
    size: int
    nodes: tuple[NodePicture | HiddenNodes, ...]


@dataclass(frozen=True, slots=True)
class RequestPicture:
    """A running request; see `RequestKV`."""

    row: int
    namespace: str
    priority: int
    protected_len: int
    committed_len: int
    allocated_len: int


@dataclass(frozen=True, slots=True)
class CachePicture:
    """A cache at one moment; sizes count tokens.

    Attributes:
        page_size: Tokens a page.
        available_size: Free.
        evictable_size: In the tree, and needed by no running request.
        protected_size: In the tree, and needed by a running request.
        held_size: Owned by running requests outside the tree, in whole pages.
        total_size: Capacity.
        namespaces: Those that something is cached in, or that a request runs in.
        requests: Running requests.
        num_hidden_requests: Those that are not shown.
    """

    page_size: int
    available_size: int
    evictable_size: int
    protected_size: int
    held_size: int
    total_size: int
    namespaces: tuple[NamespacePicture, ...]
    requests: tuple[RequestPicture, ...]
    num_hidden_requests: int


def take_picture(
    cache: PrefixCache, max_num_nodes: int, decode: Decode | None
) -> CachePicture:
    """Take a picture of a cache, which stays as it is. Costs O(nodes).

    Args:
        cache: The cache.
        max_num_nodes: Nodes to show, and requests.
        decode: Turns token ids into text.

    Raises:
        WrongThreadError: Another thread owns the cache, and may be changing it.
    """
    cache._check_thread()  # pyright: ignore[reportPrivateUsage]
    # A view is a friend of the cache: nobody else needs its tree.
    tree = cache._tree  # pyright: ignore[reportPrivateUsage]
    requests = list(cache._running)  # pyright: ignore[reportPrivateUsage]
    camera = _Camera(tree, requests, max_num_nodes, decode)
    return CachePicture(
        page_size=cache.page_size,
        available_size=cache.available_size,
        evictable_size=cache.evictable_size,
        protected_size=cache.protected_size,
        held_size=cache.held_size,
        total_size=cache.total_size,
        namespaces=tuple(camera.namespace(root) for root in tree.roots),
        requests=tuple(map(_request, requests[:max_num_nodes])),
        num_hidden_requests=max(0, len(requests) - max_num_nodes),
    )


def _request(request: RequestKV) -> RequestPicture:
    return RequestPicture(
        request.req_pool_idx,
        repr(request.namespace),
        request.priority,
        request.protected_len,
        request.committed_len,
        request.allocated_len,
    )


class _Camera:
    """Counts what is below each node, and chooses the nodes to show."""

    def __init__(
        self,
        tree: RadixTree,
        requests: list[RequestKV],
        max_num_nodes: int,
        decode: Decode | None,
    ) -> None:
        self._decode = decode
        self._next = tree.index.first()
        self._leased_by: dict[RadixNode, list[int]] = {}
        for request in requests:
            if request.node is not None:
                rows = self._leased_by.setdefault(request.node, [])
                rows.append(request.req_pool_idx)
        nodes: list[RadixNode] = [*tree.roots, *tree.nodes()]
        self._num_users = {node: len(self._leased_by.get(node, ())) for node in nodes}
        self._num_nodes = dict.fromkeys(nodes, 1)
        self._sizes = {node: len(node.key) // TOKEN_BYTES for node in nodes}
        for node in reversed(nodes):  # children before parents
            if node.parent is not node:
                for count in (self._num_users, self._num_nodes, self._sizes):
                    count[node.parent] += count[node]
        self._shown = _breadth_first(tree.roots, max_num_nodes)

    def namespace(self, root: RadixRoot) -> NamespacePicture:
        return NamespacePicture(
            repr(root.namespace),
            root.is_stale,
            self._num_nodes[root] - 1,
            self._sizes[root],
            tuple(self._below(root)),
        )

    def _below(self, root: RadixRoot) -> Iterator[NodePicture | HiddenNodes]:
        # A node with its depth, the position where it starts, and if it is chained.
        stack: list[HiddenNodes | tuple[RadixNode, int, int, bool]]
        stack = [(root, 0, 0, False)]
        while stack:
            top = stack.pop()
            if isinstance(top, HiddenNodes):
                yield top
                continue
            node, depth, start, is_chained = top
            stop = start + len(node.key) // TOKEN_BYTES
            if node is not root:
                yield self._node(node, depth, start, stop, is_chained)
            is_only = len(node.children) == 1 and node is not root
            below = depth if is_only else depth + 1
            children = list(node.children.values())
            hidden = [child for child in children if child not in self._shown]
            if hidden:
                num_nodes = sum(self._num_nodes[child] for child in hidden)
                size = sum(self._sizes[child] for child in hidden)
                stack.append(HiddenNodes(below, is_only, num_nodes, size))
            for child in reversed(children):
                if child in self._shown:
                    stack.append((child, below, stop, is_only))

    def _node(
        self, node: RadixNode, depth: int, start: int, stop: int, is_chained: bool
    ) -> NodePicture:
        return NodePicture(
            depth=depth,
            is_chained=is_chained,
            start=start,
            stop=stop,
            text=self._text(node),
            num_pages=node.num_pages,
            lock_ref=node.lock_ref,
            last_use=node.last_use,
            num_hits=node.num_hits,
            priority=node.priority,
            leased_by=tuple(self._leased_by.get(node, ())),
            num_users=self._num_users[node],
            is_next=node is self._next,
        )

    def _text(self, node: RadixNode) -> str:
        num_tokens = len(node.key) // TOKEN_BYTES
        if self._decode is None:
            ids = np.frombuffer(node.key, np.int32, min(num_tokens, _NUM_IDS_SHOWN))
            text = " ".join(map(str, ids.tolist()))
            return text if num_tokens == len(ids) else f"{text} …"
        ids = np.frombuffer(node.key, np.int32, min(num_tokens, _NUM_IDS_DECODED))
        # Line breaks and the like would tear the view.
        text = repr(self._decode(ids.tolist()))[1:-1]
        is_whole = num_tokens == len(ids) and len(text) <= _MAX_TEXT_LEN
        return text if is_whole else f"{text[:_MAX_TEXT_LEN]}…"


def _breadth_first(roots: list[RadixRoot], max_num_nodes: int) -> dict[RadixNode, None]:
    """Return the first nodes below the roots, level by level."""
    queue: deque[RadixNode] = deque(roots)
    shown: dict[RadixNode, None] = {}
    while queue:
        for child in queue.popleft().children.values():
            if len(shown) == max_num_nodes:
                return shown
            shown[child] = None
            queue.append(child)
    return shown


def count(number: int, thing: str) -> str:
    """Return a number with a noun, in the plural if need be."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"

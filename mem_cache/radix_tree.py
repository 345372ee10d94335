"""The radix tree: which token prefixes are cached, and in which pages.

A pure data structure: it knows no pool, no allocator and no request. Keys are bytes, so
finding a prefix is one dictionary lookup and one `memcmp` a node. After Zheng et al.,
"SGLang: Efficient Execution of Structured Language Model Programs" (2023,
arXiv:2312.07104); different from it: protection is counted lazily, leaves grow in place
and are evicted page by page from their tail, and a match changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterator
from contextlib import contextmanager
from typing import Final
from weakref import ref
from zlib import crc32

from .eviction import EvictionIndex, RecencyIndex
from .namespaces import Namespaces
from .radix_node import (
    NO_CHILDREN,
    PAGE_ID_BYTES,
    RadixNode,
    RadixRoot,
    detach,
    make_node,
    make_root,
    take_apart,
)
from .sharded_dict import MAX_DICT_SIZE, ShardedDict
from .tokens import TOKEN_BYTES, first_page, shared_bytes

MAX_NODE_SIZE: Final = 16_384
"""Most tokens of one node: trimming or splitting it copies no more than that."""

MAX_GROWN_SIZE: Final = 4_096
"""Most tokens of a leaf that grew: growing copies it as a whole."""


class RadixTree:
    """Cached prefixes of all namespaces.

    The tree announces four events to whoever appended a function to a list. Rooms that
    build on the tree need no other way in, and an empty list costs nothing.

    Attributes:
        on_used: Told the nodes of a path that an admission locked, root's child first.
        on_published: Told a node and where its new part starts: ``node.key[start:]`` is
            new; the whole node if `start` is 0.
        on_split: Told the new upper node and the lower one, whose first
            ``len(upper.key)`` bytes it took.
        on_evicted: Told a node, and the tokens and pages that were cut off its tail. A
            node that is gone has no key left, and still its parent.
        cause: Why pages are evicted now, if it is not to make room: for those who
            listen to `on_evicted`. See `because`.
        index: The order of eviction.
        version: Counts what may change an answer of `match`.
        num_evictable_pages: Pages in unprotected nodes.
        num_protected_pages: Pages in protected nodes.
    """

    def __init__(self, page_bytes: int, index: EvictionIndex) -> None:
        """Make an empty tree.

        Args:
            page_bytes: Bytes of the tokens of one page.
            index: Keeps the evictable nodes in order; empty.
        """
        self._page_bytes = page_bytes
        self._max_node_bytes = max(
            MAX_NODE_SIZE * TOKEN_BYTES // page_bytes * page_bytes, page_bytes
        )
        self.index = index
        self.cause: str | None = None
        self.on_used: list[Callable[[list[RadixNode]], None]] = []
        self.on_published: list[Callable[[RadixNode, int], None]] = []
        self.on_split: list[Callable[[RadixNode, RadixNode], None]] = []
        self.on_evicted: list[Callable[[RadixNode, bytes, bytes], None]] = []
        self._namespaces = Namespaces()
        self._namespaces_ref = ref(self._namespaces)
        self._roots: dict[Hashable, RadixRoot] = {}
        self._stale_roots: dict[RadixRoot, None] = {}
        self._clock = 0
        self.version = 0
        self.num_evictable_pages = 0
        self.num_protected_pages = 0

    def __del__(self) -> None:
        """Break all references between the nodes, which no collector would find."""
        self.take_apart()

    def match(self, namespace: Hashable, raw: bytes) -> int:
        """Count the bytes of `raw` that are cached. Changes nothing.

        Args:
            namespace: Where to look.
            raw: Tokens; those behind the last whole page are not cached.

        Complexity: O(nodes on the path) plus one comparison of the matched tokens.
        """
        root = self._roots.get(namespace)
        return self._walk(root, raw, 0, len(raw))[1] if root else 0

    def find(
        self, namespace: Hashable, raw: bytes, end: int | None = None
    ) -> tuple[list[RadixNode], int]:
        """Return the nodes that have the cached part of ``raw[:end]``. Changes nothing.

        Args:
            namespace: Where to look.
            raw: Tokens; those behind the last whole page are not cached.
            end: How many of its bytes count, whole pages; all if ``None``.

        Returns:
            The nodes of the path, of which the last may reach further; and the bytes of
            `raw` that are cached.
        """
        root = self._roots.get(namespace)
        if root is None:
            return [], 0
        path, matched, _ = self._walk(root, raw, 0, len(raw) if end is None else end)
        return path, matched

    def acquire(
        self, namespace: Hashable, raw: bytes, end: int | None = None
    ) -> tuple[RadixNode, bytes]:
        """Find and lock the longest cached prefix of ``raw[:end]``; splits at its end.

        Args:
            namespace: Where to look; unknown ones are made.
            raw: Tokens.
            end: How many of its bytes count, whole pages; all if ``None``.

        Returns:
            The node that the lease is on, and the page ids of the prefix, the bytes of
            int32. Give the lease back with `unlock`.
        """
        root = self._roots.get(namespace)
        if root is None:
            root = self.add_root(namespace)
        path, _ = self._descend(root, raw, 0, len(raw) if end is None else end)
        node = path[-1] if path else root
        self.lock(node)
        pages: list[bytes] = []
        # Only now, since the keys of nodes in the index must not change.
        for used in path:
            used.num_hits += 1
            pages.append(used.pages)
        for tell in self.on_used:
            tell(path)
        return node, b"".join(pages)

    def publish(
        self,
        node: RadixNode,
        raw: bytes,
        pages: bytes,
        priority: int = 0,
        start: int = 0,
        end: int | None = None,
    ) -> tuple[RadixNode, bytes]:
        """Cache ``raw[start:end]`` below `node`, and move the caller's lease there.

        Args:
            node: The node that the caller's lease is on.
            raw: Tokens; those that are cached are whole pages, at least one.
            pages: Their page ids, the bytes of int32. Those that are not duplicates
                belong to the tree from now on.
            priority: Raises the priority of the whole path.
            start: What comes before is above `node`, in bytes.
            end: What comes behind does not count, in bytes; ``None`` if nothing does.

        Returns:
            The node that the lease moved to, and the page ids that the tree had already
            for the first of the tokens, the bytes of int32: the caller's own copies of
            them are duplicates.
        """
        stop = len(raw) if end is None else end
        last = node
        offset = start
        known: list[bytes] = []
        if node.children:
            path, offset = self._descend(node, raw, start, stop)
            if path:
                last = path[-1]
                self.lock(last)
                self.unlock(node)
                known = [shared.pages for shared in path]
                num_known = (offset - start) // self._page_bytes
                pages = pages[num_known * PAGE_ID_BYTES :]
        if offset < stop:
            last = self._append(last, raw, offset, stop, pages)
        if priority:
            raised = last
            while raised.priority < priority:
                raised.priority = priority
                raised = raised.parent
        return last, b"".join(known)

    def lock(self, node: RadixNode) -> None:
        """Protect `node` and its ancestors. O(1) if `node` is protected already."""
        while True:
            node.lock_ref += 1
            if node.lock_ref > 1:
                return
            num_pages = len(node.pages) // PAGE_ID_BYTES
            self.num_evictable_pages -= num_pages
            self.num_protected_pages += num_pages
            self.index.protect(node)
            node = node.parent

    def unlock(self, node: RadixNode) -> None:
        """Give one lease on `node` back. O(1) if others protect it still."""
        while True:
            node.lock_ref -= 1
            if node.lock_ref:
                break
            num_pages = len(node.pages) // PAGE_ID_BYTES
            self.num_evictable_pages += num_pages
            self.num_protected_pages -= num_pages
            self._clock += 1
            node.last_use = self._clock
            self.index.release(node)
            node = node.parent
        if node.parent is node:
            self._forget_if_unused(node)

    def evict(self, num_pages: int) -> bytes:
        """Drop the pages that go first, each from the tail of a leaf.

        Returns:
            The page ids dropped, the bytes of int32: `num_pages` of them, or all that
            are evictable.

        Raises:
            PolicyError: The policy failed; nothing was dropped.

        Complexity: O(nodes dropped), times O(log leaves) for a keyed policy.
        """
        index = self.index
        index.check()
        freed: list[bytes] = []
        while num_pages > 0:
            node = index.first()
            if node is None:
                break
            excess = len(node.pages) // PAGE_ID_BYTES - num_pages
            freed.append(self._cut(node, excess) if excess > 0 else self._drop(node))
            num_pages = -excess
        return b"".join(freed)

    def trim(self, node: RadixNode, num_pages: int) -> bytes:
        """Drop the last pages of an unprotected leaf.

        Args:
            node: The leaf; it is gone if it has no more than `num_pages`.
            num_pages: Most to drop, at least 1.

        Returns:
            The page ids dropped, the bytes of int32.
        """
        excess = node.num_pages - num_pages
        return self._cut(node, excess) if excess > 0 else self._drop(node)

    @contextmanager
    def because(self, cause: str) -> Generator[None, None, None]:
        """Tell those who listen why pages are evicted meanwhile."""
        self.cause = cause
        try:
            yield
        finally:
            self.cause = None

    def retire(self, namespace: Hashable) -> RadixRoot | None:
        """Make all entries of a namespace stale: they match nobody from now on. O(1).

        Returns:
            The root that they are below, or ``None`` if there are none.
        """
        root = self._roots.pop(namespace, None)
        if root is not None:
            self.version += 1
            root.is_stale = True
            self._stale_roots[root] = None
        return root

    def clear(self) -> None:
        """Evict everything; no lease may be out. Costs O(nodes)."""
        for node in reversed(list(self.nodes())):
            self._drop(node)

    def take_apart(self) -> None:
        """Let everything go, and everybody who listens: the tree has no user left."""
        self.on_used.clear()
        self.on_published.clear()
        self.on_split.clear()
        self.on_evicted.clear()
        for root in (*self._roots.values(), *self._stale_roots):
            take_apart(root)
        self._roots.clear()
        self._stale_roots.clear()
        self.index = RecencyIndex()  # the old one may refer to the tree

    def root_of(self, namespace: Hashable) -> RadixRoot | None:
        """Return the root that a namespace matches below now, if there is one."""
        return self._roots.get(namespace)

    def add_root(self, namespace: Hashable) -> RadixRoot:
        """Make a root for a namespace that has none."""
        root = self._roots[namespace] = make_root(self._namespaces_ref)
        self._namespaces.names[root] = namespace
        return root

    def nodes(self) -> Iterator[RadixNode]:
        """Iterate over all nodes but the roots, parents first."""
        for root in self.roots:
            yield from self.nodes_of(root)

    def nodes_of(self, root: RadixRoot) -> Iterator[RadixNode]:
        """Iterate over all nodes below a root, parents first."""
        for node in _preorder(root):
            if node is not root:
                yield node

    @property
    def roots(self) -> list[RadixRoot]:
        """The roots that something is cached below, or that have a lease."""
        return [*self._roots.values(), *self._stale_roots]

    def _walk(
        self, node: RadixNode, raw: bytes, offset: int, end: int
    ) -> tuple[list[RadixNode], int, int]:
        """Follow ``raw[offset:end]`` below `node`.

        Returns:
            The nodes on the path; where in `raw` the match ends; and, if that is inside
            of the last node of the path, how many bytes of that node match, else 0.
        """
        page_bytes = self._page_bytes
        path: list[RadixNode] = []
        while offset < end:
            children = node.children
            page = raw[offset : offset + page_bytes]
            # Compiled code must know which of the two it is, or be slow.
            if isinstance(children, dict):
                child = children.get(page)
            else:
                child = children.get(page)
            if child is None:
                break
            path.append(child)
            behind = offset + len(child.key)
            if behind > end or not raw.startswith(child.key, offset):
                inside = shared_bytes(raw, offset, end, child.key, page_bytes)
                return path, offset + inside, inside
            offset = behind
            node = child
        return path, offset, 0

    def _descend(
        self, node: RadixNode, raw: bytes, start: int, end: int
    ) -> tuple[list[RadixNode], int]:
        """Follow ``raw[start:end]`` below `node`, splitting where that ends.

        The caller must protect the last node of the path before anything else: the
        upper part of an unprotected node that was split is in no index.
        """
        path, offset, inside = self._walk(node, raw, start, end)
        if inside:
            path[-1] = self.split(path[-1], inside)
        return path, offset

    def split(self, node: RadixNode, key_bytes: int) -> RadixNode:
        """Put a new node above `node` that takes the first `key_bytes` of its key.

        `node` stays the same object, so that leases on it stay valid. The new node is
        in no index: protect it at once, unless the index holds leaves only.
        """
        page_bytes = self._page_bytes
        cut = key_bytes // page_bytes * PAGE_ID_BYTES
        upper = make_node(node.key[:key_bytes], node.pages[:cut], node.parent)
        upper.lock_ref = 1 if node.lock_ref else 0
        upper.num_hits = node.num_hits
        upper.created = node.created
        upper.last_use = node.last_use
        upper.priority = node.priority
        node.parent.children[first_page(upper.key, page_bytes)] = upper
        node.key = node.key[key_bytes:]
        node.pages = node.pages[cut:]
        node.parent = upper
        upper.children = {first_page(node.key, page_bytes): node}
        for tell in self.on_split:
            tell(upper, node)
        return upper

    def _append(
        self, node: RadixNode, raw: bytes, start: int, end: int, pages: bytes
    ) -> RadixNode:
        """Add new tokens behind `node`, and move the caller's lease to their end.

        Args:
            node: The node that the lease is on.
            raw: Tokens.
            start: The first that is new, in bytes.
            end: Where these end, in bytes: whole pages.
            pages: The page ids of what is new.

        Returns:
            The node that the lease is on now.
        """
        self.version += 1
        self.num_protected_pages += len(pages) // PAGE_ID_BYTES
        if (
            node.lock_ref == 1
            and not node.children
            and self.index.grows_leaves
            and len(node.key) + end - start <= MAX_GROWN_SIZE * TOKEN_BYTES
            and node.parent is not node
        ):
            # A leaf that only the caller uses: depth follows branching, not turns.
            old_end = len(node.key)
            node.key += raw[start:end]
            node.pages += pages
            for tell in self.on_published:
                tell(node, old_end)
            return node
        # The lease on `node` becomes that of its first new, protected child.
        self._clock += 1
        for key, part in self._parts(raw, start, end, pages):
            child = make_node(key, part, node)
            child.lock_ref = 1
            child.created = self._clock
            children = node.children
            if children is NO_CHILDREN:
                node.children = children = {}
            children[first_page(key, self._page_bytes)] = child
            if len(children) > MAX_DICT_SIZE and isinstance(children, dict):
                node.children = ShardedDict(children, crc32)
            node = child
            for tell in self.on_published:
                tell(node, 0)
        return node

    def _parts(
        self, raw: bytes, start: int, end: int, pages: bytes
    ) -> list[tuple[bytes, bytes]]:
        """Part new tokens and their page ids so that no node is too large."""
        step = self._max_node_bytes
        if start == 0 and end == len(raw) and end <= step:
            return [(raw, pages)]  # compiled code would copy what it need not cut
        page_step = step // self._page_bytes * PAGE_ID_BYTES
        return [
            (raw[at : min(at + step, end)], pages[i * page_step : (i + 1) * page_step])
            for i, at in enumerate(range(start, end, step))
        ]

    def _cut(self, node: RadixNode, num_pages: int) -> bytes:
        """Keep the first `num_pages` pages of an unprotected leaf; returns the rest."""
        self.version += 1
        kept = num_pages * self._page_bytes
        lost = node.key[kept:]
        freed = node.pages[num_pages * PAGE_ID_BYTES :]
        node.key = node.key[:kept]
        node.pages = node.pages[: num_pages * PAGE_ID_BYTES]
        self.num_evictable_pages -= len(freed) // PAGE_ID_BYTES
        for tell in self.on_evicted:
            tell(node, lost, freed)
        return freed

    def _drop(self, node: RadixNode) -> bytes:
        """Take an unprotected leaf out of the tree; returns its pages."""
        self.version += 1
        lost = node.key
        freed = node.pages
        node.key = node.pages = b""
        self.num_evictable_pages -= len(freed) // PAGE_ID_BYTES
        self.index.protect(node)
        parent = node.parent
        del parent.children[lost[: self._page_bytes]]
        if not parent.children:
            if parent.parent is parent:
                self._forget_if_unused(parent)
            elif parent.lock_ref == 0:
                self.index.expose(parent)
        for tell in self.on_evicted:
            tell(node, lost, freed)
        # Whoever keeps it keeps no chain of nodes that are gone, however long.
        node.parent = node.root
        return freed

    def _forget_if_unused(self, root: RadixNode) -> None:
        """Drop a root without children and leases: namespaces come and go."""
        if isinstance(root, RadixRoot) and root.lock_ref == 1 and not root.children:
            if root.is_stale:
                del self._stale_roots[root]
            elif root.has_quota:
                return
            else:
                del self._roots[root.namespace]
            del self._namespaces.names[root]
            detach(root)


def _preorder(node: RadixNode) -> Iterator[RadixNode]:
    stack = [node]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())

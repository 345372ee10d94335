"""The root directory: which namespaces have something that begins with a page."""

from __future__ import annotations

from itertools import islice
from typing import Final

from .radix_node import RadixNode, RadixRoot
from .radix_tree import RadixTree
from .sizes import are_equal
from .tokens import shared_bytes

MAX_NUM_ROOTS: Final = 8
"""Most roots that a prompt is compared with; the first that had its first page."""


class RootDirectory:
    """Finds a prompt in other namespaces and in epochs that have ended.

    As long as there is only one root, nothing is kept.
    """

    def __init__(self, tree: RadixTree, page_bytes: int) -> None:
        """Start without roots.

        Args:
            tree: The cached prefixes.
            page_bytes: Bytes of the tokens of one page.
        """
        self._tree = tree
        self._page_bytes = page_bytes
        self._first: RadixRoot | None = None
        self._roots: dict[bytes, dict[RadixRoot, None]] = {}
        self.has_several = False

    def add(self, root: RadixRoot, gone: RadixRoot | None) -> None:
        """Take note of a new root. O(1), but for the second: O(children of the first).

        Args:
            root: It has no children yet.
            gone: The root that its namespace had before, if that went empty.
        """
        if self.has_several:
            return
        first = self._first
        if first is None or first is gone:
            self._first = root
            return
        self._roots = {page: {first: None} for page in first.children}
        self.has_several = True
        self._tree.on_published.append(self._on_published)
        self._tree.on_evicted.append(self._on_evicted)

    def find(self, root: RadixRoot, raw: bytes, start: int) -> tuple[int, int]:
        """Tell how much of a prompt is resident elsewhere.

        Args:
            root: The root that the prompt was looked up under.
            raw: Its tokens, whole pages.
            start: What comes before is not asked for, in bytes, whole pages.

        Returns:
            Bytes that are resident in an epoch of the namespace that has ended, and
            bytes that are cached in another namespace; 0 if no more than `start`.

        Complexity: O(nodes on the paths) of at most `MAX_NUM_ROOTS` roots.
        """
        epoch = namespace = 0
        roots = self._roots.get(raw[: self._page_bytes], {})
        for other in islice(roots, MAX_NUM_ROOTS):
            if not other.is_stale:
                if other is not root:
                    namespace = max(namespace, self._resident_bytes(other, raw, start))
            elif are_equal(other.namespace, root.namespace):
                epoch = max(epoch, self._resident_bytes(other, raw, start))
        return epoch, namespace

    def _on_published(self, node: RadixNode, start: int) -> None:
        root = node.root
        if start == 0 and node.parent is root:
            page = node.key[: self._page_bytes]
            self._roots.setdefault(page, {})[root] = None

    def _on_evicted(self, node: RadixNode, key: bytes, pages: bytes) -> None:
        root = node.root
        if node.parent is root and not node.key:
            page = key[: self._page_bytes]
            roots = self._roots[page]
            del roots[root]
            if not roots:
                del self._roots[page]

    def _resident_bytes(self, node: RadixNode, raw: bytes, start: int) -> int:
        """Count the bytes of `raw` that are below `node`; 0 if no more than `start`."""
        page_bytes = self._page_bytes
        least = start + page_bytes
        offset = 0
        end = len(raw)
        while offset < end:
            child = node.children.get(raw[offset : offset + page_bytes])
            if child is None:
                break
            if not raw.startswith(child.key, offset):
                # Most end before `least`: they need no exact count.
                if offset >= least or child.key.startswith(raw[offset:least]):
                    offset += shared_bytes(raw, offset, end, child.key, page_bytes)
                break
            offset += len(child.key)
            node = child
        return offset if offset > start else 0

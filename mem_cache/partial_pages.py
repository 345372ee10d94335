"""Partial-page reuse: the shared start of a page that does not match as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from sortedcontainers import SortedList

from .errors import OutOfPagesError, PolicyError
from .page_copies import PageCopies
from .radix_node import RadixNode
from .radix_tree import RadixTree
from .request_kv import RequestKV
from .running_requests import RunningRequests
from .tokens import TOKEN_BYTES

_FEW: Final = 8
"""So many children are compared one by one, which costs less than their order."""


class PartialPageIndex:
    """Finds the child of a node whose first page shares the longest start with a page.

    The first pages of the children, sorted as bytes, have this property: of all of
    them, one of the two neighbours of a wanted page shares the longest start with it.
    The order is kept only of nodes with many children, from the first time that it is
    asked for.
    """

    def __init__(self, tree: RadixTree, page_bytes: int) -> None:
        """Listen to a tree.

        Args:
            tree: The cached prefixes.
            page_bytes: Bytes of the tokens of one page.
        """
        self._page_bytes = page_bytes
        self._first_pages: dict[RadixNode, SortedList[bytes]] = {}
        tree.on_published.append(self._on_published)
        tree.on_evicted.append(self._on_evicted)

    def longest(self, node: RadixNode, wanted: bytes) -> tuple[RadixNode | None, int]:
        """Return the child of `node` that shares most, and how many tokens.

        Args:
            node: Where a match ended.
            wanted: The tokens that follow, at most one page.

        Returns:
            The child, or ``None`` if none shares a token; and the tokens shared.

        Complexity: O(log children), over the publications that it lived through.
        """
        best, most = b"", 0
        children = node.children
        is_few = len(children) <= _FEW
        for page in children if is_few else self._neighbours(node, wanted):
            num_shared = _common_tokens(page, wanted)
            if num_shared > most:
                best, most = page, num_shared
        return (children[best], most) if most else (None, 0)

    def _neighbours(self, node: RadixNode, wanted: bytes) -> list[bytes]:
        pages = self._first_pages.get(node)
        if pages is None:
            pages = self._first_pages[node] = SortedList(node.children)
        at = pages.bisect_left(wanted)
        return list(pages[max(0, at - 1) : at + 1])

    def _on_published(self, node: RadixNode, start: int) -> None:
        pages = self._first_pages.get(node.parent) if start == 0 else None
        if pages is not None:
            pages.add(node.key[: self._page_bytes])

    def _on_evicted(self, node: RadixNode, tokens: bytes, pages: bytes) -> None:
        first_pages = None if node.key else self._first_pages.get(node.parent)
        if first_pages is not None:
            first_pages.remove(tokens[: self._page_bytes])
            if not first_pages:
                del self._first_pages[node.parent]


class PartialPages:
    """Lets a request begin inside a page.

    A shared page is never written. So its start is copied to a page of the request's
    own, which is one that it would have needed anyway, and the request computes on from
    there.
    """

    def __init__(
        self,
        index: PartialPageIndex,
        running: RunningRequests,
        copies: PageCopies,
    ) -> None:
        """Join what is needed.

        Args:
            index: Finds the page.
            running: Gets the request's new page.
            copies: Takes note of the copy.
        """
        self._index = index
        self._running = running
        self._copies = copies

    def extend_hit(
        self,
        request: RequestKV,
        raw: bytes,
        page_size: int,
        take_page: Callable[[RequestKV], bytes],
    ) -> None:
        """Reuse the start of the page behind a hit; if no page can be had, nothing.

        Args:
            request: A request that was just admitted.
            raw: All its tokens; at least one is left to compute.
            page_size: Tokens a page.
            take_page: Takes a page for a request, or raises if it can have none.
        """
        hit = request.committed_len
        start = hit * TOKEN_BYTES
        wanted = raw[start : start + page_size * TOKEN_BYTES]
        if start + len(wanted) == len(raw):
            wanted = wanted[:-TOKEN_BYTES]
        node = request.node
        assert node is not None  # the request has its hit
        child, num_shared = self._index.longest(node, wanted)
        if child is None:
            return
        source = np.frombuffer(child.pages, np.int32, 1)
        try:
            page = take_page(request)
        except (OutOfPagesError, PolicyError):
            return
        # It may be the source itself, if that was the next to go: then nothing is left
        # to copy. Any other stays as it is until the copy is made.
        target = np.frombuffer(page, np.int32)
        self._copies.add({int(target[0]): int(source[0])})
        self._running.add_page(request, page, hit + num_shared)


def _common_tokens(page: bytes, wanted: bytes) -> int:
    """Count the leading tokens that two pages share, the second one maybe cut."""
    end = len(wanted)
    differs = int.from_bytes(page[:end]) ^ int.from_bytes(wanted)
    num_bytes = end - (differs.bit_length() + 7) // 8
    return num_bytes // TOKEN_BYTES

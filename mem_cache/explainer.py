"""The explainer: why a request finds in the cache what it finds."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import suppress
from typing import Final

from .ghost_index import EvictedPart, GhostIndex
from .hit_report import HitReport
from .in_flight import InFlight
from .radix_node import RadixRoot
from .radix_tree import RadixTree
from .request_kv import RequestKV
from .root_directory import RootDirectory
from .tokens import TOKEN_BYTES

QUOTA: Final = "quota"
"""The cause of evictions that keep a namespace below its ceiling."""

_NO_PARTS: Final[Sequence[EvictedPart]] = ()


class Explainer:
    """Makes the hit reports of a radix cache.

    It listens to the tree for what is published and evicted, and is told when requests
    come, publish and go. A report costs a few look-ups where the hit ends, whatever the
    length of the prompt.
    """

    def __init__(
        self, tree: RadixTree, page_bytes: int, num_pages: int, policy: str
    ) -> None:
        """Listen to an empty tree.

        Args:
            tree: The cached prefixes.
            page_bytes: Bytes of the tokens of one page.
            num_pages: Pages of the pool; it remembers the tokens of as many that were
                evicted.
            policy: Name of the eviction policy.
        """
        self._page_bytes = page_bytes
        self._ghosts = GhostIndex(tree, page_bytes, num_pages, policy)
        self._in_flight = InFlight(page_bytes)
        self._directory = RootDirectory(tree, page_bytes)
        # Who has the ghosts of a namespace, since its root goes with its last page.
        self._roots: dict[Hashable, RadixRoot] = {}
        self._max_num_roots = 64
        self._last_root: RadixRoot | None = None  # one of them

    def resize(self, num_pages: int) -> None:
        """Take note of another number of pages in the pool."""
        self._ghosts.resize(num_pages)

    def state(self) -> dict[str, object]:
        """Return all that it keeps, as plain values to compare."""
        return {**self._ghosts.state(), **self._in_flight.state()}

    def clear(self) -> None:
        """Take note that the cache starts anew. O(namespaces)."""
        for root in self._roots.values():
            self._ghosts.drop(root)
        self._ghosts.clear()

    def end_epoch(self, namespace: Hashable) -> None:
        """Take note that what a namespace lost is worth nothing any more. O(1)."""
        root = self._last_root = None
        with suppress(Exception):  # see `_remember`
            root = self._roots.pop(namespace, None)
        if root is not None:
            self._ghosts.drop(root)

    def count_available(self, request: RequestKV, raw: bytes) -> int:
        """Count the bytes of whole pages that are cached, also of the last page.

        Args:
            request: It was just admitted, and nothing was evicted for it yet.
            raw: The tokens that it was admitted with.
        """
        hit = request.protected_len * TOKEN_BYTES
        if len(raw) - hit == self._page_bytes:
            assert request.node is not None  # it has its lease
            if raw[hit:] in request.node.children:
                return len(raw)
        return hit

    def begin(self, request: RequestKV, raw: bytes, available: int) -> None:
        """Explain the hit of a request that was just admitted.

        Args:
            request: It begins with its hit.
            raw: The tokens that it was admitted with.
            available: See `count_available`.

        Complexity: O(1), plus O(log running requests) comparisons.
        """
        node = request.node
        assert node is not None  # it has its lease
        root = node.root
        if node is root and root is not self._last_root:
            self._remember(root)
        ghosts = self._ghosts
        num_tokens = len(raw) // TOKEN_BYTES
        # What was looked up is whole pages, of all tokens but the last.
        end = (len(raw) - TOKEN_BYTES) // self._page_bytes * self._page_bytes
        at = hit = request.protected_len * TOKEN_BYTES
        parts = _NO_PARTS
        is_forgotten = False
        if hit < end and node.place:
            parts = ghosts.follow(node, raw, hit, end)
            is_forgotten = ghosts.has_forgotten
            if parts:
                at = parts[-1][0]
        if len(raw) - available >= self._page_bytes:
            request.awaited = raw
            at = self._in_flight.join(root, raw, at)
        granted_len = request.committed_len
        if (
            at == hit
            and (hit == end or not self._directory.has_several)
            and not is_forgotten
            and not request.computed_len
            and granted_len * TOKEN_BYTES <= end
        ):
            # As for most: a hit, and what nobody has seen before.
            request.hit = (num_tokens, granted_len, available, end)
        else:
            request.hit = self._report(
                request, num_tokens, available, raw[:end], at, parts, is_forgotten
            )
        ghosts.now += 1

    def end(self, request: RequestKV) -> None:
        """Take note that nobody need wait for what a request awaits any longer."""
        self._in_flight.leave(request)

    def _report(
        self,
        request: RequestKV,
        num_tokens: int,
        available: int,
        raw: bytes,
        at: int,
        parts: Sequence[EvictedPart],
        is_forgotten: bool,
    ) -> HitReport:
        """Make the report of a request for which more than two reasons may hold.

        Args:
            request: See `begin`.
            num_tokens: All tokens that it was admitted with.
            available: See `begin`.
            raw: What was looked up.
            at: How far it is cached, was evicted or is in flight, in bytes.
            parts: What was evicted of it.
            is_forgotten: Whether what comes behind them may have been cached once.
        """
        node = request.node
        assert node is not None  # it has its lease
        end = len(raw)
        epoch = namespace = 0
        if at < end and self._directory.has_several:
            epoch, namespace = self._directory.find(node.root, raw, at)
        ends = (min(at, end), epoch, namespace, end)
        granted_len = request.committed_len
        # All tokens before `start` are counted.
        start = max(granted_len, request.computed_len)
        counts = _count_by_reason(num_tokens, start, parts, ends)
        num_cold = counts[0]
        return HitReport(
            num_tokens,
            available // TOKEN_BYTES,
            granted_len,
            start - granted_len,
            0 if is_forgotten else num_cold,
            *counts[1:],
            parts[0][1] if parts else None,
            self._ghosts.now - parts[0][2] if parts else None,
            num_cold if is_forgotten else 0,
        )

    def _remember(self, root: RadixRoot) -> None:
        """Give the ghosts of a namespace to its root, which may be a new one."""
        self._last_root = root
        known = None
        # A namespace that cannot be compared with one that is gone is admitted, as it
        # would be without explanations.
        with suppress(Exception):
            known = self._roots.get(root.namespace)
            if known is root:
                return
            self._roots[root.namespace] = root
        self._directory.add(root, known)
        if known is not None:
            self._ghosts.move_root(known, root)
        else:
            self._ghosts.begin(root)
        if len(self._roots) > self._max_num_roots:
            self._sweep()

    def _sweep(self) -> None:
        """Let go of the namespaces that went and have no ghosts. O(1) amortized."""
        roots: dict[Hashable, RadixRoot] = {}
        for namespace, root in self._roots.items():
            if root.children or root.lock_ref > 1 or self._ghosts.has_behind(root):
                roots[namespace] = root
            else:
                self._ghosts.let_go(root, namespace)
        self._roots = roots
        self._max_num_roots = 2 * len(self._roots) + 64


def _count_by_reason(
    num_tokens: int,
    start: int,
    parts: Sequence[EvictedPart],
    ends: tuple[int, int, int, int],
) -> tuple[int, int, int, int, int, int, int]:
    """Count every token once, for the first reason that reaches it.

    Args:
        num_tokens: All tokens.
        start: The first that is to be counted.
        parts: What was evicted.
        ends: How far the other reasons reach, in bytes: not published yet, in an epoch
            that has ended, in another namespace, and whole pages.

    Returns:
        The counts in the order of `HitReport`.
    """
    evicted = quota = 0
    for stop, by, _ in parts:
        num_new = max(0, stop // TOKEN_BYTES - start)
        start += num_new
        if by == QUOTA:
            quota += num_new
        else:
            evicted += num_new
    counts: list[int] = []
    for stop in ends:
        num_new = max(0, stop // TOKEN_BYTES - start)
        start += num_new
        counts.append(num_new)
    unpublished, epoch, namespace, cold = counts
    unaligned = num_tokens - start
    return cold, unaligned, evicted, quota, unpublished, epoch, namespace

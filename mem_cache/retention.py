"""Retention: chosen prefixes go after everything else, within a share of the pool."""

from __future__ import annotations

from collections.abc import Hashable
from math import inf
from typing import TypeAlias

from sortedcontainers import SortedList

from .allocator import TokenToKVPoolAllocator
from .errors import ConfigError, IntegrityError
from .radix_node import PAGE_ID_BYTES, RadixNode
from .radix_tree import RadixTree
from .retention_index import use_retention_index
from .sizes import Number, as_number
from .steady_clock import SteadyClock
from .tokens import TOKEN_BYTES

_Entry: TypeAlias = tuple[float, int, RadixNode]
"""When to look at a grant, a number that no other entry has, and whose grant it is."""


class _Grant:
    """What retains the pages of one node.

    Attributes:
        priority: The level of eviction of the node.
        ttl: Seconds that it lasts from each use on; infinite if it does not end.
        expires: When it ends.
        since: How many pages had been granted before its first one.
        entry: Where it waits for its end; ``None`` if it has none. It is out of date
            after a use, which is noticed when its time comes.
    """

    __slots__ = ("entry", "expires", "priority", "since", "ttl")

    def __init__(self, priority: int, ttl: float, expires: float, since: int) -> None:
        self.priority = priority
        self.ttl = ttl
        self.expires = expires
        self.since = since
        self.entry: _Entry | None = None


class Retention:
    """Which nodes are retained, at which priority, and until when.

    A grant covers a whole prefix, and what raises or refreshes it does so along a path
    from the root. Hence no grant is weaker than one below it, and no parent must go
    before its child.

    Grants that are over are dropped when somebody looks: before an eviction, before
    another grant, and in `settle`. Until the first grant, nothing listens to the tree.

    Attributes:
        num_pages: Pages that are retained, as of the last look. For reading.
    """

    def __init__(
        self,
        tree: RadixTree,
        allocator: TokenToKVPoolAllocator,
        share: Number,
        clock: SteadyClock,
    ) -> None:
        """Start without grants.

        Args:
            tree: Whose nodes are retained.
            allocator: Tells how many pages there are.
            share: Share of these that may be retained at a time, in ``[0, 1]``.
            clock: Tells when grants end.

        Raises:
            ConfigError: `share` is out of range.
        """
        self._share = as_number("retention_share", share)
        if not 0 <= self._share <= 1:
            raise ConfigError(f"retention_share must be in 0..1, got {share!r}")
        self._tree = tree
        self._allocator = allocator
        self._clock = clock
        self._is_listening = False
        self._has_stale_grants = False
        self._grants: dict[RadixNode, _Grant] = {}
        self._entries: SortedList[_Entry] = SortedList()
        self._num_entries_made = 0
        self._num_pages_granted = 0
        self.num_pages = 0

    def retain(
        self, namespace: Hashable, raw: bytes, priority: int, ttl: Number | None
    ) -> int:
        """Retain the cached prefix of `raw`, or as much of it as the budget allows.

        Pages that are retained already cost nothing; the higher priority, the longer
        time and the later end win. Recency stays as it is.

        Args:
            namespace: Where to look.
            raw: Tokens; of which the cached prefix counts, in whole pages.
            priority: Lower ones go first; at least 1.
            ttl: Seconds until it ends, above 0; ``None`` if it does not.

        Returns:
            The leading pages that are retained now.

        Raises:
            ConfigError: `ttl` is out of range, or there is no clock for it.

        Complexity: O(log nodes + log grants) for each node on the path. The first grant
        gives the tree another index: O(nodes log nodes), once.
        """
        ttl = self._as_ttl(ttl)
        self.settle()
        path, matched = self._tree.find(namespace, raw)
        num_retained = 0
        for node in path:
            if node not in self._grants:
                break
            num_retained += node.num_pages
        page_bytes = self._allocator.page_size * TOKEN_BYTES
        room = self._max_num_pages() - self.num_pages
        granted = min(matched // page_bytes, num_retained + room)
        if granted and not self._is_listening:
            self._listen()
        left = granted
        # Asked once: nothing may end later than what is before it.
        expires = self._clock.now() + ttl if granted and ttl < inf else inf
        for node in path:
            if not left:
                break
            if left < node.num_pages:
                node = self._tree.split(node, left * page_bytes)
            self._grant(node, priority, ttl, expires)
            left -= node.num_pages
        return granted

    def settle(self) -> None:
        """Drop the grants that are over: out of time, stale, or beyond the budget.

        Complexity: O(log nodes + log grants) for each that is out of time. A new epoch
        or a smaller budget costs O(grants log grants) once.
        """
        now = self._clock.now()
        # First, since nothing below a stale root may be split.
        if self._has_stale_grants:
            for node in [node for node in self._grants if node.root.is_stale]:
                self._end(node)
            self._has_stale_grants = False
        while self._entries and self._entries[0][0] <= now:
            node = self._entries[0][2]
            if self._grants[node].expires <= now:
                self._end(node)
            else:
                self._wait(node)
        if self.num_pages > self._max_num_pages():
            self._end_latest(self.num_pages - self._max_num_pages())

    def end_epoch(self) -> None:
        """Take note that a root has become stale, and the grants below it. O(1)."""
        self._has_stale_grants = True

    def level(self, node: RadixNode) -> int:
        """Return the priority at which a node is retained, 0 if it is not."""
        grant = self._grants.get(node)
        return grant.priority if grant else 0

    def state(self) -> dict[str, object]:
        """Return all grants that are not over, as plain values to compare."""
        self.settle()  # or a refused call would seem to have changed something
        grants = [
            (node, grant.priority, grant.ttl, grant.expires, grant.since, grant.entry)
            for node, grant in self._grants.items()
        ]
        return {"grants": (self.num_pages, self._num_pages_granted, grants)}

    def check_integrity(self) -> None:
        """Recount the grants. Costs O(nodes).

        Raises:
            IntegrityError: A grant is weaker than one below it, its node is gone, it
                would not end in time, or a counter is wrong.
        """
        nodes = dict.fromkeys(self._tree.nodes())
        faults: list[str] = []
        for node, grant in self._grants.items():
            if node not in nodes:
                faults.append(f"{node!r} is retained, but gone")
            elif node.parent is not node.root:
                above = self._grants.get(node.parent)
                if above is None or not _is_at_least(above, grant):
                    faults.append(f"{node!r} is retained more than what is before it")
            if grant.expires < (inf if grant.entry is None else grant.entry[0]):
                faults.append(f"{node!r} would be retained for too long")
        off = self.num_pages - sum(node.num_pages for node in self._grants)
        if off:
            faults.append(f"retained pages: counter is off by {off:+d}")
        entries = [grant.entry for grant in self._grants.values() if grant.entry]
        if sorted(entries) != list(self._entries):
            faults.append("the ends that are waited for are not those of the grants")
        if faults:
            raise IntegrityError("\n".join(["the retention is wrong:", *faults]))

    def _max_num_pages(self) -> int:
        return int(self._share * self._allocator.num_pages)

    def _as_ttl(self, ttl: Number | None) -> float:
        if ttl is None:
            return inf
        seconds = as_number("ttl", ttl)
        if not seconds > 0:
            raise ConfigError(f"ttl must be above 0 seconds, got {ttl!r}")
        self._clock.check()
        return seconds

    def _listen(self) -> None:
        self._is_listening = True
        self._tree.on_used.append(self._on_used)
        self._tree.on_split.append(self._on_split)
        self._tree.on_evicted.append(self._on_evicted)
        use_retention_index(self._tree, self)

    def _grant(
        self, node: RadixNode, priority: int, ttl: float, expires: float
    ) -> None:
        """Retain a node, whose parent is retained; or raise the grant that it has."""
        grant = self._grants.get(node)
        if grant is None:
            grant = _Grant(priority, ttl, expires, self._num_pages_granted)
            self._grants[node] = grant
            self._num_pages_granted += node.num_pages
            self.num_pages += node.num_pages
            self._wait(node)
        else:
            grant.priority = max(grant.priority, priority)
            grant.ttl = max(grant.ttl, ttl)
            grant.expires = max(grant.expires, expires)
        self._tree.index.rerank(node)

    def _wait(self, node: RadixNode) -> None:
        """Wait for the end that a grant has now."""
        grant = self._grants[node]
        self._wait_no_longer(grant)
        if grant.expires < inf:
            self._num_entries_made += 1
            grant.entry = (grant.expires, self._num_entries_made, node)
            self._entries.add(grant.entry)

    def _wait_no_longer(self, grant: _Grant) -> None:
        if grant.entry is not None:
            self._entries.remove(grant.entry)
            grant.entry = None

    def _end(self, node: RadixNode) -> None:
        """Make a node normal again."""
        self._wait_no_longer(self._grants.pop(node))
        self.num_pages -= node.num_pages
        self._tree.index.rerank(node)

    def _end_latest(self, num_pages: int) -> None:
        """End the grants of exactly so many pages, the latest first."""
        page_bytes = self._allocator.page_size * TOKEN_BYTES
        grants = sorted(self._grants.items(), key=lambda item: -item[1].since)
        for node, _ in grants:
            if num_pages < node.num_pages:
                self._tree.split(node, (node.num_pages - num_pages) * page_bytes)
            num_pages -= node.num_pages
            self._end(node)
            if not num_pages:
                return

    def _on_used(self, path: list[RadixNode]) -> None:
        """Let the time of grants begin anew, unless they are over already."""
        if not path or path[0] not in self._grants:
            return
        now = self._clock.now()
        for node in path:
            grant = self._grants.get(node)
            if grant is None or grant.expires <= now:
                return
            if grant.ttl < inf:
                grant.expires = max(grant.expires, now + grant.ttl)

    def _on_split(self, upper: RadixNode, lower: RadixNode) -> None:
        grant = self._grants.get(lower)
        if grant is not None:
            copy = _Grant(grant.priority, grant.ttl, grant.expires, grant.since)
            self._grants[upper] = copy
            self._wait(upper)
            grant.since += upper.num_pages

    def _on_evicted(self, node: RadixNode, key: bytes, pages: bytes) -> None:
        grant = self._grants.get(node)
        if grant is not None:
            self.num_pages -= len(pages) // PAGE_ID_BYTES
            if not node.key:
                self._wait_no_longer(self._grants.pop(node))


def _is_at_least(above: _Grant, below: _Grant) -> bool:
    return (
        above.priority >= below.priority
        and above.ttl >= below.ttl
        and above.expires >= below.expires
        and above.since < below.since
    )

"""A slow, obvious model of the prefix caches: pages in a dict, no tree, no index.

It knows what is cached page by page, whose pages are whose, and who is evicted next.
Page ids are the real cache's: the model takes note of the ids that it is shown, and
checks that each of them was free.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

Key = tuple[Hashable, tuple[int, ...]]
"""A namespace, and all tokens up to the end of a page."""


@dataclass(frozen=True)
class PastEpoch:
    """What a namespace becomes when its epoch ends: one that nobody asks for."""

    namespace: Hashable
    ended_at: int


@dataclass(eq=False)
class CachedPage:
    """One page that is cached."""

    page: int
    created_at: int
    num_locks: int = 0
    released_at: int = 0
    num_hits: int = 0
    priority: int = 0


@dataclass(eq=False)
class ModelRequest:
    """One running request."""

    namespace: Hashable
    priority: int
    protected_len: int
    committed_len: int
    allocated_len: int
    keys: list[Key]
    pages: list[int] = field(default_factory=list)


class NoRoomError(Exception):
    """Not even eviction makes enough room."""


class CacheOracle:
    """What a prefix cache must do."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_rows: int,
        policy: str,
        *,
        partial_pages: bool = False,
    ) -> None:
        self.partial_pages = partial_pages
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_rows = num_rows
        self.policy = policy
        self.cached: dict[Key, CachedPage] = {}
        self.requests: list[ModelRequest] = []
        self.clock = 0

    # What can be seen -------------------------------------------------------

    @property
    def num_evictable(self) -> int:
        return sum(1 for page in self.cached.values() if not page.num_locks)

    @property
    def num_protected(self) -> int:
        return len(self.cached) - self.num_evictable

    @property
    def num_held(self) -> int:
        return sum(
            self.pages_for(request.allocated_len)
            - self.pages_for(request.protected_len)
            for request in self.requests
        )

    @property
    def num_free(self) -> int:
        return self.num_pages - len(self.cached) - self.num_held

    def sizes(self) -> tuple[int, ...]:
        """Free, evictable, protected, held and all, in tokens."""
        pages = (self.num_free, self.num_evictable, self.num_protected, self.num_held)
        return tuple(self.page_size * count for count in (*pages, self.num_pages))

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def keys_of(self, namespace: Hashable, tokens: Sequence[int]) -> list[Key]:
        """The keys of all whole pages of `tokens`."""
        ends = range(self.page_size, len(tokens) + 1, self.page_size)
        return [(namespace, tuple(tokens[:end])) for end in ends]

    def hit(self, namespace: Hashable, tokens: Sequence[int]) -> list[Key]:
        hit = []
        for key in self.keys_of(namespace, tokens):
            if key not in self.cached:
                break
            hit.append(key)
        return hit

    def match(self, namespace: Hashable, tokens: Sequence[int]) -> int:
        return len(self.hit(namespace, tokens)) * self.page_size

    def leaves(self) -> list[Key]:
        """The cached pages that no cached page extends."""
        extended = {
            (namespace, tokens[: -self.page_size]) for namespace, tokens in self.cached
        }
        return [key for key in self.cached if key not in extended]

    def in_use(self) -> list[int]:
        """Every page that has an owner, once for each owner."""
        owned = [page.page for page in self.cached.values()]
        for request in self.requests:
            owned += request.pages[len(request.keys) :]
        return owned

    # A request's life -------------------------------------------------------

    def admit(
        self, tokens: Sequence[int], namespace: Hashable, priority: int = 0
    ) -> ModelRequest | None:
        if len(self.requests) == self.num_rows:
            return None
        keys = self.hit(namespace, tokens[:-1])
        for key in keys:
            self.cached[key].num_locks += 1
            self.cached[key].num_hits += 1
        length = len(keys) * self.page_size
        pages = [self.cached[key].page for key in keys]
        request = ModelRequest(namespace, priority, length, length, length, keys, pages)
        self.requests.append(request)
        shared = self.shared(namespace, tokens[:-1], length)
        if self.partial_pages and shared and self.num_free + self.num_evictable:
            self.evict(1 - self.num_free)
            request.committed_len += shared
            request.allocated_len += shared
        return request

    def shared(self, namespace: Hashable, tokens: Sequence[int], hit: int) -> int:
        """The most tokens behind a hit that begin a cached page, too."""
        wanted = tuple(tokens[hit : hit + self.page_size])
        pages = [
            known[hit:]
            for name, known in self.cached
            if (name, len(known)) == (namespace, hit + self.page_size)
            and known[:hit] == tuple(tokens[:hit])
        ]
        sizes = range(len(wanted), 0, -1)
        return next(
            (n for n in sizes if any(page[:n] == wanted[:n] for page in pages)), 0
        )

    def alloc(self, requests: Sequence[ModelRequest], lens: Sequence[int]) -> None:
        """Make room, or change nothing; `see_pages` must follow."""
        needed = sum(
            max(0, self.pages_for(new) - self.pages_for(request.allocated_len))
            for request, new in zip(requests, lens, strict=True)
        )
        if needed > self.num_free + self.num_evictable:
            raise NoRoomError
        self.evict(needed - self.num_free)
        for request, new in zip(requests, lens, strict=True):
            request.allocated_len = max(request.allocated_len, new)

    def see_pages(self, request: ModelRequest, pages: Iterable[int]) -> None:
        """Take note of the pages of a request's row; only free ones may be new."""
        pages = list(pages)
        known = len(request.pages)
        assert pages[:known] == request.pages
        new = pages[known:]
        assert len(pages) == self.pages_for(request.allocated_len)
        assert not set(new) & set(self.in_use())
        assert len(set(new)) == len(new)
        assert all(1 <= page <= self.num_pages for page in new)
        request.pages = pages

    def commit(self, request: ModelRequest, new_len: int) -> None:
        request.committed_len = new_len

    def truncate(self, request: ModelRequest, new_len: int) -> None:
        request.committed_len = min(request.committed_len, new_len)
        request.allocated_len = new_len
        del request.pages[self.pages_for(new_len) :]

    def publish(self, request: ModelRequest, tokens: Sequence[int]) -> None:
        if self.policy == "none" or isinstance(request.namespace, PastEpoch):
            return
        keys = self.keys_of(request.namespace, tokens[: request.committed_len])
        self.clock += 1
        for i in range(len(request.keys), len(keys)):
            new = CachedPage(request.pages[i], self.clock)
            page = self.cached.setdefault(keys[i], new)
            page.num_locks += 1
            request.pages[i] = page.page
        if len(keys) > len(request.keys):
            for key in keys:
                page = self.cached[key]
                page.priority = max(page.priority, request.priority)
        request.keys = keys
        request.protected_len = len(keys) * self.page_size

    def finish(self, request: ModelRequest, tokens: Sequence[int]) -> None:
        self.publish(request, tokens)
        self.release(request)

    def release(self, request: ModelRequest) -> None:
        self.clock += 1
        for key in request.keys:
            page = self.cached[key]
            page.num_locks -= 1
            if not page.num_locks:
                page.released_at = self.clock
        self.requests.remove(request)

    # The whole cache --------------------------------------------------------

    def worth(self, key: Key) -> tuple[Any, ...]:
        """What the policy orders by, then recency, then the deepest first.

        Stale pages go before: those that were evictable when their epoch ended, the
        oldest epoch first, then those that requests released since.
        """
        page = self.cached[key]
        if isinstance(key[0], PastEpoch):
            ended_at = key[0].ended_at
            if page.released_at < ended_at:
                return (0, ended_at, self.branches(key))
            return (1, page.released_at, -len(key[1]))
        by_policy = {
            "lru": 0,
            "keyed lru": 0,
            "mru": -page.released_at,
            "fifo": page.created_at,
            "filo": -page.created_at,
            "lfu": page.num_hits,
            "slru": min(page.num_hits, 2) // 2,
            "priority": page.priority,
            "none": 0,
        }
        return (2, by_policy[self.policy], page.released_at, -len(key[1]))

    def branches(self, key: Key) -> list[float]:
        """Orders a tree by its oldest branch, and every page behind what follows it."""
        namespace, tokens = key
        path = self.keys_of(namespace, tokens)
        return [*(self.cached[page].created_at for page in path), inf]

    def next_victim(self) -> Key | None:
        leaves = [key for key in self.leaves() if not self.cached[key].num_locks]
        return min(leaves, key=self.worth, default=None)

    def evict(self, num_pages: int) -> list[Key]:
        """Evict page by page, sorting all evictable leaves before each of them."""
        victims = []
        while len(victims) < num_pages:
            victim = self.next_victim()
            if victim is None:
                break
            del self.cached[victim]
            victims.append(victim)
        return victims

    def eviction_order(self, num_pages: int) -> list[tuple[Key, int]]:
        """Whom `evict` would take, each with its page; evicts nobody."""
        before = dict(self.cached)
        victims = self.evict(num_pages)
        self.cached = before
        return [(key, before[key].page) for key in victims]

    def resize(self, num_pages: int) -> int:
        """Returns the pages that must stay; nothing changed if those are too many.

        Pages in use above the new end move to the lowest free ones, in order.
        """
        needed = self.num_protected + self.num_held
        if needed > num_pages:
            return needed
        self.evict(needed + self.num_evictable - num_pages)
        in_use = self.in_use()
        above = sorted(page for page in in_use if page > num_pages)
        free = sorted(set(range(1, num_pages + 1)) - set(in_use))
        new_ids = dict(zip(above, free, strict=False))
        for cached in self.cached.values():
            cached.page = new_ids.get(cached.page, cached.page)
        for request in self.requests:
            request.pages = [new_ids.get(page, page) for page in request.pages]
        self.num_pages = num_pages
        return needed

    def reset(self) -> None:
        self.cached.clear()

    def bump_epoch(self, namespace: Hashable) -> None:
        """What is cached and who runs now keep a namespace that nobody asks for."""
        self.clock += 1
        past = PastEpoch(namespace, self.clock)

        def renamed(key: Key) -> Key:
            return (past, key[1]) if key[0] == namespace else key

        self.cached = {renamed(key): page for key, page in self.cached.items()}
        for request in self.requests:
            request.keys = [renamed(key) for key in request.keys]
            if request.namespace == namespace:
                request.namespace = past

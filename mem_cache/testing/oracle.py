"""A slow, obvious model of the prefix caches: pages in a dict, no tree, no index.

It knows what is cached page by page, whose pages are whose, and who is evicted next.
Page ids are the real cache's: the model takes note of the ids that it is shown, and
checks that each of them was free.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final, TypeAlias, cast

from ..errors import ConfigError
from ..eviction_policies import EvictionPolicy

Key: TypeAlias = tuple[Hashable, tuple[int, ...]]
"""A namespace, and all tokens up to the end of a page."""


@dataclass(frozen=True)
class PastEpoch:
    """What a namespace becomes when its epoch ends: one that nobody asks for.

    Attributes:
        namespace: What it was.
        ended_at: When, in the logical time of the oracle.
    """

    namespace: Hashable
    ended_at: int


@dataclass(eq=False)
class CachedPage:
    """One page that is cached; its facts are called as those of a `RadixNode`.

    Attributes:
        page: Page id.
        created: When it was published, in the logical time of the oracle.
        num_locks: Running requests that need it.
        last_use: When it was released last.
        num_hits: Admissions that used it.
        priority: Highest priority of the requests that published through it.
    """

    page: int
    created: int
    num_locks: int = 0
    last_use: int = 0
    num_hits: int = 0
    priority: int = 0


@dataclass(eq=False)
class ModelRequest:
    """One running request.

    Attributes:
        namespace: Whose it is; a `PastEpoch` once its epoch is over.
        priority: Raises the priority of what it publishes.
        protected_len: Positions in cached pages.
        committed_len: Positions with computed K and V.
        allocated_len: Positions with a slot.
        keys: The cached pages that it needs.
        pages: Its page ids, cached or its own.
    """

    namespace: Hashable
    priority: int
    protected_len: int
    committed_len: int
    allocated_len: int
    keys: list[Key]
    pages: list[int] = field(default_factory=list[int])


class NoRoomError(Exception):
    """Not even eviction makes enough room."""


_KEYS: Final[dict[str, Callable[[CachedPage], Any]]] = {
    "lru": lambda page: 0,
    "keyed lru": lambda page: 0,
    "mru": lambda page: -page.last_use,
    "fifo": lambda page: page.created,
    "filo": lambda page: -page.created,
    "lfu": lambda page: page.num_hits,
    "slru": lambda page: page.num_hits >= 2,
    "priority": lambda page: page.priority,
    "none": lambda page: 0,
}


class CacheOracle:
    """What a prefix cache must do.

    Attributes:
        num_pages: Usable pages.
        page_size: Tokens a page.
        num_rows: Requests that can run at a time.
        policy: Who is evicted first.
        partial_pages: Whether the start of a page is reused by copying it.
        cached: What is cached.
        requests: The running requests.
        clock: Logical time.

    Example:
        >>> oracle = CacheOracle(num_pages=8, page_size=2, num_rows=1, policy="lru")
        >>> request = oracle.admit([1, 2, 3], None)
        >>> oracle.alloc([request], [3])
        >>> oracle.see_pages(request, [1, 2])
        >>> oracle.commit(request, 3)
        >>> oracle.finish(request, [1, 2, 3])
        >>> oracle.match(None, [1, 2, 3]), oracle.sizes()
        (2, (14, 2, 0, 0, 16))
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_rows: int,
        policy: str | EvictionPolicy,
        *,
        partial_pages: bool = False,
    ) -> None:
        """Begin without anything cached.

        Args:
            num_pages: Usable pages.
            page_size: Tokens a page.
            num_rows: Requests that can run at a time.
            policy: The name of a built-in policy, ``"none"`` for a cache that caches
                nothing, or a policy of your own. It is asked for pages, so its `key`
                must look only at `num_hits`, `created`, `last_use` and `priority`, and
                compare times only with times of the same kind.
            partial_pages: The option of `RadixCache`.

        Raises:
            ConfigError: There is no policy of this name.
        """
        if isinstance(policy, str) and policy not in _KEYS:
            raise ConfigError(f"policy must be one of {[*_KEYS]}, got {policy!r}")
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
        """Cached pages that no running request needs."""
        return sum(1 for page in self.cached.values() if not page.num_locks)

    @property
    def num_protected(self) -> int:
        """Cached pages that a running request needs."""
        return len(self.cached) - self.num_evictable

    @property
    def num_held(self) -> int:
        """Pages that running requests own."""
        return sum(
            self.pages_for(request.allocated_len)
            - self.pages_for(request.protected_len)
            for request in self.requests
        )

    @property
    def num_free(self) -> int:
        """Pages that nobody has."""
        return self.num_pages - len(self.cached) - self.num_held

    def sizes(self) -> tuple[int, ...]:
        """Return free, evictable, protected, held and all, in tokens."""
        pages = (self.num_free, self.num_evictable, self.num_protected, self.num_held)
        return tuple(self.page_size * count for count in (*pages, self.num_pages))

    def pages_for(self, num_tokens: int) -> int:
        """Return the pages that so many tokens need."""
        return -(-num_tokens // self.page_size)

    def keys_of(self, namespace: Hashable, tokens: Sequence[int]) -> list[Key]:
        """Return the keys of all whole pages of `tokens` in `namespace`."""
        ends = range(self.page_size, len(tokens) + 1, self.page_size)
        return [(namespace, tuple(tokens[:end])) for end in ends]

    def hit(self, namespace: Hashable, tokens: Sequence[int]) -> list[Key]:
        """Return the leading keys of `tokens` in `namespace` that are cached."""
        hit: list[Key] = []
        for key in self.keys_of(namespace, tokens):
            if key not in self.cached:
                break
            hit.append(key)
        return hit

    def match(self, namespace: Hashable, tokens: Sequence[int]) -> int:
        """Return how many leading `tokens` are cached in `namespace`."""
        return len(self.hit(namespace, tokens)) * self.page_size

    def leaves(self) -> list[Key]:
        """Return the cached pages that no cached page extends."""
        extended = {
            (namespace, tokens[: -self.page_size]) for namespace, tokens in self.cached
        }
        return [key for key in self.cached if key not in extended]

    def in_use(self) -> list[int]:
        """Return every page that has an owner, once for each owner."""
        owned = [page.page for page in self.cached.values()]
        for request in self.requests:
            owned += request.pages[len(request.keys) :]
        return owned

    # A request's life -------------------------------------------------------

    def admit(
        self, tokens: Sequence[int], namespace: Hashable, priority: int = 0
    ) -> ModelRequest | None:
        """Start a request with its hit; ``None`` if all rows are taken.

        Args:
            tokens: Its tokens, of which the last one is not looked up.
            namespace: Whose it is.
            priority: Raises the priority of what it publishes.
        """
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
        """Return how many tokens behind a hit begin a cached page, too.

        Args:
            namespace: Whose they are.
            tokens: All tokens that may be reused.
            hit: How many of them are cached in whole pages.
        """
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
        """Make room for requests to get so long; `see_pages` must follow.

        Args:
            requests: A batch.
            lens: The total length of each.

        Raises:
            NoRoomError: There is none; nothing has changed.
        """
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
        """Take note of the `pages` in the row of `request`: the new ones were free."""
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
        """Take note that `request` has computed the positions below `new_len`."""
        request.committed_len = new_len

    def truncate(self, request: ModelRequest, new_len: int) -> None:
        """Drop the positions of `request` from `new_len` on."""
        request.committed_len = min(request.committed_len, new_len)
        request.allocated_len = new_len
        del request.pages[self.pages_for(new_len) :]

    def publish(self, request: ModelRequest, tokens: Sequence[int]) -> None:
        """Cache the whole pages that `request`, with these `tokens`, has computed."""
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
        """Publish the `tokens` of `request`, and release it."""
        self.publish(request, tokens)
        self.release(request)

    def release(self, request: ModelRequest) -> None:
        """End `request`; what it had cached stays."""
        self.clock += 1
        for key in request.keys:
            page = self.cached[key]
            page.num_locks -= 1
            if not page.num_locks:
                page.last_use = self.clock
        self.requests.remove(request)

    # The whole cache --------------------------------------------------------

    def worth(self, key: Key) -> tuple[Any, ...]:
        """Return what the order of eviction goes by: the lowest goes first.

        That is the policy, then recency, then the deepest.

        Stale pages go before: those that were evictable when their epoch ended, the
        oldest epoch first, then those that requests released since.
        """
        page = self.cached[key]
        if isinstance(key[0], PastEpoch):
            ended_at = key[0].ended_at
            if page.last_use < ended_at:
                return (0, ended_at, self.branches(key))
            return (1, page.last_use, -len(key[1]))
        return (2, self.key_of(page), page.last_use, -len(key[1]))

    def key_of(self, page: CachedPage) -> Any:  # noqa: ANN401 - whatever compares
        """Return what the policy says of a page."""
        if isinstance(self.policy, str):
            return _KEYS[self.policy](page)
        return self.policy.key(cast("Any", page))  # called as a node's facts are

    def branches(self, key: Key) -> list[float]:
        """Return what orders a tree by its oldest branch, and a page behind its own."""
        namespace, tokens = key
        path = self.keys_of(namespace, tokens)
        return [*(self.cached[page].created for page in path), inf]

    def next_victim(self) -> Key | None:
        """Return who goes next, or ``None``."""
        leaves = [key for key in self.leaves() if not self.cached[key].num_locks]
        return min(leaves, key=self.worth, default=None)

    def evict(self, num_pages: int) -> list[Key]:
        """Evict `num_pages`, each the least of all evictable leaves; or all."""
        victims: list[Key] = []
        while len(victims) < num_pages:
            victim = self.next_victim()
            if victim is None:
                break
            del self.cached[victim]
            victims.append(victim)
        return victims

    def eviction_order(self, num_pages: int) -> list[tuple[Key, int]]:
        """Return whom ``evict(num_pages)`` would take, each with its page."""
        before = dict(self.cached)
        victims = self.evict(num_pages)
        self.cached = before
        return [(key, before[key].page) for key in victims]

    def resize(self, num_pages: int) -> int:
        """Evict down to `num_pages`, and move what is above the end.

        Pages in use above the new end move to the lowest free ones, in order.

        Returns:
            The pages that must stay; nothing has changed if those are too many.
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
        """Forget what is cached; nobody may run."""
        self.cached.clear()

    def bump_epoch(self, namespace: Hashable) -> None:
        """End the epoch of `namespace`: what it has, nobody asks for any more."""
        self.clock += 1
        past = PastEpoch(namespace, self.clock)

        def renamed(key: Key) -> Key:
            return (past, key[1]) if key[0] == namespace else key

        self.cached = {renamed(key): page for key, page in self.cached.items()}
        for request in self.requests:
            request.keys = [renamed(key) for key in request.keys]
            if request.namespace == namespace:
                request.namespace = past

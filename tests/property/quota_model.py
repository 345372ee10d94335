"""The oracle and the checked cache once more, with quotas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from radixkv.mem_cache import (
    LRU,
    ConfigError,
    KVCacheInfo,
    MemoryManager,
    NamespaceStats,
    OutOfPagesError,
    QuotaError,
    RadixCache,
    RequestKV,
)
from radixkv.mem_cache.testing import (
    CacheOracle,
    CheckedCache,
    Live,
    ModelRequest,
    PastEpoch,
)

MAX_NUM_PAGES = 16

Key = tuple[Hashable, tuple[int, ...]]
"""A namespace, and all tokens up to the end of a page."""


def make_cache(
    policy: str, num_pages: int, page_size: int, num_rows: int, max_len: int
) -> RadixCache:
    memory = MemoryManager(
        num_pages, page_size, max_num_requests=num_rows, max_context_len=max_len
    )
    return RadixCache(memory, LRU() if policy == "keyed lru" else policy)


def name_of(namespace: Hashable) -> Hashable:
    """The namespace that a request was admitted in, whatever became of its epoch."""
    return namespace.namespace if isinstance(namespace, PastEpoch) else namespace


class QuotaOracle(CacheOracle):
    """What a prefix cache with quotas must do, in pages, recounted at every question.

    Attributes:
        floors: By namespace; 0 where it is missing.
        ceilings: By namespace; those without one are missing.
    """

    def __init__(
        self, num_pages: int, page_size: int, num_rows: int, policy: str
    ) -> None:
        super().__init__(num_pages, page_size, num_rows, policy)
        self.floors: Counter[Hashable] = Counter()
        self.ceilings: dict[Hashable, int] = {}
        # How many pages each namespace may lose in this operation; no bound for others.
        self._allowed: Counter[Hashable] = Counter()

    # What a namespace uses --------------------------------------------------

    def cached_of(self, namespace: Hashable, *, locked: bool) -> int:
        return sum(
            1
            for key, page in self.cached.items()
            if key[0] == namespace and bool(page.num_locks) == locked
        )

    def held_of(self, namespace: Hashable) -> int:
        return sum(
            self.pages_for(request.allocated_len)
            - self.pages_for(request.protected_len)
            for request in self.requests
            if name_of(request.namespace) == namespace
        )

    def sizes_of(self, namespace: Hashable) -> tuple[int, int, int]:
        """Evictable, protected and held."""
        return (
            self.cached_of(namespace, locked=False),
            self.cached_of(namespace, locked=True),
            self.held_of(namespace),
        )

    def used(self) -> Counter[Hashable]:
        """What each namespace with a quota uses."""
        names = [*self.floors, *self.ceilings]
        return Counter({name: sum(self.sizes_of(name)) for name in names})

    # Evictions --------------------------------------------------------------

    def next_victim(self) -> Key | None:
        leaves = [key for key in self.leaves() if not self.cached[key].num_locks]
        allowed = [key for key in leaves if self._allowed.get(key[0], 1) > 0]
        return min(allowed, key=self.worth, default=None)

    def evict(self, num_pages: int) -> list[Key]:
        self.allow(Counter())
        return self._evict(num_pages)

    def allow(self, claims: Counter[Hashable]) -> None:
        """Begin an operation that takes so many pages for each namespace."""
        self._allowed = Counter(
            {
                name: max(claims[name], used + claims[name] - self.floors[name])
                for name, used in self.used().items()
            }
        )

    def _evict(self, num_pages: int) -> list[Key]:
        victims = []
        while len(victims) < num_pages:
            victim = self.next_victim()
            if victim is None:
                break
            self._drop(victim)
            victims.append(victim)
        return victims

    def _evict_own(self, namespace: Hashable, num_pages: int) -> None:
        for _ in range(num_pages):
            own = [
                key
                for key in self.leaves()
                if key[0] == namespace and not self.cached[key].num_locks
            ]
            self._drop(min(own, key=self.worth))

    def _drop(self, key: Key) -> None:
        del self.cached[key]
        if key[0] in self._allowed:
            self._allowed[key[0]] -= 1

    def num_reachable(self, claims: Counter[Hashable]) -> int:
        """How many pages could be evicted: by trying."""
        before = dict(self.cached)
        self.allow(claims)
        count = len(self._evict(self.num_pages))
        self.cached = before
        return count

    # Operations -------------------------------------------------------------

    def claims(
        self, requests: Sequence[ModelRequest], lens: Sequence[int]
    ) -> Counter[Hashable]:
        """New pages by namespace."""
        claims: Counter[Hashable] = Counter()
        for request, new in zip(requests, lens, strict=True):
            more = self.pages_for(new) - self.pages_for(request.allocated_len)
            claims[name_of(request.namespace)] += max(0, more)
        return claims

    def beyond_ceiling(self, claims: Counter[Hashable]) -> list[Hashable]:
        """The namespaces that have no room below their ceilings."""
        beyond: list[Hashable] = []
        for name, claim in claims.items():
            _, protected, held = self.sizes_of(name)
            ceiling = self.ceilings.get(name)
            if claim and ceiling is not None and protected + held + claim > ceiling:
                beyond.append(name)
        return beyond

    def alloc(self, requests: Sequence[ModelRequest], lens: Sequence[int]) -> None:
        """Make room; there is enough."""
        claims = self.claims(requests, lens)
        needed = sum(claims.values())
        self.allow(claims)
        for name, used in self.used().items():
            if claims[name] and name in self.ceilings:
                excess = used + claims[name] - self.ceilings[name]
                self._evict_own(name, max(0, excess))
        self._evict(needed - self.num_free)
        for request, new in zip(requests, lens, strict=True):
            request.allocated_len = max(request.allocated_len, new)

    def resize(self, num_pages: int) -> int:
        kept = self.num_evictable - self.num_reachable(Counter())
        needed = self.num_protected + self.num_held + kept
        return needed if needed > num_pages else max(needed, super().resize(num_pages))


class CheckedQuotas(CheckedCache):
    """Every operation runs on the cache and on the oracle; `check` compares them."""

    oracle: QuotaOracle

    def __init__(
        self,
        policy: str,
        num_pages: int,
        page_size: int,
        num_rows: int,
        max_len: int,
        namespaces: Sequence[Hashable],
    ) -> None:
        cache = make_cache(policy, num_pages, page_size, num_rows, max_len)
        oracle = QuotaOracle(num_pages, page_size, num_rows, policy)
        super().__init__(cache, oracle, max_num_pages=MAX_NUM_PAGES)
        self.radix_cache = cache
        self.oracle = oracle
        self.namespaces = namespaces

    def set_quota(
        self, namespace: Hashable, floor_size: int, ceiling_size: int | None
    ) -> None:
        oracle = self.oracle
        floor = oracle.pages_for(floor_size)
        ceiling = None if ceiling_size is None else ceiling_size // self.page_size
        floors = sum(oracle.floors.values()) - oracle.floors[namespace] + floor
        is_wrong = ceiling is not None and floor > ceiling
        before = self.sizes(), self.free_order(), oracle.used()
        if is_wrong or floors > oracle.num_pages:
            with self.refused(ConfigError):
                self._set_quota(namespace, floor_size, ceiling_size)
            return
        self._set_quota(namespace, floor_size, ceiling_size)

        assert before == (self.sizes(), self.free_order(), oracle.used())
        oracle.floors[namespace] = floor
        oracle.ceilings.pop(namespace, None)
        if ceiling is not None:
            oracle.ceilings[namespace] = ceiling

    def _set_quota(
        self, namespace: Hashable, floor_size: int, ceiling_size: int | None
    ) -> None:
        self.radix_cache.set_quota(
            namespace, floor_size=floor_size, ceiling_size=ceiling_size
        )

    # Operations that evict --------------------------------------------------

    def evict(self, num_tokens: int) -> None:
        used = self.oracle.used()
        super().evict(num_tokens)
        self.check_floors(used)

    def evict_if_needed(self, num_tokens: int) -> None:
        used = self.oracle.used()
        super().evict_if_needed(num_tokens)
        self.check_floors(used)

    def resize(self, num_pages: int) -> None:
        used = self.oracle.used()
        if sum(self.oracle.floors.values()) > num_pages:
            with self.refused(ConfigError):
                self.cache.resize(num_pages)
            return
        super().resize(num_pages)
        self.check_floors(used)

    def drain(self) -> None:
        """Retract everyone, then evict page by page, with the quotas, then without."""
        for live in list(self.live):
            self.release(live)
        while self.oracle.evict(1):
            assert self.cache.evict(1) == self.page_size
            self.check_cached()

        assert self.cache.evict(1) == 0
        for name in [*self.oracle.floors]:
            self.set_quota(name, 0, None)
        super().drain()

    def _run(
        self,
        lives: Sequence[Live],
        lens: list[int],
        letter: int,
        alloc: Callable[[list[RequestKV]], KVCacheInfo],
    ) -> None:
        claims = self.oracle.claims([live.model for live in lives], lens)
        kvs = [live.kv for live in lives]
        beyond = self.oracle.beyond_ceiling(claims)
        if beyond:
            with self.refused(QuotaError) as quota_error:
                alloc(kvs)
            self.check_quota_error(quota_error.value, beyond[0], claims)
            return
        reachable = self.oracle.num_reachable(claims)
        if sum(claims.values()) > self.oracle.num_free + reachable:
            with self.refused(OutOfPagesError) as caught:
                alloc(kvs)
            self.check_out_of_pages(caught.value, reachable, claims)
            return
        used = self.oracle.used()
        super()._run(lives, lens, letter, alloc)
        self.check_ceilings(claims)
        for name, claim in claims.items():
            used[name] = 0 if claim else used[name]
        self.check_floors(used)

    # The checks -------------------------------------------------------------

    def snapshot(self) -> tuple[Any, ...]:
        return (
            *super().snapshot(),
            [self.radix_cache.namespace_stats(name) for name in self.namespaces],
            self.cache.eviction_order(self.oracle.num_pages),
        )

    def check(self) -> None:
        super().check()
        self.check_namespaces()
        self.check_order()

    def check_floors(self, before: Counter[Hashable]) -> None:
        """No namespace lost pages of its floor to others."""
        used = self.oracle.used()
        for name, floor in self.oracle.floors.items():
            assert used[name] >= min(floor, before[name])

    def check_ceilings(self, claims: Counter[Hashable]) -> None:
        used = self.oracle.used()
        for name, ceiling in self.oracle.ceilings.items():
            assert not claims[name] or used[name] <= ceiling

    def check_namespaces(self) -> None:
        for name in self.namespaces:
            actual = self.radix_cache.namespace_stats(name)
            evictable, protected, held = self.oracle.sizes_of(name)
            ceiling = self.oracle.ceilings.get(name)
            expected = NamespaceStats(
                evictable_size=evictable * self.page_size,
                protected_size=protected * self.page_size,
                held_size=held * self.page_size,
                floor_size=self.oracle.floors[name] * self.page_size,
                ceiling_size=None if ceiling is None else ceiling * self.page_size,
                num_admitted_requests=actual.num_admitted_requests,
                num_prompt_tokens=actual.num_prompt_tokens,
                num_cached_tokens=actual.num_cached_tokens,
            )
            assert expected == actual

    def check_order(self) -> None:
        num_pages = self.oracle.num_pages
        expected = [
            (name_of(key[0]), len(key[1]) - self.page_size, page)
            for key, page in self.oracle.eviction_order(num_pages)
        ]
        order = self.cache.eviction_order(num_pages)
        assert expected == [(v.namespace, v.prefix_len, v.page) for v in order]

    def check_quota_error(
        self, error: QuotaError, name: Hashable, claims: Counter[Hashable]
    ) -> None:
        evictable, protected, held = self.oracle.sizes_of(name)
        ceiling = self.oracle.ceilings[name]
        actual = (error.namespace, error.ceiling, error.needed)
        assert (name, ceiling, claims[name]) == actual
        assert (evictable, protected, held) == (
            error.evictable,
            error.protected,
            error.held,
        )
        assert error.available == max(0, ceiling - evictable - protected - held)
        assert error.needed + error.protected + error.held > error.ceiling

    def check_out_of_pages(
        self, error: OutOfPagesError, reachable: int, claims: Counter[Hashable]
    ) -> None:
        oracle = self.oracle
        assert not isinstance(error, QuotaError)
        assert sum(claims.values()) == error.needed
        assert (oracle.num_free, reachable) == (error.available, error.evictable)
        assert (oracle.num_protected, oracle.num_held) == (error.protected, error.held)
        assert error.needed > error.available + error.evictable

"""A cache that is checked against the oracle at every step, and its worker."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from radixkv.mem_cache import (
    LRU,
    CacheBusyError,
    ChunkCache,
    KVCacheInfo,
    MemoryManager,
    OutOfPagesError,
    PagesInUseError,
    PrefixCache,
    RadixCache,
    RadixKVError,
    RequestKV,
    TokenToKVPoolAllocator,
)

from .oracle import CacheOracle, ModelRequest, NoRoomError, PastEpoch
from .worker import LabelWorker

MAX_NUM_PAGES = 16


def free_order(allocator: TokenToKVPoolAllocator) -> list[int]:
    """The pages that would be handed out next; leaves the stack as it was."""
    pages: list[int] = []
    while (page := allocator.alloc(1)) is not None:
        pages += page.tolist()
    for taken in reversed(pages):
        allocator.free([taken])
    return pages


@dataclass(eq=False)
class Live:
    """A running request, as its scheduler sees it.

    Attributes:
        tokens: Its final tokens, never fewer than `committed_len`.
        drafts: Tokens that it tries behind them.
        computed_len: Positions whose labels the worker has written.
    """

    kv: RequestKV
    model: ModelRequest
    tokens: list[int]
    drafts: list[int] = field(default_factory=list)
    computed_len: int = 0


class CheckedCache:
    """Every operation runs on the cache and on the oracle; `check` compares them."""

    def __init__(
        self,
        policy: str,
        num_pages: int,
        page_size: int,
        num_rows: int,
        max_len: int,
        *,
        partial_pages: bool = False,
    ) -> None:
        memory = MemoryManager(
            num_pages, page_size, max_num_requests=num_rows, max_context_len=max_len
        )
        if policy == "none":
            self.cache: PrefixCache = ChunkCache(memory)
        else:
            self.cache = RadixCache(
                memory,
                LRU() if policy == "keyed lru" else policy,
                partial_pages=partial_pages,
            )
        self.oracle = CacheOracle(
            num_pages, page_size, num_rows, policy, partial_pages=partial_pages
        )
        self.worker = LabelWorker(
            max_num_pages=max(num_pages, MAX_NUM_PAGES),
            page_size=page_size,
            num_rows=num_rows,
            num_columns=-(-max_len // page_size),
        )
        self.page_size = page_size
        self.max_len = max_len
        self.live: list[Live] = []
        self.gone: list[RequestKV] = []
        self.texts: dict[tuple[Hashable, tuple[int, ...]], None] = {}

    # A request's life -------------------------------------------------------

    def admit(
        self,
        tokens: list[int],
        namespace: Hashable = None,
        priority: int = 0,
        computed_len: int = 0,
    ) -> Live | None:
        self._remember(namespace, tokens)
        before = self.snapshot()
        model = self.oracle.admit(tokens, namespace, priority)
        kv = self.cache.admit(
            tokens,
            namespace=namespace,
            priority=priority,
            computed_len=computed_len,
        )
        if model is None or kv is None:
            assert kv is model
            assert before == self.snapshot()
            return None
        self.oracle.see_pages(model, self.pages_of(kv))
        live = Live(kv, model, list(tokens), computed_len=kv.committed_len)
        self.live.append(live)
        return live

    def extend(self, lives: Sequence[Live], lens: list[int], letter: int = 0) -> None:
        self._run(
            lives, lens, letter, lambda kvs: self.cache.alloc_for_extend(kvs, lens)
        )

    def decode(self, lives: Sequence[Live], num_tokens: int, letter: int = 0) -> None:
        lens = [live.kv.committed_len + num_tokens for live in lives]
        alloc = self.cache.alloc_for_decode
        self._run(lives, lens, letter, lambda kvs: alloc(kvs, num_tokens))

    def commit(self, live: Live, new_len: int) -> None:
        self.cache.commit(live.kv, new_len)
        self.oracle.commit(live.model, new_len)
        accepted = max(0, new_len - len(live.tokens))
        live.tokens += live.drafts[:accepted]
        del live.drafts[:accepted]

    def truncate(self, live: Live, new_len: int) -> None:
        self.cache.truncate(live.kv, new_len)
        self.oracle.truncate(live.model, new_len)
        live.computed_len = min(live.computed_len, new_len)
        del live.drafts[max(0, new_len - len(live.tokens)) :]

    def publish(self, live: Live) -> None:
        # Tokens behind the computed ones are known, but nobody's business.
        self.cache.cache_unfinished_req(live.kv, [*live.tokens, 7])
        self.oracle.publish(live.model, live.tokens)

    def finish(self, live: Live) -> None:
        self.cache.cache_finished_req(live.kv, live.tokens)
        self.oracle.finish(live.model, live.tokens)
        self._close(live)

    def release(self, live: Live) -> None:
        self.cache.release(live.kv)
        self.oracle.release(live.model)
        self._close(live)

    # The whole cache --------------------------------------------------------

    def evict(self, num_tokens: int) -> None:
        victims = self.oracle.evict(self.oracle.pages_for(num_tokens))

        assert len(victims) * self.page_size == self.cache.evict(num_tokens)

    def evict_if_needed(self, num_tokens: int) -> None:
        shortfall = self.oracle.pages_for(num_tokens) - self.oracle.num_free
        victims = self.oracle.evict(shortfall)

        assert len(victims) * self.page_size == self.cache.evict_if_needed(num_tokens)

    def drain(self) -> None:
        """Retract everyone, then evict page by page, in the oracle's order."""
        for live in list(self.live):
            self.release(live)
        while self.oracle.evict(1):
            assert self.cache.evict(1) == self.page_size
            self.check_cached()

        assert self.cache.evict(1) == 0
        assert self.cache.available_size == self.cache.total_size

    def resize(self, num_pages: int) -> None:
        needed = self.oracle.resize(num_pages)
        if needed <= num_pages:
            self.cache.resize(num_pages)
            return
        with self.refused(PagesInUseError) as caught:
            self.cache.resize(num_pages)
        assert (caught.value.needed, caught.value.available) == (needed, num_pages)

    def reset(self) -> None:
        if self.live:
            with self.refused(CacheBusyError):
                self.cache.reset()
            return
        self.cache.reset()
        self.oracle.reset()

        assert list(range(1, self.oracle.num_pages + 1)) == self.free_order()

    def bump_epoch(self, namespace: Hashable) -> None:
        before = self.sizes(), self.cache.stats(), self.free_order()
        self.cache.bump_epoch(namespace)
        self.oracle.bump_epoch(namespace)

        assert before == (self.sizes(), self.cache.stats(), self.free_order())

    # What can be seen -------------------------------------------------------

    def sizes(self) -> tuple[int, ...]:
        cache = self.cache
        return (
            cache.available_size,
            cache.evictable_size,
            cache.protected_size,
            cache.held_size,
            cache.total_size,
        )

    def free_order(self) -> list[int]:
        return free_order(self.cache.memory.allocator)

    def pages_of(self, kv: RequestKV) -> list[int]:
        slots = self.cache.slots(kv)[:: self.page_size]
        return (slots // self.page_size).tolist()

    def snapshot(self) -> tuple[Any, ...]:
        return (
            self.sizes(),
            self.cache.stats(),
            self.free_order(),
            [self.cache.match_prefix(text, name) for name, text in self.texts],
            [(repr(live.kv), live.kv.namespace) for live in self.live],
            [self.cache.slots(live.kv).tolist() for live in self.live],
        )

    @contextmanager
    def refused(self, kind: type[Exception]) -> Iterator[pytest.ExceptionInfo[Any]]:
        """Expect a typed error and no change at all."""
        before = self.snapshot()
        with pytest.raises(kind) as caught:
            yield caught

        assert isinstance(caught.value, RadixKVError)
        assert str(caught.value) == str(caught.value).strip() != ""
        assert before == self.snapshot()

    # The checks -------------------------------------------------------------

    def check(self) -> None:
        self.cache.check_integrity()
        self.check_sizes()
        self.check_cached()
        self.check_requests()
        self.check_content()
        self.check_owners()

    def check_sizes(self) -> None:
        *parts, total = self.sizes()

        assert total == sum(parts)
        assert all(part >= 0 and part % self.page_size == 0 for part in parts)
        assert self.oracle.sizes() == (*parts, total)

    def check_cached(self) -> None:
        """All of the oracle's pages match; the equal sizes exclude any other.

        Stale pages match nobody, but are not free.
        """
        in_use = set(self.cache.memory.allocator.in_use().tolist())
        for key, page in self.oracle.cached.items():
            assert page.page in in_use or not isinstance(key[0], PastEpoch)
        for namespace, tokens in self.oracle.leaves():
            if isinstance(namespace, PastEpoch):
                continue
            assert len(tokens) == self.cache.match_prefix(tokens, namespace)
        for namespace, text in self.texts:
            expected = self.oracle.match(namespace, text)
            assert expected == self.cache.match_prefix(text, namespace)

    def check_requests(self) -> None:
        for live in self.live:
            kv, model = live.kv, live.model
            expected = (model.protected_len, model.committed_len, model.allocated_len)
            assert expected == (kv.protected_len, kv.committed_len, kv.allocated_len)
            assert model.pages == self.pages_of(kv)

    def check_content(self) -> None:
        """Every slot holds the KV of its own prefix, once pending copies are made."""
        labels = self.worker.labels_after(self.cache.memory.page_copies.pending)
        for live in self.live:
            slots = self.cache.slots(live.kv, 0, live.kv.committed_len)
            expected = self.worker.labels_of(live.kv.namespace, live.tokens)
            assert expected[: len(slots)] == labels[slots].tolist()
        pages = labels.reshape(-1, self.page_size)
        for (name, tokens), cached in self.oracle.cached.items():
            namespace = name.namespace if isinstance(name, PastEpoch) else name
            expected = self.worker.labels_of(namespace, tokens)
            assert expected[-self.page_size :] == pages[cached.page].tolist()

    def check_owners(self) -> None:
        owned = self.oracle.in_use() + self.free_order()

        assert list(range(1, self.oracle.num_pages + 1)) == sorted(owned)

    # ------------------------------------------------------------------------

    def _remember(self, namespace: Hashable, tokens: Sequence[int]) -> None:
        self.texts[namespace, tuple(tokens)] = None
        if len(self.texts) > 24:
            del self.texts[next(iter(self.texts))]

    def _close(self, live: Live) -> None:
        self.live.remove(live)
        self.gone.append(live.kv)
        self._remember(live.kv.namespace, live.tokens)

    def _run(
        self,
        lives: Sequence[Live],
        lens: list[int],
        letter: int,
        alloc: Callable[[list[RequestKV]], KVCacheInfo],
    ) -> None:
        """Allocate, mirror, and let the worker compute; or be refused."""
        kvs = [live.kv for live in lives]
        free, evictable, protected, held, _ = self.oracle.sizes()
        try:
            self.oracle.alloc([live.model for live in lives], lens)
        except NoRoomError:
            with self.refused(OutOfPagesError) as caught:
                alloc(kvs)
            error = caught.value
            counts = (error.available, error.evictable, error.protected, error.held)
            sizes = tuple(count * self.page_size for count in counts)
            assert (free, evictable, protected, held) == sizes
            assert error.needed > error.available + error.evictable
            return
        info = self.worker.receive(alloc(kvs))
        assert [kv.req_pool_idx for kv in kvs] == info.rows.tolist()
        assert [kv.committed_len for kv in kvs] == info.starts.tolist()
        assert lens == info.stops.tolist()
        taken = {live.kv.req_pool_idx for live in self.live}
        idle = [row for row in range(len(self.worker.table)) if row not in taken]
        assert not self.worker.table[idle].any()
        for live, stop in zip(lives, lens, strict=True):
            self._compute(live, stop, letter)

    def _compute(self, live: Live, stop: int, letter: int) -> None:
        kv = live.kv
        slots = self.cache.slots(kv, 0, stop).tolist()
        assert slots == self.worker.slots(kv.req_pool_idx, 0, stop).tolist()
        self.oracle.see_pages(live.model, self.pages_of(kv))
        known = self.worker.labels[slots[: kv.committed_len]].tolist()
        assert known == self.worker.labels_of(kv.namespace, live.tokens)[: len(known)]
        live.drafts += [letter] * (stop - len(live.tokens) - len(live.drafts))
        labels = self.worker.labels_of(kv.namespace, live.tokens + live.drafts)
        self.worker.compute(kv.req_pool_idx, kv.committed_len, stop, labels)
        live.computed_len = stop

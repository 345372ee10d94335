"""A cache that is checked against the oracle at every step, and its worker."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..errors import CacheBusyError, OutOfPagesError, PagesInUseError, RadixKVError
from ..kv_cache_info import KVCacheInfo
from ..prefix_cache import PrefixCache
from ..radix_key import RadixKey
from ..request_kv import RequestKV
from .label_worker import LabelWorker
from .oracle import CacheOracle, ModelRequest, NoRoomError, PastEpoch

_MAX_NUM_TEXTS = 24


@dataclass(eq=False)
class Live:
    """A running request, as its scheduler sees it.

    Attributes:
        kv: Its handle.
        model: What the oracle knows of it.
        tokens: Its final tokens, never fewer than `committed_len`.
        drafts: Tokens that it tries behind them.
        computed_len: Positions whose labels the worker has written.
        key: What it was admitted with, if it was not plain tokens.
    """

    kv: RequestKV
    model: ModelRequest
    tokens: list[int]
    drafts: list[int] = field(default_factory=list[int])
    computed_len: int = 0
    key: RadixKey | None = None

    def spell(self, *more: int) -> list[int] | RadixKey:
        """Return its tokens, and with plain ones some more, as it was admitted."""
        key = self.key
        if key is None:
            return [*self.tokens, *more]
        key.extend(self.tokens[len(key) :])
        return key


class Refusal:
    """What came of a call that had to be refused."""

    def __init__(self) -> None:
        """Wait for the call."""
        self.error: RadixKVError | None = None

    @property
    def value(self) -> Any:  # noqa: ANN401 - each kind has attributes of its own
        """The error, once it was raised."""
        assert self.error is not None, "the call was not refused"
        return self.error


class CheckedCache:
    """Every operation runs on a cache and on the oracle; `check` compares them.

    The operations have the names of `CacheOracle`. Each of them makes the call of the
    cache, lets the worker compute what is to be computed, and asserts that the result
    is that of the oracle: also where that is a typed error without any change. Every
    second request says its tokens as a `RadixKey`.

    Attributes:
        cache: The cache.
        oracle: The oracle.
        worker: Gets the messages, and writes a label into every slot.
        page_size: Tokens a page.
        max_len: Longest request, in tokens.
        live: The running requests.
        gone: The handles of those that ended.
        texts: Namespaces and tokens that were seen lately, to ask for again.

    Example:
        >>> from radixkv.mem_cache import MemoryManager, RadixCache
        >>> memory = MemoryManager(8, 2, max_num_requests=2, max_context_len=16)
        >>> checked = CheckedCache(RadixCache(memory), CacheOracle(8, 2, 2, "lru"))
        >>> live = checked.admit([1, 2, 3])
        >>> checked.extend([live], [3])
        >>> checked.commit(live, 3)
        >>> checked.finish(live)
        >>> checked.check()
    """

    def __init__(
        self,
        cache: PrefixCache,
        oracle: CacheOracle,
        *,
        max_num_pages: int | None = None,
    ) -> None:
        """Begin with an empty cache.

        Args:
            cache: The cache, without entries and requests.
            oracle: An oracle of the same sizes and the same policy.
            max_num_pages: Most pages that `resize` will ever ask for; ``None`` for as
                many as there are.
        """
        memory = cache.memory
        self.cache = cache
        self.oracle = oracle
        self.page_size = cache.page_size
        self.max_len = memory.max_context_len
        self.worker = LabelWorker(
            max_num_pages=max(memory.num_pages, max_num_pages or 0),
            page_size=cache.page_size,
            num_rows=memory.max_num_requests,
            num_columns=oracle.pages_for(memory.max_context_len),
        )
        self._num_admitted = 0
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
        """Admit a request; ``None`` if there is no row.

        Args:
            tokens: Its tokens.
            namespace: Whose it is.
            priority: Its priority.
            computed_len: Tokens that it had computed before it was retracted.
        """
        self._remember(namespace, tokens)
        before = self.snapshot()
        model = self.oracle.admit(tokens, namespace, priority)
        key = RadixKey(tokens, namespace) if self._num_admitted % 2 else None
        self._num_admitted += 1
        kv = self.cache.admit(
            tokens if key is None else key,
            namespace=namespace if key is None else None,
            priority=priority,
            computed_len=computed_len,
        )
        if model is None or kv is None:
            assert kv is None
            assert model is None
            assert before == self.snapshot()
            return None
        self.oracle.see_pages(model, self.pages_of(kv))
        live = Live(kv, model, list(tokens), [], kv.committed_len, key)
        self.live.append(live)
        return live

    def extend(self, lives: Sequence[Live], lens: list[int], letter: int = 0) -> None:
        """Compute requests up to new lengths, or be refused.

        Args:
            lives: The batch.
            lens: The total length of each.
            letter: What drafts consist of.
        """
        self._run(
            lives, lens, letter, lambda kvs: self.cache.alloc_for_extend(kvs, lens)
        )

    def decode(self, lives: Sequence[Live], num_tokens: int, letter: int = 0) -> None:
        """Compute the next tokens of requests, or be refused.

        Args:
            lives: The batch.
            num_tokens: Tokens a request.
            letter: What drafts consist of.
        """
        lens = [live.kv.committed_len + num_tokens for live in lives]
        alloc = self.cache.alloc_for_decode
        self._run(lives, lens, letter, lambda kvs: alloc(kvs, num_tokens))

    def commit(self, live: Live, new_len: int) -> None:
        """Accept the positions of `live` below `new_len`, and the drafts among them."""
        self.cache.commit(live.kv, new_len)
        self.oracle.commit(live.model, new_len)
        accepted = max(0, new_len - len(live.tokens))
        live.tokens += live.drafts[:accepted]
        del live.drafts[:accepted]

    def truncate(self, live: Live, new_len: int) -> None:
        """Drop the positions of `live` from `new_len` on."""
        self.cache.truncate(live.kv, new_len)
        self.oracle.truncate(live.model, new_len)
        live.computed_len = min(live.computed_len, new_len)
        del live.drafts[max(0, new_len - len(live.tokens)) :]

    def publish(self, live: Live) -> None:
        """Publish what `live` has computed; it runs on."""
        # Tokens behind the computed ones are known, but nobody's business.
        self.cache.cache_unfinished_req(live.kv, live.spell(7))
        self.oracle.publish(live.model, live.tokens)

    def finish(self, live: Live) -> None:
        """Publish what `live` has computed, and end it."""
        self.cache.cache_finished_req(live.kv, live.spell())
        self.oracle.finish(live.model, live.tokens)
        self._close(live)

    def release(self, live: Live) -> None:
        """End `live` without publishing."""
        self.cache.release(live.kv)
        self.oracle.release(live.model)
        self._close(live)

    # The whole cache --------------------------------------------------------

    def evict(self, num_tokens: int) -> None:
        """Evict `num_tokens` tokens."""
        victims = self.oracle.evict(self.oracle.pages_for(num_tokens))

        assert len(victims) * self.page_size == self.cache.evict(num_tokens)

    def evict_if_needed(self, num_tokens: int) -> None:
        """Make room for `num_tokens` tokens."""
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
        """Change the capacity to `num_pages` pages, or be refused."""
        needed = self.oracle.resize(num_pages)
        if needed <= num_pages:
            self.cache.resize(num_pages)
            return
        with self.refused(PagesInUseError) as caught:
            self.cache.resize(num_pages)
        assert (caught.value.needed, caught.value.available) == (needed, num_pages)

    def reset(self) -> None:
        """Forget everything, or be refused while requests run."""
        if self.live:
            with self.refused(CacheBusyError):
                self.cache.reset()
            return
        self.cache.reset()
        self.oracle.reset()

        assert list(range(1, self.oracle.num_pages + 1)) == self.free_order()

    def bump_epoch(self, namespace: Hashable) -> None:
        """End the epoch of `namespace`."""
        before = self.sizes(), self.cache.stats(), self.free_order()
        self.cache.bump_epoch(namespace)
        self.oracle.bump_epoch(namespace)

        assert before == (self.sizes(), self.cache.stats(), self.free_order())

    # What can be seen -------------------------------------------------------

    def sizes(self) -> tuple[int, ...]:
        """Return free, evictable, protected, held and all, in tokens."""
        cache = self.cache
        return (
            cache.available_size,
            cache.evictable_size,
            cache.protected_size,
            cache.held_size,
            cache.total_size,
        )

    def free_order(self) -> list[int]:
        """Return the free pages, the next to be handed out first."""
        pages: list[int] = self.cache.memory.allocator.free_pages().tolist()
        return pages[::-1]

    def pages_of(self, kv: RequestKV) -> list[int]:
        """Return the pages of `kv`, in the order of its positions."""
        slots = self.cache.slots(kv)[:: self.page_size]
        pages: list[int] = (slots // self.page_size).tolist()
        return pages

    def snapshot(self) -> tuple[object, ...]:
        """Return all that can be seen from outside."""
        return (
            self.sizes(),
            self.cache.stats(),
            self.free_order(),
            [self.cache.match_prefix(text, name) for name, text in self.texts],
            [(repr(live.kv), live.kv.namespace) for live in self.live],
            [self.cache.slots(live.kv).tolist() for live in self.live],
        )

    @contextmanager
    def refused(self, kind: type[RadixKVError]) -> Generator[Refusal, None, None]:
        """Expect a typed error of a `kind`, and no change at all."""
        before = self.snapshot()
        refusal = Refusal()
        try:
            yield refusal
        except kind as error:
            refusal.error = error

        assert str(refusal.value) == str(refusal.value).strip() != ""
        assert before == self.snapshot()

    # The checks -------------------------------------------------------------

    def check(self) -> None:
        """Compare everything; for use after each step."""
        self.cache.check_integrity()
        self.check_sizes()
        self.check_cached()
        self.check_requests()
        self.check_content()
        self.check_owners()

    def check_sizes(self) -> None:
        """The law holds, and the sizes are the oracle's."""
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
            assert expected == self.cache.match_prefix(RadixKey(text, namespace))

    def check_requests(self) -> None:
        """The lengths and the pages of each request are the oracle's."""
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
        """Every page has exactly one owner, by the oracle's account."""
        owned = self.oracle.in_use() + self.free_order()

        assert list(range(1, self.oracle.num_pages + 1)) == sorted(owned)

    # ------------------------------------------------------------------------

    def _remember(self, namespace: Hashable, tokens: Sequence[int]) -> None:
        self.texts[namespace, tuple(tokens)] = None
        if len(self.texts) > _MAX_NUM_TEXTS:
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

"""Calls from a second thread: each is refused or safe, as its entry here says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

import numpy as np
import pytest

from radixkv.mem_cache import (
    CacheStats,
    ChunkCache,
    MemoryManager,
    PrefixCache,
    RadixCache,
    RequestKV,
    SharedCounters,
    TreeView,
    WrongThreadError,
)
from radixkv.scheduling import NullRunner, Request, SamplingParams, Scheduler

TIMEOUT_S = 60
NUM_ROUNDS = 30

PROMPT = [1, 2, 3, 4, 5]

CACHE_REFUSES: dict[str, Callable[[PrefixCache, RequestKV], object]] = {
    "admission_obstacle": lambda cache, kv: cache.admission_obstacle(PROMPT, 8),
    "admit": lambda cache, kv: cache.admit(PROMPT),
    "alloc_for_decode": lambda cache, kv: cache.alloc_for_decode([kv]),
    "alloc_for_extend": lambda cache, kv: cache.alloc_for_extend([kv], [9]),
    "begin_step": lambda cache, kv: cache.begin_step(),
    "bump_epoch": lambda cache, kv: cache.bump_epoch("other"),
    "cache_finished_req": lambda cache, kv: cache.cache_finished_req(kv, PROMPT),
    "cache_unfinished_req": lambda cache, kv: cache.cache_unfinished_req(kv, PROMPT),
    "check_integrity": lambda cache, kv: cache.check_integrity(),
    "commit": lambda cache, kv: cache.commit(kv, kv.committed_len),
    "evict": lambda cache, kv: cache.evict(4),
    "evict_if_needed": lambda cache, kv: cache.evict_if_needed(4),
    "eviction_order": lambda cache, kv: cache.eviction_order(4),
    "intern": lambda cache, kv: cache.intern(bytes(16)),
    "match_prefix": lambda cache, kv: cache.match_prefix(PROMPT),
    "max_request_size": lambda cache, kv: cache.max_request_size(),
    "recall": lambda cache, kv: cache.recall(cache.alloc_for_decode([])),
    "release": lambda cache, kv: cache.release(kv),
    "reset": lambda cache, kv: cache.reset(),
    "resize": lambda cache, kv: cache.resize(32),
    "slots": lambda cache, kv: cache.slots(kv),
    "stats": lambda cache, kv: cache.stats(),
    "truncate": lambda cache, kv: cache.truncate(kv, kv.allocated_len),
}

RADIX_CACHE_REFUSES: dict[str, Callable[[RadixCache, RequestKV], object]] = {
    "namespace_stats": lambda cache, kv: cache.namespace_stats(None),
    "retain": lambda cache, kv: cache.retain(PROMPT),
    "set_quota": lambda cache, kv: cache.set_quota("other", ceiling_size=8),
}

CACHE_IS_SAFE = {
    "available_size",
    "evictable_size",
    "held_size",
    "page_size",
    "protected_size",
    "shares_prefixes",
    "total_size",
    "version",
}

RADIX_CACHE_IS_SAFE = {"retained_size"}

SCHEDULER_REFUSES: dict[str, Callable[[Scheduler, Request], object]] = {
    "abort": lambda scheduler, request: scheduler.abort("unknown"),
    "add_request": lambda scheduler, request: scheduler.add_request(request),
    "cancel": lambda scheduler, request: scheduler.cancel(None),  # type: ignore[arg-type]
    "close": lambda scheduler, request: scheduler.close(),
    "check_request": lambda scheduler, request: scheduler.check_request(request),
    "explain_stall": lambda scheduler, request: scheduler.explain_stall(),
    "schedule": lambda scheduler, request: scheduler.schedule(),
    "take_outputs": lambda scheduler, request: scheduler.take_outputs(),
    "update": lambda scheduler, request: scheduler.update(None, np.zeros(0, np.int32)),  # type: ignore[arg-type]
}

SCHEDULER_IS_SAFE = {
    "has_requests",
    "in_flight",
    "num_in_flight",
    "num_retractions",
    "num_running",
    "num_waiting",
}


def public_names(cls: type) -> set[str]:
    """Return the methods and properties; a compiled class lists its attributes, too."""
    attributes = {"memory", "watch"}
    return {name for name in dir(cls) if not name.startswith("_")} - attributes


def test_each_public_name_has_an_entry() -> None:
    """Whoever adds a method says here what another thread may expect of it."""
    radix = CACHE_REFUSES.keys() | RADIX_CACHE_REFUSES.keys()

    assert public_names(ChunkCache) == CACHE_REFUSES.keys() | CACHE_IS_SAFE
    assert public_names(RadixCache) == radix | CACHE_IS_SAFE | RADIX_CACHE_IS_SAFE
    assert public_names(Scheduler) == SCHEDULER_REFUSES.keys() | SCHEDULER_IS_SAFE


@contextmanager
def owner_at_work(work: Callable[[], object]) -> Iterator[None]:
    """Let a thread of its own do a piece of work again and again meanwhile."""
    errors: list[BaseException] = []
    begun, enough = Event(), Event()

    def hammer() -> None:
        try:
            while not enough.is_set():
                work()
                begun.set()
        except BaseException as error:
            errors.append(error)
        finally:
            begun.set()

    owner = Thread(target=hammer)
    owner.start()
    assert begun.wait(TIMEOUT_S)
    try:
        yield
        assert owner.is_alive() or errors
    finally:
        enough.set()
        owner.join(TIMEOUT_S)
    if errors:
        raise errors[0]


class BusyCache:
    """A cache whose owner serves prompts of two namespaces in a pool too small.

    Attributes:
        kv: A request that runs all the time.
    """

    def __init__(self, kind: type[PrefixCache], **options: object) -> None:
        memory = MemoryManager(24, 4, max_num_requests=4, max_context_len=64)
        self.cache: PrefixCache = kind(memory, **options)  # type: ignore[arg-type]
        self._num_served = 0
        self._kv: RequestKV | None = None

    @property
    def kv(self) -> RequestKV:
        assert self._kv is not None
        return self._kv

    def serve(self) -> None:
        """Begin the long request the first time, then take one more through."""
        if self._kv is None:
            self._kv = self._begin(PROMPT, None)
        i = self._num_served = self._num_served + 1
        tokens = [i % 7, *range(i % 5, i % 5 + 20)]
        request = self._begin(tokens, ("a", "b")[i % 2])
        self.cache.cache_finished_req(request, tokens)

    def _begin(self, tokens: list[int], namespace: str | None) -> RequestKV:
        request = self.cache.admit(tokens, namespace=namespace)
        assert request is not None
        self.cache.alloc_for_extend([request], [len(tokens)])
        self.cache.commit(request, len(tokens))
        return request


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (RadixCache, {}),
        (RadixCache, {"debug": True}),
        (RadixCache, {"policy": "lfu", "outputs_first": True}),
        (ChunkCache, {}),
    ],
    ids=["radix", "debug", "keyed", "chunk"],
)
def test_a_cache_refuses_another_thread_while_its_owner_works(
    kind: type[PrefixCache], options: dict[str, object]
) -> None:
    """Neither side sees anything of the other: no `KeyError`, no false alarm."""
    busy = BusyCache(kind, **options)
    calls: dict[str, Callable[..., object]] = {**CACHE_REFUSES}
    sizes = set(CACHE_IS_SAFE)
    if kind is RadixCache:
        calls |= RADIX_CACHE_REFUSES
        sizes |= RADIX_CACHE_IS_SAFE

    with owner_at_work(busy.serve):
        for _ in range(NUM_ROUNDS):
            for name, call in calls.items():
                if name == "recall":
                    continue  # see below
                with pytest.raises(WrongThreadError):
                    call(busy.cache, busy.kv)
            for name in sizes:
                assert 0 <= getattr(busy.cache, name)

    busy.cache.check_integrity()  # its owner has ended


def test_a_recall_from_another_thread_is_refused() -> None:
    busy = BusyCache(RadixCache)
    messages = []

    def serve_and_tell() -> None:
        busy.serve()
        messages.append(busy.cache.alloc_for_extend([], []))

    with owner_at_work(serve_and_tell):
        for _ in range(NUM_ROUNDS):
            with pytest.raises(WrongThreadError):
                busy.cache.recall(messages[-1])


def test_a_picture_is_refused_to_another_thread_but_may_be_shown_by_it() -> None:
    busy = BusyCache(RadixCache)
    views: list[TreeView] = []

    def serve_and_look() -> None:
        busy.serve()
        views.append(TreeView(busy.cache))

    with owner_at_work(serve_and_look):
        for _ in range(NUM_ROUNDS):
            with pytest.raises(WrongThreadError):
                TreeView(busy.cache)
            assert "digraph" in views[-1].dot()
            assert "<html" in views[-1].html()


def test_shared_counters_are_read_by_a_thread_as_by_a_process() -> None:
    with SharedCounters.create() as counters:
        busy = BusyCache(RadixCache, counters=counters)
        reader = SharedCounters.attach(counters.name)
        with reader, owner_at_work(busy.serve):
            for _ in range(NUM_ROUNDS * 10):
                values = reader.read()
                parts = values.available_size + values.evictable_size
                parts += values.protected_size + values.held_size

                assert values.total_size == parts
                # What is refused must not write in its place.
                with pytest.raises(WrongThreadError):
                    busy.cache.evict(4)


def test_a_scheduler_refuses_another_thread_while_its_owner_works() -> None:
    memory = MemoryManager(24, 4, max_num_requests=4, max_context_len=64)
    scheduler = Scheduler(RadixCache(memory))
    runner = NullRunner(vocab_size=9)
    names = iter(range(10**9))
    stranger = Request("stranger", PROMPT, SamplingParams(max_new_tokens=2))

    def work() -> None:
        scheduler.add_request(Request(next(names), PROMPT, SamplingParams(8)))
        batch = scheduler.schedule()
        if batch is not None:
            scheduler.update(batch, runner.run(batch))

    with owner_at_work(work):
        for _ in range(NUM_ROUNDS):
            for call in SCHEDULER_REFUSES.values():
                with pytest.raises(WrongThreadError):
                    call(scheduler, stranger)
            for name in SCHEDULER_IS_SAFE:
                assert getattr(scheduler, name) is not None

    assert scheduler.explain_stall() is not None  # its owner has ended


def test_who_calls_after_the_owner_has_ended_is_the_owner() -> None:
    """The first call may be any: a look, too."""
    busy = BusyCache(RadixCache)
    owner = Thread(target=busy.serve)
    owner.start()
    owner.join(TIMEOUT_S)
    refused: list[WrongThreadError] = []
    told: list[CacheStats] = []

    def look() -> None:
        try:
            told.append(busy.cache.stats())
        except WrongThreadError as error:
            refused.append(error)

    assert busy.cache.match_prefix(PROMPT, "a") == 0
    late = Thread(target=look)
    late.start()
    late.join(TIMEOUT_S)

    assert (1, 0) == (len(refused), len(told))
    busy.serve()

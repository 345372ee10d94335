"""Who is admitted first: orders against slow, obvious ones, and bounded overtaking.

What happens is drawn from seeds: of what Hypothesis draws by itself, most prompts share
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from fractions import Fraction
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.mem_cache import (
    CacheBusyError,
    ChunkCache,
    MemoryManager,
    OutOfPagesError,
    PagesInUseError,
    PrefixCache,
    RadixCache,
    RadixKey,
    RequestKV,
)
from radixkv.mem_cache.testing.strategies import spell
from radixkv.mem_cache.tokens import Tokens
from radixkv.scheduling import (
    SCHEDULING_POLICIES,
    QueueView,
    RandomOrder,
    Request,
    RequestStatus,
    SamplingParams,
    Scheduler,
    SchedulerLimits,
)
from radixkv.scheduling.waiting_queue import WaitingQueue

NUM_PAGES = 60
page_sizes = st.sampled_from([1, 2, 3])
seeds = st.integers(0, 2**32 - 1)


class CountingCache(RadixCache):
    """Counts the look-ups."""

    num_matches = 0

    def match_prefix(
        self, tokens: Tokens | RadixKey, namespace: Hashable = None
    ) -> int:
        self.num_matches += 1
        return super().match_prefix(tokens, namespace)


def make_memory(page_size: int) -> MemoryManager:
    return MemoryManager(
        NUM_PAGES, page_size, max_num_requests=4, max_context_len=40 * page_size
    )


class Texts:
    """Prompts that go on where others are, so that they share prefixes of any length.

    Attributes:
        random: What they are drawn with; for other draws as well.
    """

    def __init__(self, page_size: int, seed: int) -> None:
        self.random = Random(seed)
        self.page_size = page_size
        self.kinds: list[list[int]] = [[]]

    def draw(self) -> list[int]:
        """Return a new one, one that there was, or the beginning of one."""
        random = self.random
        kept = random.choice(self.kinds)[: random.choice([1, 2, 3, 9, 9, 9])]
        new = random.choices([0, 0, 1, 2, 2, 3], k=random.choice([0, 0, 1, 2]))
        kinds = [*kept, *new][:9]
        self.kinds.append(kinds)
        return spell(self.page_size, kinds, random.randrange(3)) or [0]

    def namespace(self) -> str | None:
        return self.random.choice([None, None, None, "tenant"])


def serve(cache: PrefixCache, tokens: list[int], namespace: Hashable) -> None:
    """Take a prompt through the cache, if there is room."""
    request = cache.admit(tokens, namespace=namespace)
    if request is None:
        return
    try:
        cache.alloc_for_extend([request], [len(tokens)])
    except OutOfPagesError:
        cache.release(request)
        return
    cache.commit(request, len(tokens))
    cache.cache_finished_req(request, tokens)


# Each order, against the definition in its own words ----------------------------


def make_queue(cache: PrefixCache, texts: Texts) -> WaitingQueue:
    """Queue up to forty requests; those with outputs come back from a retraction."""
    queue = WaitingQueue(cache, max_overtakes=8)
    queue.num_computed_tokens = 30
    random = texts.random
    for arrival in random.sample(range(60), random.choice([3, 10, 40])):
        request = Request(
            arrival,
            texts.draw(),
            SamplingParams(random.randint(1, 9)),
            namespace=texts.namespace(),
            priority=random.randint(-2, 2),
        )
        for _ in range(random.choice([0, 0, 1, 2, 3])):
            request.append(0)
        request.arrival = arrival
        request.arrived_at = random.randint(0, 30)
        queue.add(request)
    return queue


def make_plain_queue(cache: PrefixCache, prompts: list[list[int]]) -> WaitingQueue:
    """Queue requests that differ in their prompts only."""
    queue = WaitingQueue(cache, max_overtakes=8)
    for arrival, prompt in enumerate(prompts):
        request = Request(arrival, prompt)
        request.arrival = arrival
        queue.add(request)
    return queue


def cached_len(cache: PrefixCache, request: Request) -> int:
    return cache.match_prefix(request.tokens, request.namespace)


def num_uncached(cache: PrefixCache, request: Request) -> int:
    return len(request.tokens) - cached_len(cache, request)


def response_ratio(cache: PrefixCache, request: Request) -> Fraction:
    service = max(1, num_uncached(cache, request))
    return Fraction(30 - request.arrived_at + service, service)


def num_outputs_left(request: Request) -> int:
    return request.sampling_params.max_new_tokens - len(request.output_tokens)


KEYS: dict[str, Callable[[PrefixCache, Request], object]] = {
    "fcfs": lambda cache, request: 0,
    "hrrn": lambda cache, request: -response_ratio(cache, request),
    "lof": lambda cache, request: -num_outputs_left(request),
    "lpm": lambda cache, request: -cached_len(cache, request),
    "priority": lambda cache, request: -request.priority,
    "shortest-prefill-first": num_uncached,
}


def walked(cache: PrefixCache, requests: list[Request], depth: int) -> list[Request]:
    """Walk the prefix tree of requests that share their first `depth` tokens."""
    here = [r for r in requests if cached_len(cache, r) == depth]
    branches: dict[object, list[Request]] = {}
    for request in requests:
        if request not in here:
            page = request.tokens[depth : depth + cache.page_size].tolist()
            key = (request.namespace, tuple(page))
            branches.setdefault(key, []).append(request)
    order: list[Request] = []
    for branch in sorted(
        branches.values(), key=lambda branch: (-len(branch), branch[0].arrival)
    ):
        order += walked(cache, branch, depth + cache.page_size)
    return order + here


def expected_order(name: str, cache: PrefixCache, queue: QueueView) -> list[Request]:
    requests = sorted(queue, key=lambda request: request.arrival)
    if name == "dfs-weight":
        return walked(cache, requests, 0)
    key = KEYS[name]
    return sorted(requests, key=lambda r: (key(cache, r), r.arrival))


def test_every_order_but_the_random_one_has_a_definition_here() -> None:
    assert {*KEYS, "dfs-weight", "random"} == set(SCHEDULING_POLICIES)


@pytest.mark.parametrize("name", [*KEYS, "dfs-weight"])
@given(page_size=page_sizes, seed=seeds)
def test_an_order_equals_its_definition(name: str, page_size: int, seed: int) -> None:
    texts = Texts(page_size, seed)
    cache = RadixCache(make_memory(page_size))
    for _ in range(texts.random.randint(0, 25)):
        serve(cache, texts.draw(), texts.namespace())
    cache.evict(texts.random.choice([0, 0, 1, 5]))
    queue = make_queue(cache, texts)

    assert expected_order(name, cache, queue) == list(
        SCHEDULING_POLICIES[name]().order(queue)
    )


@pytest.mark.parametrize("name", ["lpm", "dfs-weight"])
@given(page_size=page_sizes, seed=seeds)
def test_without_a_prefix_cache_prefix_orders_are_first_come_first_served(
    name: str, page_size: int, seed: int
) -> None:
    texts = Texts(page_size, seed)
    cache = ChunkCache(make_memory(page_size))
    serve(cache, texts.draw(), None)
    queue = make_queue(cache, texts)

    assert list(queue) == list(SCHEDULING_POLICIES[name]().order(queue))


def test_a_chain_of_many_prefixes_is_walked_without_recursion() -> None:
    memory = MemoryManager(1500, 1, max_num_requests=1, max_context_len=1500)
    cache = RadixCache(memory)
    serve(cache, list(range(1500)), None)
    queue = make_plain_queue(cache, [list(range(n)) for n in range(1, 1501)])

    order = list(SCHEDULING_POLICIES["dfs-weight"]().order(queue))

    assert list(queue)[::-1] == order


@given(lots=st.integers(0, 2**64 - 1), seed=seeds)
def test_a_lot_stays_the_same_whoever_else_waits(lots: int, seed: int) -> None:
    texts = Texts(1, seed)
    queue = make_queue(ChunkCache(make_memory(1)), texts)
    before = list(RandomOrder(lots).order(queue))
    gone = texts.random.sample(before, len(before) // 3)
    for request in gone:
        queue.remove(request)

    assert [request for request in before if request not in gone] == list(
        RandomOrder(lots).order(queue)
    )


# What is remembered of the cache -------------------------------------------------

CHANGES = {
    "serve": 6,
    "admit": 3,
    "compute": 4,
    "publish": 3,
    "decode": 3,
    "release": 1,
    "come back": 2,
    "evict": 3,
    "bump_epoch": 1,
    "retain": 1,
    "resize": 1,
    "reset": 1,
}
"""What may happen, and how often it does."""


class Life:
    """Random changes of a cache, with up to four requests that run."""

    def __init__(self, page_size: int, seed: int) -> None:
        self.texts = Texts(page_size, seed)
        self.random = self.texts.random
        self.is_partial = self.random.random() < 0.3
        self.cache = CountingCache(
            make_memory(page_size),
            self.random.choice(["lru", "lfu"]),
            partial_pages=self.is_partial,
        )
        self.running: list[tuple[RequestKV, list[int]]] = []
        self.queue = make_queue(self.cache, self.texts)

    def change(self) -> str:
        """Do something; returns what."""
        cache, random = self.cache, self.random
        (what,) = random.choices(list(CHANGES), list(CHANGES.values()))
        tokens, namespace = self.texts.draw(), self.texts.namespace()
        with suppress(OutOfPagesError, PagesInUseError, CacheBusyError):
            match what:
                case "serve":
                    serve(cache, tokens, namespace)
                case "admit":
                    kv = cache.admit(tokens, namespace=namespace)
                    if kv is not None:
                        self.running.append((kv, tokens))
                case "come back":
                    request = random.choice(list(self.queue))
                    self.queue.remove(request)
                    request.append(0)
                    self.queue.add(request)
                case "evict":
                    cache.evict(random.randint(1, 4))
                case "bump_epoch":
                    cache.bump_epoch(namespace)
                case "retain":
                    cache.retain(tokens, namespace=namespace, priority=1)
                case "resize":
                    cache.resize(random.randint(NUM_PAGES // 3, NUM_PAGES))
                case "reset":
                    cache.reset()
                case _ if self.running:
                    self.change_request(what, *random.choice(self.running))
        return what

    def change_request(self, what: str, kv: RequestKV, tokens: list[int]) -> None:
        if what == "compute" and kv.committed_len < len(tokens):
            stop = (kv.committed_len + len(tokens) + 1) // 2
            self.cache.alloc_for_extend([kv], [stop])
            self.cache.commit(kv, stop)
        elif what == "publish":
            self.cache.cache_unfinished_req(kv, tokens)
        elif what == "decode" and kv.committed_len >= len(tokens) - 1:
            self.cache.alloc_for_decode([kv])
            self.cache.commit(kv, kv.committed_len + 1)
            tokens.append(0)
        elif what == "release":
            self.cache.release(kv)
            self.running.remove((kv, tokens))


@given(page_size=page_sizes, seed=seeds)
def test_what_is_remembered_is_what_the_cache_says(page_size: int, seed: int) -> None:
    life = Life(page_size, seed)
    cache, queue = life.cache, life.queue
    for request in queue:
        queue.cached_len(request)
    for _ in range(40):
        what = life.change()
        fresh = [cached_len(cache, request) for request in queue]
        cache.num_matches = 0

        assert fresh == [queue.cached_len(request) for request in queue]
        assert cache.num_matches <= len(queue)
        if what in ("admit", "retain") and not life.is_partial:
            assert cache.num_matches == 0
        cache.num_matches = 0

        assert fresh == [queue.cached_len(request) for request in queue]
        assert cache.num_matches == 0


@pytest.mark.parametrize("name", SCHEDULING_POLICIES)
def test_an_order_asks_the_cache_only_when_it_has_changed(name: str) -> None:
    cache = CountingCache(make_memory(2))
    serve(cache, [0, 0, 1, 1], None)
    queue = make_plain_queue(cache, [[0] * n for n in range(1, 6)])
    policy = SCHEDULING_POLICIES[name]()
    uses_cache = name in {"dfs-weight", "hrrn", "lpm", "shortest-prefill-first"}

    list(policy.order(queue))
    assert 5 * uses_cache == cache.num_matches
    list(policy.order(queue))
    assert 5 * uses_cache == cache.num_matches
    serve(cache, [2, 2], None)
    list(policy.order(queue))
    assert (5 + 5) * uses_cache == cache.num_matches


# Nobody waits for ever -------------------------------------------------------------


class NewestFirst:
    def order(self, queue: QueueView) -> Iterable[Request]:
        return list(queue)[::-1]


class NeverTheOldest:
    """Leaves the oldest out, as long as there is another."""

    def order(self, queue: QueueView) -> Iterable[Request]:
        return list(queue)[:0:-1] or queue


POLICIES = [
    *SCHEDULING_POLICIES,
    pytest.param(NewestFirst(), id="newest-first"),
    pytest.param(NeverTheOldest(), id="never-the-oldest"),
]


class Watched:
    """A scheduler, watched from outside: who was overtaken by whom, and how often."""

    def __init__(self, scheduler: Scheduler, *, preempts: bool = False) -> None:
        self.scheduler = scheduler
        self.preempts = preempts
        self.requests: list[Request] = []
        self.num_overtakes: dict[Request, int] = {}

    def add(self, tokens: list[int], max_new_tokens: int, priority: int) -> Request:
        params = SamplingParams(max_new_tokens)
        request = Request(len(self.requests), tokens, params, priority=priority)
        self.scheduler.add_request(request)
        self.requests.append(request)
        self.num_overtakes[request] = 0
        return request

    def step(self) -> None:
        waiting = [r for r in self.requests if r.status is RequestStatus.WAITING]
        batch = self.scheduler.schedule()
        assert batch is not None
        limit = self.scheduler.limits.max_overtakes
        admitted = [e.request for e in batch.entries if e.request in waiting]
        # Those whose pages were taken back wait as well, before anybody is admitted.
        waiting = admitted + [
            r for r in self.requests if r.status is RequestStatus.WAITING
        ]
        for request in admitted:
            waiting.remove(request)
            for older in waiting:
                if older.arrival > request.arrival or (
                    self.preempts and older.priority < request.priority
                ):
                    continue
                self.num_overtakes[older] += 1
                assert self.num_overtakes[older] <= limit
        for request in self.requests:
            assert self.num_overtakes[request] == request.num_overtakes
        self.scheduler.update(batch, np.full(batch.num_samples, 1, np.int32))


@pytest.mark.parametrize("policy", POLICIES)
@given(page_size=page_sizes, max_overtakes=st.integers(0, 4), seed=seeds)
def test_nobody_is_overtaken_more_often_than_may_be(
    policy: str, page_size: int, max_overtakes: int, seed: int
) -> None:
    texts = Texts(page_size, seed)
    random = texts.random
    limits = SchedulerLimits(
        max_running_requests=random.randint(1, 4),
        max_batched_tokens=random.choice([4, 7, 30]),
        max_overtakes=max_overtakes,
        max_deferrals=0,
    )
    memory = MemoryManager(
        14, page_size, max_num_requests=4, max_context_len=14 * page_size
    )
    admission = random.choice(["worst-case", "estimate"])
    preempts = random.random() < 0.3
    scheduler = Scheduler(
        RadixCache(memory),
        limits,
        policy=policy,
        admission=admission,
        preempts=preempts,
    )
    watched = Watched(scheduler, preempts=preempts)
    for _ in range(12):
        for _ in range(random.choice([0, 1, 2, 3])):
            tokens = texts.draw()[: 7 * page_size]
            watched.add(tokens, random.randint(1, 7), random.randint(-2, 2))
        if scheduler.has_requests:
            watched.step()
    while scheduler.has_requests:
        watched.step()


def unluckiest_seed() -> int:
    """Find a seed by which the first of sixty requests has the last lot."""
    queue = make_plain_queue(ChunkCache(make_memory(1)), [[0]] * 60)
    for seed in range(10_000):
        if list(RandomOrder(seed).order(queue))[-1].arrival == 0:
            return seed
    raise AssertionError


@pytest.mark.parametrize("max_overtakes", [0, 1, 5])
@pytest.mark.parametrize("policy", POLICIES)
def test_endless_arrivals_overtake_as_often_as_they_may_and_no_more(
    policy: str, max_overtakes: int
) -> None:
    """The first has the worst place in every order; more arrive than can run."""
    limits = SchedulerLimits(
        max_running_requests=1, max_overtakes=max_overtakes, max_deferrals=0
    )
    memory = MemoryManager(64, 2, max_num_requests=1, max_context_len=64)
    chosen = RandomOrder(unluckiest_seed()) if policy == "random" else policy
    scheduler = Scheduler(RadixCache(memory), limits, policy=chosen)
    watched = Watched(scheduler)
    watched.add([7, 7], max_new_tokens=2, priority=1)
    watched.step()
    first = watched.add(list(range(30)), max_new_tokens=1, priority=0)
    for _ in range(4 * max_overtakes + 10):
        watched.add([7, 7, 7], max_new_tokens=2, priority=1)
        watched.add([7, 7, 7], max_new_tokens=2, priority=1)
        if first.status is RequestStatus.FINISHED:
            break
        watched.step()

    assert first.status is RequestStatus.FINISHED
    assert (0 if policy == "fcfs" else max_overtakes) == first.num_overtakes

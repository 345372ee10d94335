"""A random load on a scheduler that has hardly any room, and what is seen of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from radixkv.mem_cache import ChunkCache, MemoryManager, PrefixCache, RadixCache
from radixkv.scheduling import (
    Batch,
    NullRunner,
    Request,
    RequestStatus,
    SamplingParams,
    Scheduler,
    SchedulerLimits,
)

VOCAB_SIZE = 5
EOS_TOKEN_IDS = (4,)
WAITING, RUNNING = RequestStatus.WAITING, RequestStatus.RUNNING


class Guesser:
    """Drafts that are right now and then."""

    def propose(self, request: Request, max_tokens: int) -> tuple[int, ...]:
        start = request.num_tokens
        return tuple((start + i) % VOCAB_SIZE for i in range(start % (max_tokens + 1)))


@dataclass
class Look:
    """What one call of `schedule` did.

    Attributes:
        batch: What it returned.
        is_ahead: Whether another step was in flight.
        ran: Who ran before.
        started: Who waited before and is in the step.
        retracted: Who ran before and waits.
    """

    batch: Batch | None
    is_ahead: bool
    ran: list[Request]
    started: list[Request]
    retracted: list[Request]


@dataclass
class BusyLoad:
    """Clients, a scheduler and a runner.

    Attributes:
        random: Where all that happens comes from.
        cache: The cache.
        scheduler: The scheduler.
        longest: No request is longer, in tokens with K and V.
        requests: All that were accepted.
        namespaces: Where they are.
        priorities: Those that they have.
        shares: How long requests may be, as shares of `longest`.
        writes_long: Whether outputs are much longer than prompts.
        batches: Those in flight.
        runner: Computes them.
        num_steps: How many it has.
    """

    random: Random
    cache: PrefixCache
    scheduler: Scheduler
    longest: int
    namespaces: tuple[Hashable, ...] = (None,)
    priorities: tuple[int, ...] = (0,)
    shares: tuple[float, ...] = (1.0,)
    writes_long: bool = False
    requests: list[Request] = field(default_factory=list[Request])
    batches: deque[Batch] = field(default_factory=deque[Batch])
    runner: NullRunner = field(default_factory=lambda: NullRunner(VOCAB_SIZE))
    num_steps: int = 0

    # Clients ----------------------------------------------------------------

    def arrive(self) -> None:
        """Submit a request that goes on where another one is, and that just fits."""
        random = self.random
        namespace = random.choice(self.namespaces)
        most = min(self.longest, self.cache.max_request_size(namespace))
        if most < 1:
            return
        most = max(1, int(most * random.choice(self.shares)))
        known = random.choice([[0], *(r.tokens.tolist() for r in self.requests[-9:])])
        num_known = random.choice([0, random.randint(0, len(known))])
        num_own = random.randint(1, 1 + most // (12 if self.writes_long else 3))
        own = [random.randint(0, 1) for _ in range(num_own)]
        prompt = [*known[:num_known], *own]
        prompt = prompt[: max(1, most // 2) if self.writes_long else most]
        room = most - len(prompt) + 1
        lengths = [1, room, random.randint(1, room)]
        params = SamplingParams(
            max_new_tokens=room if self.writes_long else random.choice(lengths),
            ignore_eos=random.random() < (0.8 if self.writes_long else 0.5),
        )
        request = Request(
            len(self.requests),
            prompt,
            params,
            namespace=namespace,
            priority=random.choice(self.priorities),
        )
        self.scheduler.add_request(request)
        self.requests.append(request)

    def abort_one(self) -> None:
        if self.requests:
            self.scheduler.abort(self.random.choice(self.requests).request_id)

    # The engine -------------------------------------------------------------

    @property
    def running(self) -> list[Request]:
        return [request for request in self.requests if request.status is RUNNING]

    @property
    def waiting(self) -> list[Request]:
        return [request for request in self.requests if request.status is WAITING]

    @property
    def may_schedule(self) -> bool:
        return len(self.batches) < 1 + self.scheduler.overlap

    def schedule(self) -> Look:
        ran, waited = self.running, self.waiting
        is_ahead = bool(self.batches)
        batch = self.scheduler.schedule()
        if batch is not None:
            self.batches.append(batch)
        return Look(
            batch,
            is_ahead,
            ran,
            started=[r for r in waited if r.status is RUNNING],
            retracted=[r for r in ran if r.status is WAITING],
        )

    def run(self) -> None:
        batch = self.batches.popleft()
        self.scheduler.update(batch, self.runner.run(batch))
        self.num_steps += 1

    def turn(self) -> Iterator[Look]:
        """Schedule as far ahead as may be, and then run one step."""
        look = None
        while self.may_schedule and (look is None or look.batch is not None):
            look = self.schedule()
            yield look
        if self.batches:
            self.run()
        self.scheduler.take_outputs()

    @property
    def max_num_steps(self) -> int:
        """Ten times the steps that all would take one after the other."""
        chunk = self.scheduler.limits.chunked_prefill_size
        return 10 + 10 * sum(
            -(-r.max_kv_len // chunk) + r.sampling_params.max_new_tokens
            for r in self.requests
        )

    def check_end(self) -> None:
        """Everybody is at its end, and nothing is left behind."""
        cache = self.cache
        assert not self.scheduler.has_requests
        assert all(
            r.finish_reason in ("stop", "length", "abort") for r in self.requests
        )
        assert cache.held_size == cache.protected_size == 0
        assert cache.stats().num_requests == 0
        cache.check_integrity()


def make_load(
    seed: int,
    *,
    num_pages: int | None = None,
    is_cached: bool | None = None,
    limits: SchedulerLimits | None = None,
    num_rows: int | None = None,
    **options: Any,  # noqa: ANN401 - those of Scheduler
) -> BusyLoad:
    """Make a load; what is not given comes from the seed."""
    random = Random(seed)
    page_size = random.choice([1, 2, 3, 16])
    longest = random.randint(3, 6 * page_size)
    if num_pages is None:
        num_pages = -(-longest // page_size) + random.choice([0, 1, 2, 4, 9])
    max_running = random.choice([1, 3, 6, 12])
    memory = MemoryManager(
        num_pages,
        page_size,
        max_num_requests=num_rows or random.choice([max(1, max_running - 1), 12]),
        max_context_len=longest + random.choice([0, 3]),
    )
    if is_cached is None:
        is_cached = random.random() < 0.85
    cache: PrefixCache = ChunkCache(memory)
    if is_cached:
        memory = MemoryManager(
            num_pages,
            page_size,
            max_num_requests=memory.max_num_requests,
            max_context_len=memory.max_context_len,
        )
        cache = RadixCache(memory, partial_pages=random.random() < 0.3)
    limits = limits or SchedulerLimits(
        max_running_requests=max_running,
        max_batched_tokens=max_running + random.choice([0, 1, 4, 50]),
        chunked_prefill_size=random.choice([1, 3, page_size, 100]),
        max_overtakes=random.choice([0, 2, 256]),
        max_deferrals=random.choice([0, 3, 256]),
    )
    options.setdefault("overlap", random.random() < 0.4)
    if random.random() < 0.3:
        options.setdefault("drafter", Guesser())
    scheduler = Scheduler(cache, limits, eos_token_ids=EOS_TOKEN_IDS, **options)
    return BusyLoad(random, cache, scheduler, longest)


# An oracle that counts page by page ------------------------------------------


def pages_of(cache: PrefixCache, request: Request) -> set[int]:
    """The pages that a request has, shared or not."""
    assert request.kv is not None
    return {int(slot) // cache.page_size for slot in cache.slots(request.kv)}


def hit_of(cache: PrefixCache, request: Request) -> list[int]:
    """The pages that a waiting request would find, without asking the cache for it."""
    page_size = cache.page_size
    whole = (request.num_tokens - 1) // page_size * page_size
    raw = request.tokens[:whole].tobytes()
    path, matched = cache._tree.find(request.namespace, raw)
    pages = b"".join(node.pages for node in path)
    ids = [
        int.from_bytes(pages[at : at + 4], "little") for at in range(0, len(pages), 4)
    ]
    return ids[: matched // (4 * page_size)]


def num_pages_at_longest(
    cache: PrefixCache, running: Iterable[Request], candidate: Request | None = None
) -> int:
    """The pages that all need at the same time, each at its longest."""
    used: set[int] = set()
    num_new = 0
    for request in running:
        own = pages_of(cache, request)
        used |= own
        num_new += max(0, -(-request.max_kv_len // cache.page_size) - len(own))
    if candidate is not None:
        hit = hit_of(cache, candidate)
        used |= {*hit}
        num_new += -(-candidate.max_kv_len // cache.page_size) - len(hit)
    return len(used) + num_new

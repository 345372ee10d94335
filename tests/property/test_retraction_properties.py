"""Retraction: it helps, it ends, and who goes is who should."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from radixkv.scheduling import Estimate, Request, RetractionPolicy

from .busy_load import BusyLoad, Look, make_load, num_pages_at_longest, pages_of

seeds = st.integers(0, 2**32 - 1)


class Gambler:
    """Sets nothing aside but the next token, and never learns."""

    def reserved_len(self, request: Request) -> int:
        return request.num_tokens + 1

    def on_step(self) -> None:
        pass

    def on_retraction(self, running: Collection[Request]) -> None:
        pass


class Moody:
    """Retracts whomever, those who came back most of all."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def key(self, request: Request) -> tuple[int, float]:
        return -request.num_retractions, self._random.random()


def make_gamble(seed: int) -> BusyLoad:
    random = Random(seed)
    admission = random.choice(
        [Gambler(), Estimate(initial_ratio=0.01, min_ratio=0), Estimate()]
    )
    moody: RetractionPolicy = Moody(random)
    retraction = random.choice(["least-loss", "newest", moody])
    load = make_load(
        seed,
        admission=admission,
        retraction=retraction,
        policy=random.choice(["fcfs", "fcfs", "lpm", "shortest-prefill-first"]),
    )
    load.writes_long = True
    load.priorities = random.choice([(0,), (0, 0, 1, 2)])
    return load


def rank(request: Request) -> tuple[int, int]:
    return request.priority, -request.arrival


def check_look(load: BusyLoad, look: Look) -> None:
    """What must be true of every step, whatever is retracted."""
    if look.retracted:
        assert not look.is_ahead
        assert not look.started
        assert max(look.ran, key=rank) not in look.retracted
        assert look.batch is not None  # who goes on does so at once
    for request in look.started:
        if request.num_retractions:
            check_return(load, request)


def check_return(load: BusyLoad, request: Request) -> None:
    """Who comes back has room for all that it can need, beside all others like it."""
    proven = [r for r in load.running if r.reserves_all]
    assert request in proven
    needed = num_pages_at_longest(load.cache, proven)
    for other in load.requests:
        if other.kv is not None and other not in proven:
            shared = set[int]().union(*(pages_of(load.cache, r) for r in proven))
            needed += len(pages_of(load.cache, other) - shared)
            proven.append(other)
    assert needed * load.cache.page_size <= load.cache.total_size


def check_gamble(seed: int, num_turns: int) -> Counter[str]:
    load = make_gamble(seed)
    scheduler, random = load.scheduler, load.random
    computed_at: dict[Request, int] = {}
    seen: Counter[str] = Counter()
    num_computed = turn = 0
    while turn < num_turns or scheduler.has_requests:
        if turn < num_turns:
            for _ in range(random.choice([0, 0, 1, 3])):
                load.arrive()
            if random.random() < 0.03:
                load.abort_one()
        for look in load.turn():
            check_look(load, look)
            for request in look.started:
                # Between a retraction and a return, others have computed something.
                assert computed_at.get(request, -1) < num_computed
                seen["again"] += request.num_retractions > 0
            computed_at |= dict.fromkeys(look.retracted, num_computed)
            seen["retracted"] += len(look.retracted)
            seen["twice"] += sum(r.num_retractions > 1 for r in look.retracted)
            num_computed += look.batch.num_tokens if look.batch else 0
        load.cache.check_integrity()
        turn += 1
        assert turn <= num_turns + load.max_num_steps
    load.check_end()
    num_retractions = sum(request.num_retractions for request in load.requests)
    assert scheduler.num_retractions == num_retractions
    max_running = scheduler.limits.max_running_requests
    assert num_retractions <= len(load.requests) * max_running
    return seen


@given(seed=seeds)
def test_all_requests_end_although_some_are_retracted(seed: int) -> None:
    check_gamble(seed, num_turns=15)


def test_retractions_are_bounded_whatever_the_policies() -> None:
    seen: Counter[str] = Counter()
    for seed in range(60):
        seen += check_gamble(seed, num_turns=25)

    assert seen["retracted"] > 100
    assert seen["again"] > 100

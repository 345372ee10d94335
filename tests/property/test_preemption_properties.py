"""Preemption by priority: exactly who must go, and nobody in vain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from radixkv.scheduling import Request
from radixkv.scheduling.preemption import victims_for

from .busy_load import BusyLoad, Look, hit_of, make_load, pages_of

seeds = st.integers(0, 2**32 - 1)


@dataclass
class Picture:
    """What there was before a step, page by page.

    Attributes:
        load: Whose it is.
        pages: Of each request that has any; also of those at their ends.
        running: Those that are not at their end.
    """

    load: BusyLoad
    pages: dict[Request, set[int]]
    running: list[Request]

    @classmethod
    def take(cls, load: BusyLoad) -> Picture:
        owners = [request for request in load.requests if request.kv is not None]
        pages = {owner: pages_of(load.cache, owner) for owner in owners}
        return cls(load, pages, load.running)

    def fits(self, request: Request, hit: list[int], gone: Collection[Request]) -> bool:
        """Tell whether a request could start where others were, by counting pages."""
        cache = self.load.cache
        owners = {o: pages for o, pages in self.pages.items() if o not in gone}
        used = {*hit}.union(*owners.values())
        num_new = self.num_pages(request) - len(hit)
        for owner, pages in owners.items():
            if owner in self.running:
                num_new += max(0, self.num_pages(owner) - len(pages))
        limits = self.load.scheduler.limits
        return (
            (len(used) + num_new) * cache.page_size <= cache.total_size
            and len(owners) < cache.memory.max_num_requests
            and len(self.running) - len(gone) < limits.max_running_requests
        )

    def num_pages(self, request: Request) -> int:
        return -(-request.max_kv_len // self.load.cache.page_size)


def check_preemption(seed: int, num_turns: int) -> Counter[str]:
    random = Random(seed)
    load = make_load(
        seed,
        preempts=True,
        policy=random.choice(["fcfs", "lpm", "priority", "random"]),
        retraction=random.choice(["least-loss", "newest"]),
    )
    load.priorities = (0, 0, 0, 1, 1, 2)
    load.shares = (0.2, 0.3, 0.4, 1.0)
    load.writes_long = True
    seen: Counter[str] = Counter()
    turn = 0
    while turn < num_turns or load.scheduler.has_requests:
        if turn < num_turns:
            for _ in range(random.choice([0, 0, 1, 2])):
                load.arrive()
            if random.random() < 0.03:
                load.abort_one()
        while load.may_schedule:
            picture = Picture.take(load)
            waiting = sorted(load.waiting, key=lambda r: (-r.priority, r.arrival))
            hits = {request: hit_of(load.cache, request) for request in waiting}
            deferrals = {request: request.num_deferrals for request in waiting}
            look = load.schedule()
            patient = {r for r in waiting if r.num_deferrals > deferrals[r]}
            if look.retracted:
                check_victims(look, picture, hits, seen)
            elif not look.is_ahead and waiting and waiting[0] not in patient:
                check_nobody_should_go(look, picture, waiting[0], hits[waiting[0]])
            if look.batch is None:
                break
        if load.batches:
            load.run()
        load.scheduler.take_outputs()
        load.cache.check_integrity()
        turn += 1
        assert turn <= num_turns + load.max_num_steps
    load.check_end()
    return seen


def check_victims(
    look: Look,
    picture: Picture,
    hits: dict[Request, list[int]],
    seen: Counter[str],
) -> None:
    """Each victim has a lower priority than who started, and each was needed."""
    assert not look.is_ahead
    victims = look.retracted
    top = max(look.started, key=lambda r: (r.priority, -r.arrival))
    assert all(victim.priority < top.priority for victim in victims)
    assert picture.fits(top, hits[top], victims)
    for victim in victims:
        others = [other for other in victims if other is not victim]
        assert not picture.fits(top, hits[top], others)
        assert victim not in look.started
    limits = picture.load.scheduler.limits
    seen["victims"] += len(victims)
    seen["several"] += len(victims) > 1
    seen["cap"] += len(picture.running) == limits.max_running_requests
    rows = picture.load.cache.memory.max_num_requests
    seen["rows"] += len(picture.pages) == rows < limits.max_running_requests


def check_nobody_should_go(
    look: Look, picture: Picture, top: Request, hit: list[int]
) -> None:
    """Whoever waits fits as it is, or would not even if all lower ones had gone."""
    lower = [r for r in picture.running if r.priority < top.priority]
    assert not lower or picture.fits(top, hit, ()) or not picture.fits(top, hit, lower)


@given(seed=seeds)
def test_whoever_is_preempted_had_to_go(seed: int) -> None:
    check_preemption(seed, num_turns=15)


def test_preemption_meets_every_limit() -> None:
    seen: Counter[str] = Counter()
    for seed in range(120):
        seen += check_preemption(seed, num_turns=25)

    assert all(seen[key] > 3 for key in ("victims", "several", "cap", "rows"))


@given(
    weights=st.lists(st.integers(0, 5), min_size=1, max_size=12),
    needed=st.integers(1, 20),
)
def test_the_victims_are_enough_and_none_is_too_many(
    weights: list[int], needed: int
) -> None:
    order = [Request(i, [1]) for i in range(len(weights))]

    def fits(gone: Sequence[Request]) -> bool:
        return sum(weights[order.index(request)] for request in gone) >= needed

    victims = victims_for(fits, order)

    assert bool(victims) == fits(order)
    assert victims == [request for request in order if request in victims]
    for victim in victims:
        assert not fits([other for other in victims if other is not victim])
    if victims:
        # Nobody goes who comes behind where there are enough.
        last = order.index(victims[-1])
        assert not fits(order[:last])

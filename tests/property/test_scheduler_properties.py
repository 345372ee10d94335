"""Any arrivals, aborts and failures in any order: the scheduler keeps its promises.

The state machine tries everything and shrinks what fails; the busy days are weighted
like a server's, so that retractions, hits and evictions happen all the time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from radixkv.scheduling import (
    RETRACTION_POLICIES,
    SCHEDULING_POLICIES,
    Estimate,
    Request,
    SamplingParams,
    SchedulerLimits,
)

from .checked_scheduler import VOCAB_SIZE, CheckedScheduler, serial_output

page_sizes = st.sampled_from([1, 2, 3, 16])
letters = st.lists(st.integers(0, 1), max_size=3)
params = st.builds(
    SamplingParams,
    max_new_tokens=st.sampled_from([1, 1, 2, 3, 5, 9, 18]),
    ignore_eos=st.booleans(),
)


@st.composite
def limits(draw: st.DrawFn) -> SchedulerLimits:
    max_running = draw(st.integers(1, 5))
    return SchedulerLimits(
        max_running_requests=max_running,
        max_batched_tokens=max_running + draw(st.sampled_from([0, 1, 2, 7, 100])),
        chunked_prefill_size=draw(st.sampled_from([1, 2, 3, 5, 16, 33, 100])),
        max_overtakes=draw(st.sampled_from([0, 1, 3, 256])),
        max_deferrals=draw(st.sampled_from([0, 1, 256])),
    )


class RightOrWrong:
    """A drafter that knows what comes, and lies about every third token of it."""

    def propose(self, request: Request, max_tokens: int) -> tuple[int, ...]:
        num_tokens = request.num_tokens % (max_tokens + 2)
        known = request.num_output_tokens
        expected = serial_output(
            request.prompt_tokens.tolist(), request.sampling_params
        )[known:][: min(num_tokens, max_tokens)]
        return tuple(
            (token + ((known + i) % 3 == 0)) % VOCAB_SIZE
            for i, token in enumerate(expected)
        )


def make_options(choose: Callable[[list[Any]], Any]) -> dict[str, Any]:
    """Choose how a scheduler decides."""
    return {
        "policy": choose(sorted(SCHEDULING_POLICIES)),
        "admission": choose(
            ["worst-case", Estimate(), Estimate(initial_ratio=0.01, min_ratio=0)]
        ),
        "retraction": choose(sorted(RETRACTION_POLICIES)),
        "preempts": choose([False, False, True]),
        "overlap": choose([False, True]),
        "drafter": choose([None, None, RightOrWrong()]),
    }


class SchedulerMachine(RuleBasedStateMachine):
    """What clients and the engine may do, at any time at which they may do it."""

    @initialize(
        is_cached=st.booleans() | st.just(True),
        num_pages=st.integers(1, 12),
        page_size=page_sizes,
        num_rows=st.integers(1, 5),
        limits=limits(),
        data=st.data(),
    )
    def start(
        self,
        is_cached: bool,
        num_pages: int,
        page_size: int,
        num_rows: int,
        limits: SchedulerLimits,
        data: st.DataObject,
    ) -> None:
        options = make_options(lambda choice: data.draw(st.sampled_from(choice)))
        self.checked = CheckedScheduler(
            is_cached=is_cached,
            num_pages=num_pages,
            page_size=page_size,
            num_rows=num_rows,
            max_len=10 * page_size,
            limits=limits,
            **options,
        )

    @rule(
        pages=letters,
        tail=letters,
        base=st.none() | st.integers(0, 9),
        params=params,
        namespace=st.sampled_from([None, None, "tenant"]),
        priority=st.sampled_from([0, 0, 1, 2]),
    )
    def add(
        self,
        pages: list[int],
        tail: list[int],
        base: int | None,
        params: SamplingParams,
        namespace: Hashable,
        priority: int,
    ) -> None:
        """Submit a new prompt, or one that goes on where another one is."""
        checked = self.checked
        known: list[int] = []
        if base is not None and checked.requests:
            request = checked.requests[base % len(checked.requests)]
            known, namespace = request.tokens.tolist(), request.namespace
        page = checked.cache.page_size
        prompt = known + [letter for letter in pages for _ in range(page)] + tail
        checked.add(prompt or [0], params, namespace, priority)

    @rule(number=st.integers(0, 50))
    def abort(self, number: int) -> None:
        self.checked.abort_any(number)

    @precondition(lambda self: self.checked.may_schedule)
    @rule()
    def schedule(self) -> None:
        self.checked.schedule()

    @precondition(lambda self: self.checked.batch is not None)
    @rule(fails=st.sampled_from([False] * 7 + [True]), is_received=st.booleans())
    def run_step(self, fails: bool, is_received: bool) -> None:
        if fails:
            self.checked.fail(is_received=is_received)
        else:
            self.checked.run()

    @rule(count=st.integers(1, 20))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.checked.step()
            self.checked.check()

    @precondition(lambda self: self.checked.batch is None)
    @rule(num_tokens=st.integers(0, 40))
    def evict(self, num_tokens: int) -> None:
        """Somebody else needs room, between two steps."""
        self.checked.cache.evict(num_tokens)

    @invariant()
    def check(self) -> None:
        self.checked.check()

    def teardown(self) -> None:
        if hasattr(self, "checked"):
            self.checked.drain()


SchedulerMachine.TestCase.settings = settings(stateful_step_count=30)
TestScheduler = SchedulerMachine.TestCase


class BusyDay:
    """A server under load, in a pool that may hold no more than its longest request."""

    def __init__(self, *, is_cached: bool, page_size: int, seed: int) -> None:
        random = self.random = Random(seed)
        self.longest = random.randint(3, 8 * page_size)
        self.num_pages = -(-self.longest // page_size) + random.choice([0, 1, 2, 4, 8])
        max_running = random.choice([1, 3, 5, 9])
        self.checked = CheckedScheduler(
            is_cached=is_cached,
            num_pages=self.num_pages,
            page_size=page_size,
            num_rows=random.choice([2, 5, 9]),
            max_len=self.longest + random.choice([0, 3]),
            limits=SchedulerLimits(
                max_running_requests=max_running,
                max_batched_tokens=max_running + random.choice([0, 1, 4, 50]),
                chunked_prefill_size=random.choice([1, 3, page_size, 100]),
                max_overtakes=random.choice([0, 1, 3, 256]),
                max_deferrals=random.choice([0, 1, 256]),
            ),
            **make_options(random.choice),
        )
        self.texts = [[0]]

    def run(self, num_steps: int, *, resizes: bool = False) -> Counter[str]:
        checked, random = self.checked, self.random
        for _ in range(num_steps):
            if resizes and random.random() < 0.3:
                checked.resize(random.randint(1, self.num_pages))
            for _ in range(random.choice([0, 0, 0, 1, 1, 4])):
                self.arrive()
            if checked.may_schedule:
                checked.schedule()
            if checked.may_schedule and random.random() < 0.7:
                checked.schedule()
            if random.random() < 0.06:
                checked.abort_any(random.randrange(10**6))
            if checked.batch is not None:
                if random.random() < 0.02:
                    checked.fail(is_received=random.random() < 0.5)
                else:
                    checked.run()
            if random.random() < 0.06:
                checked.abort_any(random.randrange(10**6))
            checked.check()
        checked.drain()
        return checked.seen

    def arrive(self) -> None:
        """Submit a prompt that goes on where some other one is; it just fits."""
        random = self.random
        known = random.choice(self.texts)[: random.randrange(1 + self.longest // 3)]
        own = [
            random.randint(0, 1) for _ in range(random.randint(1, self.longest // 3))
        ]
        prompt = (known + own)[: self.longest]
        self.texts.append(prompt)
        room = self.longest - len(prompt) + 1
        params = SamplingParams(
            max_new_tokens=random.randint(1 + room // 3, room),
            ignore_eos=random.random() < 0.9,
        )
        namespace = "tenant" if random.random() < 0.2 else None
        self.checked.add(prompt, params, namespace, random.choice([0, 0, 0, 1, 2]))


# A day is worth many examples, and takes as long.
days = settings(max_examples=max(10, settings().max_examples // 3))


@days
@given(
    is_cached=st.sampled_from([True, True, False]),
    page_size=page_sizes,
    seed=st.integers(0, 2**32 - 1),
)
def test_a_busy_day_ends_well(is_cached: bool, page_size: int, seed: int) -> None:
    BusyDay(is_cached=is_cached, page_size=page_size, seed=seed).run(num_steps=20)


@days
@given(page_size=page_sizes, seed=st.integers(0, 2**32 - 1))
def test_a_pool_that_is_resized_refuses_only_what_it_cannot_hold(
    page_size: int, seed: int
) -> None:
    day = BusyDay(is_cached=True, page_size=page_size, seed=seed)
    day.run(num_steps=20, resizes=True)


def test_busy_days_meet_everything_that_can_happen() -> None:
    seen: Counter[str] = Counter()
    for seed in range(32):
        page_size = (1, 2, 3, 16)[seed % 4]
        day = BusyDay(is_cached=True, page_size=page_size, seed=seed)
        seen += day.run(num_steps=30, resizes=seed % 8 == 0)

    expected = {
        "abort finished",
        "abort in flight",
        "abort mid-chunk",
        "abort retracted",
        "abort running",
        "abort waiting",
        "accepted draft",
        "ahead",
        "chunk",
        "draft",
        "failed step",
        "hit",
        "length",
        "refused",
        "resumed",
        "retraction",
        "stop",
    }
    assert set() == expected - set(seen)

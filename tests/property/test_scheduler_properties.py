"""Any arrivals, aborts and failures in any order: the scheduler keeps its promises.

The state machine tries everything and shrinks what fails; the busy days are weighted
like a server's, so that retractions, hits and evictions happen all the time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.mem_cache import ChunkCache, MemoryManager, PrefixCache, RadixCache
from radixkv.scheduling import (
    RETRACTION_POLICIES,
    SCHEDULING_POLICIES,
    Estimate,
    Request,
    SamplingParams,
    SchedulerLimits,
)
from radixkv.scheduling.testing import (
    CheckedScheduler,
    SchedulerMachine,
    SchedulerOptions,
    serial_output,
)

VOCAB_SIZE = 3
page_sizes = st.sampled_from([1, 2, 3, 16])


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


def make_options(
    choose: Callable[[list[Any]], Any], *, overlap: bool
) -> SchedulerOptions:
    """Choose how a scheduler decides."""
    return {
        "overlap": overlap,
        "policy": choose(sorted(SCHEDULING_POLICIES)),
        "admission": choose(
            ["worst-case", Estimate(), Estimate(initial_ratio=0.01, min_ratio=0)]
        ),
        "retraction": choose(sorted(RETRACTION_POLICIES)),
        "preempts": choose([False, False, True]),
        "drafter": choose([None, None, RightOrWrong()]),
    }


class Machine(SchedulerMachine):
    """The exported state machine, with all that a scheduler can be told."""

    def make_cache(self, memory: MemoryManager) -> PrefixCache:
        if self.choose([False, False, True]):
            return ChunkCache(memory)
        return RadixCache(memory, partial_pages=self.choose([False, True]))

    def make_scheduler(
        self, cache: PrefixCache, limits: SchedulerLimits, overlap: bool
    ) -> CheckedScheduler:
        options = make_options(self.choose, overlap=overlap)
        return CheckedScheduler(cache, limits, **options)


Machine.TestCase.settings = settings(stateful_step_count=30)
TestScheduler = Machine.TestCase


class BusyDay:
    """A server under load, in a pool that may hold no more than its longest request."""

    def __init__(self, *, is_cached: bool, page_size: int, seed: int) -> None:
        random = self.random = Random(seed)
        self.longest = random.randint(3, 8 * page_size)
        self.num_pages = -(-self.longest // page_size) + random.choice([0, 1, 2, 4, 8])
        max_running = random.choice([1, 3, 5, 9])
        memory = MemoryManager(
            self.num_pages,
            page_size,
            max_num_requests=random.choice([2, 5, 9]),
            max_context_len=self.longest + random.choice([0, 3]),
        )
        self.checked = CheckedScheduler(
            RadixCache(memory) if is_cached else ChunkCache(memory),
            SchedulerLimits(
                max_running_requests=max_running,
                max_batched_tokens=max_running + random.choice([0, 1, 4, 50]),
                chunked_prefill_size=random.choice([1, 3, page_size, 100]),
                max_overtakes=random.choice([0, 1, 3, 256]),
                max_deferrals=random.choice([0, 1, 256]),
            ),
            **make_options(random.choice, overlap=random.random() < 0.5),
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
                    checked.fail(
                        is_received=random.random() < 0.5,
                        requeues=random.random() < 0.5,
                    )
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
        "requeued",
        "resumed",
        "retraction",
        "stop",
    }
    assert set() == expected - set(seen)

"""Whatever happens while a step is prepared ahead: the tokens are those of no overlap.

The engine runs as it does with its thread, but for the thread: the runner computes when
it is waited for, that is, after the next step has been scheduled, or before that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from contextlib import suppress
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)
from numpy.typing import NDArray

from radixkv.mem_cache import (
    BatchRefusedError,
    ChunkCache,
    LengthError,
    MemoryManager,
    PagesInUseError,
    PrefixCache,
    RadixCache,
)
from radixkv.scheduling import (
    Batch,
    Engine,
    Estimate,
    FinishReason,
    Request,
    RequestOutput,
    RequestStatus,
    SamplingParams,
    Scheduler,
    SchedulerLimits,
)
from radixkv.scheduling.engine import OnError
from radixkv.scheduling.testing import LabelRunner, serial_output

from .late_executor import LateExecutor, late_threads

FINISHED = RequestStatus.FINISHED
VOCAB_SIZE = 3
EOS_TOKEN_IDS = (2,)
PAGE_SIZES = [1, 2, 3, 16]
ON_ERROR: list[OnError] = ["end", "requeue", "raise"]
FAULTS = ["refused", "received", "nonsense", "interrupt"]


class FaultyRunner:
    """A `LabelRunner` whose steps fail now and then, each in its own way."""

    def __init__(self, cache: PrefixCache) -> None:
        self._labels = LabelRunner(cache, VOCAB_SIZE, overlap=True)
        self.fault: str | None = None
        self.failed: list[Batch] = []
        self.last: Batch | None = None

    def run(self, batch: Batch) -> NDArray[np.int32]:
        self.last = batch
        fault, self.fault = self.fault, None
        if fault is not None:
            self.failed.append(batch)
        if fault == "refused":
            raise BatchRefusedError(fault)
        if fault in ("received", "interrupt"):
            self._labels.worker.receive(batch.kv_cache_info)
            raise ArithmeticError if fault == "received" else KeyboardInterrupt
        tokens = self._labels.run(batch)
        return np.append(tokens, 0) if fault else tokens


class Recorder(Scheduler):
    """Remembers the last step that it made."""

    last: Batch | None = None

    def schedule(self) -> Batch | None:
        batch = super().schedule()
        self.last = batch or self.last
        return batch


class Life:
    """An engine, its clients, and what they were told.

    Attributes:
        seen: What happened, so that a test can show that it tries everything.
    """

    def __init__(
        self,
        *,
        is_cached: bool,
        num_pages: int,
        page_size: int,
        limits: SchedulerLimits,
        options: dict[str, Any],
        on_error: OnError,
        overlap: bool = True,
    ) -> None:
        self.page_size = page_size
        memory = MemoryManager(
            num_pages,
            page_size,
            max_num_requests=limits.max_running_requests + 2,
            max_context_len=10 * page_size,
        )
        # Starting inside a page, and moving pages, makes messages with page copies.
        self.cache: PrefixCache = (
            RadixCache(memory, partial_pages=True) if is_cached else ChunkCache(memory)
        )
        self.scheduler = Recorder(
            self.cache, limits, overlap=overlap, eos_token_ids=EOS_TOKEN_IDS, **options
        )
        self.runner = FaultyRunner(self.cache)
        # As often as it takes: then nobody ends for a failure.
        self.engine = Engine(
            self.scheduler, self.runner, on_error=on_error, max_requeues=10**6
        )
        self.executor = LateExecutor()
        self.requests: list[Request] = []
        self.streamed: dict[Request, list[int]] = {}
        self.ended: dict[Request, FinishReason] = {}
        self.may_end_early: set[Request] = set()
        self.seen: Counter[str] = Counter()

    def add(
        self, prompt: Sequence[int], params: SamplingParams, namespace: Hashable
    ) -> None:
        request = Request(len(self.requests), prompt, params, namespace=namespace)
        try:
            self.scheduler.add_request(request)
        except LengthError:
            return
        self.requests.append(request)
        self.streamed[request] = []

    def abort(self, number: int) -> None:
        if self.requests:
            request = self.requests[number % len(self.requests)]
            self.seen[f"abort with {request.num_in_flight} in flight"] += 1
            self.may_end_early.add(request)
            self.scheduler.abort(request.request_id)

    def resize(self, num_pages: int) -> None:
        """Change the pool, if what runs leaves room for that."""
        with suppress(PagesInUseError):
            self.cache.resize(num_pages)
            self.seen["resize"] += 1

    def step(self, fault: str | None, *, is_eager: bool, is_interrupted: bool) -> None:
        """Take a step, in which the runner may fail, or the wait be interrupted."""
        if not self.scheduler.has_requests:
            return
        num_retractions = self.scheduler.num_retractions
        self.executor.is_eager = is_eager
        self.executor.num_interrupts = int(is_interrupted)
        self.runner.fault = fault
        with late_threads(self.executor):
            try:
                report = self.engine.step()
            except KeyboardInterrupt:
                self.seen["interrupt"] += 1
                failed = self.runner.failed
                if failed and failed[0] not in self.scheduler.in_flight:
                    self.seen["interrupt in the runner"] += 1
                    self._check_requeued(failed.pop(0), KeyboardInterrupt)
            except (BatchRefusedError, ArithmeticError, LengthError) as error:
                assert self.engine.on_error == "raise"
                self._excuse(error)
            else:
                self._stream(report.outputs)
                if report.error is not None:
                    assert self.engine.on_error != "raise"
                    self._excuse(report.error)
        self.executor.num_interrupts = 0
        retracted = self.scheduler.num_retractions - num_retractions
        self.seen["retraction"] += retracted
        self.seen["ahead"] += self.scheduler.num_in_flight == 1

    def _excuse(self, error: Exception) -> None:
        """Whom the failed step computes ends; without its message, the next as well.

        Or they are queued again.
        """
        self.seen[type(error).__name__] += 1
        self.seen[f"on error: {self.engine.on_error}"] += 1
        lost = [self.runner.failed.pop(0)]
        if isinstance(error, BatchRefusedError):
            assert self.scheduler.last is not None
            lost.append(self.scheduler.last)
            num_copies = sum(batch.kv_cache_info.num_copies for batch in lost)
            self.seen["recalled copies"] += num_copies
        elif self.scheduler.last is not lost[0]:
            self.seen["next step goes on"] += 1
            assert self.scheduler.num_in_flight == 1
        if self.engine.on_error == "requeue":
            self._check_requeued(lost[0], type(error))
            return
        for batch in lost:
            self.may_end_early |= {entry.request for entry in batch.entries}
        for entry in lost[0].entries:
            # An interrupt in the step before has it queued again already.
            assert entry.request.status is FINISHED or entry.request.num_requeues
            assert entry.request.status is not RequestStatus.RUNNING

    def _check_requeued(self, batch: Batch, error: type[BaseException]) -> None:
        for entry in batch.entries:
            request = entry.request
            if request.status is FINISHED:
                assert self.engine.on_error != "requeue" or not request.error
                assert not isinstance(request.error, error)
            else:
                assert request.status is RequestStatus.WAITING
                assert request.num_requeues
                self.seen["requeued"] += 1
                self.seen["requeued later"] += request.num_in_flight

    def drain(self) -> None:
        for _ in range(20 * sum(r.max_kv_len for r in self.requests) + 20):
            if not self.scheduler.has_requests:
                break
            self.step(None, is_eager=False, is_interrupted=False)
            self.check()
        self.engine.close()
        self._check_idle()

    def check(self) -> None:
        self.cache.check_integrity()
        assert self.scheduler.num_in_flight <= 2
        for request in self.requests:
            assert (request.kv is not None) == (
                request.status is RequestStatus.RUNNING or request.num_in_flight > 0
            )
            if request.status is not FINISHED:
                assert self.streamed[request] == request.output_tokens

    def _check_idle(self) -> None:
        cache = self.cache
        assert not self.scheduler.has_requests
        assert (cache.held_size, cache.protected_size) == (0, 0)
        assert cache.stats().num_requests == 0
        assert set(self.requests) == set(self.ended)
        for request, reason in self.ended.items():
            expected = serial_output(
                request.prompt_tokens.tolist(), request.sampling_params
            )
            output = request.output_tokens
            assert self.streamed[request] == output
            assert (reason is FinishReason.ERROR) == (request.error is not None)
            if reason in (FinishReason.ABORT, FinishReason.ERROR):
                assert request in self.may_end_early
                assert expected[: len(output)] == output
            elif reason is FinishReason.REFUSED:
                assert self.seen["resize"]
                assert expected[: len(output)] == output
            else:
                assert expected == output
                self.seen[reason] += 1

    def _stream(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            assert output.request not in self.ended
            self.streamed[output.request] += output.tokens
            if output.finish_reason is not None:
                self.ended[output.request] = output.finish_reason


@st.composite
def limits(draw: st.DrawFn) -> SchedulerLimits:
    max_running = draw(st.integers(1, 5))
    return SchedulerLimits(
        max_running_requests=max_running,
        max_batched_tokens=max_running + draw(st.sampled_from([0, 1, 7, 100])),
        chunked_prefill_size=draw(st.sampled_from([1, 2, 5, 33])),
        max_deferrals=draw(st.sampled_from([0, 1, 256])),
    )


def gambler() -> Estimate:
    """Set next to nothing aside, so that there are retractions."""
    return Estimate(initial_ratio=0.01, min_ratio=0)


class EngineMachine(RuleBasedStateMachine):
    """What clients do between steps, and what befalls a step."""

    @initialize(
        is_cached=st.booleans() | st.just(True),
        num_pages=st.integers(1, 12),
        page_size=st.sampled_from(PAGE_SIZES),
        limits=limits(),
        gambles=st.booleans(),
        preempts=st.booleans(),
        on_error=st.sampled_from(ON_ERROR),
        overlap=st.sampled_from([True, True, False]),
    )
    def start(
        self,
        is_cached: bool,
        num_pages: int,
        page_size: int,
        limits: SchedulerLimits,
        gambles: bool,
        preempts: bool,
        on_error: OnError,
        overlap: bool,
    ) -> None:
        self.num_pages = num_pages
        self.life = Life(
            is_cached=is_cached,
            num_pages=num_pages,
            page_size=page_size,
            limits=limits,
            options={
                "admission": gambler() if gambles else "worst-case",
                "preempts": preempts,
            },
            on_error=on_error,
            overlap=overlap,
        )

    @rule(
        letters=st.lists(st.integers(0, 1), min_size=1, max_size=4),
        tail=st.lists(st.integers(0, 1), max_size=3),
        max_new_tokens=st.sampled_from([1, 2, 3, 5, 9, 18]),
        ignore_eos=st.booleans(),
        namespace=st.sampled_from([None, None, "tenant"]),
    )
    def add(
        self,
        letters: list[int],
        tail: list[int],
        max_new_tokens: int,
        ignore_eos: bool,
        namespace: Hashable,
    ) -> None:
        prompt = [x for x in letters for _ in range(self.life.page_size)] + tail
        params = SamplingParams(max_new_tokens, ignore_eos=ignore_eos)
        self.life.add(prompt, params, namespace)

    @rule(number=st.integers(0, 20))
    def abort(self, number: int) -> None:
        self.life.abort(number)

    @rule(
        count=st.integers(1, 8),
        fault=st.none() | st.none() | st.sampled_from(FAULTS),
        is_eager=st.booleans(),
        is_interrupted=st.sampled_from([False, False, False, True]),
    )
    def steps(
        self, count: int, fault: str | None, is_eager: bool, is_interrupted: bool
    ) -> None:
        """Take steps, the last of which may go wrong."""
        for _ in range(count - 1):
            self.life.step(None, is_eager=is_eager, is_interrupted=False)
            self.life.check()
        self.life.step(fault, is_eager=is_eager, is_interrupted=is_interrupted)

    @rule(num_tokens=st.integers(0, 40))
    def evict(self, num_tokens: int) -> None:
        self.life.cache.evict(num_tokens)

    @rule(num_pages=st.integers(1, 12))
    def resize(self, num_pages: int) -> None:
        self.life.resize(min(num_pages, self.num_pages))

    @rule()
    def close(self) -> None:
        """End the thread, in the middle of everything."""
        self.life.engine.close()

    @invariant()
    def check(self) -> None:
        if hasattr(self, "life"):
            self.life.check()

    def teardown(self) -> None:
        if hasattr(self, "life"):
            self.life.drain()


EngineMachine.TestCase.settings = settings(stateful_step_count=25)
TestOverlap = EngineMachine.TestCase


def live(
    page_size: int,
    seed: int,
    fault_rate: float = 0.1,
    **options: Any,  # noqa: ANN401 - those of Life
) -> Counter[str]:
    """A server under load, in a pool not much larger than its longest request."""
    random = Random(seed)
    options.setdefault("on_error", random.choice(ON_ERROR))
    longest = random.randint(3, 5 * page_size)
    max_running = random.choice([1, 3, 5])
    num_pages = -(-longest // page_size) + random.choice([0, 1, 2, 6])
    life = Life(
        is_cached=random.random() < 0.8,
        num_pages=num_pages,
        page_size=page_size,
        limits=SchedulerLimits(
            max_running_requests=max_running,
            max_batched_tokens=max_running + random.choice([0, 4, 50]),
            chunked_prefill_size=random.choice([1, page_size, 100]),
        ),
        options={
            "admission": random.choice(["worst-case", gambler()]),
            **options.pop("scheduler", {}),
        },
        **options,
    )
    for _ in range(20):
        if random.random() < 0.2:
            life.resize(random.randint(1, num_pages))
        for _ in range(random.choice([0, 0, 1, 4])):
            prompt = [random.randint(0, 1)] * random.randint(1, max(1, longest // 2))
            room = longest - len(prompt) + 1
            params = SamplingParams(
                random.randint(1, room), ignore_eos=random.random() < 0.8
            )
            life.add(prompt, params, random.choice([None, None, "tenant"]))
        if random.random() < 0.1:
            life.abort(random.randrange(10**6))
        fault = random.choice(FAULTS) if random.random() < fault_rate else None
        is_interrupted = random.random() < 0.1
        life.step(fault, is_eager=random.random() < 0.3, is_interrupted=is_interrupted)
        if is_interrupted:
            life.abort(random.randrange(10**6))
        life.check()
    life.drain()
    return life.seen


@given(page_size=st.sampled_from(PAGE_SIZES), seed=st.integers(0, 2**32 - 1))
def test_a_busy_server_that_overlaps_ends_well(page_size: int, seed: int) -> None:
    live(page_size, seed)


class Guesses:
    """A drafter that is right now and then: two tokens of three are likely."""

    def propose(self, request: Request, max_tokens: int) -> tuple[int, ...]:
        return (request.num_tokens % 2, 0, 1, 0)[:max_tokens]


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@given(page_size=st.sampled_from(PAGE_SIZES), seed=st.integers(0, 2**32 - 1))
def test_whatever_fails_those_that_are_queued_again_have_the_same_tokens(
    overlap: bool, drafts: bool, page_size: int, seed: int
) -> None:
    """Who was not aborted or refused has the tokens of a life without failures."""
    live(
        page_size,
        seed,
        fault_rate=0.4,
        on_error="requeue",
        overlap=overlap,
        scheduler={"drafter": Guesses()} if drafts else {},
    )


def test_busy_servers_meet_everything_that_can_happen() -> None:
    seen: Counter[str] = Counter()
    for seed in range(32):
        seen += live(PAGE_SIZES[seed % 4], seed)

    expected = {
        "abort with 0 in flight",
        "abort with 1 in flight",
        "abort with 2 in flight",
        "ahead",
        "ArithmeticError",
        "BatchRefusedError",
        "interrupt",
        "interrupt in the runner",
        "length",
        "LengthError",
        "next step goes on",
        *(f"on error: {each}" for each in ON_ERROR),
        "requeued",
        "requeued later",
        "recalled copies",
        "retraction",
        "stop",
    }
    assert set() == expected - set(seen)

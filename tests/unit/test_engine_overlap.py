"""Engine with overlap: a real thread, its end, and what a failure in it does."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterable, Iterator
from itertools import count

import numpy as np
import pytest
from numpy.typing import NDArray

from radixkv.mem_cache import (
    BatchRefusedError,
    KVCacheInfo,
    LengthError,
    MemoryManager,
    PolicyError,
    RadixCache,
)
from radixkv.scheduling import (
    Batch,
    Engine,
    FinishReason,
    NullRunner,
    QueueView,
    Request,
    RequestOutput,
    SamplingParams,
    Scheduler,
    SchedulerLimits,
)
from radixkv.scheduling.engine import OnError
from radixkv.scheduling.testing import LabelRunner

from ..property.late_executor import LateExecutor, late_threads

TIMEOUT_S = 30
"""So that a test that should fail does not hang; never waited for otherwise."""


def runner_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("radixkv-runner")]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    gc.collect()
    for thread in runner_threads():
        thread.join(TIMEOUT_S)
    assert [] == runner_threads()


class AnnouncingScheduler(Scheduler):
    """Tells when it has scheduled, or tried to, while a step was in flight."""

    has_looked_ahead: threading.Event

    def schedule(self) -> Batch | None:
        is_ahead = self.num_in_flight > 0
        batch = super().schedule()
        if is_ahead:
            self.has_looked_ahead.set()
        return batch


class PatientRunner:
    """Computes a step only once the scheduler has looked ahead, in another thread."""

    def __init__(self, scheduler: AnnouncingScheduler) -> None:
        self._may_run = scheduler.has_looked_ahead = threading.Event()
        self._null = NullRunner(99)
        self.threads: list[threading.Thread] = []

    def run(self, batch: Batch) -> NDArray[np.int32]:
        assert self._may_run.wait(TIMEOUT_S)
        self._may_run.clear()
        self.threads.append(threading.current_thread())
        return self._null.run(batch)


class NullRunnerThatCounts(NullRunner):
    """Counts its steps."""

    def __init__(self) -> None:
        super().__init__(99)
        self.num_steps = 0

    def run(self, batch: Batch) -> NDArray[np.int32]:
        self.num_steps += 1
        return super().run(batch)


class FailingRunner:
    """Fails in some steps, before or after it has received the message."""

    def __init__(self, cache: RadixCache, failures: dict[int, BaseException]) -> None:
        self._failures = failures
        self._steps = count()
        self._labels = LabelRunner(cache, 99, overlap=True)

    def run(self, batch: Batch) -> NDArray[np.int32]:
        failure = self._failures.get(next(self._steps))
        if failure is None:
            return self._labels.run(batch)
        if not isinstance(failure, BatchRefusedError):
            self._labels.worker.receive(batch.kv_cache_info)
        raise failure


def make_cache(num_pages: int = 32, page_size: int = 4) -> RadixCache:
    memory = MemoryManager(num_pages, page_size, max_num_requests=8, max_context_len=64)
    return RadixCache(memory)


def make(
    failures: dict[int, BaseException] | None = None,
    limits: SchedulerLimits | None = None,
    on_error: OnError = "raise",
) -> Engine:
    cache = make_cache()
    scheduler = Scheduler(cache, limits, overlap=True)
    runner = FailingRunner(cache, failures or {})
    return Engine(scheduler, runner, on_error=on_error)


def request(name: str, num_tokens: int = 5, max_new_tokens: int = 6) -> Request:
    first = 1000 * ord(name)
    tokens = range(first, first + num_tokens)
    return Request(name, tokens, SamplingParams(max_new_tokens))


def add(engine: Engine, *args: str | int) -> Request:
    added = request(*args)  # type: ignore[arg-type]
    engine.scheduler.add_request(added)
    return added


def tokens_alone(*requests: Request) -> list[list[int]]:
    """What the requests generate without any overlap."""
    alone = [Request("x", r.prompt_tokens, r.sampling_params) for r in requests]
    for each in alone:
        Engine(Scheduler(make_cache()), NullRunner(99)).generate([each])
    return [each.output_tokens for each in alone]


def outputs_of(*requests: Request) -> list[list[int]]:
    return [each.output_tokens for each in requests]


def finish(engine: Engine) -> None:
    for _ in engine.run():
        engine.scheduler.cache.check_integrity()
    cache = engine.scheduler.cache
    assert (cache.held_size, cache.protected_size) == (0, 0)


# The thread -------------------------------------------------------------------


def test_a_step_is_scheduled_while_the_runner_computes_another_one() -> None:
    scheduler = AnnouncingScheduler(
        make_cache(), SchedulerLimits(4, 6, 4), overlap=True
    )
    runner = PatientRunner(scheduler)
    requests = [request("a", 9, 7), request("b", 3, 12), request("c", 5, 1)]

    Engine(scheduler, runner).generate(requests)

    assert tokens_alone(*requests) == outputs_of(*requests)
    assert 1 == len(set(runner.threads))
    assert threading.current_thread() not in runner.threads


def test_without_overlap_there_is_no_thread() -> None:
    class Asks:
        def run(self, batch: Batch) -> NDArray[np.int32]:
            seen.append(threading.current_thread())
            return NullRunner(99).run(batch)

    seen: list[threading.Thread] = []
    Engine(Scheduler(make_cache()), Asks()).generate([request("a")])

    assert {threading.current_thread()} == set(seen)


def fail_inside(engine: Engine) -> None:
    with engine:
        engine.step()
        raise ZeroDivisionError


@pytest.mark.parametrize("how", ["with", "close", "break", "error", "forget"])
def test_the_thread_ends_however_the_engine_is_left(how: str) -> None:
    engine = make()
    add(engine, "a")
    if how == "with":
        with engine as same:
            assert same is engine
            engine.step()
            assert runner_threads()
    elif how == "close":
        engine.step()
        engine.close()
        engine.close()
    elif how == "break":
        for _ in engine.run():
            break
    elif how == "error":
        with pytest.raises(ZeroDivisionError):
            fail_inside(engine)
    else:
        engine.step()
        del engine
        gc.collect()
        for thread in runner_threads():
            thread.join(TIMEOUT_S)

    assert [] == runner_threads()


def test_an_engine_that_was_closed_goes_on_where_it_was() -> None:
    engine = make()
    a, b = add(engine, "a", 5, 9), add(engine, "b", 9, 4)
    for _ in range(4):
        engine.step()
        engine.close()

    finish(engine)

    assert tokens_alone(a, b) == outputs_of(a, b)


def test_the_runner_is_idle_after_close() -> None:
    entered, left = threading.Event(), threading.Event()

    class Slow:
        def run(self, batch: Batch) -> NDArray[np.int32]:
            entered.set()
            assert closing.wait(TIMEOUT_S)
            left.set()
            return NullRunner(99).run(batch)

    closing = threading.Event()
    closing.set()
    engine = Engine(Scheduler(make_cache(), overlap=True), Slow())
    add(engine, "a")
    engine.step()
    closing.clear()
    timer = threading.Timer(0, closing.set)
    timer.start()
    engine.close()

    assert entered.is_set()
    assert left.is_set()
    assert [] == runner_threads()


# Failures ---------------------------------------------------------------------


@pytest.mark.parametrize("on_error", ["end", "raise"])
def test_a_failed_step_ends_its_requests_and_the_next_one_reaches_the_runner(
    on_error: OnError,
) -> None:
    # The second step decodes for a; before it is known to have failed, the third is
    # prepared, for a and b.
    failure = RuntimeError("boom")
    engine = make({1: failure}, on_error=on_error)
    a = add(engine, "a", 5, 20)
    engine.step()
    b = add(engine, "b", 9, 4)

    if on_error == "raise":
        with pytest.raises(RuntimeError):
            engine.step()
    else:
        assert [RequestOutput(a, (), FinishReason.ERROR, failure)] == (
            engine.step().outputs
        )

    assert (a.finish_reason, b.finish_reason) == (FinishReason.ERROR, None)
    assert a.error is failure
    assert a.kv is not None  # the next step writes there still
    finish(engine)
    assert a.kv is None
    assert tokens_alone(b) == outputs_of(b)


def test_the_ends_of_a_failed_step_are_told_once_with_the_next_report() -> None:
    engine = make({1: RuntimeError("boom")})
    add(engine, "a", 5, 9)
    add(engine, "b", 5, 9)

    ended = []
    while engine.scheduler.has_requests:
        try:
            outputs = engine.step().outputs
        except RuntimeError:
            continue
        ended += [o.request.request_id for o in outputs if o.finish_reason]

    assert ["a", "b"] == ended
    engine.close()


def test_a_refused_batch_takes_the_next_one_with_it_the_newest_first() -> None:
    engine = make({1: BatchRefusedError("no")})
    cache = engine.scheduler.cache
    recalled: list[KVCacheInfo] = []
    plain = cache.recall
    a = add(engine, "a", 5, 20)
    engine.step()
    b = add(engine, "b", 9, 4)
    made: list[Batch] = []
    schedule = engine.scheduler.schedule

    def remember(info: KVCacheInfo) -> None:
        recalled.append(info)
        plain(info)

    def make_one() -> Batch | None:
        batch = schedule()
        if batch is not None:
            made.append(batch)
        return batch

    cache.recall = remember  # type: ignore[method-assign]
    engine.scheduler.schedule = make_one  # type: ignore[method-assign]
    with pytest.raises(BatchRefusedError):
        engine.step()
    del cache.recall, engine.scheduler.schedule

    assert [FinishReason.ERROR] * 2 == [a.finish_reason, b.finish_reason]
    assert made[-1].kv_cache_info is recalled[0]
    assert 2 == len(recalled)
    assert 0 == engine.scheduler.num_in_flight
    c = add(engine, "c", 9, 4)  # the runner follows from here
    finish(engine)
    assert tokens_alone(c) == outputs_of(c)


def test_an_answer_that_is_no_tokens_is_a_failure_of_that_step_only() -> None:
    class Chatty:
        def run(self, batch: Batch) -> NDArray[np.int32]:
            tokens = NullRunner(99).run(batch)
            return np.append(tokens, 1) if next(steps) == 1 else tokens

    steps = count()
    engine = Engine(Scheduler(make_cache(), overlap=True), Chatty())
    a = add(engine, "a")
    engine.step()
    report = engine.step()
    assert isinstance(report.error, LengthError)
    assert (a.finish_reason, a.error) == (FinishReason.ERROR, report.error)
    b = add(engine, "b")
    finish(engine)
    assert tokens_alone(b) == outputs_of(b)


def test_a_failure_to_schedule_leaves_the_step_in_flight_alone() -> None:
    class Refuses:
        fails = False

        def order(self, queue: QueueView) -> Iterable[Request]:
            if self.fails:
                raise ArithmeticError
            return list(queue)

    policy = Refuses()
    cache = make_cache()
    scheduler = Scheduler(cache, policy=policy, overlap=True)
    with Engine(scheduler, LabelRunner(cache, 99, overlap=True)) as engine:
        a = add(engine, "a")
        engine.step()
        b = add(engine, "b")
        policy.fails = True
        for _ in range(3):
            with pytest.raises(PolicyError):
                engine.step()
        policy.fails = False
        finish(engine)

    assert tokens_alone(a, b) == outputs_of(a, b)


def test_an_interrupt_while_the_engine_waits_loses_nothing() -> None:
    engine = make()
    executor = LateExecutor()
    with late_threads(executor):
        a, b = add(engine, "a"), add(engine, "b", 9, 4)
        for _ in range(3):
            executor.num_interrupts = 1
            with pytest.raises(KeyboardInterrupt):
                engine.step()
            assert 2 == engine.scheduler.num_in_flight
            engine.step()
        finish(engine)

    assert tokens_alone(a, b) == outputs_of(a, b)


def test_an_abort_between_two_steps_keeps_the_pages_until_the_runner_is_done() -> None:
    engine = make()
    a, b = add(engine, "a", 9, 9), add(engine, "b", 5, 4)
    engine.step()  # the runner is at work on the second step now
    engine.scheduler.abort("a")
    assert a.kv is not None

    outputs = engine.step().outputs

    assert a.kv is None
    ends = {o.request: o.finish_reason for o in outputs}
    assert FinishReason.ABORT is ends[a]
    finish(engine)
    assert tokens_alone(b) == outputs_of(b)


# Times ------------------------------------------------------------------------


class Clock:
    """A clock that stands still unless somebody is at work."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        self.now += seconds


def make_timed(
    clock: Clock, schedule_s: float, run_s: float
) -> tuple[Engine, LateExecutor]:
    class Slow(Scheduler):
        def schedule(self) -> Batch | None:
            clock.work(schedule_s)
            return super().schedule()

        def update(self, *args: object) -> list:  # type: ignore[type-arg]
            clock.work(100)
            return super().update(*args)  # type: ignore[arg-type]

    class Runs:
        def run(self, batch: Batch) -> NDArray[np.int32]:
            clock.work(run_s)
            return NullRunner(99).run(batch)

    engine = Engine(Slow(make_cache(), overlap=True), Runs(), clock=clock)
    return engine, LateExecutor()


@pytest.mark.parametrize(
    ("is_eager", "wait_s"), [(False, [10, 10, 10]), (True, [10, 0, 0])]
)
def test_a_report_adds_up_to_the_time_that_the_call_took(
    is_eager: bool, wait_s: list[int]
) -> None:
    """The runner computes beside nothing here, but before or after scheduling."""
    clock = Clock()
    engine, executor = make_timed(clock, schedule_s=1, run_s=10)
    executor.is_eager = is_eager
    add(engine, "a", 5, 9)
    reports = []
    with late_threads(executor):
        for _ in wait_s:
            begin = clock.now
            reports.append(engine.step())
            assert clock.now - begin == reports[-1].total_s

    assert wait_s == [report.wait_s for report in reports]
    assert {(0, 10)} == {(report.hidden_s, report.run_s) for report in reports}


def test_the_runner_has_the_next_step_before_the_caller_has_the_report() -> None:
    engine = make()
    executor = LateExecutor()
    executor.is_eager = True
    runner = engine.runner = NullRunnerThatCounts()
    add(engine, "a", 5, 9)
    with late_threads(executor):
        engine.step()
        assert (2, 2) == (runner.num_steps, executor.num_begins)
        engine.step()
        assert (3, 3) == (runner.num_steps, executor.num_begins)


def test_a_report_tells_what_of_scheduling_the_runner_hid() -> None:
    """The runner's thread begins at once, so the whole next schedule is hidden."""
    clock = Clock()

    class Scheduled(Scheduler):
        def schedule(self) -> Batch | None:
            if self.num_in_flight:
                assert running.wait(TIMEOUT_S)
                clock.work(3)
                scheduled.set()
            else:
                clock.work(1)
            return super().schedule()

    class Runs:
        def run(self, batch: Batch) -> NDArray[np.int32]:
            running.set()
            assert scheduled.wait(TIMEOUT_S)
            running.clear()
            scheduled.clear()
            clock.work(7)
            return NullRunner(99).run(batch)

    running, scheduled = threading.Event(), threading.Event()
    engine = Engine(Scheduled(make_cache(), overlap=True), Runs(), clock=clock)
    add(engine, "a", 5, 3)

    reports = list(engine.run())

    # The first call schedules two steps, and only the second of them beside a run.
    expected = [(4.0, 3.0, 10.0), (3.0, 3.0, 10.0), (3.0, 3.0, 10.0)]
    actual = [(each.schedule_s, each.hidden_s, each.run_s) for each in reports]
    assert expected == actual


def test_nothing_is_hidden_without_overlap() -> None:
    engine = Engine(Scheduler(make_cache()), NullRunner(99))
    add(engine, "a")

    assert {0.0} == {report.hidden_s for report in engine.run()}

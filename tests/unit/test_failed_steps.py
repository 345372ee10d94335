"""Steps that fail or are interrupted: who ends, who goes on, and what is told."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from radixkv.mem_cache import (
    BatchRefusedError,
    ConfigError,
    MemoryManager,
    RadixCache,
    RequestStateError,
)
from radixkv.scheduling import (
    Batch,
    Engine,
    FinishReason,
    NullRunner,
    QueueView,
    Request,
    SamplingParams,
    Scheduler,
    SchedulerLimits,
)
from radixkv.scheduling.engine import OnError
from radixkv.scheduling.testing import LabelRunner

from ..property.late_executor import LateExecutor, late_threads

TIMEOUT_S = 30
OVERLAP = pytest.mark.parametrize("overlap", [False, True])


class Runner:
    """A `LabelRunner` that something befalls before some of its steps."""

    def __init__(self, cache: RadixCache, *, overlap: bool) -> None:
        self._labels = LabelRunner(cache, 99, overlap=overlap)
        self.befalls: Callable[[int], object] = lambda number: None
        self.num_steps = 0

    def run(self, batch: Batch) -> NDArray[np.int32]:
        self.num_steps += 1
        try:
            self.befalls(self.num_steps)
        except BatchRefusedError:
            raise
        except BaseException:
            self._labels.worker.receive(batch.kv_cache_info)
            raise
        return self._labels.run(batch)


def make(
    *,
    overlap: bool = False,
    scheduler: dict[str, Any] | None = None,
    **options: Any,  # noqa: ANN401 - those of Engine
) -> tuple[Engine, Runner]:
    memory = MemoryManager(64, 4, max_num_requests=8, max_context_len=64)
    cache = RadixCache(memory)
    limits = SchedulerLimits(8, 24, 8)
    runner = Runner(cache, overlap=overlap)
    planner = Scheduler(cache, limits, overlap=overlap, **(scheduler or {}))
    return Engine(planner, runner, **options), runner


def requests_of(names: str = "abc") -> list[Request]:
    return [
        Request(name, range(ord(name), ord(name) + 11 + i), SamplingParams(6))
        for i, name in enumerate(names)
    ]


def expected_of(requests: Iterable[Request]) -> list[list[int]]:
    """What each generates alone, without failures."""
    same = [Request(0, r.prompt_tokens, r.sampling_params) for r in requests]
    for each in same:
        memory = MemoryManager(64, 4, max_num_requests=8, max_context_len=64)
        Engine(Scheduler(RadixCache(memory)), NullRunner(99)).generate([each])
    return [each.output_tokens for each in same]


def outputs_of(requests: Iterable[Request]) -> list[list[int]]:
    return [request.output_tokens for request in requests]


def check_idle(engine: Engine) -> None:
    cache = engine.scheduler.cache
    cache.check_integrity()
    assert not engine.scheduler.has_requests
    assert (0, 0) == (cache.held_size, cache.protected_size)
    assert 0 == cache.stats().num_requests


def fail(
    *numbers: int, error: type[BaseException] = ArithmeticError
) -> Callable[[int], None]:
    def befalls(number: int) -> None:
        if number in numbers:
            raise error(f"step {number}")

    return befalls


# Failures -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"on_error": "ignore"},
        {"on_error": None},
        {"max_requeues": -1},
        {"max_requeues": 1.5},
    ],
)
def test_options_that_are_none_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        make(**options)


@OVERLAP
@pytest.mark.parametrize("error", [ArithmeticError, BatchRefusedError])
def test_others_go_on_in_a_stream(overlap: bool, error: type[Exception]) -> None:
    engine, runner = make(overlap=overlap)
    first, later = requests_of("ab"), requests_of("xy")
    runner.befalls = fail(3, error=error)
    outputs = []
    for output in engine.stream(first):
        outputs.append(output)
        if runner.num_steps >= 3 and not later[0].arrival + 1:
            for request in later:
                engine.scheduler.add_request(request)

    assert [FinishReason.ERROR] * 2 == [request.finish_reason for request in first]
    assert {error} == {type(request.error) for request in first}
    # Without the message, the next step is lost as well if there is one.
    is_lost = overlap and error is BatchRefusedError
    ends = [output for output in outputs if output.finish_reason == "error"]
    assert first + later * is_lost == [output.request for output in ends]
    assert {first[0].error} == {output.error for output in ends}
    if not is_lost:
        assert expected_of(later) == outputs_of(later)
    check_idle(engine)


@dataclass
class WorkerError(Exception):
    """It compares by its fields, so it has no hash."""

    text: str


@OVERLAP
def test_an_error_without_a_hash_ends_its_requests_as_any_other(overlap: bool) -> None:
    engine, runner = make(overlap=overlap)
    requests = requests_of()
    runner.befalls = fail(2, error=WorkerError)
    for request in requests:
        engine.scheduler.add_request(request)
    errors = [report.error for report in engine.run()]

    assert WorkerError("step 2") in errors
    assert {FinishReason.ERROR} == {request.finish_reason for request in requests}
    check_idle(engine)


class Lazy:
    """An array that is computed when somebody reads it, on a device that has failed."""

    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def __array__(self, *args: object, **kwargs: object) -> NDArray[np.int32]:
        raise self.error("device failed")


@OVERLAP
@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_an_answer_that_cannot_be_read_is_a_failed_step(
    overlap: bool, error: type[Exception]
) -> None:
    engine, runner = make(overlap=overlap)
    requests = requests_of()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "run", lambda batch: Lazy(error))
        for request in requests:
            engine.scheduler.add_request(request)
        errors = [report.error for report in engine.run()]

    assert any("device failed" in str(error) for error in errors)
    assert {FinishReason.ERROR} == {request.finish_reason for request in requests}
    check_idle(engine)


@OVERLAP
@pytest.mark.parametrize("error", [ArithmeticError, BatchRefusedError])
@pytest.mark.parametrize("number", range(1, 8))
def test_who_is_queued_again_has_the_same_tokens(
    overlap: bool, error: type[Exception], number: int
) -> None:
    engine, runner = make(overlap=overlap, on_error="requeue", max_requeues=1)
    requests = requests_of()
    runner.befalls = fail(number, error=error)

    outputs = list(engine.stream(requests))

    assert expected_of(requests) == outputs_of(requests)
    assert 0 < sum(request.usage.num_requeues for request in requests)
    # Otherwise, no step of theirs would be prepared ahead any more.
    assert {0} == {request.num_pending for request in requests}
    assert {None} == {output.error for output in outputs}
    for request in requests:
        told = [output.tokens for output in outputs if output.request is request]
        assert request.output_tokens == [token for part in told for token in part]
    check_idle(engine)


@OVERLAP
@pytest.mark.parametrize("max_requeues", [0, 1, 3])
def test_who_gets_nowhere_ends_after_all(overlap: bool, max_requeues: int) -> None:
    engine, runner = make(
        overlap=overlap, on_error="requeue", max_requeues=max_requeues
    )
    runner.befalls = fail(*range(1, 100))

    (request,) = engine.generate(requests_of("a"))

    assert FinishReason.ERROR is request.finish_reason
    assert isinstance(request.error, ArithmeticError)
    assert max_requeues == request.num_requeues
    assert max_requeues + 1 <= runner.num_steps <= 2 * (max_requeues + 1)
    check_idle(engine)


def test_a_new_token_is_a_new_start() -> None:
    """Each step but the first ones fails once: that is no way to get nowhere."""
    engine, runner = make(on_error="requeue", max_requeues=1)
    runner.befalls = fail(*range(4, 100, 2))
    requests = requests_of("a")

    engine.generate(requests)

    assert expected_of(requests) == outputs_of(requests)
    assert requests[0].num_requeues > 2


def test_what_was_computed_before_is_found_again() -> None:
    engine, runner = make(on_error="requeue")
    runner.befalls = fail(4)
    (request,) = engine.generate(requests_of("a"))

    usage = request.usage
    # Chunks of 8 and 3, and a token; these 12 positions are whole pages.
    assert (1, 0, 11 + 5) == (
        usage.num_requeues,
        usage.num_cached_tokens,
        usage.num_computed_tokens,
    )
    stats = engine.scheduler.cache.stats()
    assert (11, 1) == (stats.num_prompt_tokens, stats.num_resumed_requests)
    assert 0 == engine.scheduler.num_retractions


@OVERLAP
def test_an_abort_of_who_is_to_be_queued_again_ends_it(overlap: bool) -> None:
    engine, runner = make(overlap=overlap, on_error="requeue")
    runner.befalls = fail(2)
    a, b = requests_of("ab")
    for request in (a, b):
        engine.scheduler.add_request(request)
    engine.step()
    engine.step()
    assert {"waiting"} == {a.status, b.status}
    assert overlap == bool(a.num_in_flight)
    assert 2 == engine.scheduler.num_waiting

    engine.scheduler.abort("a")
    outputs = [output for report in engine.run() for output in report.outputs]

    ends = [(o.request, o.finish_reason) for o in outputs if o.finish_reason]
    assert [(a, FinishReason.ABORT), (b, FinishReason.LENGTH)] == ends
    assert expected_of([b]) == outputs_of([b])
    check_idle(engine)


@OVERLAP
def test_a_runner_that_failed_before_close_is_told_of_afterwards(overlap: bool) -> None:
    engine, runner = make(overlap=overlap)
    runner.befalls = fail(2)
    (request,) = requests_of("a")
    engine.scheduler.add_request(request)
    engine.step()  # with overlap, the second step is in the runner's hands
    engine.close()
    engine.close()
    assert request.finish_reason is None

    report = engine.step()

    assert isinstance(report.error, ArithmeticError)
    assert [request] == [output.request for output in report.outputs]
    assert FinishReason.ERROR is request.finish_reason
    run_on(engine)
    check_idle(engine)


@OVERLAP
def test_an_error_does_not_keep_what_its_functions_had_in_hand(overlap: bool) -> None:
    class Large:
        pass

    def befalls(number: int) -> None:
        activations = Large()
        alive.append(weakref.ref(activations))
        raise MemoryError("no room")

    alive: list[weakref.ref[Large]] = []
    engine, runner = make(overlap=overlap)
    runner.befalls = befalls
    (request,) = requests_of("a")
    gc.collect()
    gc.disable()
    try:
        engine.generate([request])
        assert {None} == {each() for each in alive}
    finally:
        gc.enable()

    assert isinstance(request.error, MemoryError)
    assert request.error.__traceback__ is not None  # where it came from, it says


# Interrupts ---------------------------------------------------------------------


def run_on(engine: Engine) -> tuple[int, list[Any]]:
    """Step to the end, whatever interrupts; how often that was, and what was told."""
    num_interrupts = 0
    outputs = []
    while engine.scheduler.has_requests:
        try:
            outputs += engine.step().outputs
        except KeyboardInterrupt:
            num_interrupts += 1
            engine.scheduler.cache.check_integrity()
    engine.close()
    return num_interrupts, outputs


@OVERLAP
@pytest.mark.parametrize("on_error", ["end", "requeue", "raise"])
@pytest.mark.parametrize("number", range(1, 8))
def test_an_interrupt_in_the_runner_ends_nobody(
    overlap: bool, on_error: OnError, number: int
) -> None:
    engine, runner = make(overlap=overlap, on_error=on_error, max_requeues=0)
    requests = requests_of()
    for request in requests:
        engine.scheduler.add_request(request)
    runner.befalls = fail(number, number + 1, error=KeyboardInterrupt)

    num_interrupts, outputs = run_on(engine)

    assert 2 == num_interrupts
    assert expected_of(requests) == outputs_of(requests)
    told = {request: [] for request in requests}  # type: ignore[var-annotated]
    for output in outputs:
        told[output.request] += output.tokens
    assert outputs_of(requests) == list(told.values())
    check_idle(engine)


class LooksAhead(Scheduler):
    """Tells when it has looked ahead."""

    has_looked_ahead: threading.Event

    def schedule(self) -> Batch | None:
        batch = super().schedule()
        if self.num_in_flight == 2:
            self.has_looked_ahead.set()
        return batch


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """A process that was started in the background ignores interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@OVERLAP
@pytest.mark.usefixtures("_interruptible")
def test_a_real_signal_in_the_runner_ends_nobody(overlap: bool) -> None:
    """Python hands it to the main thread, whichever raised it."""
    memory = MemoryManager(64, 4, max_num_requests=8, max_context_len=64)
    cache = RadixCache(memory)
    scheduler = LooksAhead(cache, SchedulerLimits(8, 24, 8), overlap=overlap)
    has_looked = scheduler.has_looked_ahead = threading.Event()

    def befalls(number: int) -> None:
        if number == 3:
            # Not in the middle of `schedule`: that is another test's affair.
            assert not overlap or has_looked.wait(TIMEOUT_S)
            signal.raise_signal(signal.SIGINT)
        has_looked.clear()

    runner = Runner(cache, overlap=overlap)
    runner.befalls = befalls
    engine = Engine(scheduler, runner)
    requests = requests_of()
    for request in requests:
        scheduler.add_request(request)

    num_interrupts, _ = run_on(engine)

    assert 1 == num_interrupts
    assert expected_of(requests) == outputs_of(requests)
    check_idle(engine)


@OVERLAP
@pytest.mark.usefixtures("_interruptible")
def test_a_real_signal_in_the_middle_of_schedule_ends_the_use_of_the_scheduler(
    overlap: bool,
) -> None:
    class Interrupted:
        def order(self, queue: QueueView) -> Iterable[Request]:
            if runner.num_steps:
                signal.raise_signal(signal.SIGINT)
            return list(queue)

    engine, runner = make(overlap=overlap, scheduler={"policy": Interrupted()})
    first, second = requests_of("ab")
    engine.scheduler.add_request(first)
    engine.step()
    engine.scheduler.add_request(second)

    with pytest.raises(KeyboardInterrupt):
        engine.step()

    with pytest.raises(RequestStateError, match="cut a call of this scheduler short"):
        engine.step()
    engine.close()
    engine.scheduler.cache.check_integrity()


class Interrupter:
    """Raises a KeyboardInterrupt before one instruction of the engine's own code."""

    FILES = ("scheduling/engine.py", "scheduling/handed_over.py")

    def __init__(self, number: int, *, but: tuple[str, ...]) -> None:
        self.number = number
        self._but = but

    def __call__(self, frame: FrameType, event: str, arg: object) -> Interrupter | None:
        code = frame.f_code
        if not code.co_filename.endswith(self.FILES) or code.co_name in self._but:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.number -= 1
            if self.number == 0:
                raise KeyboardInterrupt
        return self

    def step(self, engine: Engine) -> list[Any]:
        before = sys.gettrace()
        sys.settrace(self)
        try:
            return engine.step().outputs
        finally:
            sys.settrace(before)


def interrupt_at(number: int, *, overlap: bool, is_eager: bool) -> bool:
    """Interrupt before an instruction, and go on; False if there are fewer."""
    executor = LateExecutor()
    executor.is_eager = is_eager
    executor.is_patient = True
    # The runner's thread has no interrupts; here it is the caller's as well.
    interrupter = Interrupter(number, but=("_compute",) if overlap else ())
    engine, _ = make(overlap=overlap)
    requests = requests_of("ab")
    for request in requests:
        engine.scheduler.add_request(request)
    outputs = []
    num_interrupts = 0
    with late_threads(executor):
        while engine.scheduler.has_requests:
            try:
                outputs += interrupter.step(engine)
            except KeyboardInterrupt:
                num_interrupts += 1
    assert num_interrupts == (interrupter.number <= 0)
    assert expected_of(requests) == outputs_of(requests), number
    check_idle(engine)
    told = sum(len(output.tokens) for output in outputs)
    # Between the last instructions, nobody knows whether the caller has the report.
    assert 12 - len(requests) <= told <= 12
    ends = [output.request for output in outputs if output.finish_reason]
    assert len(ends) == len(set(ends))
    return bool(num_interrupts)


@pytest.mark.parametrize("is_eager", [False, True])
@OVERLAP
def test_an_interrupt_between_any_two_instructions_of_the_engine_loses_nothing(
    overlap: bool, is_eager: bool
) -> None:
    number = 1
    while interrupt_at(number, overlap=overlap, is_eager=is_eager):
        number += 37  # no step is as many instructions apart, so all kinds are met
    assert number > 1000


def test_an_interrupt_of_close_is_made_good_by_the_next_step() -> None:
    engine, _ = make(overlap=True)
    executor = LateExecutor()
    requests = requests_of("ab")
    for request in requests:
        engine.scheduler.add_request(request)

    def interrupted(*args: object, **kwargs: object) -> None:
        del executor.shutdown  # type: ignore[method-assign]
        raise KeyboardInterrupt

    with late_threads(executor):
        engine.step()
        executor.shutdown = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            engine.close()
        run_on(engine)

    assert expected_of(requests) == outputs_of(requests)
    check_idle(engine)

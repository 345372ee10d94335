"""The engine loop: scheduler and runner in turns, or side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from radixkv.mem_cache import (
    BatchRefusedError,
    RadixKVError,
    RequestStateError,
    StalledError,
)

from .base import ModelRunner
from .batch import Batch, BatchEntry
from .request import Request
from .request_output import RequestOutput
from .runner_thread import CallersThread, RunnerThread
from .scheduler import Scheduler
from .stall import stall_message


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one call of `Engine.step` did and how long it took.

    Attributes:
        outputs: New tokens and ends.
        num_tokens: Tokens computed.
        num_prefill_tokens: Those of them that belong to prompts, or were computed again
            after a retraction.
        schedule_s: Seconds to choose steps and give them slots: this one or, where they
            overlap, the next.
        hidden_s: Those of them in which the runner was at work.
        run_s: Seconds in the runner.
        wait_s: Seconds that the call waited for it. The rest of `run_s` passed while
            the next step was scheduled, or before the call.
        update_s: Seconds to publish, finish and free.
    """

    outputs: list[RequestOutput]
    num_tokens: int = 0
    num_prefill_tokens: int = 0
    schedule_s: float = 0.0
    hidden_s: float = 0.0
    run_s: float = 0.0
    wait_s: float = 0.0
    update_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds of the whole call."""
        return self.schedule_s + self.wait_s + self.update_s


class Engine:
    """Runs requests to their end, step after step.

    If the scheduler has `overlap`, the runner computes a step in a thread of its own
    while the next one is scheduled; the tokens are the same. Everything else stays in
    the caller's thread. Between two calls of `step` the runner is at work: `close`
    waits for it and ends its thread, and so does the end of a ``with`` block, and of
    `run` and whatever uses it, however it ends.

    Attributes:
        scheduler: Chooses the steps.
        runner: Computes them.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Join a scheduler and a runner.

        Args:
            scheduler: Chooses the steps.
            runner: Computes them.
            clock: Seconds, for the reports only; it decides nothing. The runner's
                thread asks it, too.
        """
        self.scheduler = scheduler
        self.runner = runner
        self._clock = clock
        self._thread: RunnerThread | CallersThread | None = None
        self._in_flight: _StepInFlight | None = None
        # Made, but not handed to the runner yet: it needs the tokens of the other.
        self._prepared: Batch | None = None

    def __enter__(self) -> Self:
        """Return the engine, which is closed at the end of the block."""
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the engine."""
        self.close()

    def close(self) -> None:
        """Wait until the runner is idle, and end its thread if it has one.

        Nothing is lost: what was computed comes with the next `step`, which starts a
        new thread.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown()

    def step(self) -> StepReport:
        """Compute one step.

        If the runner fails, or answers with what are no next tokens, the requests of
        the step are aborted, and the error is raised; the others can go on. An
        interrupt while the runner is at work in its thread leaves all as it is: the
        next call waits for the same step.

        Raises:
            StalledError: There are requests, but none of them can go on; the message
                says why.
        """
        clock = self._clock
        begin = clock()
        if self._in_flight is None:
            self._prepare()
            if self._prepared is None:
                return self._idle(begin)
        chosen = clock()
        if self._in_flight is None:
            self._hand_over()
        started = prepared = clock()
        if self.scheduler.overlap:
            self._prepare()
            prepared = clock()
        step = self._in_flight
        assert step is not None
        step.answer.exception()  # returns when there is an answer
        answered = clock()
        outputs = self._land(step)
        updated = clock()
        answer = step.answer.result()
        return StepReport(
            outputs=outputs,
            num_tokens=step.batch.num_tokens,
            num_prefill_tokens=sum(_num_prefill_tokens(e) for e in step.batch.entries),
            schedule_s=chosen - begin + prepared - started,
            hidden_s=answer.overlap_s(started, prepared),
            run_s=answer.end - answer.begin,
            wait_s=started - chosen + answered - prepared,
            update_s=updated - answered,
        )

    def run(self) -> Iterator[StepReport]:
        """Compute steps until nothing is left to do; `close` at the end."""
        try:
            while self.scheduler.has_requests:
                yield self.step()
        finally:
            self.close()

    def stream(self, requests: Iterable[Request]) -> Iterator[RequestOutput]:
        """Run requests to their end, and tell of each token when it is there.

        Args:
            requests: They are queued at once, all or none of them.

        Returns:
            What becomes of the requests, and of others that are there already. Whoever
            does not want the rest closes the iterator, and aborts what it queued.

        Raises:
            LengthError: A request can never fit; none was queued then.
            TokenError: A request has an unknown token; none was queued then.
            RequestStateError: A request is not new; none was queued then.
        """
        self._queue(list(requests))
        return (output for report in self.run() for output in report.outputs)

    def generate(self, requests: Iterable[Request]) -> list[Request]:
        """Run requests to their end; returns them. See `stream`."""
        requests = list(requests)
        self._queue(requests)
        for _ in self.run():
            pass
        return requests

    def _queue(self, requests: list[Request]) -> None:
        for request in requests:
            self.scheduler.check_request(request)
        ids = [request.request_id for request in requests]
        if len(set(ids)) < len(ids):
            raise RequestStateError(f"requests must have ids of their own, got {ids}")
        for request in requests:
            self.scheduler.add_request(request)

    # One step ---------------------------------------------------------------

    def _prepare(self) -> None:
        """Schedule a step, unless one is left from a call that was interrupted."""
        if self._prepared is None:
            self._prepared = self.scheduler.schedule()

    def _hand_over(self) -> None:
        """Let the runner compute what was prepared: at once, or in its thread."""
        batch = self._prepared
        assert batch is not None
        if self._thread is None:
            self._thread = RunnerThread() if self.scheduler.overlap else CallersThread()
        answer = self._thread.submit(self._compute, batch)
        self._in_flight = _StepInFlight(batch, answer)
        self._prepared = None
        self._thread.wait_for_begin()

    def _compute(self, batch: Batch) -> _Answer:
        begin = self._clock()
        next_tokens = self.runner.run(batch)
        return _Answer(next_tokens, begin, self._clock())

    def _land(self, step: _StepInFlight) -> list[RequestOutput]:
        """Take the runner's answer, and hand over what was prepared meanwhile."""
        self._in_flight = None
        try:
            try:
                next_tokens = step.answer.result().next_tokens
            except BaseException as error:
                self._give_up(step.batch, error)
                raise
            try:
                return self.scheduler.update(step.batch, next_tokens)
            except RadixKVError as error:  # no tokens for this step
                self._give_up(step.batch, error)
                raise
        finally:
            # After a failure as well: later messages build on that of the batch. Those
            # of its requests that depend on the failed step have ended.
            if self._prepared is not None:
                self._hand_over()

    def _give_up(self, batch: Batch, error: BaseException) -> None:
        """End the requests of a step that failed."""
        lost = [batch]
        if isinstance(error, BatchRefusedError):
            if self._prepared is not None:
                lost.append(self._prepared)  # it builds on a message that is lost
                self._prepared = None
            for each in reversed(lost):
                self.scheduler.cache.recall(each.kv_cache_info)
        for each in lost:
            self.scheduler.cancel(each)

    def _idle(self, begin: float) -> StepReport:
        """Report a step in which there was nothing to compute."""
        scheduler = self.scheduler
        outputs = scheduler.take_outputs()
        if scheduler.has_requests and not outputs:
            raise StalledError(stall_message(scheduler.explain_stall()))
        return StepReport(outputs, schedule_s=self._clock() - begin)


@dataclass(frozen=True, slots=True)
class _Answer:
    """What the runner said, and when it began and ended."""

    next_tokens: NDArray[np.int32]
    begin: float
    end: float

    def overlap_s(self, begin: float, end: float) -> float:
        """Return for how long of a span the runner was at work."""
        return max(0.0, min(end, self.end) - max(begin, self.begin))


@dataclass(frozen=True, slots=True)
class _StepInFlight:
    """A step in the hands of the runner."""

    batch: Batch
    answer: Future[_Answer]


def _num_prefill_tokens(entry: BatchEntry) -> int:
    """Return the tokens that an entry computes, 0 if it decodes."""
    is_decode = entry.start >= entry.request.prefill_len
    return 0 if is_decode else entry.stop - entry.start

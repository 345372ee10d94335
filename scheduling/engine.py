"""The engine loop: scheduler and runner in turns, or side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self, TypeAlias, get_args

from radixkv.mem_cache import (
    BatchRefusedError,
    ConfigError,
    PagePool,
    RequestStateError,
    StalledError,
)
from radixkv.mem_cache.sizes import as_size

from .base import ModelRunner
from .batch import Batch, BatchEntry
from .handed_over import Answer, HandedOver, NotComputedError, clear_frames_of
from .request import Request
from .request_output import RequestOutput
from .runner_thread import CallersThread, RunnerThread
from .scheduler import Scheduler
from .stall import stall_message

OnError: TypeAlias = Literal["end", "requeue", "raise"]
"""What becomes of the requests of a step that fails."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one call of `Engine.step` did and how long it took.

    Attributes:
        outputs: New tokens and ends.
        num_tokens: Tokens computed; none if the step failed.
        num_prefill_tokens: Those of them that belong to prompts, or were computed again
            after a retraction.
        schedule_s: Seconds to choose steps and give them slots: this one or, where they
            overlap, the next.
        hidden_s: Those of them in which the runner was at work.
        run_s: Seconds in the runner.
        wait_s: Seconds that the call waited for it. The rest of `run_s` passed while
            the next step was scheduled, or before the call.
        update_s: Seconds to publish, finish and free.
        error: Why the step failed, if it did.
    """

    outputs: list[RequestOutput]
    num_tokens: int = 0
    num_prefill_tokens: int = 0
    schedule_s: float = 0.0
    hidden_s: float = 0.0
    run_s: float = 0.0
    wait_s: float = 0.0
    update_s: float = 0.0
    error: Exception | None = None

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
        on_error: What becomes of the requests of a step that fails.
        max_requeues: How often a request is queued again without a new token.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        *,
        on_error: OnError = "end",
        max_requeues: int = 2,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Join a scheduler and a runner.

        Args:
            scheduler: Chooses the steps.
            runner: Computes them. If it shows its pool, as a `PooledRunner` does, then
                the cache cannot grow beyond it.
            on_error: If the runner fails, or answers with what are no next tokens, the
                requests of that step ``"end"``, with the reason ``"error"`` and the
                exception on their last output; the others go on. Or they are queued
                again: ``"requeue"``. Or they end and the exception is raised:
                ``"raise"``.
            max_requeues: How often a request is queued again without a new token in
                between, before it ends after all; at least 0.
            clock: Seconds, for the reports only; it decides nothing. The runner's
                thread asks it, too.

        Raises:
            ConfigError: `max_requeues` is negative, or `on_error` is unknown.
        """
        if on_error not in get_args(OnError):
            raise ConfigError(
                f"on_error must be one of {get_args(OnError)}, got {on_error!r}"
            )
        self.scheduler = scheduler
        self.runner = runner
        self.on_error = on_error
        self.max_requeues = as_size("max_requeues", max_requeues, 0)
        self._clock = clock
        self._thread: RunnerThread | CallersThread | None = None
        # What the runner was given. Of the scheduler's batches in flight, that is the
        # oldest, if any: what is not there any more is done, and another one has been
        # prepared. So an interrupt between two calls loses no batch.
        self._handed_over: HandedOver | None = None
        self._outputs: list[RequestOutput] = []  # not told yet
        self._is_closing = False
        pool: object = getattr(runner, "pool", None)
        if isinstance(pool, PagePool):
            scheduler.cache.memory.join(pool)

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
        new thread. So does a failure: nothing that the runner raises comes from here.
        """
        if self._thread is not None:
            self._is_closing = True
            self._thread.shutdown()
            self._thread = None
        self._is_closing = False

    def step(self) -> StepReport:
        """Compute one step.

        What becomes of the requests of a step that fails, `on_error` says. What is no
        `Exception`, such as `KeyboardInterrupt`, is raised in any case, and ends no
        request: those of the step are queued again, whether they may be or not, and the
        next call goes on. An interrupt while the runner is at work in its thread leaves
        even that step as it is: the next call waits for it. Only where it cuts
        `Scheduler.schedule` or `update` short, that scheduler is of no use any more.

        Returns:
            What became of the requests since the last call, and how long it took.

        Raises:
            StalledError: There are requests, but none of them can go on; the message
                says why.
            PolicyError: A policy failed, see `Scheduler.schedule`; try again.
        """
        clock = self._clock
        begin = clock()
        if self._oldest() is None:
            self.scheduler.schedule()
            if self._oldest() is None:
                return self._idle(begin)
        chosen = clock()
        step = self._hand_over()
        started = prepared = clock()
        if self.scheduler.overlap:
            if self.scheduler.num_in_flight == 1:
                self.scheduler.schedule()
            prepared = clock()
        answer = step.wait()
        answered = clock()
        error = self._land(step.batch, answer)
        outputs, self._outputs = self._outputs, []
        updated = clock()
        entries = () if error else step.batch.entries
        return StepReport(
            outputs=outputs,
            num_tokens=sum(entry.stop - entry.start for entry in entries),
            num_prefill_tokens=sum(_num_prefill_tokens(entry) for entry in entries),
            schedule_s=chosen - begin + prepared - started,
            hidden_s=answer.overlap_s(started, prepared),
            run_s=answer.end - answer.begin,
            wait_s=started - chosen + answered - prepared,
            update_s=updated - answered,
            error=error,
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

    def _oldest(self) -> Batch | None:
        """Return the batch that the runner has, or is to have next."""
        return next(iter(self.scheduler.in_flight), None)

    def _hand_over(self) -> HandedOver:
        """Give the oldest batch to the runner, unless it has it: at once, or later."""
        batch = self._oldest()
        assert batch is not None
        step = self._handed_over
        if step is None or step.batch is not batch:
            step = self._handed_over = HandedOver(batch, self.runner, self._clock)
        if not step.is_delivered:
            if self._is_closing:
                self.close()  # an interrupt has cut that short
            if self._thread is None:
                overlap = self.scheduler.overlap
                self._thread = RunnerThread() if overlap else CallersThread()
            step.deliver(self._thread)
        return step

    def _land(self, batch: Batch, answer: Answer) -> Exception | None:
        """Take the runner's answer, and hand over what was prepared meanwhile.

        Returns:
            What went wrong, if it is to be told and not raised.
        """
        error = answer.error
        try:
            if error is None:
                error = self._update(batch, answer)
            if error is not None:
                self._give_up(batch, error)
        finally:
            # After a failure as well: later messages build on that of the batch. Those
            # of its requests that depend on the failed step are not in it any more.
            oldest = self._oldest()
            if oldest is not None and oldest is not batch:
                self._hand_over()
        if error is None or isinstance(error, NotComputedError):
            return None
        answer.error = None  # who raises an error does not keep it
        if self.on_error == "raise" or not isinstance(error, Exception):
            try:
                raise error
            finally:
                del error
        clear_frames_of(error)
        self._outputs += self.scheduler.take_outputs()
        return error

    def _update(self, batch: Batch, answer: Answer) -> Exception | None:
        """Let the scheduler take the tokens; or return why it does not."""
        try:
            self._outputs += self.scheduler.update(batch, answer.next_tokens)
        except Exception as error:  # an answer may raise anything when it is read
            if self._oldest() is not batch:
                raise  # it had begun to take them
            return error
        return None

    def _give_up(self, batch: Batch, error: BaseException) -> None:
        """End the requests of a step that failed, or queue them again."""
        lost = [batch]
        if isinstance(error, BatchRefusedError):
            # What was prepared meanwhile builds on a message that is lost.
            lost = list(self.scheduler.in_flight)
            for each in reversed(lost):
                self.scheduler.cache.recall(each.kv_cache_info)
        max_requeues = self.max_requeues if self.on_error == "requeue" else 0
        is_interrupt = not isinstance(error, Exception)
        for each in lost:
            self.scheduler.cancel(
                each, error, max_requeues=None if is_interrupt else max_requeues
            )

    def _idle(self, begin: float) -> StepReport:
        """Report a step in which there was nothing to compute."""
        scheduler = self.scheduler
        self._outputs += scheduler.take_outputs()
        if scheduler.has_requests and not self._outputs:
            raise StalledError(stall_message(scheduler.explain_stall()))
        outputs, self._outputs = self._outputs, []
        return StepReport(outputs, schedule_s=self._clock() - begin)


def _num_prefill_tokens(entry: BatchEntry) -> int:
    """Return the tokens that an entry computes, 0 if it decodes."""
    is_decode = entry.start >= entry.request.prefill_len
    return 0 if is_decode else entry.stop - entry.start

"""The engine loop: scheduler and runner in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from radixkv.mem_cache import CacheBusyError, RequestStateError

from .base import ModelRunner
from .batch import BatchEntry
from .request import Request
from .scheduler import RequestOutput, Scheduler


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did and how long it took.

    Attributes:
        outputs: New tokens and ends.
        num_tokens: Tokens computed.
        num_prefill_tokens: Those of them that belong to prompts, or were computed again
            after a retraction.
        schedule_s: Seconds to choose the step and give it slots.
        run_s: Seconds in the runner.
        update_s: Seconds to publish, finish and free.
    """

    outputs: list[RequestOutput]
    num_tokens: int
    num_prefill_tokens: int
    schedule_s: float
    run_s: float
    update_s: float

    @property
    def total_s(self) -> float:
        """Seconds of the whole step."""
        return self.schedule_s + self.run_s + self.update_s


class Engine:
    """Runs requests to their end, one synchronous step after another."""

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
            clock: Seconds, for the reports only; it decides nothing.
        """
        self.scheduler = scheduler
        self.runner = runner
        self._clock = clock

    def step(self) -> StepReport:
        """Compute one step.

        If the runner fails, or answers with what are no next tokens, the requests of
        the step are aborted, and the error is raised; the others can go on.

        Raises:
            CacheBusyError: There are requests, but none of them can go on, since
                somebody else holds the cache.
        """
        clock = self._clock
        start = clock()
        batch = self.scheduler.schedule()
        scheduled = clock()
        if batch is None:
            outputs = self.scheduler.take_outputs()
            if self.scheduler.has_requests and not outputs:
                raise CacheBusyError(
                    f"none of {self.scheduler.num_waiting} waiting requests fits "
                    "beside what others hold in the cache"
                )
            return StepReport(outputs, 0, 0, scheduled - start, 0.0, 0.0)
        try:
            next_tokens = self.runner.run(batch)
            ran = clock()
            outputs = self.scheduler.update(batch, next_tokens)
        except BaseException:
            self.scheduler.cancel(batch)
            raise
        return StepReport(
            outputs=outputs,
            num_tokens=batch.num_tokens,
            num_prefill_tokens=sum(_num_prefill_tokens(e) for e in batch.entries),
            schedule_s=scheduled - start,
            run_s=ran - scheduled,
            update_s=clock() - ran,
        )

    def run(self) -> Iterator[StepReport]:
        """Compute steps until nothing is left to do."""
        while self.scheduler.has_requests:
            yield self.step()

    def generate(self, requests: Iterable[Request]) -> list[Request]:
        """Run requests to their end; returns them.

        Raises:
            LengthError: A request can never fit; none was queued then.
            TokenError: A request has an unknown token; none was queued then.
            RequestStateError: A request is not new; none was queued then.
        """
        requests = list(requests)
        for request in requests:
            self.scheduler.check_request(request)
        ids = [request.request_id for request in requests]
        if len(set(ids)) < len(ids):
            raise RequestStateError(f"requests must have ids of their own, got {ids}")
        for request in requests:
            self.scheduler.add_request(request)
        for _ in self.run():
            pass
        return requests


def _num_prefill_tokens(entry: BatchEntry) -> int:
    """Return the tokens that an entry computes, 0 if it decodes."""
    num_tokens = entry.stop - entry.start
    is_decode = num_tokens == 1 and entry.stop > entry.request.num_prompt_tokens
    return 0 if is_decode else num_tokens

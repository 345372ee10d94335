"""A step in the hands of the runner."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import RLock
from traceback import clear_frames

import numpy as np
from numpy.typing import NDArray

from .base import ModelRunner
from .batch import Batch
from .runner_thread import CallersThread, Outcome, RunnerThread


@dataclass(slots=True)
class Answer:
    """What the runner said, and when it began and ended.

    Attributes:
        next_tokens: The tokens; none if it failed.
        error: What it raised.
        begin: When it began, in seconds.
        end: When it ended.
    """

    next_tokens: NDArray[np.int32]
    error: BaseException | None
    begin: float
    end: float

    def overlap_s(self, begin: float, end: float) -> float:
        """Return for how long of a span the runner was at work."""
        return max(0.0, min(end, self.end) - max(begin, self.begin))


class HandedOver:
    """A step that the runner computes once, however often it is delivered.

    An interrupt may come between any two instructions of the caller's thread. If it
    comes while the step is delivered, nobody can know whether it was: so it is
    delivered again.

    Attributes:
        batch: The step.
        is_delivered: Whether the runner has it for sure.
    """

    def __init__(
        self, batch: Batch, runner: ModelRunner, clock: Callable[[], float]
    ) -> None:
        """Take a step that the runner has not seen.

        Args:
            batch: The step.
            runner: Computes it.
            clock: Seconds.
        """
        self.batch = batch
        self.is_delivered = False
        self._runner = runner
        self._clock = clock
        # Whoever takes the one ticket computes: pop() is atomic, to signals as well.
        self._tickets: deque[None] = deque([None])
        self._lock = RLock()  # and who gets none waits for who has it
        self._answer: Answer | None = None
        self._delivery: Outcome | None = None
        self._has_raised = False

    def deliver(self, thread: RunnerThread | CallersThread) -> None:
        """Let the runner compute the step, unless it has been at it.

        Args:
            thread: Where it is at work.
        """
        self._delivery = thread.submit(self._compute)
        thread.wait_for_begin()
        self.is_delivered = True

    def wait(self) -> Answer:
        """Wait for the answer; an interrupt of the wait changes nothing.

        Raises:
            KeyboardInterrupt: It came behind the answer, which the next call returns.
        """
        delivery = self._delivery
        assert delivery is not None
        error = delivery.exception()  # returns when there is an answer
        if self._answer is None:
            # The runner is at work in this thread, and was interrupted on the way.
            now = self._clock()
            self._answer = Answer(_NO_TOKENS, error or NotComputedError(), now, now)
        elif error is not None and not self._has_raised:
            self._has_raised = True
            raise error
        return self._answer

    def _compute(self) -> None:
        with self._lock:
            if not self._tickets:
                return
            self._tickets.pop()
            begin = self._clock()
            try:
                tokens = self._runner.run(self.batch)
            except BaseException as error:
                # No other name for it: it refers to this frame, through its traceback.
                self._answer = Answer(_NO_TOKENS, error, begin, self._clock())
            else:
                self._answer = Answer(tokens, None, begin, self._clock())


class NotComputedError(BaseException):
    """Nobody knows what a step has computed: an interrupt, which was told, hit it."""


_NO_TOKENS = np.zeros(0, np.int32)


def clear_frames_of(error: BaseException) -> None:
    """Let go of what the functions had in hand that an error has ended.

    The error stays on its requests. Without this it would keep all that its traceback
    refers to, such as the activations of a step for which a GPU had no room.

    Args:
        error: It keeps its traceback, and those of its causes.
    """
    seen: set[int] = set()  # not every error has a hash
    while id(error) not in seen:
        seen.add(id(error))
        clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__ or error

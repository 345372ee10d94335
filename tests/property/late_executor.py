"""The runner's thread without a thread: it computes as late as it may, or at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import ParamSpec, TypeVar
from unittest.mock import patch

from radixkv.scheduling import engine

_P = ParamSpec("_P")
_T = TypeVar("_T")


class LateFuture(Future[_T]):
    """An answer that is computed when somebody waits for it."""

    def __init__(self, compute: Callable[[], _T], executor: LateExecutor) -> None:
        super().__init__()
        self._compute = compute
        self._executor = executor

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the answer, unless the wait is interrupted."""
        executor = self._executor
        if executor.num_interrupts:
            executor.num_interrupts -= 1
            raise KeyboardInterrupt
        self.settle()
        return super().exception(timeout)

    def settle(self) -> None:
        """Compute the answer, once."""
        if not self.done():
            try:
                self.set_result(self._compute())
            except BaseException as error:
                self.set_exception(error)


class LateExecutor(Executor):
    """Computes when the engine waits, so after it has scheduled the next step.

    Attributes:
        is_eager: Whether it computes at once instead, as a very fast runner would.
        num_interrupts: Waits to come that are interrupted.
        num_begins: How often the engine let the thread begin.
        is_patient: Whether a step may come twice, as after an interrupt.
    """

    def __init__(self) -> None:
        self.is_eager = False
        self.num_interrupts = 0
        self.num_begins = 0
        self.is_patient = False
        self._last: LateFuture[object] | None = None

    def submit(
        self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs
    ) -> Future[_T]:
        if self.is_patient and self._last is not None:
            self._last.settle()
        assert self._last is None or self._last.done()  # one step at a time
        future = LateFuture(lambda: fn(*args, **kwargs), self)
        self._last = future  # type: ignore[assignment]
        if self.is_eager:
            future.settle()
        return future

    def wait_for_begin(self) -> None:
        self.num_begins += 1

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if self._last is not None:
            self._last.settle()


@contextmanager
def late_threads(executor: LateExecutor) -> Iterator[None]:
    """Let every engine use `executor` instead of a thread."""
    with patch.object(engine, "RunnerThread", lambda: executor):
        yield

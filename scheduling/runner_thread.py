"""Where a runner is at work: in a thread of its own, or in the caller's."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


class RunnerThread(ThreadPoolExecutor):
    """One thread, which is let in at once.

    A thread that was woken waits until the other one gives the interpreter away, and
    that is after milliseconds of Python unless it waits for something itself. So the
    caller should: a device that has nothing to do costs more than a late schedule.
    """

    def __init__(self) -> None:
        """Start without a thread; it begins with the first call of `submit`."""
        super().__init__(1, "radixkv-runner")
        # Unlike an Event, it holds no lock that an interrupt could leave taken.
        self._begun: SimpleQueue[None] = SimpleQueue()

    def submit(
        self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs
    ) -> Future[_T]:
        """Let the thread call a function; nothing else may be under way."""
        return super().submit(self._call, fn, *args, **kwargs)

    def wait_for_begin(self) -> None:
        """Wait until the thread is at what was submitted."""
        self._begun.get()

    def _call(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        self._begun.put(None)
        return fn(*args, **kwargs)


class CallersThread(Executor):
    """Does everything at once, in the caller's thread."""

    def submit(
        self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs
    ) -> Future[_T]:
        """Call a function; returns a future that is done."""
        future: Future[_T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future

    def wait_for_begin(self) -> None:
        """Return: everything is done."""

"""Where a runner is at work: in a thread of its own, or in the caller's."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue


class Outcome:
    """What becomes of a call in another thread.

    Unlike a `Future`, it holds no lock of Python code, which an interrupt of the wait
    could leave taken.
    """

    def __init__(self) -> None:
        """Start without an end."""
        self._is_there: SimpleQueue[None] = SimpleQueue()
        self._has_ended = False
        self._error: BaseException | None = None

    def end(self, error: BaseException | None) -> None:
        """Say how the call has ended, once."""
        self._error = error
        self._has_ended = True
        self._is_there.put(None)

    def exception(self) -> BaseException | None:
        """Wait for the end; an interrupt of the wait changes nothing.

        Returns:
            What the call raised, if anything.
        """
        if not self._has_ended:
            self._is_there.get()
        return self._error


class RunnerThread:
    """One thread, which is let in at once.

    A thread that was woken waits until the other one gives the interpreter away, and
    that is after milliseconds of Python unless it waits for something itself. So the
    caller should: a device that has nothing to do costs more than a late schedule.
    """

    def __init__(self) -> None:
        """Start without a thread; it begins with the first call of `submit`."""
        self._executor = ThreadPoolExecutor(1, "radixkv-runner")
        # Unlike an Event, it holds no lock that an interrupt could leave taken.
        self._begun: SimpleQueue[None] = SimpleQueue()

    def submit(self, work: Callable[[], object]) -> Outcome:
        """Let the thread call a function; nothing else may be under way."""
        outcome = Outcome()
        self._executor.submit(self._call, work, outcome)
        return outcome

    def wait_for_begin(self) -> None:
        """Wait until the thread is at what was submitted."""
        self._begun.get()

    def shutdown(self) -> None:
        """Wait for the thread, and end it."""
        self._executor.shutdown()

    def _call(self, work: Callable[[], object], outcome: Outcome) -> None:
        self._begun.put(None)
        _call(work, outcome)


class CallersThread:
    """Does everything at once, in the caller's thread."""

    def submit(self, work: Callable[[], object]) -> Outcome:
        """Call a function; returns what became of it."""
        outcome = Outcome()
        _call(work, outcome)
        return outcome

    def wait_for_begin(self) -> None:
        """Return: everything is done."""

    def shutdown(self) -> None:
        """Return: there is no thread."""


def _call(work: Callable[[], object], outcome: Outcome) -> None:
    try:
        work()
    except BaseException as error:
        outcome.end(error)
    else:
        outcome.end(None)

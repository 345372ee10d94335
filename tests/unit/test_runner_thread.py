"""RunnerThread: one thread, let in at once; CallersThread: none."""

from __future__ import annotations

import threading

import pytest

from radixkv.scheduling.runner_thread import CallersThread, RunnerThread

TIMEOUT_S = 30


def fail() -> None:
    raise ArithmeticError("no")


def test_it_has_begun_while_it_is_still_at_work() -> None:
    may_end = threading.Event()
    thread = RunnerThread()
    for number in range(20):
        may_end.clear()
        seen: list[str] = []
        ended: list[int] = []

        def work(
            seen: list[str] = seen, ended: list[int] = ended, number: int = number
        ) -> None:
            seen.append(threading.current_thread().name)
            assert may_end.wait(TIMEOUT_S)
            ended.append(number)

        outcome = thread.submit(work)
        thread.wait_for_begin()
        assert not ended
        may_end.set()

        assert outcome.exception() is None
        assert ["radixkv-runner_0"] == seen
        assert [number] == ended
    thread.shutdown()


@pytest.mark.parametrize("kind", [RunnerThread, CallersThread])
def test_a_failure_is_in_the_outcome_as_often_as_it_is_asked_for(
    kind: type[RunnerThread] | type[CallersThread],
) -> None:
    thread = kind()
    outcome = thread.submit(fail)
    thread.wait_for_begin()

    assert isinstance(outcome.exception(), ArithmeticError)
    assert outcome.exception() is outcome.exception()
    thread.shutdown()


def test_the_callers_thread_is_done_at_once() -> None:
    thread = CallersThread()
    seen: list[threading.Thread] = []

    outcome = thread.submit(lambda: seen.append(threading.current_thread()))

    assert [threading.current_thread()] == seen
    assert outcome.exception() is None
    thread.wait_for_begin()
    thread.shutdown()

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
    with RunnerThread() as thread:
        for number in range(20):
            may_end.clear()
            seen: list[str] = []

            def work(seen: list[str] = seen, number: int = number) -> int:
                seen.append(threading.current_thread().name)
                assert may_end.wait(TIMEOUT_S)
                return number

            answer = thread.submit(work)
            thread.wait_for_begin()
            assert not answer.done()
            may_end.set()

            assert number == answer.result(TIMEOUT_S)
            assert ["radixkv-runner_0"] == seen


@pytest.mark.parametrize("kind", [RunnerThread, CallersThread])
def test_a_failure_is_in_the_answer(
    kind: type[RunnerThread] | type[CallersThread],
) -> None:
    with kind() as thread:
        answer = thread.submit(fail)
        thread.wait_for_begin()

        assert isinstance(answer.exception(), ArithmeticError)


def test_the_callers_thread_is_done_at_once() -> None:
    thread = CallersThread()

    answer = thread.submit(threading.current_thread)

    assert answer.done()
    assert threading.current_thread() is answer.result()
    thread.wait_for_begin()

"""Engine: turns of scheduler and runner, their times, and their failures."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from radixkv.mem_cache import (
    CacheBusyError,
    LengthError,
    MemoryManager,
    RadixCache,
    RequestStateError,
    StalledError,
    TokenError,
)
from radixkv.scheduling import (
    Batch,
    Engine,
    FinishReason,
    ModelRunner,
    NullRunner,
    Request,
    SamplingParams,
    Scheduler,
    SchedulerLimits,
)


class FailingRunner:
    """Works like a `NullRunner`, but for the steps that fail."""

    def __init__(self, failures: dict[int, BaseException | object]) -> None:
        self._failures = failures
        self._steps = count()
        self._null = NullRunner(99)

    def run(self, batch: Batch) -> NDArray[np.int32]:
        failure = self._failures.get(next(self._steps))
        if isinstance(failure, BaseException):
            raise failure
        if failure is not None:
            return np.array(failure)
        return self._null.run(batch)


def make(
    runner: ModelRunner | None = None,
    *,
    num_pages: int = 16,
    page_size: int = 4,
    limits: SchedulerLimits | None = None,
    **options: Any,  # noqa: ANN401 - those of Engine
) -> Engine:
    memory = MemoryManager(num_pages, page_size, max_num_requests=8, max_context_len=64)
    scheduler = Scheduler(RadixCache(memory), limits)
    return Engine(scheduler, runner or NullRunner(99), **options)


def request(name: str, num_tokens: int = 5, max_new_tokens: int = 3) -> Request:
    first = 1000 * ord(name)
    tokens = range(first, first + num_tokens)
    return Request(name, tokens, SamplingParams(max_new_tokens))


def test_generate_returns_the_requests_in_order_and_finished() -> None:
    engine = make()
    requests = [request("a", 5, 9), request("b", 9, 1), request("c", 1, 3)]

    returned = engine.generate(iter(requests))

    assert requests == returned
    assert [9, 1, 3] == [len(r.output_tokens) for r in returned]


def test_generate_of_nothing_returns_nothing() -> None:
    assert [] == make().generate([])


@pytest.mark.parametrize(
    ("bad", "error"),
    [(request("l", 64, 2), LengthError), (request("a"), RequestStateError)],
    ids=["too long", "same id"],
)
def test_generate_runs_all_or_none(bad: Request, error: type[Exception]) -> None:
    engine = make()
    first = request("a")

    with pytest.raises(error):
        engine.generate([first, bad, request("c")])

    assert (first.status, first.finish_reason) == ("waiting", None)
    assert not engine.scheduler.has_requests
    assert [3] == [len(r.output_tokens) for r in engine.generate([first])]


def test_generate_takes_others_along() -> None:
    engine = make()
    other = request("o")
    engine.scheduler.add_request(other)

    engine.generate([request("a")])

    assert other.finish_reason is FinishReason.LENGTH


def test_run_tells_every_token_and_every_end_once() -> None:
    engine = make()
    a, b = request("a"), request("b", 9, 2)
    for each in (a, b):
        engine.scheduler.add_request(each)

    outputs = [output for report in engine.run() for output in report.outputs]

    for each in (a, b):
        mine = [output for output in outputs if output.request is each]
        assert each.output_tokens == [
            token for output in mine for token in output.tokens
        ]
        ends = [output.finish_reason for output in mine]
        assert [*[None] * (len(mine) - 1), FinishReason.LENGTH] == ends


def test_run_tells_of_an_abort_although_nothing_is_left_to_compute() -> None:
    engine = make()
    engine.scheduler.add_request(request("a"))
    engine.scheduler.abort("a")

    (report,) = engine.run()

    assert [FinishReason.ABORT] == [output.finish_reason for output in report.outputs]
    assert report.num_tokens == 0


def test_a_step_without_requests_does_nothing() -> None:
    report = make(clock=lambda: 5.0).step()

    assert [] == report.outputs
    assert (report.num_tokens, report.num_prefill_tokens, report.total_s) == (0, 0, 0)


def test_a_report_says_how_long_each_part_took() -> None:
    # Scheduled at 11, in the runner from 11 to 13, back at 13, done at 17.
    times = iter([10.0, 11.0, 11.0, 13.0, 13.0, 13.0, 17.0])
    engine = make(clock=lambda: next(times))
    engine.scheduler.add_request(request("a"))

    report = engine.step()

    parts = (report.schedule_s, report.run_s, report.update_s, report.total_s)
    assert (1.0, 2.0, 4.0, 7.0) == parts
    assert (0.0, 2.0) == (report.hidden_s, report.wait_s)


def test_a_report_tells_prefill_from_decode() -> None:
    engine = make(
        page_size=1, num_pages=64, limits=SchedulerLimits(chunked_prefill_size=5)
    )
    scheduler = engine.scheduler
    scheduler.add_request(request("a", 5, 3))
    first = engine.step()
    scheduler.add_request(request("b", 6, 3))
    second = engine.step()
    third = engine.step()
    fourth = engine.step()

    # The last step of b's prompt computes one token, and is no decode.
    expected = [(5, 5), (6, 5), (2, 1), (1, 0)]
    reports = [first, second, third, fourth]
    assert expected == [(r.num_tokens, r.num_prefill_tokens) for r in reports]


def test_a_prompt_that_was_cached_but_for_a_token_is_prefill() -> None:
    engine = make(page_size=1, num_pages=64)
    engine.generate([request("a")])
    engine.scheduler.add_request(request("a"))

    report = engine.step()

    assert (report.num_tokens, report.num_prefill_tokens) == (1, 1)


@pytest.mark.parametrize("on_error", ["end", "raise"])
def test_a_runner_that_fails_ends_its_step_and_no_more(on_error: str) -> None:
    failure = RuntimeError("boom")
    runner = FailingRunner({1: failure})
    engine = make(runner, limits=SchedulerLimits(2, 2, 2), on_error=on_error)
    a, b, waiting = request("a", 1, 9), request("b", 5, 9), request("c", 4, 2)
    for each in (a, b, waiting):
        engine.scheduler.add_request(each)
    engine.step()

    outputs = []
    if on_error == "raise":
        with pytest.raises(RuntimeError) as raised:
            engine.step()
        assert raised.value is failure
    else:
        report = engine.step()
        assert (failure, 0, 0) == (
            report.error,
            report.num_tokens,
            report.num_prefill_tokens,
        )
        outputs = report.outputs

    assert [FinishReason.ERROR] * 2 == [a.finish_reason, b.finish_reason]
    assert a.error is b.error is failure
    engine.scheduler.cache.check_integrity()
    outputs += [output for report in engine.run() for output in report.outputs]
    told = [o.request for o in outputs if o.error is failure]
    assert [a, b] == told
    assert told == [o.request for o in outputs if o.finish_reason == "error"]
    assert waiting.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ([], LengthError),
        ([1, 2, 3], LengthError),
        ([-2], TokenError),
        ([1.5], TokenError),
    ],
)
def test_a_runner_that_answers_nonsense_ends_its_step_and_no_more(
    answer: object, error: type[Exception]
) -> None:
    engine = make(FailingRunner({0: answer}))
    failed = request("a")

    engine.generate([failed])

    assert (failed.finish_reason, failed.output_tokens) == ("error", [])
    assert isinstance(failed.error, error)
    assert engine.scheduler.cache.stats().num_requests == 0
    assert [3] == [len(r.output_tokens) for r in engine.generate([request("b")])]


def test_it_says_so_when_somebody_else_holds_the_cache() -> None:
    engine = make(num_pages=4)
    cache = engine.scheduler.cache
    foreign = cache.admit(range(9))
    assert foreign is not None
    cache.alloc_for_extend([foreign], [9])
    waiting = request("a", 9)
    engine.scheduler.add_request(waiting)

    # Callers may have caught this as what it is a kind of.
    with pytest.raises(CacheBusyError, match="'a': no room, needs 12 slots") as stall:
        engine.step()
    assert type(stall.value) is StalledError

    cache.release(foreign)
    for _ in engine.run():
        pass
    assert waiting.finish_reason is FinishReason.LENGTH

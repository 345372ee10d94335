"""Scheduler: what it accepts, whom it runs first, and how requests end."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from radixkv.mem_cache import (
    CacheBusyError,
    ConfigError,
    LengthError,
    MemoryManager,
    PolicyError,
    RadixCache,
    RadixKVError,
    RadixNode,
    RequestStateError,
    TokenError,
)
from radixkv.scheduling import (
    Batch,
    Engine,
    Estimate,
    FinishReason,
    NullRunner,
    Request,
    RequestOutput,
    RequestStatus,
    SamplingParams,
    Scheduler,
    SchedulerLimits,
)

from .failing_steps import fail_steps

NO_TOKENS = np.array([], np.int32)


def make(
    num_pages: int = 16,
    page_size: int = 4,
    *,
    num_rows: int = 8,
    max_len: int = 64,
    limits: SchedulerLimits | None = None,
    eos_token_ids: tuple[int, ...] = (),
    admission: str | Estimate = "worst-case",
    retraction: str = "newest",
) -> Scheduler:
    memory = MemoryManager(
        num_pages, page_size, max_num_requests=num_rows, max_context_len=max_len
    )
    return Scheduler(
        RadixCache(memory),
        limits,
        admission=admission,
        retraction=retraction,
        eos_token_ids=eos_token_ids,
    )


def gambler() -> Estimate:
    """Set next to nothing aside, so that there are retractions."""
    return Estimate(initial_ratio=0.01, min_ratio=0)


def add(
    scheduler: Scheduler, name: str, num_tokens: int, max_new_tokens: int = 1
) -> Request:
    """Add a request whose tokens no other name has."""
    first = 1000 * ord(name)
    params = SamplingParams(max_new_tokens)
    request = Request(name, range(first, first + num_tokens), params)
    scheduler.add_request(request)
    return request


def schedule(scheduler: Scheduler) -> Batch:
    batch = scheduler.schedule()
    assert batch is not None
    return batch


def answer(batch: Batch, token: int = 7) -> np.ndarray:
    """Sample the same token for every entry that samples."""
    return np.full(batch.num_samples, token, np.int32)


def step(scheduler: Scheduler, token: int = 7) -> list[RequestOutput]:
    batch = schedule(scheduler)
    return scheduler.update(batch, answer(batch, token))


def spans(batch: Batch) -> list[tuple[object, int, int]]:
    return [(e.request.request_id, e.start, e.stop) for e in batch.entries]


def drain(scheduler: Scheduler) -> None:
    for _ in range(1000):
        if not scheduler.has_requests:
            return
        if (batch := scheduler.schedule()) is not None:
            scheduler.update(batch, answer(batch))
        scheduler.take_outputs()
    pytest.fail("it never ends")


# What is accepted -------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ([], LengthError),
        ([-1], TokenError),
        ([2**31], TokenError),
        ([2**64], TokenError),
        ([1.0], TokenError),
        ([True], TokenError),
        ([[1, 2]], TokenError),
        (["a"], TokenError),
        ("ab", TokenError),
        (None, TokenError),
        (5, TokenError),
    ],
)
def test_a_prompt_of_no_token_ids_is_no_request(
    prompt: object, error: type[Exception]
) -> None:
    with pytest.raises(error) as refusal:
        Request("a", prompt)  # type: ignore[arg-type]

    assert isinstance(refusal.value, RadixKVError)


@pytest.mark.parametrize(
    "options", [{"namespace": ["no", "hash"]}, {"priority": "high"}, {"priority": 0.5}]
)
def test_what_the_cache_would_refuse_later_is_refused_at_once(
    options: dict[str, object],
) -> None:
    """Else it would stand at the head of the queue for ever."""
    with pytest.raises(ConfigError, match=r"(namespace|priority) must be"):
        Request("a", [1], **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("max_len", "longest"), [(64, 32), (24, 24)], ids=["pool", "context"]
)
def test_the_longest_request_that_fits_is_accepted_and_no_longer_one(
    max_len: int, longest: int
) -> None:
    scheduler = make(8, 4, max_len=max_len)

    with pytest.raises(LengthError, match=f"longest that fits is {longest}"):
        add(scheduler, "a", longest - 4, 6)

    assert not scheduler.has_requests
    request = add(scheduler, "a", longest - 4, 5)
    drain(scheduler)
    assert request.finish_reason is FinishReason.LENGTH


def test_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    scheduler = make()
    add(scheduler, "a", 4)

    with pytest.raises(RequestStateError, match="with an id of its own"):
        add(scheduler, "a", 5)

    assert scheduler.num_waiting == 1
    drain(scheduler)
    add(scheduler, "a", 5)


def test_a_request_that_ended_is_refused() -> None:
    scheduler = make()
    finished, aborted = add(scheduler, "a", 4), add(scheduler, "b", 4)
    scheduler.abort("b")
    drain(scheduler)

    for request in (finished, aborted):
        with pytest.raises(RequestStateError, match="must be new"):
            scheduler.add_request(request)

    assert not scheduler.has_requests


def test_a_request_that_runs_elsewhere_is_refused() -> None:
    scheduler, other = make(), make()
    request = add(scheduler, "a", 4)
    schedule(scheduler)

    with pytest.raises(RequestStateError, match="must be new"):
        other.add_request(request)

    assert not other.has_requests


# Turns ------------------------------------------------------------------------


def test_without_requests_there_is_no_batch() -> None:
    scheduler = make()

    assert scheduler.schedule() is None
    assert not scheduler.has_requests
    assert [] == scheduler.take_outputs()


def test_a_batch_must_be_done_before_the_next() -> None:
    scheduler = make()
    add(scheduler, "a", 4)
    batch = schedule(scheduler)

    with pytest.raises(RequestStateError, match="the last batch must go to update"):
        scheduler.schedule()

    (output,) = scheduler.update(batch, answer(batch))
    assert output.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("late_call", ["update", "cancel"])
def test_a_batch_is_done_once(late_call: str) -> None:
    scheduler = make()
    request = add(scheduler, "a", 4, 9)
    batch = schedule(scheduler)
    scheduler.update(batch, answer(batch))
    schedule(scheduler)

    with pytest.raises(RequestStateError, match="oldest batch that schedule"):
        scheduler.update(batch, answer(batch)) if late_call == "update" else (
            scheduler.cancel(batch)
        )

    assert [7] == request.output_tokens
    assert request.status is RequestStatus.RUNNING


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        ([], LengthError),
        ([1], LengthError),
        ([1, 2, 3], LengthError),
        ([1, -2], TokenError),
        ([2**31, 1], TokenError),
        ([1.5, 2.5], TokenError),
        ([float("nan"), 1], TokenError),
        ([[1, 2]], TokenError),
        (None, TokenError),
    ],
)
def test_next_tokens_that_are_none_change_nothing(
    tokens: object, error: type[Exception]
) -> None:
    limits = SchedulerLimits(max_running_requests=3, max_batched_tokens=9)
    scheduler = make(limits=limits)
    names = ["a", "b", "c"]
    requests = [add(scheduler, name, 4, 9) for name in names]
    batch = schedule(scheduler)
    assert [("a", 0, 4), ("b", 0, 4), ("c", 0, 1)] == spans(batch)

    with pytest.raises(error):
        scheduler.update(batch, np.array(tokens))

    assert [0, 0, 0] == [request.num_computed_tokens for request in requests]
    scheduler.update(batch, np.array([5, 6]))
    assert [[5], [6], []] == [request.output_tokens for request in requests]
    scheduler.cache.check_integrity()


def test_a_failed_step_aborts_its_requests_and_no_other() -> None:
    scheduler = make(limits=SchedulerLimits(max_running_requests=1))
    failed, waiting = add(scheduler, "a", 4, 9), add(scheduler, "b", 4)

    scheduler.cancel(schedule(scheduler))

    assert [RequestOutput(failed, (), FinishReason.ABORT)] == scheduler.take_outputs()
    assert failed.kv is None
    assert scheduler.cache.stats().num_requests == 0
    drain(scheduler)
    assert waiting.finish_reason is FinishReason.LENGTH


# Who runs ---------------------------------------------------------------------


def test_prompts_come_in_chunks_beside_decodes() -> None:
    scheduler = make(
        limits=SchedulerLimits(
            max_running_requests=3, max_batched_tokens=5, chunked_prefill_size=8
        )
    )
    add(scheduler, "a", 4, 9)
    add(scheduler, "b", 9, 9)
    expected = [
        [("a", 0, 4), ("b", 0, 1)],
        [("a", 4, 5), ("b", 1, 5)],
        [("a", 5, 6), ("b", 5, 9)],
        [("a", 6, 7), ("b", 9, 10)],
    ]

    actual = []
    for _ in expected:
        batch = schedule(scheduler)
        actual.append(spans(batch))
        scheduler.update(batch, answer(batch))

    assert expected == actual


def test_only_the_last_chunk_gives_a_token() -> None:
    scheduler = make(limits=SchedulerLimits(chunked_prefill_size=4))
    request = add(scheduler, "a", 9, 2)

    outputs = [step(scheduler) for _ in range(4)]

    assert [0, 0, 1, 1] == [len(part) for part in outputs]
    assert outputs[3] == [RequestOutput(request, (7,), FinishReason.LENGTH)]


def test_nobody_overtakes_where_nobody_may() -> None:
    scheduler = make(8, 4, limits=SchedulerLimits(max_overtakes=0))
    add(scheduler, "a", 16, 9)
    step(scheduler)
    long, short = add(scheduler, "b", 16), add(scheduler, "c", 1)

    step(scheduler)

    assert (long.kv, short.kv) == (None, None)


@pytest.mark.parametrize(
    ("num_rows", "max_running"), [(2, 8), (8, 2)], ids=["rows", "limit"]
)
def test_no_more_run_than_may(num_rows: int, max_running: int) -> None:
    scheduler = make(
        num_rows=num_rows, limits=SchedulerLimits(max_running_requests=max_running)
    )
    for name in "abcd":
        add(scheduler, name, 2, 2)

    step(scheduler)

    assert (2, 2) == (scheduler.num_running, scheduler.num_waiting)
    step(scheduler)
    assert [("c", 0, 2), ("d", 0, 2)] == spans(schedule(scheduler))


@pytest.mark.parametrize(("num_tokens", "starts"), [(12, True), (13, False)])
def test_a_prompt_starts_when_all_of_it_fits_and_the_others_can_go_on(
    num_tokens: int, starts: bool
) -> None:
    limits = SchedulerLimits(chunked_prefill_size=4)
    scheduler = make(8, 4, limits=limits)
    running = add(scheduler, "a", 14, 7)
    while not running.num_output_tokens:
        step(scheduler)

    # Four pages are free, and one of them is set aside.
    request = add(scheduler, "b", num_tokens)
    batch = schedule(scheduler)

    expected = [("a", 14, 15), ("b", 0, 4)] if starts else [("a", 14, 15)]
    assert expected == spans(batch)
    assert starts == (request.kv is not None)


def test_a_hit_is_no_room_for_the_request_that_hits() -> None:
    """What is evictable before it starts is locked once it has started."""
    scheduler = make(8, 4, limits=SchedulerLimits(chunked_prefill_size=4))
    add(scheduler, "a", 17)
    drain(scheduler)
    running = add(scheduler, "b", 9, 3)
    while not running.num_output_tokens:
        step(scheduler)
    assert (4, 16) == (scheduler.cache.available_size, scheduler.cache.evictable_size)
    again = add(scheduler, "a", 21)

    step(scheduler)

    assert again.kv is None
    assert scheduler.cache.evictable_size == 16
    drain(scheduler)
    assert again.num_cached_tokens == 16


def test_the_newest_is_retracted_and_comes_back_with_what_it_had() -> None:
    scheduler = make(6, 4, admission=gambler())
    older, newer = add(scheduler, "a", 4, 16), add(scheduler, "b", 4, 12)
    while not newer.num_retractions:
        step(scheduler)
    assert (newer.status, newer.kv) == (RequestStatus.WAITING, None)
    output = newer.output_tokens
    assert output

    drain(scheduler)

    assert older.num_retractions == 0
    assert newer.num_retractions == scheduler.num_retractions == 1
    assert output == newer.output_tokens[: len(output)]
    assert (newer.num_output_tokens, newer.num_cached_tokens) == (12, 0)
    # It took its place with the page that was still cached.
    assert newer.num_computed_tokens < 2 * (4 + 12)


def test_recomputation_after_a_retraction_is_counted_apart() -> None:
    scheduler = make(6, 4, admission=gambler())
    _, newer = add(scheduler, "a", 4, 16), add(scheduler, "b", 4, 12)
    drain(scheduler)
    stats = scheduler.cache.stats()

    assert (stats.num_admitted_requests, stats.num_resumed_requests) == (3, 1)
    # Two prompts, and not the token that had no K and V when the pages went (B175).
    assert (stats.num_prompt_tokens, stats.num_cached_tokens) == (4 + 4, 0)
    assert stats.num_resumed_cached_tokens > 0
    resumed = stats.num_resumed_cached_tokens + stats.num_recomputed_tokens
    assert newer.retracted_len == resumed
    assert newer.num_computed_tokens == 4 + 12 - 1 + stats.num_recomputed_tokens


def test_who_was_retracted_goes_before_who_never_ran() -> None:
    limits = SchedulerLimits(max_running_requests=2, max_overtakes=0)
    scheduler = make(6, 4, limits=limits, admission=gambler())
    add(scheduler, "a", 4, 16)
    retracted = add(scheduler, "b", 4, 12)
    behind = add(scheduler, "c", 4)
    while not retracted.num_retractions:
        step(scheduler)

    started: list[Request] = []
    while not started:
        batch = schedule(scheduler)
        started = [e.request for e in batch.entries if e.request in (retracted, behind)]
        scheduler.update(batch, answer(batch))

    assert retracted is started[0]


def test_namespaces_share_nothing() -> None:
    scheduler = make()
    prompt = range(9)
    for number, namespace in enumerate([None, "x", "y", "x"]):
        request = Request(number, prompt, SamplingParams(1), namespace=namespace)
        scheduler.add_request(request)
        drain(scheduler)

        assert request.num_cached_tokens == (8 if number == 3 else 0)


def test_the_priority_of_a_request_goes_to_the_cache() -> None:
    memory = MemoryManager(5, 4, max_num_requests=2, max_context_len=20)
    scheduler = Scheduler(RadixCache(memory, policy="priority"))
    for name, priority in [("kept", 2), ("gone", 1), ("new", 1)]:
        tokens = [ord(letter) for letter in name] * 3
        scheduler.add_request(
            Request(name, tokens[:9], SamplingParams(1), priority=priority)
        )
        drain(scheduler)

    assert scheduler.cache.match_prefix([ord(x) for x in "keptkept"]) == 8


def test_outputs_can_go_before_all_prompts() -> None:
    memory = MemoryManager(16, 4, max_num_requests=2, max_context_len=20)
    scheduler = Scheduler(RadixCache(memory, outputs_first=True))
    for name in "ab":
        add(scheduler, name, num_tokens=8, max_new_tokens=5)
        drain(scheduler)
    victims = scheduler.cache.eviction_order(16)

    assert [victim.prefix_len for victim in victims] == [8, 8, 4, 0, 4, 0]


# How requests end -------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(5), FinishReason.STOP),
        (SamplingParams(1), FinishReason.STOP),
        (SamplingParams(5, ignore_eos=True), None),
        (SamplingParams(5, stop_token_ids=(3, 9), ignore_eos=True), FinishReason.STOP),
        (SamplingParams(1, ignore_eos=True), FinishReason.LENGTH),
    ],
)
def test_a_token_ends_a_request_or_not(
    params: SamplingParams, expected: FinishReason | None
) -> None:
    scheduler = make(eos_token_ids=(9, 11))
    request = Request("a", [1, 2], params)
    scheduler.add_request(request)

    (output,) = step(scheduler, token=9)

    assert RequestOutput(request, (9,), expected) == output
    assert [9] == request.output_tokens
    assert (request.status is RequestStatus.FINISHED) == (expected is not None)
    assert expected is request.finish_reason


def test_unknown_and_finished_ids_are_ignored_by_abort() -> None:
    scheduler = make()
    add(scheduler, "a", 4)
    drain(scheduler)

    scheduler.abort("a")
    scheduler.abort("nobody")

    assert [] == scheduler.take_outputs()


def test_an_abort_is_told_once_and_keeps_the_scheduler_awake_until_then() -> None:
    scheduler = make()
    request = add(scheduler, "a", 4)
    scheduler.abort("a")
    scheduler.abort("a")

    assert scheduler.has_requests
    assert scheduler.schedule() is None
    expected = [RequestOutput(request, (), FinishReason.ABORT)]
    assert expected == scheduler.take_outputs()
    assert not scheduler.has_requests


def test_an_abort_in_flight_is_told_at_once_and_frees_after_the_step() -> None:
    scheduler = make()
    request = add(scheduler, "a", 4, 9)
    batch = schedule(scheduler)
    scheduler.abort("a")
    told = scheduler.take_outputs()
    assert [RequestOutput(request, (), FinishReason.ABORT)] == told
    # Its slots are being written: nobody else may have them yet.
    assert scheduler.cache.held_size == 4
    assert scheduler.has_requests

    assert [] == scheduler.update(batch, answer(batch))

    assert scheduler.cache.available_size == scheduler.cache.total_size
    assert not scheduler.has_requests
    assert [] == request.output_tokens


def test_an_id_can_be_used_again_while_its_old_request_is_in_flight() -> None:
    scheduler = make()
    old = add(scheduler, "a", 4, 9)
    batch = schedule(scheduler)
    scheduler.abort("a")
    new = add(scheduler, "a", 6)

    scheduler.update(batch, answer(batch))

    drain(scheduler)
    assert (old.finish_reason, new.finish_reason) == ("abort", "length")


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> tuple[Scheduler, Request, Batch]:
    """A scheduler, a half-computed request that finds no room, and who goes on."""
    scheduler = make(limits=SchedulerLimits(chunked_prefill_size=4))
    add(scheduler, "a", 2, 9)
    request = add(scheduler, "b", 9, 2)
    step(scheduler)
    assert request.num_computed_tokens == 4

    with monkeypatch.context() as patch:
        fail_steps(patch, scheduler.cache, "extend", 9)
        batch = schedule(scheduler)
    assert [("a", 2, 3)] == spans(batch)
    return scheduler, request, batch


def test_a_prompt_without_room_waits_while_others_decode(
    stuck: tuple[Scheduler, Request, Batch],
) -> None:
    scheduler, request, batch = stuck

    scheduler.update(batch, answer(batch))

    assert request.status is RequestStatus.RUNNING
    assert [("a", 3, 4), ("b", 4, 8)] == spans(schedule(scheduler))


def test_an_abort_of_who_is_not_in_flight_frees_at_once(
    stuck: tuple[Scheduler, Request, Batch],
) -> None:
    scheduler, request, batch = stuck

    scheduler.abort("b")

    assert request.kv is None
    assert scheduler.cache.stats().num_requests == 1
    scheduler.update(batch, answer(batch))
    scheduler.cache.check_integrity()


@pytest.mark.parametrize("end", ["finish", "abort", "cancel"])
def test_everything_comes_back(end: str) -> None:
    scheduler = make()
    add(scheduler, "a", 9, 2)
    ends: dict[str, Callable[[], None]] = {
        "finish": lambda: None,
        "abort": lambda: scheduler.abort("a"),
        "cancel": lambda: scheduler.cancel(schedule(scheduler)),
    }
    step(scheduler)

    ends[end]()

    drain(scheduler)
    cache = scheduler.cache
    assert cache.available_size + cache.evictable_size == cache.total_size
    assert cache.memory.request_table.num_free_rows == 8
    assert cache.match_prefix(range(97000, 97008)) == 8


def test_outputs_do_not_depend_on_the_schedule() -> None:
    outputs = set()
    for chunk in (1, 3, 100):
        scheduler = make(limits=SchedulerLimits(chunked_prefill_size=chunk))
        requests = [add(scheduler, name, 5, 8) for name in "abc"]
        runner = NullRunner(1000)
        while scheduler.has_requests:
            batch = schedule(scheduler)
            scheduler.update(batch, runner.run(batch))
        outputs.add(str([request.output_tokens for request in requests]))

    assert len(outputs) == 1


class FailsSoon:
    """A policy that fails once it was asked a few times."""

    num_calls = 0

    def key(self, node: RadixNode) -> int:
        self.num_calls += 1
        if self.num_calls > 2:
            raise ArithmeticError("no")
        return 0


def make_to_fail() -> tuple[Engine, Request, Request]:
    """The policy fails in the next step, once the first request has its slot."""
    memory = MemoryManager(8, 4, max_num_requests=3, max_context_len=32)
    cache = RadixCache(memory, FailsSoon())
    engine = Engine(Scheduler(cache), NullRunner(9))
    for i in range(3):
        engine.generate([Request(i, [i] * 9, SamplingParams(1))])
    first = Request("a", [5] * 6, SamplingParams(6))
    second = Request("b", [6] * 9, SamplingParams(1))
    engine.scheduler.add_request(first)
    engine.step()
    engine.scheduler.add_request(second)
    return engine, first, second


def test_a_policy_that_fails_leaves_no_request_half_scheduled() -> None:
    engine, first, second = make_to_fail()
    cache = engine.scheduler.cache

    with pytest.raises(PolicyError) as failure:
        engine.step()

    cache.check_integrity()
    assert (first.status, first.finish_reason) == ("finished", "error")
    assert first.error is failure.value
    assert (second.status, second.kv) == ("waiting", None)
    assert cache.held_size == cache.protected_size == 0


def test_a_step_that_fails_halfway_loses_no_page_copy() -> None:
    engine, _, _ = make_to_fail()
    copies = engine.scheduler.cache.memory.page_copies
    copies.add({2: 1})

    with pytest.raises(PolicyError):
        engine.step()

    assert copies.pending == {2: 1}


def test_an_unknown_token_is_refused_before_it_fails_a_step() -> None:
    cache = RadixCache(MemoryManager(8, 4, max_num_requests=2, max_context_len=32))
    scheduler = Scheduler(cache, vocab_size=10)

    with pytest.raises(TokenError, match="request 'a': tokens must be < 10, got 10"):
        scheduler.add_request(Request("a", [1, 10, 2], SamplingParams(1)))
    assert not scheduler.has_requests
    scheduler.add_request(Request("a", [1, 9, 2], SamplingParams(1)))


def test_a_request_that_others_leave_no_room_waits_and_is_not_refused() -> None:
    cache = RadixCache(MemoryManager(4, 4, max_num_requests=2, max_context_len=32))
    engine = Engine(Scheduler(cache), NullRunner(9))
    request = Request("a", [1] * 7, SamplingParams(4))
    engine.scheduler.add_request(request)
    engine.step()
    stranger = cache.admit([2])
    assert stranger is not None
    cache.alloc_for_extend([stranger], [8])

    with pytest.raises(CacheBusyError, match="others hold"):
        for _ in engine.run():
            pass

    assert (request.status, request.num_retractions) == ("waiting", 1)
    cache.release(stranger)
    for _ in engine.run():
        pass
    assert len(request.output_tokens) == 4


def test_with_overlap_a_step_is_prepared_before_the_token_is_known() -> None:
    memory = MemoryManager(16, 4, max_num_requests=8, max_context_len=64)
    scheduler = Scheduler(RadixCache(memory), overlap=True)
    add(scheduler, "a", 4, 4)
    actual = []
    batches = [schedule(scheduler)]
    for _ in range(3):
        batches.append(schedule(scheduler))
        done = batches.pop(0)
        actual.append(spans(done))
        scheduler.update(done, answer(done))

    # Nothing comes behind the last token that it may have.
    assert scheduler.schedule() is None
    assert [[("a", 0, 4)], [("a", 4, 5)], [("a", 5, 6)]] == actual
    assert [("a", 6, 7)] == spans(batches[0])


def test_nobody_waits_for_a_page_behind_another_prefix() -> None:
    """The page that it lacks is computed, but its tokens come after other ones."""
    scheduler = make()
    first = Request("first", [1, 2, 3, 4, 9], SamplingParams(1))
    scheduler.add_request(first)
    drain(scheduler)
    other = Request("other", [6, 6, 6, 6, 5, 5, 5, 5, 1], SamplingParams(1))
    request = Request("same page", [1, 2, 3, 4, 5, 5, 5, 5, 1], SamplingParams(1))
    for each in (other, request):
        scheduler.add_request(each)

    assert [("other", 0, 9), ("same page", 4, 9)] == spans(schedule(scheduler))


def test_nobody_waits_for_a_prompt_that_is_computed_but_of_a_past_epoch() -> None:
    scheduler = make()
    prompt = range(9)
    scheduler.add_request(Request("old", prompt, SamplingParams(9)))
    step(scheduler)
    scheduler.cache.bump_epoch(None)
    scheduler.add_request(Request("new", prompt, SamplingParams(1)))

    assert [("old", 9, 10), ("new", 0, 9)] == spans(schedule(scheduler))

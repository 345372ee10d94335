"""Faults that other schedulers had, by their case id; each is a small workload.

Every step runs through `CheckedScheduler`: the law, the
content of every slot and the order of the queues are looked at all the time.
"""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from radixkv.mem_cache import (
    ChunkCache,
    LengthError,
    MemoryManager,
    RadixCache,
    RequestStateError,
)
from radixkv.scheduling import (
    FinishReason,
    Request,
    RequestStatus,
    SamplingParams,
    SchedulerLimits,
)
from radixkv.scheduling.testing import CheckedScheduler

from ..unit.failing_steps import fail_steps


def make(
    num_slots: int,
    page_size: int,
    *,
    num_rows: int = 8,
    chunk: int = 2048,
    max_running: int = 256,
    max_deferrals: int = 256,
    is_cached: bool = True,
) -> CheckedScheduler:
    """Make a pool of `num_slots` usable slots and its scheduler."""
    memory = MemoryManager(
        num_slots // page_size,
        page_size,
        max_num_requests=num_rows,
        max_context_len=num_slots,
    )
    return CheckedScheduler(
        RadixCache(memory) if is_cached else ChunkCache(memory),
        SchedulerLimits(
            max_running_requests=max_running,
            chunked_prefill_size=chunk,
            max_deferrals=max_deferrals,
        ),
    )


def span(first: int, last: int) -> list[int]:
    """The tokens `first..last`, both included, as the cases write them."""
    return list(range(first, last + 1))


def add(
    checked: CheckedScheduler, prompt: list[int], max_new_tokens: int = 1
) -> Request:
    checked.add(prompt, SamplingParams(max_new_tokens, ignore_eos=True))
    return checked.requests[-1]


def run(
    checked: CheckedScheduler, prompt: list[int], max_new_tokens: int = 1
) -> Request:
    """Run a request to its end, alone."""
    request = add(checked, prompt, max_new_tokens)
    checked.drain()
    return request


def step(checked: CheckedScheduler, count: int = 1) -> None:
    for _ in range(count):
        checked.step()
        checked.check()


def spans(checked: CheckedScheduler) -> list[tuple[object, int, int]]:
    """Schedule, and tell which positions of which requests."""
    checked.schedule()
    batch = checked.batch
    entries = batch.entries if batch else ()
    return [(entry.request.request_id, entry.start, entry.stop) for entry in entries]


def sizes(checked: CheckedScheduler) -> dict[str, int]:
    """Free, evictable, locked and held slots, as the cases name them."""
    cache = checked.cache
    return {
        "F": cache.available_size,
        "E": cache.evictable_size,
        "L": cache.protected_size,
        "H": cache.held_size,
    }


def num_free_rows(checked: CheckedScheduler) -> int:
    return checked.cache.memory.request_table.num_free_rows


def fail_once(
    patch: pytest.MonkeyPatch, checked: CheckedScheduler, method: str
) -> None:
    """Let one call of the cache find no room, whatever is free."""
    checked.may_retract = True
    fail_steps(patch, checked.cache, method)


def retract_one(
    checked: CheckedScheduler, monkeypatch: pytest.MonkeyPatch
) -> tuple[Request, Request]:
    """Run two requests until the newer is retracted; returns both."""
    first = add(checked, span(1, 3), 5)
    second = add(checked, span(11, 14), 5)
    step(checked)
    with monkeypatch.context() as patch:
        fail_once(patch, checked, "decode")
        checked.step()
    assert (second.status, second.num_retractions) == (RequestStatus.WAITING, 1)
    return first, second


# A. Who owns a slot when a request ends ---------------------------------------


def test_b01_nothing_is_lost_or_freed_twice_by_an_ordinary_request() -> None:
    checked = make(64, 1)

    run(checked, span(1, 5), 4)

    assert {"F": 56, "E": 8, "L": 0, "H": 0} == sizes(checked)


def test_b02_a_request_that_finishes_is_no_victim_of_the_same_step() -> None:
    checked = make(32, 1)
    first = add(checked, span(1, 5), 2)
    second = add(checked, span(101, 120), 13)
    step(checked, 2)

    assert first.status is RequestStatus.FINISHED
    assert sizes(checked)["E"] == 6
    checked.drain()
    assert checked.scheduler.num_retractions == 0
    assert second.finish_reason is FinishReason.LENGTH
    assert {"F": 0, "E": 32, "L": 0, "H": 0} == sizes(checked)


@pytest.mark.parametrize("when", ["waiting", "between chunks", "in flight"])
def test_b07_an_abort_gives_a_half_computed_prompt_back(when: str) -> None:
    checked = make(64, 1, chunk=8)
    request = add(checked, span(1, 20), 4)
    if when != "waiting":
        step(checked)
    if when == "in flight":
        checked.schedule()

    checked.abort(request)

    step(checked)
    assert sizes(checked)["F"] + sizes(checked)["E"] == 64
    assert num_free_rows(checked) == 8
    checked.drain()
    assert {request: FinishReason.ABORT} == checked.ended


def test_b08_an_abort_while_waiting_gives_back_what_was_held_before() -> None:
    checked = make(16, 4, num_rows=1)
    first = add(checked, span(1, 7), 2)
    checked.schedule()
    checked.abort(first)
    second = add(checked, span(11, 17), 10)
    assert first.kv is not None
    checked.run()

    checked.drain()

    assert second.finish_reason is FinishReason.LENGTH
    assert sizes(checked)["F"] + sizes(checked)["E"] == 16
    assert num_free_rows(checked) == 1


def test_b08_a_retracted_request_that_is_aborted_owns_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked = make(16, 4)
    first, second = retract_one(checked, monkeypatch)

    checked.abort(second)

    assert second.kv is None
    checked.drain()
    assert {first: "length", second: "abort"} == checked.ended


def test_b09_a_request_that_ends_in_its_first_step_gives_its_row_back() -> None:
    checked = make(64, 1, num_rows=2)

    for first in (1, 11, 21):
        request = run(checked, span(first, first + 4))
        assert request.finish_reason is FinishReason.LENGTH

    assert num_free_rows(checked) == 2


def test_b12_a_prompt_advances_through_its_chunks_without_being_published() -> None:
    checked = make(64, 1, chunk=8, is_cached=False)
    add(checked, span(1, 20))
    chunks, held = [], []

    while checked.scheduler.has_requests:
        chunks += spans(checked)
        held.append(sizes(checked)["H"])
        checked.run()

    assert [(0, 0, 8), (0, 8, 16), (0, 16, 20)] == chunks
    assert [8, 16, 20] == held
    assert {"F": 64, "E": 0, "L": 0, "H": 0} == sizes(checked)


def test_b15_the_law_holds_over_500_mixed_requests() -> None:
    random = Random(15)
    checked = make(4096, 16, num_rows=48, chunk=512)
    prefixes = [[random.randrange(99) for _ in range(200)] for _ in range(6)]
    while len(checked.requests) < 500 or checked.scheduler.has_requests:
        for _ in range(random.choice([0, 0, 2, 4, 8])):
            if len(checked.requests) < 500:
                shared = random.choice(prefixes)[: random.randint(0, 200)]
                tail = [random.randrange(99) for _ in range(random.randint(1, 100))]
                add(checked, shared + tail, random.randint(1, 64))
        checked.schedule()
        if random.random() < 0.05:
            checked.abort_any(random.randrange(10**6))
        if checked.batch is not None:
            checked.run()
        checked.cache.check_integrity()

    checked.drain()
    assert checked.cache.stats().num_evicted_tokens > 0
    assert {"length", "abort"} == set(checked.ended.values())
    assert sizes(checked)["F"] + sizes(checked)["E"] == 4096


def test_b161_a_step_that_ends_late_ends_once() -> None:
    checked = make(16, 4)
    request = add(checked, span(1, 8))
    checked.schedule()
    batch = checked.batch
    assert batch is not None
    checked.abort(request)
    checked.run()
    before = sizes(checked)

    for late_call in (
        lambda: checked.scheduler.update(batch, np.array([1], np.int32)),
        lambda: checked.scheduler.cancel(batch),
    ):
        with pytest.raises(RequestStateError, match="oldest batch that schedule"):
            late_call()

    assert before == sizes(checked)
    assert checked.cache.match_prefix(span(1, 8)) == 0


# E. Page arithmetic and admission ---------------------------------------------


def test_b35_new_pages_are_counted_from_what_is_computed() -> None:
    checked = make(64, 4)
    for first, length in [(10, 4), (20, 4), (30, 4), (40, 5)]:
        add(checked, span(first, first + length - 1), 9)
    step(checked)
    before = sizes(checked)["F"]

    checked.schedule()

    assert before - 3 * 4 == sizes(checked)["F"]


def test_b36_no_more_are_retracted_than_pages_are_needed() -> None:
    checked = make(160, 16)
    for first in range(0, 500, 100):
        add(checked, span(first, first + 15), 9)
    step(checked)
    checked.resize(5)
    assert {"F": 0, "E": 0, "L": 80, "H": 0} == sizes(checked)

    decoded = spans(checked)

    assert checked.scheduler.num_retractions == 3
    assert [(0, 16, 17), (1, 16, 17)] == decoded
    checked.run()
    checked.drain()


def test_b37_every_prompt_is_counted_in_pages_of_its_own() -> None:
    checked = make(5120, 64, num_rows=100)
    for i in range(100):
        add(checked, [i] * 14, 8)

    num_admitted = len(spans(checked))

    assert num_admitted == 80
    checked.run()
    checked.drain()


def test_b43_a_decode_takes_a_page_only_behind_the_last_slot() -> None:
    checked = make(12, 4)
    request = add(checked, span(1, 3), 4)
    step(checked)
    assert request.kv is not None
    held = []

    while checked.scheduler.has_requests:
        checked.schedule()
        held.append(checked.cache.slots(request.kv).tolist())
        checked.run()

    assert [4, 5, 6] == [len(slots) for slots in held]
    assert held[1][4] % 4 == 0
    assert held[2][4] == held[1][4]


def test_b44_behind_a_hit_only_the_rest_is_computed() -> None:
    checked = make(64, 4)
    run(checked, span(1, 5))
    request = add(checked, span(1, 7), 4)

    assert [(1, 4, 7)] == spans(checked)
    assert request.kv is not None
    assert len(checked.cache.slots(request.kv)) == 7
    assert request.num_cached_tokens == 4


# F. Full hits and tiny prompts ------------------------------------------------


def test_b48_a_prompt_that_is_cached_whole_computes_its_last_page_again() -> None:
    checked = make(16, 4)
    run(checked, span(1, 8))
    add(checked, span(1, 8))

    assert [(1, 4, 8)] == spans(checked)
    assert {"F": 4, "E": 4, "L": 4, "H": 4} == sizes(checked)
    checked.run()
    assert {"F": 8, "E": 8, "L": 0, "H": 0} == sizes(checked)


def test_b51_behind_a_hit_there_is_one_chunk_and_no_empty_one() -> None:
    checked = make(64, 4, chunk=4)
    run(checked, span(1, 8))
    request = add(checked, span(1, 9))

    assert [(1, 8, 9)] == spans(checked)
    checked.run()
    assert request.status is RequestStatus.FINISHED


@pytest.mark.parametrize("page_size", [1, 4])
def test_b51_a_prompt_of_one_token_is_one_chunk(page_size: int) -> None:
    checked = make(16, page_size)
    run(checked, [1])
    add(checked, [1])

    assert [(1, 0, 1)] == spans(checked)
    with pytest.raises(LengthError, match="a prompt must have >= 1 tokens"):
        add(checked, [])


# G. Match, allocate and reuse inside one step ---------------------------------


def test_b54_nobody_hits_what_the_same_step_computes() -> None:
    """The second is put off until the first has computed what both need."""
    checked = make(64, 4)
    add(checked, span(1, 9), 4)
    waiting = add(checked, span(1, 9), 4)

    assert [(0, 0, 9)] == spans(checked)
    assert waiting.kv is None
    checked.run()
    add(checked, span(1, 9), 4)
    assert [(0, 9, 10), (1, 8, 9), (2, 8, 9)] == spans(checked)


def test_b54_nobody_waits_who_may_not() -> None:
    checked = make(64, 4, max_deferrals=0)
    add(checked, span(1, 9), 4)
    add(checked, span(1, 9), 4)

    assert [(0, 0, 9), (1, 0, 9)] == spans(checked)


def test_b56_who_waited_is_matched_again() -> None:
    checked = make(16, 4, max_running=1)
    run(checked, span(1, 8))
    add(checked, span(101, 108), 9)
    waiting = add(checked, span(1, 9), 4)
    assert checked.cache.match_prefix(waiting.tokens) == 8

    while waiting.kv is None:
        step(checked)

    assert waiting.num_cached_tokens == 0
    checked.drain()


# J. Preemption, retraction, progress ------------------------------------------


def test_b83_the_last_request_ends_when_there_is_no_more_room() -> None:
    checked = make(20, 4)
    request = add(checked, span(1, 16), 2)
    step(checked)
    checked.resize(4)

    step(checked)

    assert request.finish_reason is FinishReason.REFUSED
    assert request.num_output_tokens == 1
    assert sizes(checked)["L"] == sizes(checked)["H"] == 0
    after = add(checked, span(31, 34))
    checked.drain()
    assert after.finish_reason is FinishReason.LENGTH
    assert {request: "refused", after: "length"} == checked.ended


def test_b83_who_waits_is_refused_when_the_pool_became_too_small_for_it() -> None:
    checked = make(20, 4)
    request = add(checked, span(1, 17), 2)
    after = add(checked, span(31, 34))
    checked.resize(4)

    checked.drain()

    assert {request: "refused", after: "length"} == checked.ended


def test_b87_a_prompt_that_the_pool_cannot_hold_is_refused_at_once() -> None:
    checked = make(16, 4)

    with pytest.raises(LengthError, match="need 20 slots, the longest that fits is 16"):
        checked.scheduler.add_request(
            Request("long", span(1, 20), SamplingParams(max_new_tokens=1))
        )

    request = add(checked, span(1, 4))
    step(checked)
    assert request.status is RequestStatus.FINISHED


def test_b88_a_failed_allocation_puts_a_request_back_in_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked = make(64, 4)
    run(checked, span(1, 5))
    running = add(checked, span(61, 63), 9)
    step(checked)
    request = add(checked, span(1, 8), 2)
    behind = add(checked, span(21, 28), 2)
    with monkeypatch.context() as patch:
        fail_once(patch, checked, "extend")

        expected = [(running.request_id, 3, 4), (behind.request_id, 0, 8)]
        assert expected == spans(checked)

    assert (request.kv, request.status) == (None, RequestStatus.WAITING)
    assert num_free_rows(checked) == 6
    assert sizes(checked)["L"] == 0
    checked.run()
    ids = [request_id for request_id, _, _ in spans(checked)]
    assert [running.request_id, behind.request_id, request.request_id] == ids
    assert request.num_cached_tokens == 4
    checked.run()
    checked.drain()


def test_b91_a_resumed_request_reuses_its_prompt_and_its_outputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked = make(32, 4)
    add(checked, [9], 9)
    request = add(checked, span(1, 8), 9)
    step(checked, 5)
    output = request.output_tokens
    assert (5, 12) == (len(output), request.kv and request.kv.committed_len)
    with monkeypatch.context() as patch:
        fail_once(patch, checked, "decode")
        checked.step()
    assert (request.kv, request.num_retractions) == (None, 1)

    resumed = spans(checked)

    assert (request.request_id, 12, 13) == resumed[-1]
    assert output == request.output_tokens == checked.streamed[request]
    assert request.num_cached_tokens == 0
    checked.run()
    checked.drain()


@pytest.mark.parametrize("num_failures", [0, 1])
def test_b92_locks_balance_when_a_request_is_resumed(
    monkeypatch: pytest.MonkeyPatch, num_failures: int
) -> None:
    checked = make(32, 4)
    _, request = retract_one(checked, monkeypatch)
    for _ in range(num_failures):
        with monkeypatch.context() as patch:
            fail_once(patch, checked, "extend")
            checked.step()
        assert request.kv is None

    checked.drain()

    assert request.finish_reason is FinishReason.LENGTH
    assert sizes(checked)["L"] == 0

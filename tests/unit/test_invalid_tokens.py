"""B170: a request whose logits are not finite ends alone, and publishes nothing."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import pytest
from numpy.typing import NDArray

from radixkv.mem_cache import (
    MemoryManager,
    NonFiniteLogitsError,
    RadixCache,
    TokenError,
)
from radixkv.scheduling import (
    INVALID_TOKEN,
    Batch,
    Engine,
    FinishReason,
    NullRunner,
    Request,
    RequestOutput,
    SamplingParams,
    Scheduler,
    SchedulerLimits,
)
from radixkv.scheduling.testing import LabelRunner


class SickRunner:
    """Says nothing behind certain positions of certain requests."""

    def __init__(
        self, cache: RadixCache, gaps: dict[Hashable, int], *, is_late: bool = False
    ) -> None:
        self._labels = LabelRunner(cache, 99, overlap=is_late)
        self._gaps = gaps

    def run(self, batch: Batch) -> NDArray[np.int32]:
        tokens = self._labels.run(batch)
        places = [
            (entry.request.request_id, stop)
            for entry in batch.entries
            for stop in range(entry.stop - entry.num_samples + 1, entry.stop + 1)
        ]
        for i, (name, position) in enumerate(places):
            if position >= self._gaps.get(name, position + 1):
                tokens[i] = INVALID_TOKEN
        return tokens


class Knows:
    """A drafter that knows what comes, but for some positions."""

    def __init__(self, wrong: set[int]) -> None:
        self._wrong = wrong

    def propose(self, request: Request, max_tokens: int) -> tuple[int, ...]:
        first = request.num_tokens
        (same,) = alone(request.prompt_tokens.tolist(), first + max_tokens)
        drafts = [*request.prompt_tokens, *same.output_tokens][first:]
        return tuple(
            (int(token) + 1) % 99 if first + i in self._wrong else int(token)
            for i, token in enumerate(drafts[:max_tokens])
        )


def alone(prompt: list[int], max_new_tokens: int) -> list[Request]:
    request = Request("alone", prompt, SamplingParams(max_new_tokens))
    memory = MemoryManager(64, 4, max_num_requests=1, max_context_len=256)
    return Engine(Scheduler(RadixCache(memory)), NullRunner(99)).generate([request])


def make(
    gaps: dict[Hashable, int], *, chunk: int = 64, **options: object
) -> tuple[Engine, RadixCache]:
    memory = MemoryManager(32, 4, max_num_requests=8, max_context_len=64)
    cache = RadixCache(memory, debug=True)
    limits = SchedulerLimits(chunked_prefill_size=chunk)
    scheduler = Scheduler(cache, limits, **options)  # type: ignore[arg-type]
    is_late = bool(options.get("overlap"))
    return Engine(scheduler, SickRunner(cache, gaps, is_late=is_late)), cache


def prompt_of(name: str, num_tokens: int = 9) -> list[int]:
    return list(range(ord(name), ord(name) + num_tokens))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("position", [9, 10, 13])
def test_b170_a_gap_ends_its_request_alone(
    overlap: bool, temperature: float, position: int
) -> None:
    engine, cache = make({"b": position}, overlap=overlap)
    params = SamplingParams(8, temperature=temperature)
    requests = [Request(name, prompt_of(name), params) for name in "abc"]

    outputs = list(engine.stream(requests))

    reasons = [request.finish_reason for request in requests]
    assert [FinishReason.LENGTH, FinishReason.ERROR, FinishReason.LENGTH] == reasons
    told = [output for output in outputs if output.request is requests[1]]
    error = requests[1].error
    assert isinstance(error, NonFiniteLogitsError)
    assert f"'b': the logits behind position {position - 1} " in str(error)
    assert RequestOutput(requests[1], (), FinishReason.ERROR, error) == told[-1]
    for request in requests:
        (same,) = alone(request.prompt_tokens.tolist(), 8)
        num_tokens = position - 9 if request is requests[1] else 8
        assert same.output_tokens[:num_tokens] == request.output_tokens
    # The prompt was computed before the step that went wrong, unless this was the one.
    published = 0 if position == 9 else 8
    assert published == cache.match_prefix(requests[1].tokens)
    assert 16 == cache.match_prefix(requests[0].tokens)
    assert (0, 0) == (cache.held_size, cache.protected_size)


def test_b170_chunks_that_were_published_before_stay_and_nothing_else() -> None:
    engine, cache = make({"a": 23}, chunk=8)
    (request,) = engine.generate([Request("a", prompt_of("a", 23), SamplingParams(4))])

    assert request.finish_reason is FinishReason.ERROR
    assert 16 == cache.match_prefix(request.tokens)
    assert 23 == request.num_computed_tokens


def test_b170_who_waits_for_the_prompt_computes_it_alone() -> None:
    engine, _ = make({"a": 9})
    requests = [Request(name, prompt_of("x"), SamplingParams(3)) for name in "ab"]

    engine.generate(requests)

    (same,) = alone(prompt_of("x"), 3)
    assert [FinishReason.ERROR, FinishReason.LENGTH] == [
        request.finish_reason for request in requests
    ]
    assert same.output_tokens == requests[1].output_tokens
    assert 0 == requests[1].num_cached_tokens


@pytest.mark.parametrize("gap", range(9, 18))
@pytest.mark.parametrize("wrong", [set[int](), {11}, {10, 12}, {13}])
def test_b170_with_drafts_a_request_has_the_same_tokens_and_the_same_end(
    gap: int, wrong: set[int]
) -> None:
    results = []
    for options in ({}, {"drafter": Knows(wrong), "max_draft_tokens": 4}):
        engine, cache = make({"a": gap}, **options)
        params = SamplingParams(8)
        requests = [Request(name, prompt_of(name), params) for name in "ab"]
        outputs = list(engine.stream(requests))
        told = [
            token
            for output in outputs
            for token in output.tokens
            if output.request is requests[0]
        ]
        assert requests[0].output_tokens == told
        assert cache.match_prefix(requests[0].tokens) <= (8 if gap < 17 else 16)
        ends = [
            (request.output_tokens, request.finish_reason, request.num_computed_tokens)
            for request in requests
        ]
        results.append([end[:2] for end in ends])

    assert results[0] == results[1]


def test_b170_an_end_before_the_gap_is_that_end() -> None:
    (same,) = alone(prompt_of("a"), 8)
    third = same.output_tokens[2]
    stop = same.output_tokens.index(third) + 1
    engine, _ = make({"a": 9 + stop}, drafter=Knows(set()), max_draft_tokens=7)
    params = SamplingParams(8, stop_token_ids=(third,))

    (request,) = engine.generate([Request("a", prompt_of("a"), params)])

    assert (FinishReason.STOP, None) == (request.finish_reason, request.error)
    assert same.output_tokens[:stop] == request.output_tokens


@pytest.mark.parametrize("token", [-2, -(2**31)])
def test_b205_other_negative_tokens_are_no_tokens(token: int) -> None:
    engine, _ = make({})
    engine.scheduler.add_request(Request("a", prompt_of("a"), SamplingParams(4)))
    batch = engine.scheduler.schedule()
    assert batch is not None

    with pytest.raises(TokenError):
        engine.scheduler.update(batch, np.array([token]))

    assert 1 == engine.scheduler.num_in_flight


def test_b170_a_request_that_ended_meanwhile_is_not_told_twice() -> None:
    engine, cache = make({})
    scheduler = engine.scheduler
    request = Request("a", prompt_of("a"), SamplingParams(4))
    scheduler.add_request(request)
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.abort("a")

    outputs = scheduler.update(batch, np.array([INVALID_TOKEN], np.int32))

    assert [RequestOutput(request, (), FinishReason.ABORT)] == outputs
    assert (None, 0) == (request.error, cache.stats().num_requests)

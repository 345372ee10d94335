"""Streams: each token once, in order, and exactly one end for every request."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from radixkv.mem_cache import LengthError, MemoryManager, RadixCache, RequestStateError
from radixkv.scheduling import (
    Engine,
    FinishReason,
    NullRunner,
    Request,
    RequestOutput,
    SamplingParams,
    Scheduler,
    SchedulerLimits,
)

EOS = 7
OVERLAP = pytest.mark.parametrize("overlap", [False, True])


def make(*, overlap: bool = False, vocab_size: int = 20) -> Engine:
    memory = MemoryManager(16, 4, max_num_requests=8, max_context_len=64)
    limits = SchedulerLimits(chunked_prefill_size=4)
    scheduler = Scheduler(
        RadixCache(memory), limits, overlap=overlap, eos_token_ids=[EOS]
    )
    return Engine(scheduler, NullRunner(vocab_size))


def request(name: str, num_tokens: int = 5, max_new_tokens: int = 6) -> Request:
    first = 1000 * ord(name)
    tokens = range(first, first + num_tokens)
    return Request(name, tokens, SamplingParams(max_new_tokens))


def by_request(outputs: Iterable[RequestOutput]) -> dict[Request, list[RequestOutput]]:
    parts: dict[Request, list[RequestOutput]] = {}
    for output in outputs:
        parts.setdefault(output.request, []).append(output)
    return parts


def check_stream(parts: list[RequestOutput]) -> None:
    """Tokens are only appended, and the last output is the only end."""
    request = parts[0].request
    assert request.output_tokens == [token for part in parts for token in part.tokens]
    *before, end = (part.finish_reason for part in parts)
    assert [None] * len(before) == before
    assert end is request.finish_reason is not None


@OVERLAP
def test_every_way_to_end_is_told_exactly_once(overlap: bool) -> None:
    engine = make(overlap=overlap)
    scheduler, cache = engine.scheduler, engine.scheduler.cache
    stops = next(r for r in map(request, "abcdefghijk") if _stops(r))
    length = request("l", 3, 1)
    aborted = request("q", 9, 30)
    refused = request("r", 40, 20)
    for each in (stops, length, aborted, refused):
        scheduler.add_request(each)
    outputs = []
    cache.resize(12)  # the last one cannot even run alone any more

    for report in engine.run():
        outputs += report.outputs
        if aborted.num_output_tokens == 3:
            scheduler.abort("q")

    told = by_request(outputs)
    assert {stops, length, aborted, refused} == set(told)
    for parts in told.values():
        check_stream(parts)
    assert ["stop", "length", "abort", "refused"] == [
        each.finish_reason for each in (stops, length, aborted, refused)
    ]


def _stops(request: Request) -> bool:
    alone = Request("alone", request.prompt_tokens, request.sampling_params)
    make().generate([alone])
    return alone.finish_reason is FinishReason.STOP


@OVERLAP
def test_a_stream_tells_of_tokens_as_they_come(overlap: bool) -> None:
    engine = make(overlap=overlap)
    a, b = request("a", 5, 4), request("b", 9, 2)

    seen = []
    for output in engine.stream([a, b]):
        check = output.request.output_tokens[-len(output.tokens) :]
        assert list(output.tokens) == check
        seen.append(output)

    for parts in by_request(seen).values():
        check_stream(parts)
    assert {a, b} == set(by_request(seen))
    assert not engine.scheduler.has_requests


def test_a_stream_queues_all_or_none_at_once() -> None:
    engine = make()

    with pytest.raises(LengthError):
        engine.stream([request("a"), request("l", 60, 60)])
    with pytest.raises(RequestStateError):
        engine.stream([request("a"), request("a")])
    assert not engine.scheduler.has_requests
    engine.stream([request("a")])
    assert engine.scheduler.num_waiting == 1


@OVERLAP
def test_a_stream_that_is_left_goes_on_with_the_next(overlap: bool) -> None:
    engine = make(overlap=overlap)
    a, b = request("a", 5, 9), request("b", 5, 9)
    for output in engine.stream([a]):
        assert output.request is a
        break
    assert a.finish_reason is None

    told = by_request(engine.stream([b]))

    assert a.finish_reason is not None
    assert a.finish_reason is told[a][-1].finish_reason
    check_stream(told[b])


def test_a_stream_takes_others_along() -> None:
    engine = make()
    other = request("o")
    engine.scheduler.add_request(other)

    told = by_request(engine.stream([request("a")]))

    check_stream(told[other])

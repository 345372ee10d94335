"""Outputs, usage and statistics as messages: JSON and msgpack, there and back."""

from __future__ import annotations

import json
from collections.abc import Hashable
from dataclasses import asdict
from types import ModuleType

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from radixkv.mem_cache import CacheStats, MemoryManager, NamespaceStats, RadixCache
from radixkv.scheduling import (
    INVALID_TOKEN,
    Batch,
    Engine,
    ErrorMessage,
    FinishReason,
    NullRunner,
    OutputMessage,
    Request,
    RequestOutput,
    RequestUsage,
    SamplingParams,
    Scheduler,
)

CODECS = pytest.mark.parametrize("codec", [msgspec.json, msgspec.msgpack])


class SickRunner:
    """Has no token for requests with a long prompt."""

    def run(self, batch: Batch) -> NDArray[np.int32]:
        tokens = NullRunner(99).run(batch)
        for i, entry in enumerate(batch.entries):
            if entry.request.num_prompt_tokens > 8:
                tokens[i] = INVALID_TOKEN
        return tokens


def outputs() -> tuple[RadixCache, list[RequestOutput]]:
    memory = MemoryManager(16, 4, max_num_requests=4, max_context_len=64)
    cache = RadixCache(memory)
    engine = Engine(Scheduler(cache), SickRunner())
    params = SamplingParams(3, temperature=1.0)
    requests = [Request("a", range(5), params), Request(("b", 1), range(9), params)]
    return cache, list(engine.stream(requests))


@CODECS
def test_every_output_comes_back_as_it_was(codec: ModuleType) -> None:
    _, told = outputs()
    messages = [output.message() for output in told]

    back = [codec.decode(codec.encode(each), type=OutputMessage) for each in messages]

    assert messages == back
    assert {None, "length", "error"} == {each.finish_reason for each in back}
    assert {"a", ("b", 1)} == {each.request_id for each in back}
    for output, message in zip(told, back, strict=True):
        assert output.tokens == message.tokens
        is_last = output.finish_reason is not None
        # The usage of an earlier one would be out of date when it arrives.
        assert (output.request.usage if is_last else None) == message.usage


def test_an_error_is_its_type_and_its_message() -> None:
    _, told = outputs()
    (error,) = [output.message().error for output in told if output.error is not None]

    assert isinstance(error, ErrorMessage)
    assert "NonFiniteLogitsError" == error.type
    assert "request ('b', 1): the logits behind position 8" in error.message


def test_json_leaves_out_what_there_is_not() -> None:
    message = RequestOutput(Request("a", [1]), (7, 8), None).message()

    assert {"request_id": "a", "tokens": [7, 8]} == json.loads(
        msgspec.json.encode(message)
    )


class Named:
    def __repr__(self) -> str:
        return "Named()"


@pytest.mark.parametrize(
    ("request_id", "expected"),
    [
        ("a", "a"),
        (7, 7),
        (("a", 0, 1), ("a", 0, 1)),
        ((("a", 0), 1), "(('a', 0), 1)"),
        (b"a", "b'a'"),
        (1.5, "1.5"),
        (True, "True"),
        (None, "None"),
        (Named(), "Named()"),
        (frozenset([1]), "frozenset({1})"),
    ],
    ids=repr,
)
@CODECS
def test_an_id_of_another_kind_is_told_by_its_repr(
    codec: ModuleType, request_id: Hashable, expected: Hashable
) -> None:
    output = RequestOutput(Request(request_id, [1]), (), FinishReason.ABORT)

    back = codec.decode(codec.encode(output.message()), type=OutputMessage)

    assert expected == back.request_id


@CODECS
@given(
    seed=st.none() | st.integers(0, 2**64 - 1),
    queue_s=st.none() | st.floats(0, 1e9),
    count=st.integers(0, 2**31),
)
def test_usage_comes_back_as_it_was(
    codec: ModuleType, seed: int | None, queue_s: float | None, count: int
) -> None:
    usage = RequestUsage(count, 0, count, 1, 2, 1, 0, 0, seed, queue_s, None, 3.5)

    assert usage == codec.decode(codec.encode(usage), type=RequestUsage)
    assert asdict(usage) == json.loads(json.dumps(asdict(usage)))


@CODECS
def test_statistics_come_back_as_they_were(codec: ModuleType) -> None:
    cache, _ = outputs()
    stats, of_namespace = cache.stats(), cache.namespace_stats(None)

    assert stats == codec.decode(codec.encode(stats), type=CacheStats)
    assert of_namespace == codec.decode(codec.encode(of_namespace), type=NamespaceStats)
    assert asdict(stats) == json.loads(json.dumps(asdict(stats)))

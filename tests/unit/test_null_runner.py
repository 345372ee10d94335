"""NullRunner: a token depends on its own request and on nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.mem_cache import ChunkCache, ConfigError, MemoryManager
from radixkv.scheduling.batch import Batch, BatchEntry
from radixkv.scheduling.null_runner import NullRunner
from radixkv.scheduling.request import Request

PROMPTS = st.lists(st.integers(0, 9), min_size=1, max_size=12)


def make_batch(requests: list[Request], stops: list[int]) -> Batch:
    cache = ChunkCache(
        MemoryManager(
            num_pages=200, page_size=1, max_num_requests=9, max_context_len=99
        )
    )
    kvs = [cache.admit(request.tokens) for request in requests]
    info = cache.alloc_for_extend([kv for kv in kvs if kv is not None], stops)
    pairs = zip(requests, stops, strict=True)
    entries = [BatchEntry(r, 0, stop, int(stop == r.num_tokens)) for r, stop in pairs]
    return Batch(tuple(entries), info, cache)


def next_tokens(runner: NullRunner, *prompts: list[int]) -> list[int]:
    requests = [Request(i, prompt) for i, prompt in enumerate(prompts)]
    batch = make_batch(requests, [len(prompt) for prompt in prompts])
    return [int(token) for token in runner.run(batch)]


@given(st.lists(PROMPTS, min_size=1, max_size=8), st.integers(1, 1000))
def test_a_batch_gives_what_each_request_gives_alone(
    prompts: list[list[int]], vocab_size: int
) -> None:
    runner = NullRunner(vocab_size)
    tokens = next_tokens(runner, *prompts)

    assert tokens == [next_tokens(runner, prompt)[0] for prompt in prompts]
    assert all(0 <= token < vocab_size for token in tokens)


def test_only_entries_that_sample_get_a_token() -> None:
    runner = NullRunner(100)
    requests = [Request(0, [1, 2, 3]), Request(1, [4, 5, 6])]

    tokens = runner.run(make_batch(requests, [2, 3]))

    assert next_tokens(runner, [4, 5, 6]) == tokens.tolist()
    assert np.int32 == tokens.dtype


def test_tokens_after_the_entry_are_not_looked_at() -> None:
    runner = NullRunner(100)
    request = Request(0, [1, 2, 3])
    batch = make_batch([request], [3])
    expected = runner.run(batch).tolist()
    request.append(7)

    assert expected == runner.run(batch).tolist()


def test_length_and_order_change_the_token() -> None:
    runner = NullRunner(1_000_000)
    prompts = [[1], [1, 1], [1] * 5, [1] * 6, [1, 2], [2, 1], [0, 1]]

    assert len(prompts) == len(set(next_tokens(runner, *prompts)))


def test_tokens_stay_the_same_from_version_to_version() -> None:
    assert [4, 160, 328] == next_tokens(NullRunner(1000), [0], [1, 2], [7] * 9)


def test_a_vocabulary_without_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="vocab_size must be >= 1"):
        NullRunner(0)

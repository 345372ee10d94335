"""Batch: per-token arrays against loops over the entries."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.mem_cache import ChunkCache, LengthError, MemoryManager, RequestStateError
from radixkv.scheduling.batch import Batch, BatchEntry
from radixkv.scheduling.request import Request


def make_cache(page_size: int) -> ChunkCache:
    return ChunkCache(
        MemoryManager(
            num_pages=160, page_size=page_size, max_num_requests=8, max_context_len=32
        )
    )


def make_batch(cache: ChunkCache, spans: list[tuple[int, int]]) -> Batch:
    """Make a batch of one request a span, computed up to where the span begins."""
    entries: list[BatchEntry] = []
    for i, (start, stop) in enumerate(spans):
        request = Request(i, range(100 * i, 100 * i + 20))
        request.kv = cache.admit(request.tokens)
        assert request.kv is not None
        if start:
            cache.alloc_for_extend([request.kv], [start])
            cache.commit(request.kv, start)
        entries.append(BatchEntry(request, start, stop, min(i, stop - start)))
    kvs = [entry.request.kv for entry in entries if entry.request.kv is not None]
    info = cache.alloc_for_extend(kvs, [stop for _, stop in spans])
    return Batch(tuple(entries), info, cache)


SPANS = st.tuples(st.integers(0, 19), st.integers(0, 19)).map(
    lambda ends: (min(ends), max(ends) + 1)
)


@given(st.sampled_from([1, 2, 3, 16]), st.lists(SPANS, min_size=1, max_size=8))
def test_arrays_list_the_entries_token_by_token(
    page_size: int, spans: list[tuple[int, int]]
) -> None:
    cache = make_cache(page_size)
    batch = make_batch(cache, spans)

    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    samples: list[int] = []
    for entry in batch.entries:
        end = len(ids) + entry.stop - entry.start
        samples += range(end - entry.num_samples, end)
        assert entry.request.kv is not None
        for position in range(entry.start, entry.stop):
            ids.append(int(entry.request.tokens[position]))
            positions.append(position)
            slots.append(int(cache.slots(entry.request.kv)[position]))
    assert ids == batch.input_ids.tolist()
    assert positions == batch.positions.tolist()
    assert slots == batch.out_cache_loc().tolist()
    assert samples == batch.sample_indices.tolist()
    assert len(ids) == batch.num_tokens
    assert len(samples) == batch.num_samples
    assert np.int32 == batch.input_ids.dtype
    assert np.int32 == batch.positions.dtype
    assert np.int64 == batch.out_cache_loc().dtype


def test_drafts_stand_behind_the_tokens_of_the_request() -> None:
    entry = BatchEntry(Request("a", [1, 2, 3]), 2, 5, 3, drafts=(8, 9))

    assert [1, 2, 3, 8, 9] == entry.tokens.tolist()


def test_a_token_that_never_came_reads_as_zero() -> None:
    """The request was aborted after the step that reads it had been prepared."""
    entry = BatchEntry(Request("a", [1, 2, 3]), 3, 4, 1)

    assert [1, 2, 3, 0] == entry.tokens.tolist()


def test_an_entry_samples_only_where_it_computes() -> None:
    cache = make_cache(2)
    batch = make_batch(cache, [(0, 4), (2, 5)])
    first, second = batch.entries
    second = BatchEntry(second.request, 2, 5, 4)

    with pytest.raises(LengthError, match="at 3 positions, got num_samples 4"):
        Batch((first, second), batch.kv_cache_info, cache)


def test_a_message_about_other_positions_is_refused() -> None:
    cache = make_cache(2)
    batch = make_batch(cache, [(0, 4), (2, 5)])

    with pytest.raises(LengthError, match="must cover the entries' positions"):
        Batch(batch.entries[::-1], batch.kv_cache_info, cache)


def test_slots_of_a_request_outside_the_cache_are_refused() -> None:
    batch = make_batch(make_cache(2), [(0, 4)])
    batch.entries[0].request.kv = None

    with pytest.raises(RequestStateError, match="holds no part of the cache"):
        batch.out_cache_loc()

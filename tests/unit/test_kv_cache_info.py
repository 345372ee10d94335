"""The per-step message of a cache: what is in it, and how much it costs."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from radixkv.mem_cache import KVCacheInfo, RequestStateError

from .driver import Wrong, admit, compute, decode, insert, make_cache, run, span

PROMPT = span(1, 10)


def test_the_first_message_lists_the_cached_pages_too() -> None:
    cache = make_cache()
    insert(cache, PROMPT)
    request = admit(cache, PROMPT)
    info = compute(cache, request, 10)

    assert info.num_reqs == 1
    assert info.rows.tolist() == [request.req_pool_idx]
    assert (info.starts.tolist(), info.stops.tolist()) == ([8], [10])
    assert info.page_starts.tolist() == [0]
    assert info.page_indptr.tolist() == [0, 3]
    assert info.new_pages.tolist() == (cache.slots(request)[::4] // 4).tolist()


def test_a_batch_is_ragged() -> None:
    cache = make_cache()
    long, short = admit(cache, PROMPT), admit(cache, [1, 2])
    info = cache.alloc_for_extend([long, short], [9, 2])

    assert info.page_indptr.tolist() == [0, 3, 4]
    assert info.num_new_pages == 4
    assert len(set(info.new_pages.tolist())) == 4


def test_rows_that_were_given_back_are_forgotten_once() -> None:
    cache = make_cache()
    first, second = run(cache, PROMPT), run(cache, PROMPT)
    cache.release(second)
    cache.release(first)
    running = admit(cache, [1])

    assert compute(cache, running, 1).forgotten_rows.tolist() == [2, 1]
    assert decode(cache, running).forgotten_rows.tolist() == []


def test_a_row_that_came_and_went_twice_is_forgotten_once() -> None:
    cache = make_cache()
    for _ in range(2):
        cache.release(admit(cache, [1]))

    assert cache.alloc_for_decode([]).forgotten_rows.tolist() == [1]


def test_a_refused_allocation_keeps_the_rows_to_forget() -> None:
    cache = make_cache(2, 4)
    cache.release(run(cache, span(1, 8)))
    request = admit(cache, PROMPT)

    with pytest.raises(MemoryError):
        cache.alloc_for_extend([request], [10])
    assert compute(cache, request, 8).forgotten_rows.tolist() == [1]


def test_a_decode_step_costs_a_few_bytes_a_request() -> None:
    cache = make_cache(256, 16, max_num_requests=256)
    requests = [run(cache, [token]) for token in range(256)]
    wire = msgspec.msgpack.encode(cache.alloc_for_decode(requests))

    assert len(wire) <= 20 * 256 + 16


def test_a_message_cannot_be_changed() -> None:
    info: Wrong = make_cache().alloc_for_decode([])

    with pytest.raises(AttributeError):
        info.num_reqs = 3
    with pytest.raises(ValueError, match="read-only"):
        info.page_indptr[0] = 3


def test_merge_joins_an_extend_and_a_decode() -> None:
    cache = make_cache()
    cache.release(admit(cache, [9]))
    old, new = run(cache, [1]), admit(cache, PROMPT)
    extend = cache.alloc_for_extend([new], [10])
    both = KVCacheInfo.merge([cache.alloc_for_decode([old]), extend])

    assert both.rows.tolist() == [old.req_pool_idx, new.req_pool_idx]
    assert both.starts.tolist() == [1, 0]
    assert both.stops.tolist() == [2, 10]
    assert both.page_indptr.tolist() == [0, 0, 3]
    assert both.new_pages.tolist() == extend.new_pages.tolist()


def test_numbers_are_int32_of_the_right_shape() -> None:
    info = KVCacheInfo.pack(
        [1, 2], [0, 3], [4, 4], [0, 1], [0, 1, 1], np.int32(7).tobytes(), [5]
    )

    for name in ("rows", "starts", "stops", "page_starts"):
        assert getattr(info, name).shape == (2,)
        assert getattr(info, name).dtype == np.int32
    assert info.page_indptr.shape == (3,)
    assert info.new_pages.tolist() == [7]
    assert info.forgotten_rows.tolist() == [5]


def test_a_step_that_gives_back_what_it_uses_cannot_be_merged() -> None:
    used = KVCacheInfo.pack([1], [0], [4], [0], [0, 0], b"")
    forgets = KVCacheInfo.pack([2], [0], [4], [0], [0, 0], b"", [1])

    with pytest.raises(RequestStateError, match="within the step"):
        KVCacheInfo.merge([used, forgets])
    assert KVCacheInfo.merge([forgets, used]).forgotten_rows.tolist() == [1]

"""Known faults, groups E, N and O: page arithmetic, the table's borders, resizes.

Sizes are (free, evictable, protected, held), in tokens.
"""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from radixkv.mem_cache import (
    ConfigError,
    LengthError,
    OutOfPagesError,
    PagesInUseError,
    RequestKV,
    TokenToKVPoolAllocator,
)

from .driver import (
    admit,
    compute,
    decode,
    free_order,
    insert,
    law,
    make_cache,
    run,
    span,
)


@pytest.mark.parametrize(("num_pages", "fits"), [(8, True), (7, False)])
def test_b35_new_pages_are_counted_from_the_kv_length(
    num_pages: int, fits: bool
) -> None:
    cache = make_cache(num_pages, 4)
    requests = [run(cache, span(1, length)) for length in (4, 4, 4, 5)]
    if fits:
        assert cache.alloc_for_decode(requests).num_new_pages == 3
        return
    with pytest.raises(OutOfPagesError) as caught:
        cache.alloc_for_decode(requests)
    assert caught.value.needed == 3


def test_b36_room_is_counted_in_pages_not_in_tokens() -> None:
    """16 free slots are no room for 4 requests that each need a page."""
    cache = make_cache(5, 16)
    requests = [run(cache, span(1, 16)) for _ in range(5)]
    num_retracted = 0
    while True:
        try:
            cache.alloc_for_decode(requests)
            break
        except OutOfPagesError:
            cache.release(requests.pop())
            num_retracted += 1

    assert num_retracted == 3
    assert law(cache) == (16, 0, 0, 64)


def test_b37_every_request_fills_a_page_of_its_own() -> None:
    cache = make_cache(80, 64, max_num_requests=100)
    requests = [admit(cache, span(1, 14)) for _ in range(100)]

    with pytest.raises(OutOfPagesError):
        cache.alloc_for_extend(requests[:81], [14] * 81)
    cache.alloc_for_extend(requests[:80], [14] * 80)
    assert law(cache) == (0, 0, 0, 5120)


def refuse_three_pages(cache_free: int) -> tuple[RequestKV, list[int], list[int]]:
    cache = make_cache(cache_free + 4, 4)
    request = run(cache, span(1, 16))
    before = free_order(cache.memory.allocator)
    with pytest.raises(OutOfPagesError):
        cache.alloc_for_extend([request], [28])
    with pytest.raises(OutOfPagesError):
        cache.alloc_for_decode([request], 9)
    return request, before, free_order(cache.memory.allocator)


def test_b42_a_refused_allocation_leaves_the_free_list_in_order() -> None:
    request, before, after = refuse_three_pages(2)

    assert before == after
    assert len(after) == 2
    assert request.allocated_len == 16


def test_b43_a_new_page_begins_behind_the_last_slot() -> None:
    full = make_cache(1, 4)
    decode(full, run(full, span(1, 3)))
    assert law(full) == (0, 0, 0, 4)

    full = make_cache(1, 4)
    request = run(full, span(1, 4))
    with pytest.raises(OutOfPagesError):
        decode(full, request)

    roomy = make_cache(2, 4)
    request = run(roomy, span(1, 4))
    assert decode(roomy, request).num_new_pages == 1
    assert roomy.slots(request, 4).tolist() == [8]


@pytest.mark.parametrize("is_resumed", [False, True])
def test_b44_what_is_left_to_compute_follows_from_the_hit(is_resumed: bool) -> None:
    cache = make_cache(16, 4)
    insert(cache, span(1, 4))
    request = admit(cache, span(1, 7))
    if is_resumed:
        compute(cache, request, 7)
        cache.release(request)
        request = admit(cache, span(1, 7))
    info = compute(cache, request, 7)

    assert (info.starts.tolist(), info.stops.tolist()) == ([4], [7])
    assert info.num_new_pages == 2
    assert cache.slots(request).size == 7


def test_b45_slots_of_rejected_drafts_come_back() -> None:
    cache = make_cache(16, 4)
    tokens = span(1, 12)
    request = run(cache, tokens[:6])
    num_owned = []
    for num_accepted in (2, 2, 1):
        cache.alloc_for_decode([request], 5)
        num_owned.append(cache.held_size // 4)
        cache.commit(request, request.committed_len + num_accepted)
        cache.truncate(request, request.committed_len)
    cache.cache_finished_req(request, tokens)

    assert num_owned == [3, 4, 4]
    assert law(cache) == (56, 8, 0, 0)
    assert cache.match_prefix(tokens) == 8


def test_b45_drafts_may_stay_allocated_until_the_end() -> None:
    cache = make_cache(16, 4)
    request = run(cache, span(1, 6))
    for num_accepted in (2, 2, 1):
        cache.alloc_for_decode([request], 5)
        cache.commit(request, request.committed_len + num_accepted)
    cache.cache_finished_req(request, span(1, 11))

    assert law(cache) == (56, 8, 0, 0)


def test_b46_drafts_are_published_when_they_are_accepted() -> None:
    cache = make_cache(16, 4)
    tokens = span(1, 10)
    request = run(cache, tokens[:7])
    cache.alloc_for_decode([request], 3)
    cache.cache_unfinished_req(request, tokens)
    assert cache.match_prefix(tokens) == 4
    cache.commit(request, 8)
    cache.cache_unfinished_req(request, tokens)

    assert cache.match_prefix(tokens) == 8


def test_b47_what_was_free_a_moment_ago_is_no_promise() -> None:
    cache = make_cache(3, 4)
    first, second = admit(cache, span(1, 12)), admit(cache, span(1, 8))
    assert cache.available_size == 12
    compute(cache, second, 8)

    with pytest.raises(OutOfPagesError):
        cache.alloc_for_extend([first], [12])
    assert law(cache) == (4, 0, 0, 8)


@pytest.mark.parametrize("page_size", [1, 2, 3, 7, 16, 64])
def test_demand_is_what_a_slot_by_slot_count_says(page_size: int) -> None:
    random = Random(page_size)
    cache = make_cache(6000, page_size, max_num_requests=40, max_context_len=400)
    requests = [run(cache, [i] * random.randint(1, 130)) for i in range(40)]
    for _ in range(20):
        batch = random.sample(requests, random.randint(1, 40))
        num_tokens = random.randint(1, 5)
        pages_before = {
            (request, slot // page_size)
            for request in batch
            for slot in cache.slots(request).tolist()
        }
        free = cache.available_size
        cache.alloc_for_decode(batch, num_tokens)
        pages_after = {
            (request, slot // page_size)
            for request in batch
            for slot in cache.slots(request).tolist()
        }
        for request in batch:
            cache.commit(request, request.committed_len + random.randint(0, num_tokens))
        num_taken = (free - cache.available_size) // page_size

        assert len(pages_after) - len(pages_before) == num_taken
    law(cache)


# N: the borders of the table ------------------------------------------------


def test_b132_drafts_at_the_context_limit_stay_in_their_row() -> None:
    cache = make_cache(32, 4, max_context_len=32)
    request, neighbour = run(cache, span(1, 31)), run(cache, span(1, 4))
    before = cache.slots(neighbour).tolist()

    with pytest.raises(LengthError, match=r"32..32, got 34"):
        cache.alloc_for_decode([request], 3)
    cache.alloc_for_decode([request], 1)
    assert cache.slots(request).size == 32
    assert before == cache.slots(neighbour).tolist()
    with pytest.raises(LengthError):
        cache.alloc_for_extend([request], [33])


def test_b136_slots_are_listed_by_position() -> None:
    """The row of the last request is torn: its pages were freed one by one."""
    cache = make_cache(8, 1, max_num_requests=9)
    blockers = [run(cache, [token]) for token in range(8)]
    request = admit(cache, span(20, 24))
    for stop, blocker in enumerate([6, 2, 7, 0], start=1):
        cache.release(blockers[blocker])
        compute(cache, request, stop)

    assert cache.slots(request).tolist() == [7, 3, 8, 1]
    assert cache.slots(request, 1, 4).tolist() == [3, 8, 1]


def test_b139_the_free_count_is_right_after_each_of_many_frees() -> None:
    allocator = TokenToKVPoolAllocator(62_500, 16)
    pages = allocator.alloc(62_500)
    assert pages is not None
    for count, page in enumerate(pages[:10_000].tolist(), start=1):
        allocator.free([page])
        assert allocator.num_free_pages == count
    again = allocator.alloc(10_000)

    assert again is not None
    assert np.array_equal(again, pages[:10_000])


def test_b141_pages_are_interchangeable() -> None:
    random = Random(141)
    allocator = TokenToKVPoolAllocator(16, 4)
    allocator.alloc(16)
    for pages in (list(range(1, 17, 2)), list(range(2, 17, 2))):
        for page in random.sample(pages, 8):
            allocator.free([page])
    again = allocator.alloc(16)

    assert again is not None
    assert again.tolist() == span(1, 16)


# O: resizes, and all or nothing ---------------------------------------------


def test_b145_a_shrink_is_refused_until_usage_fits_and_growth_works_after_it() -> None:
    cache = make_cache(16, 4)
    insert(cache, span(1, 8))
    requests = [run(cache, span(10 * i, 10 * i + 7)) for i in range(1, 6)]
    assert law(cache) == (16, 8, 0, 40)

    with pytest.raises(PagesInUseError) as caught:
        cache.resize(8)
    assert (caught.value.needed, caught.value.available) == (10, 8)
    assert cache.match_prefix(span(1, 8)) == 8
    for request in (requests.pop(), requests.pop()):
        cache.release(request)
    cache.resize(8)
    assert law(cache) == (0, 8, 0, 24)
    assert max(cache.slots(request).max() for request in requests) < 9 * 4
    cache.resize(16)
    assert law(cache) == (32, 8, 0, 24)
    with pytest.raises(ConfigError):
        cache.resize(0)


@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 64])
@pytest.mark.parametrize("num_pages", [1, 5, 9])
@pytest.mark.parametrize("has_quotas", [False, True])
def test_the_advertised_capacity_is_the_longest_request_that_runs(
    page_size: int, num_pages: int, has_quotas: bool
) -> None:
    """Alone, after resizes, and whatever is cached."""
    cache = make_cache(7, page_size, max_context_len=7 * page_size)
    insert(cache, span(1, 7 * page_size), "other")
    cache.resize(num_pages)
    if has_quotas:
        cache.set_quota("other", floor_size=num_pages // 4 * page_size)
        cache.set_quota("bounded", ceiling_size=num_pages // 2 * page_size)
    for namespace in (None, "bounded", "other"):
        size = cache.max_request_size(namespace)
        request = admit(cache, [0], namespace)
        with pytest.raises((OutOfPagesError, LengthError)):
            cache.alloc_for_extend([request], [size + 1])
        if size:
            cache.alloc_for_extend([request], [size])
        cache.release(request)


def test_b147_a_batch_that_does_not_fit_gets_nothing() -> None:
    cache = make_cache(3, 4)
    requests = [admit(cache, span(1, length)) for length in (8, 4, 4)]

    with pytest.raises(OutOfPagesError):
        cache.alloc_for_extend(requests, [8, 4, 4])
    assert law(cache) == (12, 0, 0, 0)
    assert [0, 0, 0] == [cache.slots(request).size for request in requests]
    assert cache.alloc_for_extend(requests[:2], [8, 4]).num_new_pages == 3

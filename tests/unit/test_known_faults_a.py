"""Known faults, group A: who owns a page when a request ends.

Sizes are (free, evictable, protected, held), in tokens.
"""

from __future__ import annotations

from random import Random

import pytest

from radixkv.mem_cache import (
    DoubleFreeError,
    OutOfPagesError,
    RequestKV,
    RequestStateError,
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
    make_chunk_cache,
    run,
    span,
)


def test_b01_a_slot_taken_ahead_goes_back_when_a_request_finishes() -> None:
    cache = make_cache(64, 1)
    tokens = span(1, 9)
    request = run(cache, tokens[:5])
    for _ in range(3):
        decode(cache, request)
    cache.alloc_for_decode([request])
    assert law(cache) == (55, 0, 0, 9)
    cache.cache_finished_req(request, tokens)

    assert law(cache) == (56, 8, 0, 0)
    assert len(set(free_order(cache.memory.allocator))) == 56
    with pytest.raises(RequestStateError):
        cache.cache_finished_req(request, tokens)
    assert law(cache) == (56, 8, 0, 0)


def test_b02_a_finished_request_is_not_released_again() -> None:
    cache = make_cache(32, 1)
    request = run(cache, span(1, 6))
    cache.cache_finished_req(request, span(1, 6))

    with pytest.raises(RequestStateError):
        cache.release(request)
    assert law(cache) == (26, 6, 0, 0)


def test_b03_a_retraction_gives_back_the_page_behind_the_cached_prefix() -> None:
    cache = make_cache(8, 4)
    request = run(cache, span(1, 10))
    cache.cache_unfinished_req(request, span(1, 10))
    assert law(cache) == (20, 0, 8, 4)
    cache.release(request)

    assert law(cache) == (24, 8, 0, 0)


def test_b05_double_free_is_refused() -> None:
    allocator = TokenToKVPoolAllocator(4, 1)
    page = allocator.alloc(1)
    assert page is not None
    allocator.free(page)

    with pytest.raises(DoubleFreeError):
        allocator.free(page)
    assert allocator.num_free_pages == 4
    pages = allocator.alloc(4)
    assert pages is not None
    assert len(set(pages.tolist())) == 4


def test_b07_an_abort_in_the_middle_of_a_prompt_leaves_nothing_behind() -> None:
    cache = make_cache(64, 1, max_num_requests=1)
    request = admit(cache, span(1, 20))
    compute(cache, request, 8)
    cache.release(request)

    assert law(cache) == (64, 0, 0, 0)
    admit(cache, span(1, 20))


def test_b08_a_request_that_only_waits_gives_back_what_it_was_given() -> None:
    cache = make_cache(4, 4)
    waiting = admit(cache, span(1, 8))
    cache.alloc_for_extend([waiting], [8])
    cache.release(waiting)
    second = run(cache, span(1, 8))

    assert law(cache) == (8, 0, 0, 8)
    cache.release(second)
    assert law(cache) == (16, 0, 0, 0)


def test_b09_rows_come_back_from_requests_that_end_in_their_first_step() -> None:
    cache = make_cache(max_num_requests=2)
    for first in (1, 11, 21):
        insert(cache, span(first, first + 4))

    assert cache.memory.request_table.num_free_rows == 2


@pytest.mark.parametrize("make", [make_cache, make_chunk_cache])
def test_b12_a_request_that_publishes_nothing_advances_through_its_chunks(
    make: type,
) -> None:
    cache = make(64, 1)
    request = admit(cache, span(1, 20))
    chunks = []
    for stop in (8, 16, 20):
        info = compute(cache, request, stop)
        chunks.append((int(info.starts[0]), int(info.stops[0])))

    assert chunks == [(0, 8), (8, 16), (16, 20)]
    assert law(cache) == (44, 0, 0, 20)
    cache.release(request)
    assert law(cache) == (64, 0, 0, 0)


def test_b15_the_law_holds_over_500_mixed_requests() -> None:
    random = Random(15)
    cache = make_cache(4096, 16, max_num_requests=48, max_context_len=400)
    running: dict[RequestKV, list[int]] = {}
    num_started = 0
    while num_started < 500 or running:
        if num_started < 500 and len(running) < 48:
            num_started += 1
            shared = [7] * random.randint(0, 200)
            tail = [random.randrange(9) for _ in range(random.randint(1, 100))]
            running[admit(cache, shared + tail)] = shared + tail
        for request, tokens in random.sample(list(running.items()), 1):
            if request.committed_len < len(tokens):
                step = random.choice([len(tokens), request.committed_len + 17])
                compute(cache, request, min(step, len(tokens)))
                cache.cache_unfinished_req(request, tokens)
            elif random.random() < 0.7:
                tokens.append(random.randrange(9))
                decode(cache, request)
            elif random.random() < 0.2:
                cache.release(request)
                del running[request]
            else:
                cache.cache_finished_req(request, tokens)
                del running[request]
        sizes = cache.available_size + cache.evictable_size + cache.protected_size
        assert sizes + cache.held_size == cache.total_size

    free, evictable, protected, held = law(cache)
    assert protected == held == 0
    assert free + evictable == 4096 * 16


def test_b161_late_calls_for_a_dead_request_are_refused() -> None:
    cache = make_cache(4, 4)
    request = run(cache, span(1, 8))
    cache.release(request)

    for late in (cache.cache_unfinished_req, cache.cache_finished_req):
        with pytest.raises(RequestStateError):
            late(request, span(1, 8))
    with pytest.raises(RequestStateError):
        cache.release(request)
    assert cache.match_prefix(span(1, 8)) == 0
    assert law(cache) == (16, 0, 0, 0)


def test_b88_a_failed_allocation_after_admission_can_be_undone() -> None:
    cache = make_cache(4, 4, max_num_requests=2)
    insert(cache, span(1, 4))
    blocker = run(cache, span(50, 61))
    request = admit(cache, span(1, 8))
    with pytest.raises(OutOfPagesError):
        cache.alloc_for_extend([request], [8])
    cache.release(request)
    assert law(cache) == (0, 4, 0, 12)
    cache.release(blocker)

    run(cache, span(1, 8))
    assert law(cache) == (8, 0, 4, 4)

"""Known faults, group F: full hits and tiny prompts.

Sizes are (free, evictable, protected, held), in tokens.
"""

from __future__ import annotations

import pytest

from radixkv.mem_cache import LengthError

from .driver import admit, compute, decode, insert, law, make_cache, span


def test_b48_a_full_hit_leaves_a_token_and_writes_no_shared_page() -> None:
    cache = make_cache(4, 4)
    insert(cache, span(1, 8))
    shared = set(span(4, 11))
    request = admit(cache, span(1, 8))
    assert request.committed_len == 4
    compute(cache, request, 8)

    assert law(cache) == (4, 4, 4, 4)
    assert not shared & set(cache.slots(request, 4).tolist())
    cache.cache_finished_req(request, span(1, 9))
    assert law(cache) == (8, 8, 0, 0)


def test_b50_a_hit_ends_before_the_first_position_whose_output_is_wanted() -> None:
    """Outputs are wanted from position 5 on, so the request begins with 6 tokens."""
    cache = make_cache(16, 4)
    prompt = span(1, 12)
    insert(cache, prompt)
    request = admit(cache, prompt[:6])

    assert request.committed_len == 4
    info = compute(cache, request, 12)
    assert (info.starts.tolist(), info.stops.tolist()) == ([4], [12])
    assert law(cache) == (44, 8, 4, 8)
    cache.cache_finished_req(request, prompt)
    assert law(cache) == (52, 12, 0, 0)


@pytest.mark.parametrize("page_size", [1, 4])
def test_b51_a_prompt_of_one_token_has_no_hit_and_one_token_to_compute(
    page_size: int,
) -> None:
    cache = make_cache(16, page_size)
    insert(cache, span(1, 8))
    request = admit(cache, [1])

    assert request.committed_len == 0
    info = compute(cache, request, 1)
    assert (info.starts.tolist(), info.stops.tolist()) == ([0], [1])


def test_b51_behind_a_hit_there_is_one_chunk_and_no_empty_one() -> None:
    cache = make_cache(16, 4)
    insert(cache, span(1, 8))
    request = admit(cache, span(1, 9))
    compute(cache, request, 9)

    with pytest.raises(LengthError, match=r"10\.\.64, got 9"):
        cache.alloc_for_extend([request], [9])


@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 7])
def test_a_hit_is_whole_pages_and_leaves_a_token(page_size: int) -> None:
    cache = make_cache(200, page_size)
    insert(cache, span(1, 30))
    for length in range(1, 40):
        request = admit(cache, span(1, length))
        cached = request.committed_len

        assert cached == min(length - 1, 30) // page_size * page_size
        assert cached < length
        cache.release(request)


def test_b52_degenerate_input_is_refused_or_does_nothing() -> None:
    cache = make_cache(16, 4)
    insert(cache, span(1, 8))
    before = law(cache)
    requests = [admit(cache, [token]) for token in (50, 60, 70)]

    assert cache.alloc_for_extend([], []).num_reqs == 0
    with pytest.raises(LengthError, match=r"1\.\.64, got 0"):
        cache.alloc_for_extend(requests, [3, 0, 2])
    assert cache.evict(0) == cache.evict_if_needed(0) == 0
    cache.memory.allocator.free([])
    with pytest.raises(LengthError):
        cache.admit([])
    for request in requests:
        cache.release(request)
    assert before == law(cache)


def test_b52_a_request_without_a_hit_locks_nothing() -> None:
    cache = make_cache(16, 4)
    insert(cache, span(1, 8))
    request = admit(cache, [99])

    assert law(cache) == (56, 8, 0, 0)
    assert cache.evict(8) == 8
    decode(cache, request)
    cache.cache_finished_req(request, [99])
    assert law(cache) == (64, 0, 0, 0)

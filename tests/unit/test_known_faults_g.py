"""Known faults, group G: stale matches and stale pages.

The content check of this group runs in tests/property. Sizes are (free, evictable,
protected, held), in tokens.
"""

from __future__ import annotations

import pytest

from radixkv.mem_cache import CacheBusyError, RequestStateError

from .driver import admit, compute, insert, law, make_cache, run, span


def test_b54_nobody_hits_pages_that_are_not_computed_yet() -> None:
    cache = make_cache(16, 4)
    prompt = span(1, 9)
    batch = [admit(cache, prompt), admit(cache, prompt)]
    cache.alloc_for_extend(batch, [9, 9])
    cache.cache_unfinished_req(batch[0], prompt)
    assert cache.match_prefix(prompt) == 0
    cache.commit(batch[0], 9)
    cache.cache_unfinished_req(batch[0], prompt)

    assert batch[1].committed_len == 0
    assert admit(cache, prompt).committed_len == 8


def test_b55_a_page_that_was_reused_no_longer_hits() -> None:
    cache = make_cache(2, 4)
    x, y, z = span(1, 4), span(11, 14), span(21, 24)
    for tokens in (x, y, z):
        insert(cache, tokens)

    assert [cache.match_prefix(tokens) for tokens in (x, y, z)] == [0, 4, 4]


def test_b56_a_match_is_no_promise_until_admission() -> None:
    cache = make_cache(4, 4)
    prompt = span(1, 9)
    insert(cache, prompt[:8])
    assert cache.match_prefix(prompt) == 8
    insert(cache, span(50, 65))
    assert cache.evict(8) == 8
    request = admit(cache, prompt)

    assert request.committed_len == 0
    compute(cache, request, 8)
    assert law(cache) == (0, 8, 0, 8)


def test_b56_an_admitted_hit_cannot_be_evicted() -> None:
    cache = make_cache(4, 4)
    prompt = span(1, 9)
    insert(cache, prompt[:8])
    request = admit(cache, prompt)
    insert(cache, span(50, 57))

    assert cache.evict(100) == 8
    slots = cache.slots(request).tolist()
    compute(cache, request, 9)
    assert slots == cache.slots(request, 0, 8).tolist() == span(4, 11)


def test_b59_a_reset_is_refused_while_a_request_holds_a_node() -> None:
    cache = make_cache(16, 4)
    insert(cache, span(1, 8))
    request = admit(cache, span(1, 9))

    with pytest.raises(CacheBusyError):
        cache.reset()
    assert law(cache) == (56, 0, 8, 0)
    cache.release(request)
    cache.reset()
    insert(cache, span(1, 8))
    with pytest.raises(RequestStateError):
        cache.release(request)
    assert law(cache) == (56, 8, 0, 0)


def test_b90_a_resumed_request_starts_from_its_match_with_pages_of_its_own() -> None:
    cache = make_cache(8, 4)
    first = run(cache, span(1, 10))
    cache.cache_unfinished_req(first, span(1, 10))
    cache.release(first)
    other = run(cache, span(50, 53))
    again = admit(cache, span(1, 10))

    assert again.committed_len == 8
    compute(cache, again, 10)
    assert not set(cache.slots(again).tolist()) & set(cache.slots(other).tolist())


def test_b91_a_retracted_request_finds_its_prompt_and_its_outputs() -> None:
    cache = make_cache(8, 4)
    request = run(cache, span(1, 12))
    cache.cache_finished_req(request, span(1, 13))

    assert admit(cache, span(1, 13)).committed_len == 12

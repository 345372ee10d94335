"""The chunk cache: the same interface, and nothing is ever cached."""

from __future__ import annotations

import pytest

from radixkv.mem_cache import (
    CacheBusyError,
    ConfigError,
    LengthError,
    OutOfPagesError,
    RequestStateError,
    TokenError,
)

from .driver import Wrong, admit, decode, insert, law, make_chunk_cache, run, span

PROMPT = span(1, 10)


def test_nothing_is_cached_after_a_request() -> None:
    cache = make_chunk_cache()
    insert(cache, PROMPT)

    assert cache.match_prefix(PROMPT) == 0
    assert law(cache) == (64, 0, 0, 0)
    assert cache.stats().hit_rate == 0


def test_publishing_keeps_the_pages_with_the_request() -> None:
    cache = make_chunk_cache()
    request = run(cache, PROMPT)
    before = cache.slots(request).tolist()
    cache.cache_unfinished_req(request, PROMPT)

    assert before == cache.slots(request).tolist()
    assert request.protected_len == 0
    assert law(cache) == (52, 0, 0, 12)


def test_there_is_nothing_to_evict() -> None:
    cache = make_chunk_cache()
    request = run(cache, PROMPT)

    assert cache.evict(100) == 0
    assert cache.evict_if_needed(1000) == 0
    assert cache.slots(request).size == 10


def test_a_request_lives_its_whole_life() -> None:
    cache = make_chunk_cache(4, 4)
    request = run(cache, PROMPT)
    for _ in range(6):
        decode(cache, request)
    with pytest.raises(OutOfPagesError):
        decode(cache, request)
    cache.truncate(request, 3)
    assert law(cache) == (12, 0, 0, 4)
    cache.cache_finished_req(request, PROMPT)
    assert law(cache) == (16, 0, 0, 0)


def test_what_every_cache_refuses_is_refused() -> None:
    cache = make_chunk_cache()
    request = run(cache, PROMPT)
    unhashable: Wrong = []

    with pytest.raises(TokenError):
        cache.match_prefix([-1])
    with pytest.raises(TokenError):
        cache.admit([-1])
    with pytest.raises(ConfigError):
        cache.match_prefix([1], unhashable)
    with pytest.raises(LengthError):
        cache.cache_unfinished_req(request, PROMPT[:9])
    with pytest.raises(CacheBusyError):
        cache.reset()
    cache.release(request)
    with pytest.raises(RequestStateError):
        cache.cache_unfinished_req(request, PROMPT)


def test_two_requests_do_not_share() -> None:
    cache = make_chunk_cache()
    first, second = run(cache, PROMPT), run(cache, PROMPT)

    assert not set(cache.slots(first)) & set(cache.slots(second))


def test_resize_and_reset_work() -> None:
    cache = make_chunk_cache(8, 4)
    request = run(cache, PROMPT)
    cache.resize(3)
    assert law(cache) == (0, 0, 0, 12)
    cache.release(request)
    cache.reset()
    assert law(cache) == (12, 0, 0, 0)
    assert admit(cache, PROMPT).req_pool_idx == 1

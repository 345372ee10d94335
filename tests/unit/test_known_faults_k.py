"""Known faults, group K: lengths, ends and grants at their borders."""

from __future__ import annotations

import numpy as np
import pytest

from radixkv.mem_cache import (
    ConfigError,
    LengthError,
    RadixCache,
    RequestKV,
)

from .driver import (
    Wrong,
    admit,
    compute,
    insert,
    law,
    make_cache,
    make_memory,
    run,
    span,
)


@pytest.mark.parametrize("method", ["truncate", "commit"])
@pytest.mark.parametrize("wrong", [-5, np.int64(-1), 2**40, 9.5, True, None, "3"])
def test_b183_a_length_that_is_none_is_refused(method: str, wrong: Wrong) -> None:
    """Else memory is read that nobody has written."""
    cache = RadixCache(make_memory(), debug=True)  # compares the state after a refusal
    request = run(cache, span(1, 10))

    with pytest.raises(LengthError):
        getattr(cache, method)(request, wrong)
    assert (10, 10) == (request.committed_len, request.allocated_len)


def test_b185_an_empty_cache_evicts_nothing() -> None:
    cache = make_cache()

    assert [0, 0, 0] == [cache.evict(size) for size in (0, 1, 10**30)]
    for wrong in (-1, 2.0):
        with pytest.raises(LengthError):
            cache.evict(wrong)  # type: ignore[arg-type]


def test_b186_a_longer_prompt_adds_only_its_end() -> None:
    cache = make_cache(page_size=1)
    insert(cache, [1, 2])
    insert(cache, [1, 2, 3])

    assert 3 == cache.evictable_size
    assert 0 == cache.match_prefix([])
    with pytest.raises(LengthError):
        cache.admit([])


@pytest.mark.parametrize(("partial_pages", "hit"), [(False, 4), (True, 7)])
def test_b189_the_last_token_is_left_to_compute(partial_pages: bool, hit: int) -> None:
    cache = RadixCache(make_memory(), partial_pages=partial_pages)
    insert(cache, span(1, 8))

    assert hit == admit(cache, span(1, 8)).committed_len


def test_b190_what_was_rolled_back_is_published_for_nobody() -> None:
    """Another request takes the page that the drafts gave back."""
    cache = make_cache(num_pages=4)
    request = run(cache, span(1, 6))
    cache.cache_unfinished_req(request, span(1, 6))
    cache.alloc_for_extend([request], [12])
    cache.commit(request, 12)
    cache.truncate(request, 7)
    with pytest.raises(LengthError):
        cache.truncate(request, 3)  # it is published
    other = run(cache, span(50, 53))
    cache.cache_finished_req(other, span(50, 53))
    law(cache)
    cache.cache_finished_req(request, [*span(1, 6), 90])

    assert 4 == cache.match_prefix([*span(1, 6), *span(7, 12)])
    assert 4 == cache.match_prefix(span(50, 53))
    assert (8, 8, 0, 0) == law(cache)


def test_b192_only_what_is_computed_is_published() -> None:
    cache = make_cache()
    request = admit(cache, span(1, 20))
    cache.alloc_for_extend([request], [20])
    cache.commit(request, 9)
    cache.cache_unfinished_req(request, span(1, 20))

    assert 8 == cache.match_prefix(span(1, 20))
    cache.release(request)
    assert 8 == cache.match_prefix(span(1, 20))


def test_b195_what_is_retained_never_stands_in_the_way() -> None:
    half = RadixCache(make_memory(8), retention_share=0.5, clock=lambda: 0.0)
    insert(half, span(1, 24))
    assert 16 == half.retain(span(1, 24))
    for wrong in (float("nan"), 0, -1):
        with pytest.raises(ConfigError):
            half.retain(span(1, 24), ttl=wrong)
    assert 16 == half.retained_size

    whole = RadixCache(make_memory(8), retention_share=1)
    insert(whole, span(1, 32))
    assert 32 == whole.retain(span(1, 32))
    request: RequestKV = admit(whole, span(50, 69))
    compute(whole, request, 20)

    assert (0, 12, 0, 20) == law(whole)
    assert 12 == whole.retained_size

"""Partial-page reuse: a request begins inside a page, on a copy of its own."""

from __future__ import annotations

import pytest

from radixkv.mem_cache import (
    EvictionPolicy,
    RadixCache,
    RadixNode,
    RequestKV,
)
from radixkv.mem_cache.cache_state import cache_state
from radixkv.mem_cache.eviction import RecencyIndex
from radixkv.mem_cache.partial_pages import PartialPageIndex
from radixkv.mem_cache.radix_tree import RadixTree

from .driver import admit, compute, insert, law, make_memory, run, span

PROMPT = span(1, 8)


def make_cache(
    num_pages: int = 16, page_size: int = 4, policy: str | EvictionPolicy = "lru"
) -> RadixCache:
    return RadixCache(make_memory(num_pages, page_size), policy, partial_pages=True)


def lens(request: RequestKV) -> tuple[int, int, int]:
    return request.protected_len, request.committed_len, request.allocated_len


def pages_of(cache: RadixCache, request: RequestKV) -> list[int]:
    return (cache.slots(request)[:: cache.page_size] // cache.page_size).tolist()


def pending(cache: RadixCache) -> dict[int, int]:
    return cache.memory.page_copies.pending


def test_a_request_begins_inside_a_page_on_a_copy_of_its_own() -> None:
    cache = make_cache()
    insert(cache, PROMPT)
    request = admit(cache, [1, 2, 3, 4, 5, 6, 70, 80])

    assert (4, 6, 6) == lens(request)
    assert (52, 4, 4, 4) == law(cache)
    assert [1, 3] == pages_of(cache, request)
    info = compute(cache, request, 8)
    assert cache.stats().num_cached_tokens == 6
    assert info.copies == {3: 2}
    assert info.starts.tolist() == [6]
    assert info.new_pages.tolist() == [1, 3]
    cache.cache_finished_req(request, [1, 2, 3, 4, 5, 6, 70, 80])
    assert cache.match_prefix(PROMPT) == 8
    assert cache.match_prefix([1, 2, 3, 4, 5, 6, 70, 80]) == 8
    assert (52, 12, 0, 0) == law(cache)


def test_without_the_option_a_hit_is_whole_pages() -> None:
    cache = RadixCache(make_memory())
    insert(cache, PROMPT)
    request = admit(cache, [1, 2, 3, 4, 5, 6, 70, 80])

    assert (4, 4, 4) == lens(request)
    assert compute(cache, request, 8).num_copies == 0


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([1, 9, 9], 1),  # behind no hit at all
        ([1, 2, 3, 4], 3),  # one token is left to compute
        ([1, 2, 3, 4, 5, 6, 7, 8], 7),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], 8),
        ([1, 2, 3, 4, 5], 4),
        ([1, 2, 3, 4, 50, 6, 7, 8], 4),
        ([10, 2, 3], 0),
        ([1], 0),
    ],
)
def test_the_shared_start_is_counted_in_tokens(
    prompt: list[int], expected: int
) -> None:
    cache = make_cache()
    insert(cache, PROMPT)
    request = admit(cache, prompt)

    assert expected == request.committed_len == request.allocated_len
    assert expected // 4 * 4 == request.protected_len
    assert bool(expected % 4) == bool(pending(cache))
    cache.check_integrity()


def test_tokens_are_told_apart_in_each_of_their_bytes() -> None:
    for byte in range(4):
        cache = make_cache()
        insert(cache, [7, 7, 1 << 8 * byte, 7])

        assert admit(cache, [7, 7, 2 << 8 * byte, 7]).committed_len == 2


def test_a_page_in_the_middle_of_a_node_is_found() -> None:
    cache = make_cache()
    insert(cache, span(1, 16))
    request = admit(cache, [*span(1, 7), 0, 0, 0])

    assert (4, 7, 7) == lens(request)
    assert compute(cache, request, 10).copies == {5: 2}


def test_the_page_that_shares_most_is_copied() -> None:
    """Of few pages and of many."""
    cache = make_cache(num_pages=64)
    for i in range(20):
        insert(cache, [1, 2, 3, 4, 5, i, i, i])
        request = admit(cache, [1, 2, 3, 4, 5, i // 2, i // 2, 99])
        assert (4, 7, 7) == lens(request)
        source = pending(cache)[pages_of(cache, request)[1]]
        reader = admit(cache, [1, 2, 3, 4, 5, i // 2, i // 2, i // 2, 0])
        assert [1, source] == pages_of(cache, reader)
        cache.release(request)
        cache.release(reader)
    assert admit(cache, [1, 2, 3, 4, 5, 33, 0]).committed_len == 5
    assert admit(cache, [1, 2, 3, 4, 6, 0, 0]).committed_len == 4


def test_a_node_of_many_pages_is_found_among_many_by_its_first() -> None:
    cache = make_cache(num_pages=64)
    for i in range(10):
        insert(cache, [i, 1, 1, 1])
    assert admit(cache, [0, 1, 2]).committed_len == 2  # now they are kept in order
    insert(cache, [20, *span(1, 11)])

    assert admit(cache, [20, 1, 2, 0]).committed_len == 3
    assert admit(cache, [20, 1, 0]).committed_len == 2


@pytest.mark.parametrize("how", ["namespace", "epoch"])
def test_nothing_is_shared_with_others(how: str) -> None:
    cache = make_cache()
    insert(cache, PROMPT, "tenant" if how == "namespace" else None)
    cache.bump_epoch(None)

    assert admit(cache, [1, 2, 3, 0]).committed_len == 0
    assert pending(cache) == {}


def test_pages_of_one_token_have_no_start() -> None:
    cache = make_cache(page_size=1)
    insert(cache, PROMPT)

    assert (4, 4, 4) == lens(admit(cache, [1, 2, 3, 4, 50, 6]))


# Room ------------------------------------------------------------------------


def test_a_page_is_evicted_for_it_and_no_more() -> None:
    cache = make_cache(4)
    insert(cache, span(20, 27))
    insert(cache, PROMPT)
    request = admit(cache, [1, 2, 3, 4, 5, 0])

    assert (4, 5, 5) == lens(request)
    assert cache.match_prefix(span(20, 27)) == 4
    assert cache.match_prefix(PROMPT) == 8
    assert (0, 8, 4, 4) == law(cache)


def test_a_page_that_would_go_next_is_taken_over_as_it_is() -> None:
    cache = make_cache(2)
    insert(cache, PROMPT)
    request = admit(cache, [1, 2, 3, 4, 5, 6, 0])

    assert (4, 6, 6) == lens(request)
    assert [1, 2] == pages_of(cache, request)
    assert cache.match_prefix(PROMPT) == 4
    assert compute(cache, request, 7).num_copies == 0
    assert (0, 0, 4, 4) == law(cache)


def test_without_room_the_hit_is_whole_pages_and_nothing_is_refused() -> None:
    cache = make_cache(3)
    insert(cache, PROMPT)
    first, second = run(cache, [*PROMPT, 0]), admit(cache, [1, 2, 3, 4, 5, 0])

    assert (4, 4, 4) == lens(second)
    assert pending(cache) == {}
    assert (0, 0, 8, 4) == law(cache)
    cache.release(first)
    assert (4, 5, 5) == lens(admit(cache, [1, 2, 3, 4, 5, 0]))


class Broken:
    """A policy that fails."""

    def key(self, node: RadixNode) -> int:
        raise ArithmeticError


def test_a_policy_that_fails_costs_the_start_of_a_page_only() -> None:
    cache = make_cache(2, policy=Broken())
    insert(cache, PROMPT)

    assert (4, 4, 4) == lens(admit(cache, [1, 2, 3, 4, 5, 0]))
    assert (0, 4, 4, 0) == law(cache)


def test_a_namespace_at_its_ceiling_gets_no_page() -> None:
    cache = make_cache()
    insert(cache, PROMPT)
    holder = run(cache, PROMPT)
    cache.set_quota(None, ceiling_size=8)

    assert (4, 4, 4) == lens(admit(cache, [1, 2, 3, 4, 5, 0]))
    assert cache.match_prefix(PROMPT) == 8
    cache.set_quota(None, ceiling_size=16)
    request = admit(cache, [1, 2, 3, 4, 5, 0])
    assert (4, 5, 5) == lens(request)
    assert cache.namespace_stats(None).held_size == 8
    cache.release(request)
    cache.release(holder)
    assert cache.namespace_stats(None).held_size == 0


def test_contents_of_a_request_outlive_the_page_that_is_evicted_for_it() -> None:
    cache = make_cache(3)
    image = cache.intern(b"i" * 16)
    insert(cache, [9, image, image, 9])
    insert(cache, PROMPT)
    request = admit(cache, [1, 2, 3, 4, 5, image])

    assert (4, 5, 5) == lens(request)
    assert cache.match_prefix([9, image, image, 9]) == 0
    assert cache.stats().num_contents == 1
    cache.release(request)


# What becomes of it -------------------------------------------------------------


def test_the_source_may_be_evicted_and_handed_out_before_the_message() -> None:
    cache = make_cache(4)
    insert(cache, PROMPT)
    request = admit(cache, [1, 2, 3, 4, 5, 6, 0])
    other = admit(cache, span(30, 37))
    info = cache.alloc_for_extend([other, request], [8, 7])

    assert [1, 3] == pages_of(cache, request)
    assert 2 in pages_of(cache, other)
    assert info.copies == {3: 2}


@pytest.mark.parametrize("how", ["release", "truncate", "finish"])
def test_a_page_that_was_given_back_is_not_copied(how: str) -> None:
    cache = make_cache()
    insert(cache, PROMPT)
    request = admit(cache, [1, 2, 3, 4, 5, 6, 0])
    if how == "release":
        cache.release(request)
    elif how == "truncate":
        cache.truncate(request, 4)
    else:
        cache.cache_finished_req(request, [1, 2, 3, 4, 5, 6, 0])

    other = admit(cache, span(30, 37))
    assert compute(cache, other, 8).copies == {}
    assert law(cache)[3] == 8


def test_a_start_may_be_cut_and_is_computed_again() -> None:
    cache = make_cache()
    insert(cache, PROMPT)
    request = admit(cache, [1, 2, 3, 4, 5, 6, 7, 0])
    cache.truncate(request, 5)
    info = compute(cache, request, 8)

    assert info.starts.tolist() == [5]
    assert info.copies == {3: 2}
    assert (4, 8, 8) == lens(request)


def test_two_requests_get_copies_of_their_own() -> None:
    cache = make_cache()
    insert(cache, PROMPT)
    prompts = [[1, 2, 3, 4, 5, 6, 70, 80]] * 2
    requests = [admit(cache, prompt) for prompt in prompts]
    info = cache.alloc_for_extend(requests, [8, 8])

    assert info.copies == {3: 2, 4: 2}
    for request, prompt in zip(requests, prompts, strict=True):
        cache.commit(request, 8)
        cache.cache_unfinished_req(request, prompt)
    assert [[1, 3], [1, 3]] == [pages_of(cache, request) for request in requests]
    assert cache.stats().num_duplicate_tokens == 4
    assert (52, 4, 8, 0) == law(cache)


def test_a_start_that_moves_before_its_message_is_copied_once() -> None:
    cache = make_cache(8)
    low = run(cache, span(90, 97))
    insert(cache, PROMPT)
    request = admit(cache, [1, 2, 3, 4, 5, 6, 0])
    assert {5: 4} == pending(cache)
    cache.release(low)
    cache.resize(4)

    assert [3, 1] == pages_of(cache, request)
    assert compute(cache, request, 7).copies == {1: 4}


def test_an_admission_that_is_refused_takes_no_page() -> None:
    cache = make_cache()
    insert(cache, PROMPT)
    for token in range(8):
        admit(cache, [token])
    before = cache_state(cache.memory, cache._tree, cache._running)

    assert cache.admit([1, 2, 3, 4, 5, 0]) is None
    assert before == cache_state(cache.memory, cache._tree, cache._running)


def test_the_index_keeps_nothing_of_what_is_gone() -> None:
    tree = RadixTree(8, RecencyIndex())
    index = PartialPageIndex(tree, 8)
    root, _ = tree.acquire(None, b"")
    for i in range(30):
        end, _ = tree.publish(
            root, bytes([0, 0, 0, 0, i, 0, 0, 0]), bytes([i, 0, 0, 0])
        )
        tree.unlock(end)
        root, _ = tree.acquire(None, b"")
        index.longest(root, bytes([0, 0, 0, 0, 99]))
    tree.unlock(root)
    assert index._first_pages
    tree.clear()

    assert index._first_pages == {}


def test_the_report_counts_what_was_cached_before_the_admission_took_a_page() -> None:
    cache = RadixCache(make_memory(1, 4), partial_pages=True)
    insert(cache, span(1, 4))
    report = admit(cache, span(1, 4)).hit_report

    assert report is not None
    assert (4, 3) == (report.available_len, report.granted_len)

"""Shrinks under load: pages move out of the way, and what is in them follows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixkv.mem_cache import (
    HOLD_PAGE,
    PADDING_ROW,
    ConfigError,
    EvictionPolicy,
    ForeignPageError,
    KVCacheInfo,
    KVPool,
    MemoryManager,
    OutOfPagesError,
    PagesInUseError,
    PolicyError,
    PrefixCache,
    RadixCache,
    RadixNode,
    RequestKV,
    TokenToKVPoolAllocator,
)
from radixkv.mem_cache.cache_state import cache_state
from radixkv.mem_cache.page_copies import PageCopies

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


def pages_of(cache: PrefixCache, request: RequestKV) -> list[int]:
    return (cache.slots(request)[:: cache.page_size] // cache.page_size).tolist()


def flush(cache: PrefixCache) -> KVCacheInfo:
    """The message of a step that computes nothing."""
    return cache.alloc_for_extend([], [])


def state(cache: PrefixCache) -> dict[str, object]:
    return cache_state(cache.memory, cache._tree, cache._running)


def make_high() -> tuple[RadixCache, RequestKV]:
    """Pages 1 and 2 free, 3 and 4 cached, 5 and 6 held, 7 and 8 free."""
    cache = make_cache(8, 4)
    low = run(cache, span(90, 97))
    insert(cache, span(1, 8))
    request = run(cache, span(20, 27))
    cache.release(low)
    assert [5, 6] == pages_of(cache, request)
    return cache, request


# The copies that wait for a message ------------------------------------------


def make_copies(num_pages: int = 9, num_in_use: int = 9) -> PageCopies:
    allocator = TokenToKVPoolAllocator(num_pages, 1)
    allocator.alloc(num_in_use)
    return PageCopies(allocator)


def test_a_copy_of_a_copy_reads_where_the_first_one_reads() -> None:
    copies = make_copies()
    copies.add({2: 1})
    copies.add({3: 2, 4: 2})

    assert copies.take() == {2: 1, 3: 1, 4: 1}


def test_a_source_that_was_handed_on_is_read_before_it_is_written() -> None:
    copies = make_copies()
    copies.add({2: 1})
    copies.add({1: 5})

    assert copies.take() == {2: 1, 1: 5}


def test_a_target_with_a_new_copy_loses_the_old_one() -> None:
    copies = make_copies()
    copies.add({2: 1})
    copies.add({2: 7})

    assert copies.take() == {2: 7}


def test_what_is_back_where_it_came_from_needs_no_copy() -> None:
    copies = make_copies()
    copies.add({2: 1})
    copies.add({1: 2})
    copies.add({7: 7})

    assert copies.take() == {2: 1}


def test_nothing_is_copied_to_pages_that_are_free_or_handed_out_again() -> None:
    copies = make_copies(num_pages=9, num_in_use=4)
    copies.add({2: 1, 3: 1, 5: 1, 9: 1})
    copies.add({4: 5})

    copies.drop(np.array([3], np.int32).tobytes())
    assert copies.take() == {2: 1, 4: 1}
    assert copies.take() == {}


maps = st.dictionaries(st.integers(1, 6), st.integers(1, 6), max_size=6)


def copied(pool: list[int], copies: dict[int, int]) -> list[int]:
    """What is in each page once some copies are made, all at a time."""
    return [pool[copies.get(page, page)] for page in range(len(pool))]


@given(steps=st.lists(maps | st.none(), max_size=8))
def test_one_message_does_what_all_the_copies_would_do_one_after_another(
    steps: list[dict[int, int] | None],
) -> None:
    """``None`` is a message: it is sent and made, while the pages stay in use."""
    copies = make_copies(6, 6)
    pool = list(range(7))
    expected = list(range(7))
    for step in [*steps, None]:
        if step is None:
            pool = copied(pool, copies.take())
            assert expected == pool
        else:
            copies.add(step)
            expected = copied(expected, step)
        assert expected == copied(pool, copies.pending)


@given(batches=st.lists(maps, min_size=1, max_size=4), later=maps)
def test_messages_that_were_recalled_are_made_with_the_next_one(
    batches: list[dict[int, int]], later: dict[int, int]
) -> None:
    copies = make_copies(6, 6)
    expected = list(range(7))
    infos = []
    for batch in batches:
        copies.add(batch)
        expected = copied(expected, batch)
        infos.append(KVCacheInfo.merge([]).with_copies(copies.take()))
    copies.add(later)
    expected = copied(expected, later)
    for info in reversed(infos):
        copies.recall(info)

    assert expected == copied(list(range(7)), copies.take())


# What a resize does ------------------------------------------------------------


def test_a_growth_moves_nothing() -> None:
    cache, request = make_high()
    cache.resize(20)

    assert [5, 6] == pages_of(cache, request)
    assert flush(cache).copies == {}
    assert law(cache) == (64, 8, 0, 8)


def test_a_shrink_moves_held_and_cached_pages_and_tells_the_workers() -> None:
    cache, request = make_high()
    cache.resize(4)

    assert law(cache) == (0, 8, 0, 8)
    assert [1, 2] == pages_of(cache, request)
    info = flush(cache)
    assert info.copies == {1: 5, 2: 6}
    assert (info.num_reqs, info.num_new_pages) == (0, 0)
    assert flush(cache).num_copies == 0


def test_a_shrink_keeps_what_is_cached_where_there_is_room_below() -> None:
    cache = make_cache(8, 4)
    low = run(cache, span(90, 97))
    insert(cache, span(1, 16))
    cache.release(low)
    cache.resize(4)

    assert cache.match_prefix(span(1, 16)) == 16
    assert law(cache) == (0, 16, 0, 0)
    assert flush(cache).copies == {1: 5, 2: 6}
    request = admit(cache, span(1, 17))
    assert [3, 4, 1, 2] == pages_of(cache, request)


def test_a_shrink_evicts_exactly_what_must_go_the_least_recently_used_first() -> None:
    cache = make_cache(9, 4)
    for first in (10, 20, 30):
        insert(cache, span(first, first + 11))
    cache.release(admit(cache, [*span(10, 21), 0]))
    expected = [victim.page for victim in cache.eviction_order(4)]
    evicted_before = cache.stats().num_evicted_tokens
    cache.resize(5)

    assert [6, 5, 4, 9] == expected
    assert cache.stats().num_evicted_tokens - evicted_before == 4 * 4
    matches = [cache.match_prefix(span(x, x + 11)) for x in (10, 20, 30)]
    assert [12, 0, 8] == matches


def test_everybody_who_shares_a_page_finds_it_where_it_went() -> None:
    cache = make_cache(8, 4)
    low = run(cache, span(90, 97))
    insert(cache, span(1, 8))
    sharing = [run(cache, [*span(1, 8), tail]) for tail in (50, 60)]
    cache.release(low)
    cache.resize(4)

    assert [[3, 4, 1], [3, 4, 2]] == [pages_of(cache, kv) for kv in sharing]
    assert law(cache) == (0, 0, 8, 8)
    assert flush(cache).copies == {1: 5, 2: 6}


def test_only_the_columns_that_changed_are_sent_again() -> None:
    cache = make_cache(8, 4)
    request = run(cache, span(1, 8))
    other = run(cache, span(20, 31))
    compute(cache, request, 12)
    cache.release(other)
    assert [1, 2, 6] == pages_of(cache, request)
    cache.resize(5)

    info = decode(cache, request)
    assert info.page_starts.tolist() == [2]
    assert info.new_pages.tolist() == [3, 4]
    assert info.copies == {3: 6}


def test_two_shrinks_before_a_message_copy_each_page_once() -> None:
    cache = make_cache(12, 4)
    first, second = run(cache, span(1, 12)), run(cache, span(20, 31))
    request = run(cache, span(40, 47))
    cache.release(second)
    cache.resize(6)
    assert [4, 5] == pages_of(cache, request)
    cache.release(first)
    cache.resize(3)

    assert [1, 2] == pages_of(cache, request)
    assert flush(cache).copies == {1: 7, 2: 8}


def test_a_page_that_moved_may_be_handed_out_again_with_the_same_message() -> None:
    cache, request = make_high()
    cache.resize(4)
    cache.resize(8)
    other = admit(cache, span(60, 71))
    info = cache.alloc_for_extend([other], [12])

    assert set(info.copies.values()) < set(pages_of(cache, other))
    assert info.copies == {1: 5, 2: 6}
    assert [1, 2] == pages_of(cache, request)


def test_a_page_that_moved_and_was_given_back_is_not_copied() -> None:
    cache, request = make_high()
    cache.resize(4)
    cache.release(request)
    cache.evict(8)

    assert flush(cache).copies == {}


def test_a_page_that_moved_and_was_handed_out_again_is_not_copied() -> None:
    cache, request = make_high()
    cache.resize(4)
    cache.release(request)
    other = admit(cache, span(60, 67))

    assert cache.alloc_for_extend([other], [8]).copies == {}
    assert {1, 2} == set(pages_of(cache, other))


def test_a_refused_allocation_keeps_the_copies_for_the_next_message() -> None:
    cache, request = make_high()
    cache.resize(4)
    with pytest.raises(OutOfPagesError):
        cache.alloc_for_extend([request], [40])

    assert decode(cache, request).copies == {1: 5, 2: 6}


def test_a_message_that_reached_nobody_is_made_up_for() -> None:
    cache, request = make_high()
    cache.resize(4)
    admit(cache, [4])
    other = admit(cache, [5])
    cache.evict(4)
    info = cache.alloc_for_extend([other], [1])
    cache.recall(info)
    cache.release(other)

    again = flush(cache)
    assert again.copies == info.copies == {1: 5, 2: 6}
    assert info.forgotten_rows.tolist() == [1]
    assert again.forgotten_rows.tolist() == [1, other.req_pool_idx]
    assert [1, 2] == pages_of(cache, request)


def test_a_message_from_before_a_shrink_is_still_good() -> None:
    """A step in flight writes where its message says; the copies come after it."""
    cache, request = make_high()
    early = cache.alloc_for_decode([request])
    cache.resize(5)
    late = flush(cache)

    assert early.new_pages.tolist() == [2]
    assert [5, 1, 2] == pages_of(cache, request)
    assert late.copies == {1: 6}


def test_a_cache_that_caches_nothing_moves_pages_too() -> None:
    cache = make_chunk_cache(8, 4)
    low, request = run(cache, span(1, 8)), run(cache, span(1, 8))
    cache.release(low)
    cache.resize(2)

    assert [1, 2] == pages_of(cache, request)
    assert flush(cache).copies == {1: 3, 2: 4}
    assert law(cache) == (0, 0, 0, 8)


def test_pages_of_a_past_epoch_move_too() -> None:
    cache = make_cache(8, 4)
    low = run(cache, span(90, 93))
    insert(cache, span(1, 8))
    request = run(cache, span(1, 8))
    cache.bump_epoch(None)
    cache.release(low)
    cache.resize(3)

    assert [2, 1] == pages_of(cache, request)
    assert law(cache) == (0, 4, 4, 4)
    cache.release(request)
    assert law(cache) == (4, 8, 0, 0)


def test_a_reset_after_a_shrink_leaves_nothing_to_copy() -> None:
    cache, request = make_high()
    cache.resize(4)
    cache.release(request)
    cache.reset()

    assert flush(cache).copies == {}
    assert span(1, 4) == free_order(cache.memory.allocator)


# Refusals ------------------------------------------------------------------------


class Broken:
    """A policy that fails."""

    def key(self, node: RadixNode) -> int:
        raise ArithmeticError


REFUSALS: list[tuple[type[Exception], str | EvictionPolicy, int]] = [
    (PagesInUseError, "lru", 4),
    (PagesInUseError, "lfu", 4),
    (ConfigError, "lru", 0),
    (PolicyError, Broken(), 6),
]


@pytest.mark.parametrize(("error", "policy", "num_pages"), REFUSALS)
def test_b145_a_refused_shrink_changes_nothing(
    error: type[Exception], policy: str | EvictionPolicy, num_pages: int
) -> None:
    cache = make_cache(12, 4, policy=policy)
    low = run(cache, span(90, 93))
    insert(cache, span(1, 8))
    insert(cache, span(30, 37))
    requests = [run(cache, [*span(1, 8), tail]) for tail in (50, 60, 70)]
    cache.release(low)
    before = state(cache), cache.stats()

    with pytest.raises(error) as caught:
        cache.resize(num_pages)

    assert before == (state(cache), cache.stats())
    assert flush(cache).copies == {}
    if isinstance(caught.value, PagesInUseError):
        assert (caught.value.needed, caught.value.available) == (5, 4)
        assert "cannot shrink to 4 pages" in str(caught.value)
        assert law(cache) == (20, 8, 8, 12)
    for request in requests:
        cache.release(request)


def test_a_shrink_that_evicts_nothing_needs_no_policy() -> None:
    cache = make_cache(12, 4, policy=Broken())
    insert(cache, span(1, 8))
    cache.resize(2)

    assert cache.match_prefix(span(1, 8)) == 8


# Known faults and requirements -----------------------------------------------------


def test_b145_a_shrink_completes_when_usage_fits_and_nothing_is_above_the_end() -> None:
    """Requests are not touched, cached pages help out, and growth works again."""
    cache = make_cache(16, 4)
    insert(cache, span(1, 8))
    requests = [run(cache, span(10 * i, 10 * i + 7)) for i in range(1, 6)]
    with pytest.raises(PagesInUseError):
        cache.resize(8)
    for request in requests[:2]:
        cache.release(request)
    cache.resize(7)

    in_use = cache.memory.allocator.in_use()
    assert in_use.max() <= 7
    assert law(cache) == (0, 4, 0, 24)
    assert cache.match_prefix(span(1, 8)) == 4
    cache.resize(16)
    assert law(cache) == (36, 4, 0, 24)
    compute(cache, requests[2], 40)
    assert law(cache) == (4, 4, 0, 56)


def test_b147_after_a_shrink_a_batch_that_does_not_fit_gets_nothing() -> None:
    cache, request = make_high()
    cache.evict(8)
    cache.resize(3)
    batch = [request, *(admit(cache, span(1, size)) for size in (4, 4))]
    before = state(cache)

    with pytest.raises(OutOfPagesError):
        cache.alloc_for_extend(batch, [9, 4, 4])
    assert before == state(cache)
    assert cache.alloc_for_extend(batch[1:2], [4]).copies == {1: 5, 2: 6}


@pytest.mark.parametrize("num_pages", [4, 5, 20])
def test_s4_10_hold_page_and_padding_row_belong_to_nobody_after_a_move(
    num_pages: int,
) -> None:
    cache, request = make_high()
    cache.resize(num_pages)
    info = flush(cache)

    assert HOLD_PAGE not in pages_of(cache, request)
    assert HOLD_PAGE not in free_order(cache.memory.allocator)
    assert HOLD_PAGE not in {*info.copies, *info.copies.values()}
    assert not cache.memory.request_table.rows[PADDING_ROW]
    cache.check_integrity()


def test_s4_11_after_a_move_everything_derived_is_that_of_a_fresh_cache() -> None:
    cache, fresh = make_cache(8, 4), make_cache(3, 4)
    low = run(cache, span(90, 97))
    request = run(cache, span(1, 9))
    cache.release(low)
    cache.resize(3)
    run(fresh, span(1, 9))

    assert law(fresh) == law(cache)
    assert pages_of(cache, request) == [3, 1, 2]
    assert free_order(fresh.memory.allocator) == free_order(cache.memory.allocator)
    fresh.resize(8)
    cache.resize(8)
    assert free_order(fresh.memory.allocator) == free_order(cache.memory.allocator)


# Pools -------------------------------------------------------------------------------


def make_pool(num_pages: int, page_size: int = 4) -> KVPool:
    """Every page holds its own number, in K and in V."""
    pool = KVPool.uniform(
        num_pages=num_pages,
        page_size=page_size,
        num_layers=2,
        num_kv_heads=1,
        head_dim=2,
        v_head_dim=3,
    )
    for layer in range(2):
        for buffer in (pool.k_buffer(layer), pool.v_buffer(layer)):
            buffer[:] = torch.arange(num_pages + 1.0).view(-1, 1, 1, 1)
    return pool


def contents(pool: KVPool) -> list[int]:
    """What each page holds, the same in all buffers and all its slots."""
    buffers = [x for layer in pool.layers.values() for x in (layer.k, layer.v)]
    pages = buffers[0][:, :1, :1, :1]
    for buffer in buffers:
        assert torch.equal(buffer, pages.expand_as(buffer))
    return pages.flatten().int().tolist()


def test_a_pool_in_this_process_makes_the_copies_before_it_is_cut() -> None:
    pool = make_pool(8)
    memory = MemoryManager(8, 4, max_num_requests=4, max_context_len=64, kv_pool=pool)
    cache = RadixCache(memory)
    low, request = run(cache, span(1, 12)), run(cache, span(20, 31))
    cache.release(low)
    cache.resize(4)

    assert [4, 1, 2] == pages_of(cache, request)
    assert [0, 5, 6, 3, 4] == contents(pool)
    assert flush(cache).copies == {}
    cache.resize(8)
    assert [0, 5, 6, 3, 4, 0, 0, 0, 0] == contents(pool)


def test_a_pool_elsewhere_makes_the_copies_of_the_message_and_is_cut_then() -> None:
    pool = make_pool(8)
    cache, request = make_high()
    cache.resize(4)
    info = flush(cache)
    pool.copy_pages(info.copy_sources, info.copy_targets)
    pool.resize(4)

    assert [0, 5, 6, 3, 4] == contents(pool)
    assert [1, 2] == pages_of(cache, request)


@pytest.mark.parametrize(
    ("source", "target"), [(5, 1), (1, 5), (0, 1), (1, 0), (-1, 1)]
)
def test_a_pool_that_was_cut_too_early_says_so(source: int, target: int) -> None:
    pool = make_pool(4)

    with pytest.raises(ForeignPageError, match=r"must be in 1\.\.4, got"):
        pool.copy_pages([2, source], [3, target])
    assert span(0, 4) == contents(pool)


Copy = Callable[[KVPool], None]


@pytest.mark.parametrize(
    "copy",
    [
        lambda pool: pool.copy_pages([2, 1], [1, 2]),
        lambda pool: pool.copy_pages(np.array([2, 1]), np.array([1, 2])),
        lambda pool: pool.copy_pages(np.array([2, 1], np.int32), [1, 2]),
    ],
)
def test_a_pool_copies_all_layers_at_a_time(copy: Copy) -> None:
    pool = make_pool(3)
    places = [pool.k_buffer(0).data_ptr(), pool.v_buffer(1).data_ptr()]
    copy(pool)
    pool.copy_pages([], [])

    assert [0, 2, 1, 3] == contents(pool)
    assert places == [pool.k_buffer(0).data_ptr(), pool.v_buffer(1).data_ptr()]

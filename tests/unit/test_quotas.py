"""Floors and ceilings of namespaces, and what is told of each of them."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Hashable

import pytest

from radixkv.mem_cache import (
    ConfigError,
    IntegrityError,
    NamespaceStats,
    OutOfPagesError,
    PagesInUseError,
    PolicyError,
    QuotaError,
    RadixCache,
    RadixNode,
)
from radixkv.mem_cache.allocator import TokenToKVPoolAllocator
from radixkv.mem_cache.eviction import RecencyIndex
from radixkv.mem_cache.hit_counters import HitCounters
from radixkv.mem_cache.quotas import Quotas
from radixkv.mem_cache.radix_node import RadixRoot
from radixkv.mem_cache.radix_tree import RadixTree
from radixkv.mem_cache.request_table import RequestTable
from radixkv.mem_cache.running_requests import RunningRequests

from .driver import (
    Wrong,
    admit,
    compute,
    decode,
    insert,
    law,
    make_cache,
    make_memory,
    run,
    span,
)


def sizes(cache: RadixCache, namespace: Hashable) -> tuple[int, int, int]:
    """Evictable, protected and held tokens of a namespace."""
    stats = cache.namespace_stats(namespace)
    assert stats.used_size == (
        stats.evictable_size + stats.protected_size + stats.held_size
    )
    return stats.evictable_size, stats.protected_size, stats.held_size


def order(cache: RadixCache) -> list[tuple[Hashable, int]]:
    return [(v.namespace, v.prefix_len) for v in cache.eviction_order(99)]


# Setting a quota


def test_a_floor_is_rounded_up_and_a_ceiling_down_to_whole_pages() -> None:
    cache = make_cache(page_size=4)

    cache.set_quota("a", floor_size=5, ceiling_size=15)

    stats = cache.namespace_stats("a")
    assert (stats.floor_size, stats.ceiling_size) == (8, 12)


def test_a_namespace_without_a_quota_has_no_bounds() -> None:
    stats = make_cache().namespace_stats("unknown")

    assert stats == NamespaceStats(0, 0, 0, 0, None, 0, 0, 0)
    assert stats.hit_rate == 0


@pytest.mark.parametrize(
    ("floor", "ceiling", "message"),
    [
        (9, 8, "floor_size must be <= ceiling_size .* got 9 .3 pages. and 8 .2 pages."),
        (5, 7, "floor_size must be <= ceiling_size .* got 5 .2 pages. and 7 .1 pages."),
        (-1, None, "floor_size must be >= 0 .* got -1"),
        (0, -1, "ceiling_size must be >= 0 .* got -1"),
        (True, None, "floor_size must be an integer, got True"),
        (0, 1.5, "ceiling_size must be an integer, got 1.5"),
        (45, None, "floors of all namespaces must fit in 16 pages, got 17"),
    ],
)
def test_a_quota_that_cannot_be_is_refused(
    floor: Wrong, ceiling: Wrong, message: str
) -> None:
    cache = make_cache(16, 4)
    cache.set_quota("b", floor_size=20, ceiling_size=40)
    cache.set_quota("a", floor_size=4, ceiling_size=60)
    before = cache.namespace_stats("a"), cache.namespace_stats("b")

    with pytest.raises(ConfigError, match=message):
        cache.set_quota("a", floor_size=floor, ceiling_size=ceiling)

    assert before == (cache.namespace_stats("a"), cache.namespace_stats("b"))


def test_a_namespace_must_be_hashable() -> None:
    cache = make_cache()
    unhashable: Wrong = []

    with pytest.raises(ConfigError, match=r"^namespace must be hashable"):
        cache.set_quota(unhashable, ceiling_size=4)
    with pytest.raises(ConfigError, match=r"^namespace must be hashable"):
        cache.namespace_stats(unhashable)


def test_the_floor_of_a_namespace_may_change_where_the_others_leave_room() -> None:
    cache = make_cache(4, 1)
    cache.set_quota("a", floor_size=3)
    cache.set_quota("b", floor_size=1)

    with pytest.raises(ConfigError, match="fit in 4 pages, got 5"):
        cache.set_quota("a", floor_size=4)
    cache.set_quota("b", floor_size=0)
    cache.set_quota("a", floor_size=4)

    assert cache.namespace_stats("a").floor_size == 4


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_a_busy_namespace_gets_and_loses_a_quota_unharmed(policy: str) -> None:
    cache = make_cache(16, 2, policy=policy)
    insert(cache, span(1, 6), "a")
    insert(cache, span(21, 26), "b")
    running = run(cache, [*span(1, 4), 9, 9], "a")
    decode(cache, running)
    before = sizes(cache, "a"), order(cache), law(cache)

    cache.set_quota("a", floor_size=2, ceiling_size=30)
    assert before == (sizes(cache, "a"), order(cache), law(cache))
    cache.set_quota("a")

    assert before == (sizes(cache, "a"), order(cache), law(cache))
    cache.release(running)
    assert sizes(cache, "a") == (6, 0, 0)


def test_nothing_is_left_of_the_last_quota() -> None:
    memory = make_memory()
    index = RecencyIndex()
    tree = RadixTree(16, index)
    table = RequestTable(2)
    allocator: TokenToKVPoolAllocator = memory.allocator
    quotas = Quotas(
        tree, RunningRequests(allocator, table, 16, HitCounters()), allocator
    )

    quotas.set("a", 4, None)
    assert tree.index is not index
    quotas.set("a", 0, None)
    quotas.set("b", 0, None)

    assert tree.index is index
    assert [tree.on_published, tree.on_evicted, tree.roots] == [[], [], []]
    assert len(quotas) == 0


def test_a_cache_forgets_its_quotas_with_the_last_of_them() -> None:
    cache = make_cache()
    cache.set_quota("a", floor_size=4)
    assert cache._quotas is not None
    cache.set_quota("a")

    assert cache._quotas is None  # so that nothing asks for them any more


def test_a_debugged_cache_checks_quotas_too() -> None:
    cache = RadixCache(make_memory(4, 1), debug=True)

    cache.set_quota("a", floor_size=1, ceiling_size=2)
    insert(cache, span(1, 2), "a")
    stats = cache.namespace_stats("a")

    assert sizes(cache, "a") == (2, 0, 0)
    assert (stats.floor_size, stats.ceiling_size) == (1, 2)


# The ceiling


def test_at_its_ceiling_a_namespace_evicts_its_own_and_exactly_the_shortfall() -> None:
    cache = make_cache(16, 1)
    insert(cache, span(1, 4), "other")
    cache.set_quota("a", ceiling_size=5)
    insert(cache, span(11, 12), "a")
    insert(cache, span(21, 22), "a")

    request = run(cache, span(31, 33), "a")

    assert sizes(cache, "a") == (2, 0, 3)
    assert cache.match_prefix(span(11, 12), "a") == 0
    assert cache.match_prefix(span(21, 22), "a") == 2
    # Whoever is older loses nothing, and there was enough that is free.
    assert law(cache) == (7, 6, 0, 3)
    cache.cache_finished_req(request, span(31, 33))
    assert sizes(cache, "a") == (5, 0, 0)


def test_above_its_ceiling_an_allocation_is_refused_with_the_numbers() -> None:
    cache = make_cache(16, 2)
    cache.set_quota("a", ceiling_size=10)
    insert(cache, span(1, 4), "a")
    running = run(cache, [*span(1, 2), 9], "a")
    waiting = admit(cache, span(21, 25), "a")
    before = law(cache), sizes(cache, "a"), order(cache), cache.stats()

    with pytest.raises(QuotaError) as caught:
        compute(cache, waiting, 8)

    error = caught.value
    assert (error.namespace, error.ceiling, error.needed) == ("a", 5, 4)
    assert (error.available, error.evictable) == (2, 1)
    assert (error.protected, error.held) == (1, 1)
    assert str(error) == (
        "need 4 pages for namespace 'a', which may use 5: it has 1 evictable "
        "(1 are protected, 1 held by running requests)"
    )
    assert before == (law(cache), sizes(cache, "a"), order(cache), cache.stats())
    compute(cache, waiting, 6)
    cache.release(running)


def test_a_quota_error_survives_a_trip_to_another_process() -> None:
    error = QuotaError("a", 5, needed=4, evictable=1, protected=1, held=1)

    copy = pickle.loads(pickle.dumps(error))

    assert (str(error), error.args, error.available) == (
        str(copy),
        copy.args,
        copy.available,
    )


def test_a_ceiling_below_the_present_use_is_heeded_at_the_next_allocation() -> None:
    cache = make_cache(16, 1)
    insert(cache, span(1, 8), "a")
    other = run(cache, span(21, 22), "b")

    cache.set_quota("a", ceiling_size=3)
    decode(cache, other)
    assert sizes(cache, "a") == (8, 0, 0)
    run(cache, [30], "a")

    assert sizes(cache, "a") == (2, 0, 1)


def test_a_ceiling_of_nothing_shuts_a_namespace_out() -> None:
    cache = make_cache()
    cache.set_quota("a", ceiling_size=0)
    request = admit(cache, [1, 2], "a")

    with pytest.raises(QuotaError):
        compute(cache, request, 2)

    run(cache, [1, 2], "b")


def test_publishing_and_releasing_never_pass_a_ceiling() -> None:
    cache = make_cache(16, 1)
    cache.set_quota("a", ceiling_size=4)
    twins = [run(cache, [1, 2], "a") for _ in range(2)]
    assert sizes(cache, "a") == (0, 0, 4)

    cache.cache_unfinished_req(twins[0], [1, 2])
    cache.cache_unfinished_req(twins[1], [1, 2])  # duplicates are freed

    assert sizes(cache, "a") == (0, 2, 0)
    cache.truncate(twins[0], 2)
    decode(cache, twins[0])
    cache.truncate(twins[0], 2)
    assert sizes(cache, "a") == (0, 2, 0)
    for twin in twins:
        cache.release(twin)
    assert sizes(cache, "a") == (2, 0, 0)


def test_a_page_that_is_shared_in_part_is_left_out_at_the_ceiling() -> None:
    cache = RadixCache(make_memory(8, 4), partial_pages=True)
    insert(cache, span(1, 8), "a")
    holder = admit(cache, span(1, 9), "a")
    cache.set_quota("a", ceiling_size=8)

    full = admit(cache, [1, 2, 3, 9, 9], "a")
    assert (full.committed_len, sizes(cache, "a")) == (0, (0, 8, 0))
    cache.set_quota("a", ceiling_size=12)
    partial = admit(cache, [1, 2, 3, 9, 9], "a")

    assert (partial.committed_len, sizes(cache, "a")) == (3, (0, 8, 4))
    cache.release(partial)
    cache.release(full)
    cache.release(holder)
    assert sizes(cache, "a") == (8, 0, 0)
    law(cache)


# The floor


def test_others_leave_a_namespace_its_floor_and_not_a_page_more() -> None:
    cache = make_cache(8, 2)
    insert(cache, span(1, 8), "a")
    cache.set_quota("a", floor_size=6)

    insert(cache, span(21, 26), "b")
    assert sizes(cache, "a") == (8, 0, 0)
    insert(cache, span(31, 38), "b")

    # Its only node was cut in the middle, since it was the least recently used.
    assert sizes(cache, "a") == (6, 0, 0)
    assert cache.match_prefix(span(1, 8), "a") == 6
    assert law(cache) == (0, 16, 0, 0)


def test_what_a_floor_keeps_is_not_evictable_for_others() -> None:
    cache = make_cache(8, 1)
    insert(cache, span(1, 4), "a")
    insert(cache, [11], "b")
    cache.set_quota("a", floor_size=3)
    request = admit(cache, span(21, 26), "b")
    before = law(cache), order(cache)

    with pytest.raises(OutOfPagesError) as caught:
        compute(cache, request, 6)

    assert not isinstance(caught.value, QuotaError)
    assert (caught.value.needed, caught.value.available) == (6, 3)
    assert caught.value.evictable == 2
    assert before == (law(cache), order(cache))
    compute(cache, request, 5)
    assert sizes(cache, "a") == (3, 0, 0)


def test_what_a_namespace_holds_counts_for_its_floor() -> None:
    cache = make_cache(8, 1)
    insert(cache, span(1, 3), "a")
    running = run(cache, span(11, 12), "a")
    cache.set_quota("a", floor_size=3)

    assert cache.evict(99) == 2
    cache.release(running)

    assert sizes(cache, "a") == (1, 0, 0)
    assert cache.evict(99) == 0


def test_evictions_by_hand_respect_floors() -> None:
    cache = make_cache(8, 2)
    insert(cache, span(1, 6), "a")
    insert(cache, span(11, 14), "b")
    cache.set_quota("a", floor_size=4)
    expected = order(cache)

    assert cache.evict_if_needed(10) == 4
    assert cache.evict(99) == 2

    assert expected == [("a", 4), ("b", 2), ("b", 0)]
    assert law(cache) == (12, 4, 0, 0)


def test_a_namespace_evicts_its_own_pages_below_its_floor() -> None:
    cache = make_cache(4, 1)
    insert(cache, span(1, 4), "a")
    cache.set_quota("a", floor_size=4)

    request = run(cache, span(11, 13), "a")

    assert sizes(cache, "a") == (1, 0, 3)
    cache.release(request)
    assert cache.evict(99) == 0


def test_free_pages_are_not_kept_for_a_floor() -> None:
    cache = make_cache(4, 1)
    cache.set_quota("a", floor_size=4)

    run(cache, span(1, 4), "b")

    assert law(cache) == (0, 0, 0, 4)


def test_a_capacity_that_the_floors_do_not_fit_in_is_refused() -> None:
    cache = make_cache(8, 1)
    cache.set_quota("a", floor_size=3)
    cache.set_quota("b", floor_size=2)
    before = law(cache)

    with pytest.raises(ConfigError, match="must fit in 4 pages, got 5"):
        cache.resize(4)

    assert before == law(cache)
    cache.resize(5)
    assert cache.total_size == 5


def test_a_shrink_leaves_floors_or_is_refused() -> None:
    cache = make_cache(8, 1)
    insert(cache, span(1, 4), "a")
    running = run(cache, span(11, 12), "b")
    insert(cache, span(21, 22), "b")
    cache.set_quota("a", floor_size=3)
    before = law(cache), order(cache)

    with pytest.raises(PagesInUseError) as caught:
        cache.resize(4)
    assert (caught.value.needed, caught.value.available) == (5, 4)
    assert before == (law(cache), order(cache))
    cache.resize(5)

    assert law(cache) == (0, 3, 0, 2)
    assert sizes(cache, "a") == (3, 0, 0)
    cache.release(running)


def test_an_explanation_tells_a_ceiling_from_a_lack_of_room() -> None:
    cache = make_cache(12, 1, max_context_len=12)
    insert(cache, span(1, 4), "a")
    insert(cache, span(1, 4), "b")
    cache.set_quota("a", floor_size=5, ceiling_size=5)
    running = run(cache, span(11, 13), "a")
    run(cache, span(21, 24), "c")

    ours, theirs = admit(cache, span(1, 5), "a"), admit(cache, span(1, 5), "b")

    assert ours.hit_report is not None
    assert theirs.hit_report is not None
    assert (ours.hit_report.evicted_by, theirs.hit_report.evicted_by) == (
        "quota",
        "lru",
    )
    cache.release(running)


# Both


def test_a_batch_is_refused_as_a_whole_if_one_namespace_has_no_room() -> None:
    cache = make_cache(16, 1)
    insert(cache, span(1, 3), "a")
    cache.set_quota("a", ceiling_size=4)
    cache.set_quota("b", ceiling_size=2)
    fits, does_not = admit(cache, span(11, 13), "a"), admit(cache, span(21, 23), "b")
    before = law(cache), sizes(cache, "a"), order(cache)

    with pytest.raises(QuotaError, match="need 3 pages for namespace 'b'"):
        cache.alloc_for_extend([fits, does_not], [3, 3])

    assert before == (law(cache), sizes(cache, "a"), order(cache))
    cache.alloc_for_extend([fits, does_not], [3, 2])
    assert sizes(cache, "a") == (1, 0, 3)
    assert sizes(cache, "b") == (0, 0, 2)


def test_all_requests_of_a_namespace_in_a_batch_count_together() -> None:
    cache = make_cache(16, 1)
    cache.set_quota("a", ceiling_size=3)
    batch = [admit(cache, span(first, first + 1), "a") for first in (1, 11)]

    with pytest.raises(QuotaError, match="need 4 pages for namespace 'a'"):
        cache.alloc_for_extend(batch, [2, 2])
    cache.alloc_for_extend(batch, [2, 1])

    assert sizes(cache, "a") == (0, 0, 3)


def test_in_a_batch_a_namespace_gives_others_what_is_above_its_floor_then() -> None:
    cache = make_cache(6, 1)
    insert(cache, span(1, 4), "a")
    insert(cache, span(11, 12), "b")
    cache.set_quota("a", floor_size=4)
    ours, theirs = admit(cache, [21, 22], "a"), admit(cache, [31, 32, 33], "c")

    with pytest.raises(OutOfPagesError) as caught:
        cache.alloc_for_extend([ours, theirs], [2, 3])
    assert (caught.value.needed, caught.value.evictable) == (5, 4)
    cache.alloc_for_extend([ours, theirs], [2, 2])

    assert sizes(cache, "a") == (2, 0, 2)
    assert sizes(cache, "b") == (0, 0, 0)


def test_stale_pages_are_nobodys_use_and_go_first_whatever_the_floor() -> None:
    cache = make_cache(8, 1)
    cache.set_quota("a", floor_size=4, ceiling_size=4)
    insert(cache, span(1, 4), "a")
    insert(cache, span(11, 12), "b")

    cache.bump_epoch("a")
    assert sizes(cache, "a") == (0, 0, 0)
    assert order(cache)[:4] == [("a", 3), ("a", 2), ("a", 1), ("a", 0)]
    run(cache, span(21, 24), "a")

    assert sizes(cache, "a") == (0, 0, 4)
    assert law(cache) == (0, 4, 0, 4)
    assert cache.evict(2) == 2
    assert cache.match_prefix(span(11, 12), "b") == 2


def test_a_request_of_an_old_epoch_counts_for_the_quota_until_it_ends() -> None:
    cache = make_cache(8, 1)
    cache.set_quota("a", ceiling_size=4)
    old = run(cache, [1, 2, 3], "a")
    cache.cache_unfinished_req(old, [1, 2, 3])
    decode(cache, old)

    cache.bump_epoch("a")
    assert sizes(cache, "a") == (0, 0, 1)
    decode(cache, old)
    assert sizes(cache, "a") == (0, 0, 2)
    cache.cache_finished_req(old, [1, 2, 3, 4, 5])

    assert sizes(cache, "a") == (0, 0, 0)
    assert law(cache) == (5, 3, 0, 0)


def test_an_empty_namespace_with_a_quota_may_begin_an_epoch_again_and_again() -> None:
    cache = make_cache(8, 1)
    cache.set_quota("a", floor_size=1)
    for _ in range(3):
        cache.bump_epoch("a")

    insert(cache, [1, 2], "a")

    assert cache.match_prefix([1, 2], "a") == 2
    assert sizes(cache, "a") == (2, 0, 0)
    law(cache)


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_a_quota_may_go_before_what_is_stale(policy: str) -> None:
    cache = make_cache(8, 1, policy=policy)
    for namespace in ("a", "b"):
        cache.set_quota(namespace, floor_size=1)
        insert(cache, span(1, 3), namespace)
        cache.bump_epoch(namespace)
    insert(cache, span(11, 12), "a")

    cache.set_quota("a")
    law(cache)
    cache.set_quota("b")

    assert law(cache) == (0, 8, 0, 0)
    assert cache.evict(6) == 6
    assert cache.match_prefix(span(11, 12), "a") == 2


def test_past_epochs_leave_nothing_behind() -> None:
    cache = make_cache(8, 1)
    cache.set_quota("epochs", floor_size=1)

    for _ in range(20):
        insert(cache, span(1, 4), "epochs")
        cache.bump_epoch("epochs")
        cache.evict(4)
        cache.bump_epoch("epochs")  # of nothing

    gc.collect()
    roots = [x for x in gc.get_objects() if type(x) is RadixRoot]
    ours = [root for root in roots if str(root.namespace) == "epochs"]
    assert len(ours) <= 2


@pytest.mark.parametrize("quota_first", [False, True])
@pytest.mark.parametrize("epoch_first", [False, True])
def test_retained_pages_go_last_within_the_bounds_of_their_namespace(
    quota_first: bool, epoch_first: bool
) -> None:
    cache = RadixCache(make_memory(16, 1), retention_share=1)
    if quota_first:
        cache.set_quota("old", ceiling_size=8)
    insert(cache, [70, 71], "old")
    if epoch_first:
        cache.bump_epoch("old")
    for start, namespace in [(1, "a"), (11, "b"), (21, "a")]:
        insert(cache, span(start, start + 1), namespace)
    if quota_first:
        cache.set_quota("a", floor_size=1, ceiling_size=4)
    assert cache.retain([1, 2], "a") == 2
    if not quota_first:
        cache.set_quota("a", floor_size=1, ceiling_size=4)

    expected = [("old", 1), ("old", 0), ("b", 1), ("b", 0), ("a", 1), ("a", 0)]
    assert order(cache) == [*expected, ("a", 1)]
    run(cache, [31, 32, 33], "a")

    assert cache.match_prefix([21, 22], "a") == 0
    assert cache.match_prefix([1, 2], "a") == 1
    law(cache)


def test_what_follows_a_retained_page_is_not_retained() -> None:
    cache = RadixCache(make_memory(16, 1), retention_share=1)
    cache.set_quota("a", ceiling_size=8)
    insert(cache, [1, 2], "a")
    cache.retain([1, 2], "a")
    insert(cache, [1, 2, 3, 4], "a")
    insert(cache, [11], "b")

    assert order(cache) == [("a", 3), ("a", 2), ("b", 0), ("a", 1), ("a", 0)]


def test_outputs_go_first_within_the_bounds_of_their_namespace() -> None:
    cache = RadixCache(make_memory(16, 1), outputs_first=True)
    cache.set_quota("a", ceiling_size=4)
    insert(cache, [11], "b")
    request = run(cache, [1, 2, 3, 4], "a")
    cache.cache_finished_req(request, [1, 2, 3, 4], prompt_len=3)

    assert order(cache) == [("a", 3), ("b", 0), ("a", 2), ("a", 1), ("a", 0)]


# The statistics


def test_namespaces_share_no_statistics() -> None:
    cache = make_cache(16, 2)
    insert(cache, span(1, 6), "a")
    insert(cache, span(1, 6), "a")
    running = run(cache, span(1, 6), "b")

    stats = cache.namespace_stats("a")
    assert (stats.num_admitted_requests, stats.num_prompt_tokens) == (2, 12)
    assert (stats.num_cached_tokens, stats.hit_rate) == (4, 4 / 12)
    assert sizes(cache, "a") == (6, 0, 0)
    other = cache.namespace_stats("b")
    assert (other.num_admitted_requests, other.num_prompt_tokens) == (1, 6)
    assert (other.num_cached_tokens, other.hit_rate) == (0, 0)
    assert sizes(cache, "b") == (0, 0, 6)
    cache.release(running)


def test_counters_go_on_as_long_as_there_is_a_quota() -> None:
    cache = make_cache(16, 2)
    cache.set_quota("bound", ceiling_size=32)
    for namespace in ("bound", "free"):
        insert(cache, span(1, 6), namespace)
    pending = admit(cache, span(1, 8), "bound")
    cache.bump_epoch("bound")
    compute(cache, pending, 8)
    cache.release(pending)
    cache.reset()

    assert cache.namespace_stats("bound").num_admitted_requests == 2
    assert cache.namespace_stats("bound").num_cached_tokens == 6
    assert cache.namespace_stats("bound").ceiling_size == 32
    assert cache.namespace_stats("free") == NamespaceStats(0, 0, 0, 0, None, 0, 0, 0)


def test_the_longest_request_heeds_the_ceiling_and_the_floors_of_others() -> None:
    cache = make_cache(8, 4, max_context_len=64)
    assert cache.max_request_size("a") == 32

    cache.set_quota("a", floor_size=8, ceiling_size=20)
    cache.set_quota("b", floor_size=4)

    assert cache.max_request_size("a") == 20
    assert cache.max_request_size("b") == 24
    assert cache.max_request_size() == 20
    cache.set_quota("a", floor_size=8, ceiling_size=32)
    assert cache.max_request_size("a") == 28
    assert make_cache(8, 4, max_context_len=9).max_request_size() == 9


# Faults


class KeysOfTwoKinds:
    """A policy whose keys compare within a namespace only."""

    def key(self, node: RadixNode) -> object:
        return node.num_hits if node.root.namespace == "a" else "text"


def test_keys_that_do_not_compare_between_namespaces_are_a_policy_error() -> None:
    cache = make_cache(8, 1, policy=KeysOfTwoKinds())
    cache.set_quota("a", floor_size=1)
    insert(cache, span(1, 4), "a")
    insert(cache, span(11, 14), "b")

    with pytest.raises(PolicyError, match="do not compare"):
        cache.evict(1)
    with pytest.raises(PolicyError, match="do not compare"):
        cache.eviction_order(1)
    before = law(cache)

    assert before == (0, 8, 0, 0)
    request = admit(cache, [21], "a")
    with pytest.raises(PolicyError):
        compute(cache, request, 1)
    assert before == law(cache)
    assert sizes(cache, "a") == (4, 0, 0)
    cache.set_quota("a")
    assert sum(law(cache)) == 8


def test_keys_are_also_compared_where_a_floor_keeps_the_pages() -> None:
    cache = make_cache(8, 1, policy=KeysOfTwoKinds())
    cache.set_quota("a", floor_size=4)
    insert(cache, span(1, 4), "a")
    insert(cache, span(11, 14), "b")

    with pytest.raises(PolicyError, match="do not compare"):
        cache.eviction_order(1)

    assert cache.evict(1) == 1


class KeysOfLeaves:
    """A policy that fails for a node with children."""

    def key(self, node: RadixNode) -> int:
        if node.children:
            raise ValueError("no leaf")
        return 0


def test_a_policy_that_fails_for_a_parent_is_a_policy_error() -> None:
    cache = make_cache(8, 1, policy=KeysOfLeaves())
    cache.set_quota("a", ceiling_size=8)
    insert(cache, [1, 2], "a")
    insert(cache, [1, 3, 4], "a")

    with pytest.raises(PolicyError, match="no leaf"):
        cache.eviction_order(8)

    assert cache.evict(8) == 4


class NoKeys:
    """A policy that fails."""

    def key(self, node: RadixNode) -> object:
        raise ValueError("no key")


def test_a_policy_that_fails_in_one_namespace_evicts_nowhere() -> None:
    cache = make_cache(8, 1, policy=NoKeys())
    cache.set_quota("a", ceiling_size=4)
    insert(cache, span(1, 4), "a")

    with pytest.raises(PolicyError, match="no key"):
        cache.evict(1)
    with pytest.raises(PolicyError, match="no key"):
        insert(cache, [11], "a")

    assert sizes(cache, "a") == (4, 0, 0)


def test_a_wrong_count_is_named_with_a_sign() -> None:
    cache = make_cache(8, 1)
    cache.set_quota("a", ceiling_size=8)
    request = run(cache, [1, 2], "a")
    assert request.quota is not None

    request.quota.num_held_pages += 1
    with pytest.raises(
        IntegrityError, match=r"held of namespace 'a': counter 3, recount 2 \(\+1 page"
    ):
        cache.check_integrity()
    request.quota.num_held_pages -= 1
    request.quota = None

    with pytest.raises(IntegrityError, match="has a wrong quota"):
        cache.check_integrity()


def test_a_root_without_its_quota_is_told() -> None:
    cache = make_cache(8, 1)
    cache.set_quota("a", ceiling_size=8)
    request = run(cache, [1, 2], "a")
    assert request.node is not None

    request.node.root.quota = None

    with pytest.raises(IntegrityError, match="namespace 'a' has lost its quota"):
        cache.check_integrity()

"""The radix cache through a request's whole life."""

from __future__ import annotations

from dataclasses import asdict
from threading import Event, Thread
from typing import Any, cast

import numpy as np
import pytest

from radixkv.mem_cache import (
    LFU,
    CacheBusyError,
    ChunkCache,
    ConfigError,
    LengthError,
    OutOfPagesError,
    PagesInUseError,
    PrefixCache,
    Priority,
    RadixCache,
    RadixNode,
    RequestKV,
    RequestStateError,
    SharedCounters,
    TokenError,
    WrongThreadError,
)
from radixkv.mem_cache.eviction import RecencyIndex
from radixkv.mem_cache.radix_tree import RadixTree

from .driver import (
    Wrong,
    admit,
    compute,
    decode,
    insert,
    law,
    make_cache,
    make_chunk_cache,
    make_memory,
    run,
    span,
)
from .lifetimes import num_leaves_alive

PROMPT = span(1, 10)


def pages_of(cache: PrefixCache, request: RequestKV) -> list[int]:
    slots = cache.slots(request)[:: cache.page_size]
    return (slots // cache.page_size).tolist()


# Admission ------------------------------------------------------------------


def test_a_new_request_starts_with_its_hit() -> None:
    cache = make_cache()
    insert(cache, PROMPT, namespace="a")
    request = admit(cache, [*PROMPT, 11], namespace="a")

    lengths = (request.protected_len, request.committed_len, request.allocated_len)
    assert lengths == (8, 8, 8)
    assert request.namespace == "a"
    assert law(cache) == (56, 0, 8, 0)


@pytest.mark.parametrize("page_size", [1, 2, 4, 8])
def test_admit_leaves_a_token_to_compute_and_match_does_not(page_size: int) -> None:
    cache = make_cache(32 // page_size, page_size)
    prompt = span(1, 8)
    insert(cache, prompt)

    assert cache.match_prefix(prompt) == 8
    assert admit(cache, prompt).committed_len == 8 - page_size


def test_there_are_as_many_requests_as_rows() -> None:
    cache = make_cache(max_num_requests=2)
    first, second = admit(cache, [1]), admit(cache, [1])
    before = cache.stats()

    assert {first.req_pool_idx, second.req_pool_idx} == {1, 2}
    assert cache.admit([1]) is None
    assert before == cache.stats()
    cache.release(first)
    assert admit(cache, [1]).req_pool_idx == 1


def test_the_longest_context_is_allowed_and_no_more() -> None:
    cache = make_cache(max_context_len=9)
    request = admit(cache, span(1, 9))
    compute(cache, request, 9)

    with pytest.raises(LengthError, match=r"1\.\.9 tokens, got 10"):
        cache.admit(span(1, 10))
    with pytest.raises(LengthError, match=r"got 10"):
        cache.alloc_for_decode([request])
    assert law(cache) == (52, 0, 0, 12)


def test_namespaces_share_nothing() -> None:
    cache = make_cache()
    for namespace in (None, "a", ("a", 1), 7):
        assert cache.match_prefix(PROMPT, namespace) == 0
        insert(cache, PROMPT, namespace)
        assert cache.match_prefix(PROMPT, namespace) == 8

    assert law(cache) == (32, 32, 0, 0)


def test_a_namespace_must_be_hashable() -> None:
    cache = make_cache()
    bad: Wrong = ["a"]

    with pytest.raises(ConfigError, match=r"^namespace must be hashable, got \['a'\]"):
        cache.admit(PROMPT, namespace=bad)
    with pytest.raises(ConfigError, match=r"^namespace must be hashable"):
        cache.match_prefix(PROMPT, bad)
    assert law(cache) == (64, 0, 0, 0)


@pytest.mark.parametrize("priority", ["high", None, 1.5, float("nan")], ids=repr)
def test_a_priority_must_be_an_integer(priority: Wrong) -> None:
    """It is compared when the request publishes, too late to refuse it."""
    cache = make_cache()

    with pytest.raises(ConfigError, match="priority must be an integer"):
        cache.admit(PROMPT, priority=priority)
    assert law(cache) == (64, 0, 0, 0)


# Allocation -----------------------------------------------------------------


def test_a_batch_is_all_or_nothing() -> None:
    cache = make_cache(3, 4)
    requests = [admit(cache, span(1, n)) for n in (5, 4, 4)]

    with pytest.raises(OutOfPagesError) as caught:
        cache.alloc_for_extend(requests, [5, 4, 4])

    assert (caught.value.needed, caught.value.available) == (4, 3)
    assert [0, 0, 0] == [request.allocated_len for request in requests]
    assert law(cache) == (12, 0, 0, 0)


def test_an_allocation_evicts_the_shortfall_only() -> None:
    cache = make_cache(6, 4)
    insert(cache, span(1, 16))
    request = admit(cache, span(50, 59))
    cache.alloc_for_extend([request], [10])

    assert cache.match_prefix(span(1, 16)) == 12
    assert law(cache) == (0, 12, 0, 12)


def test_slots_of_another_position_do_not_change() -> None:
    cache = make_cache()
    request = admit(cache, PROMPT)
    compute(cache, request, 6)
    before = cache.slots(request).tolist()
    compute(cache, request, 10)

    assert before == cache.slots(request, 0, 6).tolist()
    assert cache.slots(request, 4).tolist() == cache.slots(request).tolist()[4:]
    assert cache.slots(request).dtype == np.int64


def test_slots_are_asked_for_allocated_positions_only() -> None:
    cache = make_cache()
    request = run(cache, PROMPT)

    for start, stop in ((0, 11), (-1, 3), (5, 4)):
        with pytest.raises(LengthError, match=rf"got {start}\.\.{stop}"):
            cache.slots(request, start, stop)
    assert cache.slots(request, 10).tolist() == []


def test_an_empty_batch_is_a_batch() -> None:
    cache = make_cache()

    assert cache.alloc_for_extend([], []).num_reqs == 0
    assert cache.alloc_for_decode([]).num_reqs == 0
    assert cache.alloc_for_decode([], 3).num_reqs == 0


def test_a_request_is_named_once_in_a_batch() -> None:
    cache = make_cache()
    request = admit(cache, PROMPT)

    with pytest.raises(RequestStateError, match="once"):
        cache.alloc_for_extend([request, request], [5, 10])
    assert request.allocated_len == 0


@pytest.mark.parametrize("lens", [[1.5], ["3"], [None], 3], ids=repr)
def test_new_lens_are_integers(lens: Wrong) -> None:
    cache = make_cache()
    request = admit(cache, PROMPT)

    with pytest.raises(LengthError, match="new_lens must be"):
        cache.alloc_for_extend([request], lens)


@pytest.mark.parametrize("num_tokens", [0, -1, 1.0, True, None, 2**31], ids=repr)
def test_the_number_of_drafts_is_positive(num_tokens: Wrong) -> None:
    cache = make_cache()
    request = admit(cache, PROMPT)

    with pytest.raises(ConfigError, match="num_tokens"):
        cache.alloc_for_decode([request], num_tokens)


def test_commit_goes_forward_and_not_beyond_what_is_allocated() -> None:
    cache = make_cache()
    request = admit(cache, PROMPT)
    cache.alloc_for_extend([request], [8])
    cache.commit(request, 5)
    cache.commit(request, 5)

    for new_len in (4, -1, 9, 64):
        with pytest.raises(LengthError, match=rf"5\.\.8, got {new_len}"):
            cache.commit(request, new_len)
    assert request.committed_len == 5


# Publishing -----------------------------------------------------------------


def test_the_second_copy_of_a_page_is_freed_and_its_row_points_at_the_first() -> None:
    cache = make_cache()
    first, second = run(cache, PROMPT), run(cache, PROMPT)
    assert law(cache) == (40, 0, 0, 24)
    cache.cache_unfinished_req(first, PROMPT)
    cache.cache_unfinished_req(second, PROMPT)

    assert pages_of(cache, first)[:2] == pages_of(cache, second)[:2]
    assert pages_of(cache, first)[2] != pages_of(cache, second)[2]
    assert law(cache) == (48, 0, 8, 8)


def test_workers_learn_of_pages_that_were_swapped() -> None:
    cache = make_cache()
    first, second = run(cache, PROMPT), run(cache, PROMPT)
    cache.cache_unfinished_req(first, PROMPT)
    cache.cache_unfinished_req(second, PROMPT)
    info = decode(cache, second)

    assert info.page_starts.tolist() == [0]
    assert info.new_pages.tolist() == pages_of(cache, second)


def test_workers_are_told_new_pages_only() -> None:
    cache = make_cache()
    request = run(cache, span(1, 7))
    cache.cache_unfinished_req(request, span(1, 7))

    assert decode(cache, request).num_new_pages == 0
    info = decode(cache, request)
    assert (info.page_starts.tolist(), info.num_new_pages) == ([2], 1)


def test_publishing_twice_changes_nothing() -> None:
    cache = make_cache()
    request = run(cache, PROMPT)
    cache.cache_unfinished_req(request, PROMPT)
    before = cache.stats()
    cache.cache_unfinished_req(request, PROMPT)

    assert before == cache.stats()
    cache.check_integrity()


def test_only_computed_positions_are_published() -> None:
    cache = make_cache()
    request = admit(cache, PROMPT)
    cache.alloc_for_extend([request], [10])
    cache.commit(request, 7)
    cache.cache_unfinished_req(request, PROMPT)

    assert cache.match_prefix(PROMPT) == 4
    assert (request.protected_len, request.allocated_len) == (4, 10)


def test_finishing_drops_what_is_allocated_and_not_computed() -> None:
    cache = make_cache()
    request = run(cache, span(1, 8))
    cache.alloc_for_decode([request], 9)
    cache.cache_finished_req(request, span(1, 8))

    assert law(cache) == (56, 8, 0, 0)


def test_the_newest_token_has_no_kv_yet() -> None:
    """With 7 prompt and 3 output tokens, 9 are committed: 2 pages, not 3."""
    cache = make_cache(page_size=4)
    request = run(cache, span(1, 7))
    decode(cache, request)
    decode(cache, request)
    cache.cache_finished_req(request, span(1, 10))

    assert cache.match_prefix(span(1, 10)) == 8


def test_tokens_must_cover_what_is_computed() -> None:
    cache = make_cache()
    request = run(cache, PROMPT)

    for publish in (cache.cache_unfinished_req, cache.cache_finished_req):
        with pytest.raises(LengthError, match="cover 10 computed positions, got 9"):
            publish(request, PROMPT[:9])
    assert law(cache) == (52, 0, 0, 12)


def test_release_publishes_nothing() -> None:
    cache = make_cache()
    cache.release(run(cache, PROMPT))

    assert cache.match_prefix(PROMPT) == 0
    assert law(cache) == (64, 0, 0, 0)


def test_a_retracted_request_finds_what_it_published() -> None:
    cache = make_cache()
    request = run(cache, PROMPT)
    cache.cache_unfinished_req(request, PROMPT)
    cache.release(request)

    assert admit(cache, PROMPT).committed_len == 8


# Truncation -----------------------------------------------------------------


def test_truncate_frees_whole_pages() -> None:
    cache = make_cache()
    request = run(cache, PROMPT)
    cache.truncate(request, 5)

    assert (request.committed_len, request.allocated_len) == (5, 5)
    assert law(cache) == (56, 0, 0, 8)
    cache.truncate(request, 4)
    assert law(cache) == (60, 0, 0, 4)


def test_truncate_keeps_what_is_computed_below() -> None:
    cache = make_cache()
    request = run(cache, PROMPT)
    cache.alloc_for_decode([request], 4)
    cache.truncate(request, 12)

    assert (request.committed_len, request.allocated_len) == (10, 12)


def test_truncate_does_not_reach_into_the_tree() -> None:
    cache = make_cache()
    request = run(cache, PROMPT)
    cache.cache_unfinished_req(request, PROMPT)

    with pytest.raises(LengthError, match=r"8\.\.10, got 7"):
        cache.truncate(request, 7)
    cache.truncate(request, 8)
    assert law(cache) == (56, 0, 8, 0)


def test_workers_learn_the_pages_that_replace_truncated_ones() -> None:
    cache = make_cache()
    request = run(cache, PROMPT)
    cache.truncate(request, 3)
    other = run(cache, span(20, 25))
    info = compute(cache, request, 10)

    assert info.page_starts.tolist() == [1]
    assert info.new_pages.tolist() == pages_of(cache, request)[1:]
    assert not set(pages_of(cache, request)) & set(pages_of(cache, other))


# The whole cache ------------------------------------------------------------


def test_evict_counts_whole_pages() -> None:
    cache = make_cache()
    insert(cache, span(1, 12))

    assert cache.evict(0) == 0
    assert cache.evict(1) == 4
    assert cache.evict(5) == 8
    assert cache.evict(1) == 0


def test_evict_if_needed_counts_what_is_free() -> None:
    cache = make_cache(4, 4)
    insert(cache, span(1, 12))

    assert cache.evict_if_needed(4) == 0
    assert cache.evict_if_needed(9) == 8
    assert cache.evict_if_needed(100) == 4
    assert cache.available_size == 16


def test_reset_needs_a_quiet_cache() -> None:
    cache = make_cache()
    insert(cache, PROMPT)
    request = admit(cache, PROMPT)

    with pytest.raises(CacheBusyError, match="got 1"):
        cache.reset()
    assert cache.match_prefix(PROMPT) == 8
    cache.release(request)
    cache.reset()
    assert cache.match_prefix(PROMPT) == 0
    assert law(cache) == (64, 0, 0, 0)


def test_workers_still_forget_the_rows_from_before_a_reset() -> None:
    cache = make_cache()
    insert(cache, PROMPT)
    cache.reset()
    request = admit(cache, [1])

    assert compute(cache, request, 1).forgotten_rows.tolist() == [1]
    assert decode(cache, request).forgotten_rows.tolist() == []


def test_a_shrink_evicts_no_more_than_must_go() -> None:
    cache = make_cache(8, 4)
    insert(cache, span(1, 12))
    insert(cache, span(1, 20))
    cache.resize(4)

    assert cache.match_prefix(span(1, 20)) == 16
    assert law(cache) == (0, 16, 0, 0)
    cache.resize(6)
    assert law(cache) == (8, 16, 0, 0)


def test_a_shrink_below_a_running_request_is_refused() -> None:
    cache = make_cache(8, 4)
    insert(cache, span(1, 8))
    request = run(cache, span(20, 31))

    with pytest.raises(PagesInUseError) as caught:
        cache.resize(2)
    assert (caught.value.needed, caught.value.available) == (3, 2)
    assert cache.match_prefix(span(1, 8)) == 8
    cache.cache_finished_req(request, span(20, 31))
    cache.resize(2)
    assert law(cache) == (0, 8, 0, 0)


def test_a_second_release_is_refused() -> None:
    cache = make_cache()
    request = run(cache, PROMPT)
    cache.release(request)

    for use in (cache.release, cache.slots):
        with pytest.raises(RequestStateError, match="released already"):
            use(request)
    with pytest.raises(RequestStateError):
        cache.alloc_for_decode([request])
    assert law(cache) == (64, 0, 0, 0)


def test_a_released_handle_cannot_reach_the_next_user_of_its_row() -> None:
    cache = make_cache(max_num_requests=1)
    old = run(cache, PROMPT)
    cache.release(old)
    new = run(cache, PROMPT)

    assert old.req_pool_idx == new.req_pool_idx
    with pytest.raises(RequestStateError):
        cache.release(old)
    assert law(cache) == (52, 0, 0, 12)


def test_another_caches_request_is_refused() -> None:
    cache, other = make_cache(), make_cache()
    request = run(other, PROMPT)
    run(cache, PROMPT)

    with pytest.raises(RequestStateError, match="another cache's"):
        cache.release(request)


def test_one_thread_owns_a_cache() -> None:
    cache = make_cache()
    insert(cache, PROMPT)
    caught: list[Exception] = []

    def intrude() -> None:
        try:
            cache.admit(PROMPT)
        except WrongThreadError as error:
            caught.append(error)

    def run_in_thread() -> None:
        thread = Thread(target=intrude)
        thread.start()
        thread.join()

    run_in_thread()
    assert len(caught) == 1
    assert law(cache) == (56, 8, 0, 0)
    cache.reset()
    run_in_thread()
    assert len(caught) == 1


def test_who_outlives_the_owner_takes_over() -> None:
    cache = make_cache()
    owner = Thread(target=insert, args=(cache, PROMPT))
    owner.start()
    owner.join()

    assert cache.evict(4) == 4


def test_a_refused_call_makes_nobody_the_owner() -> None:
    cache = make_cache()

    def fail() -> None:
        with pytest.raises(LengthError):
            cache.admit([])
        done.set()
        leave.wait()

    done, leave = Event(), Event()
    thread = Thread(target=fail)
    thread.start()
    done.wait()
    insert(cache, PROMPT)
    leave.set()
    thread.join()

    assert cache.match_prefix(PROMPT) == 8


def test_statistics_count_tokens() -> None:
    cache = make_cache()
    insert(cache, PROMPT)
    first, second = run(cache, [*PROMPT, 11, 12, 13]), run(cache, [*PROMPT, 11, 12, 13])
    cache.cache_unfinished_req(first, [*PROMPT, 11, 12, 13])
    cache.cache_finished_req(second, [*PROMPT, 11, 12, 13])
    cache.release(first)
    cache.evict(4)
    stats = cache.stats()

    assert stats.num_admitted_requests == 3
    assert stats.num_requests == 0
    assert stats.num_prompt_tokens == 36
    assert stats.num_cached_tokens == 16
    assert stats.num_published_tokens == 12
    assert stats.num_duplicate_tokens == 4
    assert stats.num_evicted_tokens == 4
    assert stats.hit_rate == 16 / 36
    assert (stats.total_size, stats.available_size, stats.evictable_size) == (64, 56, 8)


def test_a_cache_is_watched_as_it_was_asked_to_be() -> None:
    counters = SharedCounters.create()
    plain = RadixCache(make_memory())
    debugged = RadixCache(make_memory(), debug=True)
    counted = RadixCache(make_memory(16, 4), counters=counters)
    values = counters.read()
    counters.close()
    counters.unlink()

    assert plain.watch is None
    assert debugged.watch is not None
    assert debugged.watch.log is not None
    assert counted.watch is not None
    assert counted.watch.log is None
    assert (values.available_size, values.total_size) == (64, 64)


def test_what_is_counted_is_a_plain_integer() -> None:
    """Page sizes, bytes and numpy leave no trace of themselves."""
    cache = make_cache()
    cache.set_quota("a", floor_size=5, ceiling_size=30)
    for _ in range(2):
        request = run(cache, PROMPT, "a")
        cache.cache_unfinished_req(request, PROMPT)
    insert(cache, PROMPT, "b")
    for _ in range(2):
        cache.evict(4)
    of_all = asdict(cache.stats())
    del of_all["runs_per_thousand_pages"]
    of_one = asdict(cache.namespace_stats("a"))
    matched = cache.match_prefix(PROMPT, "a")
    retained = cache.retain(PROMPT, "a")
    counts = [*of_all.values(), *of_one.values(), matched, retained]

    assert {int} == {type(count) for count in [*counts, cache.retained_size]}


def test_the_hit_rate_of_a_new_cache_is_0() -> None:
    assert make_cache().stats().hit_rate == 0


# Policies -------------------------------------------------------------------


def survivors(policy: Wrong, *, priorities: tuple[int, int, int] = (0, 0, 0)) -> str:
    """Who is left of a (first, and used again at once), b and c, less one page."""
    cache = make_cache(policy=policy, page_size=1)
    for token, priority in zip((1, 2, 3), priorities, strict=True):
        insert(cache, [token], priority=priority)
        if token == 1:
            cache.release(admit(cache, [1, 0]))
    cache.evict(1)
    return "".join(
        name
        for name, token in zip("abc", (1, 2, 3), strict=True)
        if cache.match_prefix([token])
    )


class LargestTokenFirst:
    """A policy of the user's own."""

    def key(self, node: RadixNode) -> int:
        return -int(np.frombuffer(node.key, np.int32)[0])


def test_policies_choose_who_goes() -> None:
    assert survivors("lru") == "bc"
    assert survivors("lfu") == survivors(LFU()) == "ac"
    assert survivors("priority", priorities=(0, 1, 1)) == "bc"
    assert survivors(Priority(), priorities=(1, 1, 0)) == "ab"
    assert survivors(LargestTokenFirst()) == "ab"


@pytest.mark.parametrize(
    "policy",
    ["", "LRU", None, 5, object(), LFU],
    ids=["nothing", "LRU", "none", "5", "object", "class"],
)
def test_an_unknown_policy_is_refused(policy: Wrong) -> None:
    with pytest.raises(ConfigError, match="policy must"):
        make_cache(policy=policy)


def test_a_path_has_the_highest_priority_that_published_through_it() -> None:
    cache = make_cache(policy="priority", page_size=1)
    insert(cache, [1, 2], priority=1)
    insert(cache, [3], priority=0)
    insert(cache, [1, 2, 4], priority=2)
    insert(cache, [1, 2, 5], priority=0)

    order = []
    for _ in range(5):
        before = {t for t in (4, 5) if cache.match_prefix([1, 2, t]) == 3}
        had = cache.match_prefix([3])
        cache.evict(1)
        if cache.match_prefix([3]) < had:
            order.append(3)
        order += [t for t in before if cache.match_prefix([1, 2, t]) < 3]
    assert order[:2] == [3, 5]


# Size -----------------------------------------------------------------------


def test_a_prompt_of_a_million_tokens() -> None:
    num_tokens = 1_000_000
    cache = make_cache(
        num_tokens // 16 + 1, 16, max_context_len=num_tokens + 1, max_num_requests=1
    )
    prompt = np.arange(num_tokens, dtype=np.int32)
    request = cache.admit(prompt)
    assert request is not None
    cache.alloc_for_extend([request], [num_tokens])
    cache.commit(request, num_tokens)
    cache.cache_finished_req(request, prompt)

    assert cache.match_prefix(prompt) == num_tokens
    assert cache.match_prefix(prompt[: num_tokens // 2]) == num_tokens // 2
    again = cache.admit(prompt)
    assert again is not None
    assert again.committed_len == num_tokens - 16
    cache.release(again)
    assert cache.evict(num_tokens // 2) == num_tokens // 2
    assert cache.match_prefix(prompt) == num_tokens // 2
    cache.check_integrity()


def test_b138_a_chat_of_5000_turns() -> None:
    """Every turn is a request of its own, one token longer than the one before."""
    num_turns = 5_000
    cache = make_cache(num_turns, 1, max_context_len=num_turns)
    text = np.arange(num_turns, dtype=np.int32)
    for length in range(1, num_turns + 1):
        request = cache.admit(text[:length])
        assert request is not None
        assert request.committed_len == length - 1
        decode(cache, request)
        cache.cache_finished_req(request, text[:length])

    assert cache.match_prefix(text) == num_turns
    assert cache.evict(num_turns // 2) == num_turns // 2
    assert cache.match_prefix(text) == num_turns // 2
    assert law(cache) == (num_turns // 2, num_turns // 2, 0, 0)


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_b138_a_request_that_publishes_5000_times(policy: str) -> None:
    num_turns = 5_000
    cache = make_cache(num_turns + 1, 1, policy=policy, max_context_len=num_turns + 1)
    request = admit(cache, [0])
    tokens = []
    for turn in range(num_turns):
        tokens.append(turn)
        decode(cache, request)
        cache.cache_unfinished_req(request, tokens)
    cache.cache_finished_req(request, tokens)

    assert cache.match_prefix(tokens) == num_turns
    again = admit(cache, tokens)
    assert again.committed_len == num_turns - 1
    cache.release(again)
    assert cache.evict(1) == 1
    assert cache.match_prefix(tokens) == num_turns - 1
    assert law(cache) == (2, num_turns - 1, 0, 0)


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_namespaces_and_caches_that_are_gone_leave_no_node_behind(policy: str) -> None:
    before = num_leaves_alive()
    cache = make_cache(policy=policy)
    for namespace in range(200):
        insert(cache, span(1, 8), namespace)
        cache.evict(64)
    cache.stats()  # counts the last admissions, and lets them go
    # Some are remembered still, to explain misses.
    assert num_leaves_alive() - before <= 2 * 64 + 16
    insert(cache, span(1, 8))
    cache.bump_epoch(None)
    admit(cache, span(1, 8))
    del cache

    assert before == num_leaves_alive()


def test_a_cache_reads_its_sizes_through_its_memory() -> None:
    cache = make_cache(6, 2)

    assert (cache.page_size, cache.total_size) == (2, 12)
    assert cache.memory.num_pages == 6
    assert make_memory().max_context_len == 64


@pytest.mark.parametrize("wrong", [2.0, None, "4", True], ids=repr)
def test_lengths_are_integers(wrong: Wrong) -> None:
    cache = make_cache()
    request = admit(cache, PROMPT)
    cache.alloc_for_extend([request], [4])
    calls = (
        lambda: cache.commit(request, wrong),
        lambda: cache.truncate(request, wrong),
        lambda: cache.slots(request, wrong),
        lambda: cache.evict(wrong),
        lambda: cache.evict_if_needed(wrong),
    )

    for call in calls:
        with pytest.raises(LengthError, match="must be an integer"):
            call()
    assert (request.committed_len, request.allocated_len) == (0, 4)


@pytest.mark.parametrize("wrong", [None, 7, iter([1])], ids=["none", "7", "iterator"])
def test_published_tokens_are_a_sequence(wrong: Wrong) -> None:
    cache = make_cache()
    request = admit(cache, PROMPT)

    with pytest.raises(TokenError, match="token"):
        cache.cache_finished_req(request, wrong)
    cache.release(request)


class Unequal:
    """A namespace that cannot be compared."""

    def __hash__(self) -> int:
        return 7

    def __eq__(self, other: object) -> bool:
        raise ArithmeticError("no")


def test_a_namespace_that_cannot_be_compared_leaks_nothing() -> None:
    cache = make_cache()
    other = cache.admit(PROMPT, namespace=7)
    assert other is not None

    with pytest.raises(ArithmeticError):
        cache.admit(PROMPT, namespace=Unequal())

    cache.release(other)
    assert cache.stats().num_requests == 0
    cache.check_integrity()


@pytest.mark.parametrize("batch", [[None], [7], 7, None], ids=repr)
def test_a_batch_is_made_of_requests(batch: Wrong) -> None:
    cache = make_cache()

    with pytest.raises(RequestStateError):
        cache.alloc_for_decode(batch)
    with pytest.raises(RequestStateError):
        cache.alloc_for_extend(batch, [1])
    with pytest.raises(RequestStateError):
        cache.release(batch)


def test_a_generator_of_requests_is_a_batch() -> None:
    cache = make_cache()
    request = admit(cache, PROMPT)

    batch: Wrong = (r for r in [request])
    assert cache.alloc_for_decode(batch).num_reqs == 1


def test_no_kind_of_cache_is_taken_for_another() -> None:
    """In either order, as compiled classes once shared what they remembered."""
    radix, chunk = make_cache(), make_chunk_cache()

    for _ in range(2):
        assert not isinstance(chunk, RadixCache)
        assert not isinstance(radix, ChunkCache)
        assert isinstance(chunk, PrefixCache)
        assert isinstance(radix, PrefixCache)


def test_a_cache_that_lacks_a_method_says_so() -> None:
    class Incomplete(PrefixCache):
        pass

    tree = RadixTree(16, RecencyIndex())
    cache = cast("Any", Incomplete)(make_memory(), tree)

    with pytest.raises(NotImplementedError):
        cache.match_prefix([1])
    with pytest.raises(NotImplementedError):
        cache.admit([1])
    with pytest.raises(NotImplementedError):
        cast("Any", PrefixCache).match_prefix(make_cache(), [1])

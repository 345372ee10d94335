"""Retention: what is retained goes last, for a time, within a share; never blocks."""

from __future__ import annotations

import itertools
import threading
from fractions import Fraction

import numpy as np
import pytest

from radixkv.mem_cache import (
    ConfigError,
    IntegrityError,
    PolicyError,
    RadixCache,
    RadixNode,
    TokenError,
    WrongThreadError,
)
from radixkv.mem_cache.eviction import RecencyIndex
from radixkv.mem_cache.radix_node import make_node

from .driver import Wrong, admit, compute, insert, law, make_cache, make_memory, span

A, B, C = span(1, 16), span(101, 116), span(201, 216)


class Clock:
    """Moves by hand; fails if its time is an exception."""

    def __init__(self) -> None:
        self.time: Wrong = 0.0

    def __call__(self) -> float:
        if isinstance(self.time, Exception):
            raise self.time
        return self.time


def make_clocked(
    num_pages: int = 16, page_size: int = 4, share: float = 0.5
) -> tuple[RadixCache, Clock]:
    clock = Clock()
    memory = make_memory(num_pages, page_size)
    return RadixCache(memory, retention_share=share, clock=clock), clock


def cached(cache: RadixCache, *prompts: list[int]) -> list[int]:
    law(cache)
    return [cache.match_prefix(prompt) for prompt in prompts]


# Who goes first -------------------------------------------------------------


def test_what_is_retained_goes_last() -> None:
    cache = RadixCache(make_memory(16, 4), retention_share=0.5)
    for prompt in (A, B, C):
        insert(cache, prompt)

    assert cache.retain(A) == 16
    cache.evict(32)
    assert [16, 0, 0] == cached(cache, A, B, C)
    cache.evict(4)
    assert [12, 0, 0] == cached(cache, A, B, C)


def test_lower_priorities_go_first() -> None:
    cache = RadixCache(make_memory(16, 4), retention_share=1)
    for prompt in (A, B, C):
        insert(cache, prompt)
    cache.retain(A, priority=3)
    cache.retain(B, priority=1)
    cache.retain(C, priority=2)

    cache.evict(16)
    assert [16, 0, 16] == cached(cache, A, B, C)
    cache.evict(16)
    assert [16, 0, 0] == cached(cache, A, B, C)


def test_the_lowest_priority_is_what_one_gets_without_asking() -> None:
    cache = RadixCache(make_memory(16, 4), retention_share=1)
    for prompt in (A, B):
        insert(cache, prompt)
    cache.retain(A)
    cache.retain(B, priority=1)

    cache.evict(16)
    assert [0, 16] == cached(cache, A, B)  # among equals the oldest goes first


def test_virtual_tokens_can_be_retained() -> None:
    cache = RadixCache(make_memory(16, 4), retention_share=1)
    prompt = [*A, cache.intern(b"0123456789abcdef"), *B]
    insert(cache, prompt)

    assert cache.retain(prompt) == 32


def test_among_equals_the_policy_decides() -> None:
    cache = RadixCache(make_memory(16, 4), "priority", retention_share=1)
    insert(cache, A, priority=5)
    insert(cache, B, priority=1)
    cache.retain(B)
    cache.retain(A)
    cache.evict(16)

    assert [16, 0] == cached(cache, A, B)


def test_a_request_raises_the_priority_of_the_path_that_it_publishes() -> None:
    cache = make_cache(16, 4, policy="priority")
    insert(cache, span(1, 8))
    insert(cache, B, priority=1)
    insert(cache, A, priority=2)  # its first two pages were there
    insert(cache, span(1, 4), priority=0)  # and a low one lowers nothing
    cache.evict(16)

    assert [16, 0] == cached(cache, A, B)


def test_retention_never_stands_in_the_way_of_an_allocation() -> None:
    cache = RadixCache(make_memory(8, 4), retention_share=1)
    insert(cache, A)
    insert(cache, B)
    assert cache.retain(A) + cache.retain(B) == 32
    request = admit(cache, C + C)
    compute(cache, request, 32)

    assert (0, 0, 0, 32) == law(cache)
    assert cache.retained_size == 0


def test_to_retain_is_no_use() -> None:
    cache = RadixCache(make_memory(16, 4), "lfu", retention_share=0.5)
    insert(cache, A)
    insert(cache, B)
    before = [(node.num_hits, node.last_use) for node in cache._tree.nodes()]
    cache.retain(A)

    assert before == [(node.num_hits, node.last_use) for node in cache._tree.nodes()]


def test_what_goes_next_is_told_with_what_is_retained() -> None:
    cache, clock = make_clocked()
    insert(cache, A)
    insert(cache, B)
    cache.retain(A, ttl=5)
    in_time = [victim.prefix_len for victim in cache.eviction_order(4)]
    first = cache.eviction_order(1)
    clock.time = 5

    assert [12, 8, 4, 0] == in_time
    assert first != cache.eviction_order(1)
    cache.evict(16)
    assert [0, 16] == cached(cache, A, B)


# What is retained -----------------------------------------------------------


def test_the_share_bounds_what_is_granted_down_to_the_page() -> None:
    cache = RadixCache(make_memory(16, 4), retention_share=6 / 16)
    insert(cache, A)
    insert(cache, B)

    assert cache.retain(A) == 16
    assert cache.retain(B) == 8
    assert cache.retain(B) == 8
    assert cache.retain(C) == 0
    assert cache.retained_size == 24
    cache.evict(8)  # the rest of B
    assert [16, 8] == cached(cache, A, B)


def test_without_a_share_nothing_is_retained() -> None:
    cache = RadixCache(make_memory(16, 4), retention_share=0)
    insert(cache, A)

    assert cache.retain(A) == 0
    assert isinstance(cache._tree.index, RecencyIndex)


def test_only_whole_cached_pages_are_retained() -> None:
    cache = RadixCache(make_memory(16, 4), retention_share=1)
    insert(cache, A)

    assert cache.retain(np.array(A[:7])) == 4
    assert cache.retain([*A[:9], 99]) == 8
    assert cache.retain(A[:3]) == 0
    assert cache.retain([]) == 0
    assert cache.retain(A, "tenant") == 0
    assert cache.retained_size == 8
    cache.evict(8)
    assert [8] == cached(cache, A)


def test_what_is_retained_already_costs_nothing() -> None:
    cache = RadixCache(make_memory(16, 4), retention_share=0.25)
    insert(cache, A)
    insert(cache, B)

    assert cache.retain(A) == 16
    assert cache.retain(A, priority=2) == 16
    assert cache.retain(A[:8]) == 8
    assert cache.retain(B) == 0
    assert cache.retained_size == 16


@pytest.mark.parametrize("policy", ["lru", "mru", "lfu"])
@pytest.mark.parametrize("is_bumped", [False, True])
def test_what_is_published_behind_a_retained_leaf_is_not(
    policy: str, is_bumped: bool
) -> None:
    cache = RadixCache(make_memory(16, 4), policy, retention_share=1)
    if is_bumped:
        insert(cache, C)
        cache.bump_epoch(None)
        cache.evict(16)
    insert(cache, A[:8])
    cache.retain(A)
    insert(cache, A)

    assert cache.retained_size == 8
    insert(cache, B)
    cache.evict(24)
    assert [8, 0] == cached(cache, A, B)


def test_what_a_running_request_published_can_be_retained() -> None:
    cache = RadixCache(make_memory(16, 4), retention_share=1)
    insert(cache, B)
    request = admit(cache, A)
    compute(cache, request, 16)
    cache.cache_unfinished_req(request, A)

    assert cache.retain(A) == 16
    cache.release(request)
    cache.evict(16)
    assert [16, 0] == cached(cache, A, B)


def test_grants_follow_the_splits_of_their_nodes() -> None:
    cache = RadixCache(make_memory(16, 4), retention_share=1)
    insert(cache, A)
    cache.retain(A, priority=2)
    insert(cache, [*A[:8], *C[:8]])

    assert cache.retained_size == 16
    cache.evict(8)
    assert [16, 8] == cached(cache, A, [*A[:8], *C[:8]])


def test_the_higher_priority_wins() -> None:
    cache = RadixCache(make_memory(16, 4), retention_share=1)
    for prompt in (A, B):
        insert(cache, prompt)
    cache.retain(A, priority=1)
    cache.retain(B, priority=2)
    cache.retain(A[:8], priority=3)
    cache.retain(A[:8], priority=1)
    cache.evict(24)

    assert [8, 0] == cached(cache, A, B)


def test_evicted_pages_are_retained_no_longer() -> None:
    cache, _ = make_clocked(share=0.25)
    insert(cache, A)
    cache.retain(A, ttl=1_000)
    cache.evict(4)
    assert cache.retained_size == 12
    insert(cache, A)
    assert cache.retained_size == 12
    assert cache.retain(A) == 16
    cache.evict(16)

    assert cache.retained_size == 0
    insert(cache, B)
    assert cache.retain(B) == 16


def test_grants_that_are_evicted_again_and_again_leave_nothing_behind() -> None:
    cache, _ = make_clocked(share=1)
    for _ in range(100):
        insert(cache, A)
        cache.retain(A[:8], ttl=1e9)
        cache.retain(A, ttl=1e9)
        cache.evict(16)
    retention = cache._retention

    assert retention is not None
    assert (0, 0) == (len(retention._entries), len(retention._grants))


# Time -----------------------------------------------------------------------


def test_at_expiry_pages_are_normal_again_with_their_recency() -> None:
    cache, clock = make_clocked()
    for prompt in (A, B, C):
        insert(cache, prompt)
    cache.retain(B, ttl=10)
    clock.time = 9.9
    assert cache.retained_size == 16
    clock.time = 10

    assert cache.retained_size == 0
    assert [16, 16, 16] == cached(cache, A, B, C)
    cache.evict(16)
    assert [0, 16, 16] == cached(cache, A, B, C)
    cache.evict(16)
    assert [0, 0, 16] == cached(cache, A, B, C)


def test_a_hit_lets_the_time_begin_anew() -> None:
    cache, clock = make_clocked(share=1)
    for prompt in (A, B):
        insert(cache, prompt)
    cache.retain(A[:8], ttl=10)
    cache.retain(A, ttl=10)
    cache.retain(B, ttl=10)
    clock.time = 6
    insert(cache, A[:9])  # uses the first two pages only
    clock.time = 12

    assert cache.retained_size == 8
    clock.time = 16
    assert cache.retained_size == 0


def test_a_hit_that_comes_too_late_revives_nothing() -> None:
    cache, clock = make_clocked()
    insert(cache, A)
    cache.retain(A, ttl=10)
    clock.time = 10
    insert(cache, A)

    assert cache.retained_size == 0


def test_the_later_end_wins() -> None:
    cache, clock = make_clocked(share=1)
    for prompt in (A, B, C):
        insert(cache, prompt)
    cache.retain(A, ttl=10)
    cache.retain(A, ttl=2)
    cache.retain(B, ttl=2)
    cache.retain(B, ttl=10)
    cache.retain(C, ttl=10)
    cache.retain(C)
    clock.time = 9
    assert cache.retained_size == 48
    clock.time = 10
    assert cache.retained_size == 16
    clock.time = 1e9
    assert cache.retained_size == 16
    cache.evict(48)
    assert (64, 0, 0, 0) == law(cache)


def test_the_longer_time_counts_from_a_hit_on() -> None:
    cache, clock = make_clocked()
    insert(cache, A)
    cache.retain(A, ttl=10)
    clock.time = 9
    cache.retain(A, ttl=2)
    insert(cache, A[:9])
    clock.time = 18

    assert cache.retained_size == 8
    law(cache)


def test_a_clock_that_goes_backwards_stands_still() -> None:
    cache, clock = make_clocked(share=1)
    insert(cache, A)
    insert(cache, B)
    clock.time = 100
    cache.retain(A, ttl=10)
    clock.time = 5
    cache.retain(B, ttl=20)
    insert(cache, A)
    assert cache.retained_size == 32
    clock.time = 112

    assert cache.retained_size == 16
    law(cache)


@pytest.mark.parametrize("time", [RuntimeError("no battery"), "late", None, 1j])
def test_a_clock_that_fails_stops_nothing_but_new_ends(time: Wrong) -> None:
    cache, clock = make_clocked()
    insert(cache, A)
    insert(cache, B)
    cache.retain(A, ttl=10)
    clock.time = time
    insert(cache, A)
    cache.evict(16)

    assert [16, 0] == cached(cache, A, B)
    assert cache.retain(A) == 16
    clock.time = 1e6
    assert cache.retain(A, ttl=1) == 16


@pytest.mark.parametrize(
    ("time", "told"),
    [
        (RuntimeError("no battery"), "RuntimeError('no battery')"),
        ("late", "TypeError("),
        (None, "TypeError("),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (float("-inf"), "-inf"),
    ],
)
def test_a_clock_that_never_worked_gives_no_end(time: Wrong, told: str) -> None:
    cache, clock = make_clocked()
    insert(cache, A)
    clock.time = time

    with pytest.raises(ConfigError) as caught:
        cache.retain(A, ttl=1)
    assert str(caught.value).startswith(f"clock must return seconds, got {told}")
    assert cache.retained_size == 0
    assert cache.retain(A) == 16


@pytest.mark.parametrize("time", [float("nan"), float("inf"), float("-inf")])
def test_times_that_are_no_numbers_are_passed_over(time: float) -> None:
    cache, clock = make_clocked()
    insert(cache, A)
    cache.retain(A, ttl=10)
    clock.time = time

    assert cache.retained_size == 16
    assert cache.retain(A, ttl=10) == 16
    clock.time = 11
    assert cache.retained_size == 0


@pytest.mark.parametrize("ttl", [1, 0.5, np.float32(2), np.int64(3), Fraction(1, 3)])
def test_seconds_are_any_real_number(ttl: Wrong) -> None:
    cache, clock = make_clocked()
    insert(cache, A)

    assert cache.retain(A, ttl=ttl) == 16
    clock.time = float(ttl)
    assert cache.retained_size == 0


# The whole cache ------------------------------------------------------------


def test_a_shrink_ends_the_latest_grants() -> None:
    cache, clock = make_clocked(share=0.5)
    insert(cache, A)
    insert(cache, B)
    cache.retain(B, ttl=10)
    cache.retain(A, ttl=10, priority=9)
    cache.resize(10)

    assert cache.retained_size == 20
    cache.evict(12)
    assert [4, 16] == cached(cache, A, B)
    clock.time = 10
    assert cache.retained_size == 0


def test_a_shrink_and_a_growth_leave_the_smaller_share() -> None:
    cache = RadixCache(make_memory(16, 4), retention_share=0.25)
    insert(cache, A)
    cache.retain(A)
    cache.resize(8)
    cache.resize(32)

    assert cache.retained_size == 8
    assert cache.retain(A) == 16


def test_a_reset_ends_all_grants() -> None:
    cache, _ = make_clocked(share=0.25)
    insert(cache, A)
    cache.retain(A, ttl=10)
    cache.reset()

    assert cache.retained_size == 0
    insert(cache, A)
    assert cache.retained_size == 0
    assert cache.retain(A) == 16


@pytest.mark.parametrize("bumped_before", [False, True])
def test_the_grants_of_an_old_epoch_end(bumped_before: bool) -> None:
    cache, _ = make_clocked(share=0.25)
    if bumped_before:
        insert(cache, C)
        cache.bump_epoch(None)
    insert(cache, A)
    insert(cache, B, namespace="tenant")
    cache.retain(A, ttl=10)
    cache.bump_epoch(None)

    assert cache.retain(B, "tenant") == 16
    assert cache.retained_size == 16
    cache.evict(cache.evictable_size - 16)
    assert cache.match_prefix(B, "tenant") == 16
    law(cache)


def test_a_stale_grant_is_not_split_by_a_shrink() -> None:
    cache, _ = make_clocked(share=0.5)
    insert(cache, B, namespace="tenant")
    insert(cache, A)
    cache.retain(B, "tenant", ttl=10)
    cache.retain(A)
    cache.bump_epoch(None)
    cache.resize(8)

    assert cache.retained_size == 16
    cache.evict(16)
    assert cache.match_prefix(B, "tenant") == 16
    law(cache)


@pytest.mark.parametrize("quota_first", [False, True])
@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_retention_and_quotas_live_together(policy: str, quota_first: bool) -> None:
    cache = RadixCache(make_memory(16, 4), policy, retention_share=0.5)
    for name in ("a", "b"):
        insert(cache, A, namespace=name)
        insert(cache, B, namespace=name)
    if quota_first:
        cache.set_quota("a", floor_size=20)
    cache.retain(A, "a")
    cache.retain(A, "b")
    cache.set_quota("a", floor_size=20)
    cache.evict(16)

    assert cache.retained_size == 32
    kept = [cache.match_prefix(text, name) for name in "ab" for text in (A, B)]
    assert [16, 4, 16, 12] == kept
    cache.evict(16)
    kept = [cache.match_prefix(text, name) for name in "ab" for text in (A, B)]
    assert [16, 4, 12, 0] == kept
    law(cache)
    cache.set_quota("a")
    cache.evict(8)
    kept = [cache.match_prefix(text, name) for name in "ab" for text in (A, B)]
    assert [12, 0, 12, 0] == kept
    law(cache)


def test_until_something_is_retained_the_cache_is_as_without() -> None:
    cache, _ = make_clocked()
    tree = cache._tree
    listeners = [tree.on_used, tree.on_published, tree.on_split, tree.on_evicted]
    before = [list(functions) for functions in listeners]
    insert(cache, A)
    cache.retain(B, ttl=1)

    assert isinstance(tree.index, RecencyIndex)
    assert before == listeners


def test_a_cache_that_is_debugged_can_retain() -> None:
    clock = Clock()
    cache = RadixCache(make_memory(16, 4), clock=clock, debug=True)
    insert(cache, A, "a")

    assert cache.retain(A, "a", priority=2, ttl=3) == 16
    with pytest.raises(ConfigError):
        cache.retain(A, priority=0)
    clock.time = 3
    cache.evict(4)
    assert cache.retained_size == 0


# What is refused ------------------------------------------------------------


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan"), True, "1", None, 10**400])
def test_a_wrong_share_is_refused(share: Wrong) -> None:
    memory = make_memory()

    with pytest.raises(ConfigError, match="retention_share must be"):
        RadixCache(memory, retention_share=share)
    RadixCache(memory)  # which is nobody's


def test_a_clock_must_be_callable() -> None:
    memory = make_memory()

    with pytest.raises(ConfigError, match="clock must be a function or None, got 3"):
        RadixCache(memory, clock=3)  # type: ignore[arg-type]
    RadixCache(memory)


def test_a_time_to_live_needs_a_clock() -> None:
    cache = make_cache()
    insert(cache, A)

    with pytest.raises(ConfigError, match="needs a cache with a clock"):
        cache.retain(A, ttl=1)
    assert cache.retained_size == 0


@pytest.mark.parametrize("ttl", [0, -1, float("nan"), "1", True, 1j])
def test_a_wrong_time_to_live_is_refused(ttl: Wrong) -> None:
    cache, _ = make_clocked()
    insert(cache, A)

    with pytest.raises(ConfigError, match="ttl must be"):
        cache.retain(A, ttl=ttl)
    assert cache.retained_size == 0


def test_wrong_tokens_namespaces_and_priorities_are_refused() -> None:
    cache = make_cache()
    insert(cache, A)

    with pytest.raises(TokenError):
        cache.retain([0.5])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match=r"^namespace must be hashable"):
        cache.retain(A, [])  # type: ignore[arg-type]
    for priority in (0, -1, 1.5, 2**31):
        with pytest.raises(ConfigError, match=r"^priority must be"):
            cache.retain(A, priority=priority)  # type: ignore[arg-type]
    assert cache.retained_size == 0


def test_other_threads_may_look_but_not_retain() -> None:
    cache, clock = make_clocked()
    insert(cache, A)
    cache.retain(A, ttl=1)
    clock.time = 1
    seen: list[object] = []

    def look() -> None:
        seen.append(cache.retained_size)
        with pytest.raises(WrongThreadError):
            cache.retain(A)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()

    assert [16] == seen  # only the owner drops what is over
    assert cache.retained_size == 0


# Faults ---------------------------------------------------------------------


class LearnsBadly:
    """A policy whose lessons fail on demand."""

    def __init__(self) -> None:
        self.is_broken = False

    def key(self, node: RadixNode) -> int:
        return node.created

    def used(self, nodes: list[RadixNode]) -> None:
        if self.is_broken:
            raise RuntimeError("cannot learn")


def test_a_policy_that_fails_after_the_first_grant_is_noticed() -> None:
    policy = LearnsBadly()
    cache = RadixCache(make_memory(), policy)
    insert(cache, A)
    insert(cache, B)
    cache.retain(A)
    cache.evict(4)
    policy.is_broken = True
    insert(cache, A)

    with pytest.raises(PolicyError, match="cannot learn"):
        cache.evict(4)
    assert [16, 12] == cached(cache, A, B)


class FailsOnDemand:
    """A policy that cannot tell the worth of nodes on demand."""

    def __init__(self) -> None:
        self.is_broken = False

    def key(self, node: RadixNode) -> int:
        if self.is_broken:
            raise RuntimeError("no key")
        return 0


def test_a_policy_that_fails_at_the_end_of_a_grant_evicts_nothing() -> None:
    policy = FailsOnDemand()
    clock = Clock()
    cache = RadixCache(make_memory(), policy, clock=clock)
    insert(cache, A)
    insert(cache, B)
    cache.retain(A, ttl=1)
    policy.is_broken = True
    clock.time = 1

    with pytest.raises(PolicyError, match="no key"):
        cache.evict(4)
    assert [16, 16] == cached(cache, A, B)


def test_an_eviction_that_a_broken_policy_refuses_ends_no_grant() -> None:
    policy = FailsOnDemand()
    clock = Clock()
    cache = RadixCache(make_memory(), policy, clock=clock)
    insert(cache, A)
    cache.retain(A, ttl=1)
    policy.is_broken = True
    insert(cache, B)
    retention = cache._retention
    assert retention is not None
    clock.time = 1

    with pytest.raises(PolicyError, match="no key"):
        cache.evict(4)
    assert retention.num_pages == 4
    assert cache.retained_size == 0


def test_wrong_grants_are_told() -> None:
    cache, _ = make_clocked()
    insert(cache, A)
    insert(cache, [*A[:8], *B[:8]])
    cache.retain(A, ttl=5)
    retention = cache._retention
    assert retention is not None
    upper, lower = retention._grants.values()

    def fault() -> str:
        with pytest.raises(IntegrityError) as caught:
            cache.check_integrity()
        return str(caught.value)

    retention.num_pages += 1
    assert "retained pages: counter is off by +1" in fault()
    retention.num_pages -= 1
    for name in ("priority", "ttl", "expires", "since"):
        value = getattr(lower, name)
        setattr(lower, name, getattr(upper, name) + (0 if name == "since" else 1))
        assert "is retained more than what is before it" in fault()
        setattr(lower, name, value)
    entry, lower.entry = lower.entry, None
    assert "would be retained for too long" in fault()
    assert "the ends that are waited for" in fault()
    lower.entry = entry
    law(cache)
    gone = make_node(b"", b"", cache._tree.roots[0])
    retention._grants[gone] = upper
    assert "is retained, but gone" in fault()


def test_all_of_a_prefix_ends_at_a_time_whatever_the_clock_does_meanwhile() -> None:
    clock = itertools.count().__next__
    memory = make_memory(8, 1, max_context_len=8)
    cache = RadixCache(memory, clock=clock, retention_share=1.0, debug=True)
    for tokens in ([2, 1], [2, 3]):
        insert(cache, tokens)
    cache.retain([2, 1], ttl=60)
    cache.check_integrity()

    assert 2 == cache.retained_size

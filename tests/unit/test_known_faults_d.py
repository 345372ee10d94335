"""Known faults, group D: who is evicted, how much, and at what cost.

Sizes are (free, evictable, protected, held), in tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from random import Random
from types import FrameType

import pytest

from radixkv.mem_cache import LFU, OutOfPagesError, RadixCache, RadixNode

from .driver import admit, decode, insert, law, make_cache, run, span


def count_calls(function: Callable[[int], object], argument: int) -> int:
    """How many Python functions run: what would be a visit runs at least one."""
    calls = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        function(argument)
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("policy", ["lru", "lfu", "priority"])
def test_b26_an_eviction_does_not_look_at_all_leaves(policy: str) -> None:
    num_leaves = 20_000
    cache = make_cache(num_leaves, 1, policy=policy)
    for token in range(num_leaves):
        insert(cache, [token])
    num_calls = 0
    for token in range(1_000):
        num_calls += count_calls(cache.evict, 1)
        insert(cache, [num_leaves + token])

    assert num_calls / 1_000 <= 40
    assert [cache.match_prefix([999]), cache.match_prefix([1_000])] == [0, 1]


def test_b26_the_order_is_that_of_a_sort() -> None:
    random = Random(26)
    cache = make_cache(500, 1, policy="lfu")
    hits = {token: random.randrange(5) for token in range(500)}
    for token in hits:
        insert(cache, [token])
    released = list(hits)
    for token, count in random.sample(sorted(hits.items()), 500):
        for _ in range(count):
            cache.release(admit(cache, [token, 0]))
            released.remove(token)
            released.append(token)
    for token in sorted(released, key=lambda token: hits[token]):
        assert cache.match_prefix([token]) == 1
        cache.evict(1)
        assert cache.match_prefix([token]) == 0


class Spy(LFU):
    """Counts how often it is asked."""

    num_calls = 0

    def key(self, node: RadixNode) -> int:
        self.num_calls += 1
        return 0


def test_b26_a_policy_is_asked_once_a_release() -> None:
    spy = Spy()
    cache = make_cache(100, 1, policy=spy)
    for token in range(100):
        insert(cache, [token])
    cache.evict(50)

    assert spy.num_calls == 100


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_b28_recency_is_a_counter_and_never_ties(policy: str) -> None:
    cache = make_cache(8, 1, policy=policy)
    for token in (1, 2, 3):
        insert(cache, [token])
    cache.release(admit(cache, [1, 0]))

    for gone in (2, 3, 1):
        assert cache.match_prefix([gone]) == 1
        cache.evict(1)
        assert cache.match_prefix([gone]) == 0


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize("step", [4, 12])
def test_b29_the_end_of_a_chain_goes_first(policy: str, step: int) -> None:
    """As three nodes (lfu, published page by page) and as one."""
    cache = make_cache(3, 4, policy=policy)
    request = admit(cache, span(1, 12))
    for stop in range(step, 13, step):
        cache.alloc_for_extend([request], [stop])
        cache.commit(request, stop)
        cache.cache_unfinished_req(request, span(1, 12))
    cache.cache_finished_req(request, span(1, 12))
    assert law(cache) == (0, 12, 0, 0)
    run(cache, [50])

    assert cache.match_prefix(span(1, 12)) == 8
    assert law(cache) == (0, 8, 0, 4)


def test_b30_only_the_shortfall_is_evicted() -> None:
    cache = make_cache(4, 16)
    x, y = span(1, 16), span(101, 116)
    insert(cache, x)
    insert(cache, y)
    run(cache, span(201, 248))

    assert (cache.match_prefix(x), cache.match_prefix(y)) == (0, 16)


def test_b30_a_tail_page_with_room_needs_no_new_page() -> None:
    cache = make_cache(2, 16)
    insert(cache, span(1, 16))
    request = run(cache, span(201, 215))
    assert law(cache) == (0, 16, 0, 16)
    decode(cache, request)

    assert cache.match_prefix(span(1, 16)) == 16


def test_b34_nothing_evictable_is_refused_at_once() -> None:
    cache = make_cache(2, 4)
    insert(cache, span(1, 8))
    request = admit(cache, span(1, 9))

    with pytest.raises(OutOfPagesError) as caught:
        cache.alloc_for_extend([request], [9])
    assert (caught.value.needed, caught.value.evictable) == (1, 0)
    assert cache.evict(8) == 0
    assert law(cache) == (0, 0, 8, 0)


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_b159_a_node_that_got_a_child_is_no_candidate(policy: str) -> None:
    cache = make_cache(16, 4, policy=policy)
    a, b, c, d = span(1, 4), span(5, 8), span(9, 12), span(20, 23)
    for tokens in (a, a + b, a + b + c):
        insert(cache, tokens)
    cache.evict(4)
    assert cache.match_prefix(a + b + c) == 8
    insert(cache, a + b + d)
    cache.evict(4)
    assert cache.match_prefix(a + b + d) == 8
    cache.evict(4)

    assert cache.match_prefix(a + b) == 4


def cache_of(tokens: list[list[int]]) -> RadixCache:
    cache = make_cache(16, 1)
    for text in tokens:
        insert(cache, text)
    return cache


def test_the_victims_of_one_call_are_those_of_many() -> None:
    texts = [[1, 2, 3], [1, 2, 4, 5], [6], [1, 7]]
    together, apart = cache_of(texts), cache_of(texts)
    together.evict(4)
    for _ in range(4):
        apart.evict(1)

    assert [together.match_prefix(text) for text in texts] == [
        apart.match_prefix(text) for text in texts
    ]

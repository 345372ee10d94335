"""Epochs: weights or adapters are reloaded, and nobody meets what they computed before.

Sizes are (free, evictable, protected, held), in tokens.
"""

from __future__ import annotations

from collections.abc import ValuesView
from threading import Thread

import numpy as np
import pytest

from radixkv.mem_cache import (
    ConfigError,
    LengthError,
    PolicyError,
    PrefixCache,
    RadixNode,
    TokenError,
    WrongThreadError,
)
from radixkv.mem_cache.eviction import make_eviction_index
from radixkv.mem_cache.radix_tree import RadixTree
from radixkv.mem_cache.stale_first import end_epoch

from .driver import (
    Wrong,
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
from .lifetimes import num_leaves_alive

PROMPT = span(1, 8)
POLICIES = ["lru", "lfu", "priority"]


def seen(cache: PrefixCache) -> tuple[object, ...]:
    """What a call that changes nothing leaves as it was."""
    pages = [victim.page for victim in cache.eviction_order(100)]
    return law(cache), cache.stats(), free_order(cache.memory.allocator), pages


def victims(cache: PrefixCache) -> list[tuple[int, int]]:
    """Where each page begins that would go, and the page."""
    return [(victim.prefix_len, victim.page) for victim in cache.eviction_order(100)]


# What matches ---------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_b64_an_adapter_that_was_reloaded_meets_nothing_of_its_old_version(
    policy: str,
) -> None:
    cache = make_cache(16, 1, policy=policy)
    insert(cache, PROMPT, "a")
    cache.bump_epoch("a")
    assert cache.match_prefix(PROMPT, "a") == 0
    assert law(cache) == (8, 8, 0, 0)
    insert(cache, PROMPT, "a")
    assert cache.match_prefix(PROMPT, "a") == 8

    assert cache.evict(8) == 8
    assert cache.match_prefix(PROMPT, "a") == 8
    assert law(cache) == (8, 8, 0, 0)
    assert cache.evict(8) == 8
    assert law(cache) == (16, 0, 0, 0)


def test_other_namespaces_keep_their_epoch() -> None:
    cache = make_cache(16, 1)
    for name in (None, "a", "b"):
        insert(cache, span(1, 4), name)
    cache.bump_epoch("a")

    assert [cache.match_prefix(PROMPT, name) for name in (None, "a", "b")] == [4, 0, 4]


def test_the_next_epoch_has_no_part_of_the_last_one() -> None:
    cache = make_cache(64, 1)
    for epoch in range(4):
        insert(cache, span(1, 4 + epoch))
        assert cache.match_prefix(PROMPT) == 4 + epoch
        cache.bump_epoch(None)
        assert cache.match_prefix(PROMPT) == 0

    assert law(cache) == (64 - 22, 22, 0, 0)


@pytest.mark.parametrize("name", [None, "unknown"])
def test_a_namespace_without_entries_has_nothing_to_forget(name: str | None) -> None:
    cache = make_cache(16, 1)
    insert(cache, PROMPT, "a")
    before = seen(cache)
    cache.bump_epoch(name)

    assert before == seen(cache)
    assert cache.match_prefix(PROMPT, "a") == 8


def test_a_chunk_cache_has_no_epochs() -> None:
    cache = make_chunk_cache()
    request = run(cache, PROMPT)
    before = law(cache)
    cache.bump_epoch(None)

    assert before == law(cache)
    cache.cache_finished_req(request, PROMPT)
    assert law(cache) == (64, 0, 0, 0)
    namespace: Wrong = []
    with pytest.raises(ConfigError):
        cache.bump_epoch(namespace)


# Running requests -----------------------------------------------------------


@pytest.mark.parametrize("cached", [0, 1, 4, 7], ids="hit of {}".format)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_of_the_old_epoch_finishes_and_publishes_nothing(
    policy: str, cached: int
) -> None:
    cache = make_cache(16, 1, policy=policy)
    if cached:
        insert(cache, PROMPT[:cached])
    request = run(cache, PROMPT)
    cache.bump_epoch(None)
    before = seen(cache), repr(request), cache.slots(request).tolist()
    cache.cache_unfinished_req(request, PROMPT)
    assert before == (seen(cache), repr(request), cache.slots(request).tolist())
    assert law(cache) == (8, 0, cached, 8 - cached)
    decode(cache, request)
    published = cache.stats().num_published_tokens
    cache.cache_finished_req(request, span(1, 9))

    assert law(cache) == (16 - cached, cached, 0, 0)
    assert cache.match_prefix(span(1, 9)) == 0
    assert published == cache.stats().num_published_tokens == cached
    assert cache.stats().num_duplicate_tokens == 0
    assert cache.evict(16) == cached


def test_what_was_published_before_the_bump_is_protected_until_the_release() -> None:
    cache = make_cache(16, 1)
    request = run(cache, PROMPT)
    cache.cache_unfinished_req(request, PROMPT)
    cache.bump_epoch(None)

    assert law(cache) == (8, 0, 8, 0)
    assert cache.evict(8) == 0
    cache.release(request)
    assert law(cache) == (8, 8, 0, 0)
    assert cache.evict(8) == 8


@pytest.mark.parametrize("num_bumps", [1, 2])
def test_a_request_in_a_namespace_without_entries_publishes_nothing(
    num_bumps: int,
) -> None:
    cache = make_cache(16, 1)
    request = admit(cache, PROMPT, "a")
    for _ in range(num_bumps):
        cache.bump_epoch("a")
    compute(cache, request, 8)
    cache.cache_finished_req(request, PROMPT)

    assert law(cache) == (16, 0, 0, 0)
    insert(cache, PROMPT, "a")
    assert cache.match_prefix(PROMPT, "a") == 8


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("is_old_first", [False, True])
@pytest.mark.parametrize("cached", [0, 4])
def test_requests_of_two_epochs_run_side_by_side(
    cached: int, is_old_first: bool, policy: str
) -> None:
    cache = make_cache(32, 1, policy=policy)
    if cached:
        insert(cache, PROMPT[:cached])
    old = run(cache, PROMPT)
    cache.bump_epoch(None)
    new = admit(cache, PROMPT)
    assert new.committed_len == 0
    compute(cache, new, 8)
    cache.cache_unfinished_req(old, PROMPT)
    assert cache.match_prefix(PROMPT) == 0
    cache.cache_unfinished_req(new, PROMPT)
    cache.cache_unfinished_req(old, PROMPT)

    assert cache.match_prefix(PROMPT) == 8
    assert law(cache) == (16, 0, 8 + cached, 8 - cached)
    assert not set(cache.slots(old).tolist()) & set(cache.slots(new).tolist())
    order = [old, new] if is_old_first else [new, old]
    cache.cache_finished_req(order[0], PROMPT)
    cache.check_integrity()
    cache.cache_finished_req(order[1], PROMPT)
    assert law(cache) == (24 - cached, 8 + cached, 0, 0)
    assert cache.evict(cached) == cached
    assert cache.match_prefix(PROMPT) == 8


def test_a_request_of_the_old_epoch_is_checked_as_ever() -> None:
    cache = make_cache(16, 1)
    request = run(cache, PROMPT)
    cache.bump_epoch(None)
    before = seen(cache), repr(request)
    halves: Wrong = [0.5, *PROMPT[1:]]

    with pytest.raises(LengthError):
        cache.cache_unfinished_req(request, PROMPT[:7])
    with pytest.raises(TokenError):
        cache.cache_unfinished_req(request, [-1, *PROMPT[1:]])
    with pytest.raises(TokenError):
        cache.cache_finished_req(request, halves)
    assert before == (seen(cache), repr(request))


# Refused calls --------------------------------------------------------------


def test_a_namespace_that_is_not_hashable_is_refused() -> None:
    cache = make_cache(16, 1)
    insert(cache, PROMPT)
    before = seen(cache)
    namespace: Wrong = []

    with pytest.raises(ConfigError, match=r"namespace must be hashable, got \[\]"):
        cache.bump_epoch(namespace)
    assert before == seen(cache)
    assert cache.match_prefix(PROMPT) == 8


class Unequal:
    """A namespace that cannot be compared."""

    def __hash__(self) -> int:
        return 7

    def __eq__(self, other: object) -> bool:
        raise ArithmeticError("no")


def test_a_namespace_that_cannot_be_compared_ends_no_epoch() -> None:
    cache = make_cache(16, 1)
    insert(cache, PROMPT, namespace=7)
    before = seen(cache)

    with pytest.raises(ArithmeticError):
        cache.bump_epoch(Unequal())
    assert before == seen(cache)
    assert cache.match_prefix(PROMPT, 7) == 8


def test_only_the_owner_ends_an_epoch() -> None:
    cache = make_cache(16, 1)
    insert(cache, PROMPT)
    caught: list[Exception] = []

    def intrude() -> None:
        try:
            cache.bump_epoch(None)
        except WrongThreadError as error:
            caught.append(error)

    thread = Thread(target=intrude)
    thread.start()
    thread.join()

    assert len(caught) == 1
    assert cache.match_prefix(PROMPT) == 8


class Fails:
    """A policy that fails for one leaf."""

    def key(self, node: RadixNode) -> int:
        if node.num_hits:
            raise KeyError("used")
        return 0


def test_a_policy_that_failed_refuses_to_evict_stale_pages_too() -> None:
    cache = make_cache(16, 1, policy=Fails())
    insert(cache, PROMPT)
    cache.bump_epoch(None)
    assert cache.evict(1) == 1
    insert(cache, span(1, 2), "a")
    cache.release(admit(cache, span(1, 3), "a"))

    with pytest.raises(PolicyError):
        cache.evict(1)
    with pytest.raises(PolicyError):
        cache.eviction_order(1)
    assert law(cache) == (7, 9, 0, 0)
    cache.reset()
    assert law(cache) == (16, 0, 0, 0)


# Who goes first -------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_stale_pages_go_first_however_much_they_were_worth(policy: str) -> None:
    cache = make_cache(16, 1, policy=policy)
    insert(cache, span(20, 23), "b")
    for _ in range(3):
        insert(cache, span(1, 4), "a", priority=9)
    cache.bump_epoch("a")

    assert cache.evict(4) == 4
    assert cache.match_prefix(span(20, 23), "b") == 4
    assert cache.evict(4) == 4


@pytest.mark.parametrize("policy", POLICIES)
def test_the_oldest_epoch_goes_first_its_oldest_branch_first(policy: str) -> None:
    """Two branches in "b", 5 and 6 behind 1 2 and 3 4, then one in "a"."""
    cache = make_cache(16, 1, policy=policy)
    insert(cache, [1, 2, 3, 4], "a")
    insert(cache, [1, 2, 5], "b")
    insert(cache, [1, 2, 6], "b")
    insert(cache, [3, 4], "b")
    cache.release(admit(cache, [1, 2, 5, 0], "b"))
    for name in ("b", "a"):
        cache.bump_epoch(name)

    order = [(2, 7), (2, 8), (1, 6), (0, 5), (1, 10), (0, 9)]
    assert victims(cache) == [*order, (3, 4), (2, 3), (1, 2), (0, 1)]
    cache.evict(2)
    assert victims(cache) == [*order[2:], (3, 4), (2, 3), (1, 2), (0, 1)]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_was_released_later_goes_behind_what_was_idle(policy: str) -> None:
    cache = make_cache(16, 1, policy=policy)
    insert(cache, [1, 2, 3, 4])
    insert(cache, [1, 2, 5])
    insert(cache, [9], "a")
    request = admit(cache, [1, 2, 0])
    cache.bump_epoch(None)
    assert victims(cache)[:3] == [(3, 4), (2, 3), (2, 5)]
    assert cache.evict(1) == 1
    cache.release(request)

    assert victims(cache) == [(2, 3), (2, 5), (1, 2), (0, 1), (0, 6)]
    cache.bump_epoch("a")
    assert victims(cache) == [(2, 3), (2, 5), (0, 6), (1, 2), (0, 1)]
    assert cache.evict(3) == 3
    cache.check_integrity()
    assert victims(cache) == [(1, 2), (0, 1)]
    assert cache.evict(3) == 2


@pytest.mark.parametrize("policy", POLICIES)
def test_with_a_full_stale_pool_allocations_evict_nothing_else(policy: str) -> None:
    """Reinforcement learning: new weights after every round."""
    cache = make_cache(32, 1, policy=policy, max_context_len=16)
    for weights in range(3):
        for rollout in range(4):
            prompt = [1, 2, 3, 4, *span(10 * rollout + 10, 10 * rollout + 16)]
            insert(cache, prompt)
            assert cache.match_prefix(prompt) == 11
            for earlier in range(rollout):
                known = [1, 2, 3, 4, *span(10 * earlier + 10, 10 * earlier + 16)]
                assert cache.match_prefix(known) == 11
        assert law(cache)[1] == 32
        assert cache.stats().num_cached_tokens == 12 * (weights + 1)
        cache.bump_epoch(None)

    assert cache.evict(32) == 32


@pytest.mark.parametrize("policy", POLICIES)
def test_the_index_lists_stale_nodes_first_each_once(policy: str) -> None:
    tree = make_tree(policy)
    node, _ = tree.acquire("kept", b"")
    tree.unlock(tree.publish(node, raw([20]), raw([20]))[0])
    late = grow(tree, [1, 2])
    for tokens in ([1, 2, 3], [1, 2, 4], [5, 6], [5, 7]):
        tree.unlock(grow(tree, tokens))
    grows_leaves = tree.index.grows_leaves
    end_epoch(tree, None)
    assert grows_leaves == tree.index.grows_leaves
    tree.unlock(late)

    nodes = list(tree.index)
    held = [node for node in tree.index.order() if node in tree.index]
    assert held == nodes
    assert len(tree.index) == len(nodes)
    leaves = [node for node in nodes if not node.children]
    assert [raw([token]) for token in (3, 4, 6, 7, 20)] == [leaf.key for leaf in leaves]


# Beside holds and quotas -----------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_retained_goes_first_all_the_same_once_it_is_stale(policy: str) -> None:
    cache = make_cache(16, 1, policy=policy)
    insert(cache, span(20, 23), "b")
    insert(cache, span(1, 4), "a")
    assert cache.retain(span(1, 4), "a", priority=9) == 4
    cache.bump_epoch("a")

    assert cache.evict(4) == 4
    assert cache.match_prefix(span(20, 23), "b") == 4
    assert law(cache) == (12, 4, 0, 0)
    assert cache.retained_size == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_first_hold_in_the_middle_of_a_walk_is_heeded(policy: str) -> None:
    cache = make_cache(16, 1, policy=policy)
    insert(cache, span(1, 4), "a")
    insert(cache, span(20, 23), "b")
    insert(cache, span(30, 33), "b")
    cache.bump_epoch("a")
    assert cache.evict(1) == 1
    assert cache.retain(span(20, 23), "b") == 4

    order = [(2, 3), (1, 2), (0, 1), (3, 12), (2, 11), (1, 10), (0, 9)]
    assert victims(cache) == [*order, (3, 8), (2, 7), (1, 6), (0, 5)]
    insert(cache, span(1, 5), "a")
    assert cache.retain(span(30, 33), "b", priority=2) == 0
    assert cache.evict(7) == 7
    law(cache)
    assert cache.match_prefix(span(20, 23), "b") == 4
    assert cache.match_prefix(span(1, 5), "a") == 5


@pytest.mark.parametrize("policy", POLICIES)
def test_a_floor_keeps_nothing_stale(policy: str) -> None:
    """The first quota comes in the middle of a walk, and so does its end."""
    cache = make_cache(16, 1, policy=policy)
    insert(cache, span(1, 4), "a")
    old = run(cache, span(1, 6), "a")
    cache.bump_epoch("a")
    assert cache.evict(1) == 0
    insert(cache, span(20, 23), "b")
    cache.set_quota("a", floor_size=4)
    insert(cache, span(1, 4), "a")
    cache.bump_epoch("a")
    insert(cache, span(1, 3), "a")
    cache.cache_finished_req(old, span(1, 6))
    assert law(cache) == (2, 14, 0, 0)  # one page of the second epoch went

    assert cache.evict(2) == 2
    cache.set_quota("a")
    law(cache)
    assert cache.evict(5) == 5
    law(cache)
    assert cache.match_prefix(span(1, 3), "a") == 3
    assert cache.match_prefix(span(20, 23), "b") == 4


# While a walk rests in the middle -------------------------------------------


@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 64])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("num_pages", "left"), [(5, [2, 1, 3, 5, 4]), (3, [3, 2, 1]), (1, [1])]
)
def test_a_shrink_in_the_middle_of_a_walk(
    num_pages: int, left: list[int], policy: str, page_size: int
) -> None:
    """Stale leaves of pages 1 2 3 and 4 5 6; page 3 is gone, then the last ones move.

    The sizes mean: 6 moves; the first leaf goes, and 4 5 6 move; so does 4 alone.
    """
    size = 4 * page_size
    cache = make_cache(12, page_size, policy=policy, max_context_len=size)
    for first in (1, 4):
        pages = span(first, first + 2)
        insert(cache, [page for page in pages for _ in range(page_size)])
    cache.bump_epoch(None)
    cache.evict(1)
    assert [page for _, page in victims(cache)] == [2, 1, 6, 5, 4]
    cache.resize(num_pages)

    assert left == [page for _, page in victims(cache)]
    law(cache)
    assert cache.evict(page_size) == page_size
    assert left[1:] == [page for _, page in victims(cache)]
    assert cache.evict(1000) == page_size * (len(left) - 1)
    assert cache.available_size == num_pages * page_size


@pytest.mark.parametrize("policy", POLICIES)
def test_what_others_drop_in_the_middle_of_a_walk_is_passed(policy: str) -> None:
    """The walk rests in 1 2; 3 goes, and 4 loses its tail."""
    tree = make_tree(policy)
    ends = [grow(tree, tokens) for tokens in ([1, 2], [3], [4, 5, 6], [7])]
    for end in ends:
        tree.unlock(end)
    end_epoch(tree, None)
    assert raw([2]) == tree.evict(1)
    assert raw([3]) == tree.trim(ends[1], 1)
    assert raw([6]) == tree.trim(ends[2], 1)
    assert [ends[0], ends[2], ends[3]] == list(tree.index.order())
    assert raw([1]) == tree.trim(ends[0], 1)

    assert raw([5, 4, 7]) == b"".join([tree.evict(1) for _ in range(3)])
    assert tree.index.first() is None
    assert len(tree.index) == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_reset_in_the_middle_of_a_walk_keeps_nothing_alive(policy: str) -> None:
    before = num_leaves_alive()
    cache = make_cache(64, 1, policy=policy)
    for first in range(10):
        insert(cache, [first, 20, 21])
        insert(cache, [first, 30, 31])
    running = run(cache, [0, 20, 21, 22])
    cache.bump_epoch(None)
    cache.evict(12)
    cache.release(running)
    del running
    assert num_leaves_alive() > before
    cache.reset()

    assert before == num_leaves_alive()
    assert law(cache) == (64, 0, 0, 0)
    insert(cache, PROMPT)
    assert cache.evict(8) == 8


def test_the_index_holds_no_released_node_that_is_not_stale() -> None:
    """What the integrity check finds, if a node is in the wrong queue."""
    tree = make_tree("lru")
    node = grow(tree, [1, 2])
    end_epoch(tree, None)
    tree.unlock(node)
    assert node in tree.index
    assert tree.index.holds(node)

    for fault in ("is_stale", "lock_ref"):
        target, wrong = (node.root, False) if fault == "is_stale" else (node, 1)
        right = getattr(target, fault)
        setattr(target, fault, wrong)
        assert not tree.index.holds(node)
        setattr(target, fault, right)
    assert tree.index.holds(node)
    assert [node] == list(tree.index)
    assert len(tree.index) == 1


# Cost -----------------------------------------------------------------------


class CountedChildren(dict[bytes, RadixNode]):
    """Children that count how often somebody looks through them."""

    num_looks = 0

    def values(self) -> ValuesView[RadixNode]:  # type: ignore[override]
        CountedChildren.num_looks += 1
        return super().values()


def make_tree(policy: str) -> RadixTree:
    return RadixTree(4, make_eviction_index(policy))


def raw(numbers: list[int]) -> bytes:
    return np.array(numbers, np.int32).tobytes()


def grow(tree: RadixTree, tokens: list[int]) -> RadixNode:
    """Publish tokens, each in the page of its number; keeps the lease on their end."""
    node, known = tree.acquire(None, raw(tokens))
    rest = raw(tokens)[len(known) :]
    return tree.publish(node, rest, rest)[0] if rest else node


def looks(tree: RadixTree) -> int:
    """Looks since the last question; from now on, they are counted."""
    for node in [*tree.roots, *tree.nodes()]:
        node.children = CountedChildren(node.children)
    num_looks, CountedChildren.num_looks = CountedChildren.num_looks, 0
    return num_looks


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_leaves", [10, 1000])
def test_the_end_of_an_epoch_visits_no_node(num_leaves: int, policy: str) -> None:
    tree = make_tree(policy)
    leases = [grow(tree, [first, first + 1]) for first in range(0, num_leaves, 2)]
    for node in leases[::2]:
        tree.unlock(node)
    looks(tree)
    end_epoch(tree, None)
    for node in leases[1::2]:
        tree.unlock(node)

    assert CountedChildren.num_looks == 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("depth", [1, 40])
def test_eviction_visits_what_it_evicts_and_the_path_to_it(
    depth: int, policy: str
) -> None:
    """Two branches at each of the depths, and a wide bottom."""
    tree = make_tree(policy)
    spine = list(range(depth))
    for level in range(depth):
        tree.unlock(grow(tree, [*spine[:level], 500 + level]))
    for leaf in range(1000, 2000):
        tree.unlock(grow(tree, [*spine, leaf]))
    end_epoch(tree, None)
    looks(tree)

    for num_evicted in (1, 1, 10, 100):
        CountedChildren.num_looks = 0
        assert len(tree.evict(num_evicted)) == 4 * num_evicted
        assert CountedChildren.num_looks <= num_evicted + depth + 1
    CountedChildren.num_looks = 0
    tree.evict(2000)
    assert CountedChildren.num_looks <= 1000
    assert list(tree.nodes()) == []


def test_a_request_that_runs_on_is_passed_once() -> None:
    tree = make_tree("lru")
    leases = [grow(tree, [first]) for first in range(50)]
    for first in range(50, 100):
        tree.unlock(grow(tree, [first]))
    end_epoch(tree, None)
    looks(tree)
    for num_evicted in range(50):
        assert len(tree.evict(1)) == 4
        assert CountedChildren.num_looks <= 52 + num_evicted
    for node in leases:
        tree.unlock(node)
    CountedChildren.num_looks = 0

    assert len(tree.evict(100)) == 200
    assert CountedChildren.num_looks <= 1


def test_a_path_of_100_000_nodes_goes_without_recursion() -> None:
    tree = make_tree("lfu")
    node, _ = tree.acquire(None, b"")
    for page in range(1, 100_001):
        # A second lease keeps the leaf from growing in place.
        tree.lock(node)
        node = tree.publish(node, raw([page]), raw([page]))[0]
    while node.parent is not node:
        parent = node.parent
        tree.unlock(node)
        node = parent
    end_epoch(tree, None)

    assert raw(list(range(100_000, 99_990, -1))) == tree.evict(10)
    assert len(tree.evict(200_000)) == 4 * 99_990
    assert tree.num_evictable_pages == 0

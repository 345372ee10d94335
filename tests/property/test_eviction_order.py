"""Who is evicted, page by page: the order of a reference that sorts all leaves."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.mem_cache import FIFO, LFU, LRU, EvictionPolicy, RadixNode, Victim
from radixkv.mem_cache.eviction import EvictionIndex, KeyedIndex
from radixkv.mem_cache.radix_tree import RadixTree
from radixkv.mem_cache.testing import CheckedCache, Live

from .caches import make_checked

NUM_PAGES = 60
POLICIES = ["lru", "keyed lru", "mru", "fifo", "filo", "lfu", "slru", "priority"]


class Visit(NamedTuple):
    """A request: so many pages of the text before it, then pages of these letters."""

    num_kept: int
    letters: list[int]
    namespace: str | None
    priority: int
    choice: int


visits = st.lists(
    st.builds(
        Visit,
        st.sampled_from([0, 1, 2, 4, 99, 99]),
        st.lists(st.integers(0, 1), min_size=1, max_size=6),
        st.sampled_from([None, None, None, "tenant"]),
        st.integers(0, 2),
        st.integers(0, 5),
    ),
    min_size=1,
    max_size=20,
)
policies = st.sampled_from(POLICIES)
page_sizes = st.sampled_from([1, 2, 3])


def compute(checked: CheckedCache, live: Live, stop: int) -> None:
    if stop > live.kv.committed_len:
        checked.extend([live], [stop])
        checked.commit(live, stop)


def finish_one_of(checked: CheckedCache, choice: int) -> None:
    live = checked.live[choice % len(checked.live)]
    compute(checked, live, len(live.tokens))
    checked.finish(live)


def checked_after(policy: str, trace: list[Visit], page_size: int) -> CheckedCache:
    """Serve a trace with up to three requests at a time; up to two run on.

    They are published in another order than they were admitted, half of them in two
    parts, so that nodes grow, hang in chains and are split while others need them.
    """
    checked = make_checked(policy, NUM_PAGES, page_size, num_rows=3, max_len=99)
    before: list[int] = []
    for visit in trace:
        if len(checked.live) == 3:
            finish_one_of(checked, visit.choice)
        pages = [letter for letter in visit.letters for _ in range(page_size)]
        before = [*before[: visit.num_kept * page_size], *pages][: 18 * page_size]
        live = checked.admit([*before, 0], visit.namespace, visit.priority)
        assert live is not None
        if visit.choice % 2:
            compute(checked, live, len(before) // 2 + 1)
            checked.publish(live)
    while len(checked.live) > trace[-1].choice % 3:
        finish_one_of(checked, 0)
    checked.check()
    return checked


def check_order(checked: CheckedCache, num_pages: int) -> list[int]:
    """Compare `eviction_order` with the oracle's; returns the pages."""
    before = checked.snapshot()
    victims = checked.cache.eviction_order(num_pages)

    assert victims == [
        Victim(namespace, len(tokens) - checked.page_size, page)
        for (namespace, tokens), page in checked.oracle.eviction_order(num_pages)
    ]
    assert before == checked.snapshot()
    return [victim.page for victim in victims]


@pytest.mark.parametrize("policy", POLICIES)
@given(trace=visits, page_size=page_sizes)
def test_pages_go_in_the_order_of_the_reference(
    policy: str, trace: list[Visit], page_size: int
) -> None:
    checked = checked_after(policy, trace, page_size)
    check_order(checked, NUM_PAGES)
    checked.drain()


@given(policy=policies, trace=visits, page_size=page_sizes, num_pages=st.integers(1, 5))
def test_pages_go_in_the_same_order_one_by_one_and_together(
    policy: str, trace: list[Visit], page_size: int, num_pages: int
) -> None:
    checked = checked_after(policy, trace, page_size)
    while checked.cache.evictable_size:
        checked.evict(num_pages * page_size)
        checked.check_cached()
        checked.check_sizes()


@given(policy=policies, trace=visits, shortfall=st.integers(1, 8))
def test_an_allocation_evicts_exactly_the_shortfall(
    policy: str, trace: list[Visit], shortfall: int
) -> None:
    checked = checked_after(policy, trace, 1)
    while checked.live:
        finish_one_of(checked, 0)
    cached = checked.cache.evictable_size
    needed = checked.cache.available_size + min(shortfall, cached)
    live = checked.admit([2] * needed)
    assert live is not None
    checked.extend([live], [needed])
    checked.check()

    assert cached - min(shortfall, cached) == checked.cache.evictable_size


@given(policy=policies, trace=visits, page_size=page_sizes, num_pages=st.integers(0, 9))
def test_the_listed_pages_are_those_that_go_and_nothing_changes_before(
    policy: str, trace: list[Visit], page_size: int, num_pages: int
) -> None:
    checked = checked_after(policy, trace, page_size)
    allocator = checked.cache.memory.allocator
    everybody = check_order(checked, NUM_PAGES)
    assert len(everybody) * page_size == checked.cache.evictable_size
    while everybody:
        listed = check_order(checked, num_pages)
        assert listed == everybody[:num_pages]
        in_use = set(allocator.in_use().tolist())
        checked.evict(num_pages * page_size)
        assert set(listed) == in_use - set(allocator.in_use().tolist())
        del everybody[:num_pages]
        num_pages += 1

    assert check_order(checked, NUM_PAGES) == []


# Levels ---------------------------------------------------------------------


def naive_order(
    tree: RadixTree, policy: EvictionPolicy, levels: dict[RadixNode, int]
) -> list[RadixNode]:
    """Take the least of all evictable leaves, again and again."""
    left = list(tree.nodes())
    order: list[RadixNode] = []
    while True:
        leaves = [
            node
            for node in left
            if node.lock_ref == 0 and not any(child.parent is node for child in left)
        ]
        if not leaves:
            return order
        first = min(
            leaves,
            key=lambda node: (levels.get(node, 0), policy.key(node), node.last_use),
        )
        order.append(first)
        left.remove(first)


def grow(tree: RadixTree, texts: list[bytes]) -> RadixNode:
    """Publish texts of one-byte tokens and pages; the lease on the last stays out."""
    node, _ = tree.acquire(None, b"")
    for text in texts:
        tree.unlock(node)
        node, known = tree.acquire(None, text)
        rest = text[len(known) :]
        if rest:
            node, _ = tree.publish(node, rest, bytes(len(rest)))
    return node


def check_index(index: EvictionIndex, expected: list[RadixNode]) -> None:
    assert expected == list(index.order())
    assert expected[:1] == list(filter(None, [index.first()]))
    assert [node for node in expected if not node.children] == list(index)


@pytest.mark.parametrize("policy", [LRU(), LFU(), FIFO()], ids=["lru", "lfu", "fifo"])
@given(
    texts=st.lists(
        st.lists(st.integers(0, 1), min_size=1, max_size=6).map(
            lambda letters: b"".join(bytes(4 * [letter]) for letter in letters)
        ),
        min_size=1,
        max_size=12,
    ),
    changes=st.lists(st.tuples(st.integers(0, 99), st.integers(-1, 1)), max_size=9),
)
def test_a_lower_level_goes_first_then_the_policy_decides(
    policy: EvictionPolicy, texts: list[bytes], changes: list[tuple[int, int]]
) -> None:
    """Levels change for leaves, for their parents and for protected nodes."""
    levels: dict[RadixNode, int] = {}
    index = KeyedIndex(policy, level=lambda node: levels.get(node, 0))
    tree = RadixTree(4, index)
    lease = grow(tree, texts)
    check_index(index, naive_order(tree, policy, levels))
    nodes = list(tree.nodes())
    for number, level in changes:
        node = nodes[number % len(nodes)]
        levels[node] = level
        index.rerank(node)
        check_index(index, naive_order(tree, policy, levels))
    tree.unlock(lease)
    expected = naive_order(tree, policy, levels)
    check_index(index, expected)

    for node in expected:
        assert index.first() is node
        assert tree.evict(node.num_pages)
        assert node.num_pages == 0
    assert len(index) == 0

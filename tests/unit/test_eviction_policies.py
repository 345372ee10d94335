"""The built-in policies, who is listed to go next, and policies that learn."""

from __future__ import annotations

import sys
from dataclasses import FrozenInstanceError
from types import FrameType

import numpy as np
import pytest

from radixkv.mem_cache import (
    FIFO,
    FILO,
    LFU,
    LRU,
    MRU,
    SLRU,
    ConfigError,
    EvictionPolicy,
    LengthError,
    PolicyError,
    Priority,
    RadixCache,
    RadixNode,
    Victim,
)
from radixkv.mem_cache.eviction import (
    EvictionIndex,
    KeyedIndex,
    RecencyIndex,
    make_eviction_index,
)
from radixkv.mem_cache.radix_tree import RadixTree

from .driver import (
    Wrong,
    admit,
    insert,
    law,
    make_cache,
    make_chunk_cache,
    run,
    span,
)

POLICIES: dict[str, EvictionPolicy] = {
    "lru": LRU(),
    "mru": MRU(),
    "fifo": FIFO(),
    "filo": FILO(),
    "lfu": LFU(),
    "slru": SLRU(),
    "priority": Priority(),
}

each_policy = pytest.mark.parametrize(
    "policy", [*POLICIES, pytest.param(LRU(), id="keyed lru")]
)


def use(cache: RadixCache, tokens: list[int]) -> None:
    """Admit a request that goes on where `tokens` end, and abort it."""
    cache.release(admit(cache, [*tokens, 99]))


def pages(cache: RadixCache) -> list[int]:
    return [victim.page for victim in cache.eviction_order(99)]


def starts(cache: RadixCache) -> list[int]:
    return [victim.prefix_len for victim in cache.eviction_order(99)]


# Built-in policies ----------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("lru", "cbda"),
        ("mru", "adbc"),
        ("fifo", "abcd"),
        ("filo", "dcba"),
        ("lfu", "cbda"),
        ("slru", "cbda"),
        ("priority", "bcad"),
    ],
)
@pytest.mark.parametrize("by_name", [True, False])
def test_each_policy_has_its_own_order(policy: str, order: str, by_name: bool) -> None:
    """Hits are 3, 1, 0, 2, priorities 1, 0, 1, 2; c is released first, then b, d, a."""
    cache = make_cache(page_size=1, policy=policy if by_name else POLICIES[policy])
    for token, priority in zip((1, 2, 3, 4), (1, 0, 1, 2), strict=True):
        insert(cache, [token], priority=priority)
    for token in (1, 1, 2, 4, 4, 1):
        use(cache, [token])

    assert order == "".join(" abcd"[page] for page in pages(cache))


def test_lfu_and_slru_differ_from_the_second_hit_on() -> None:
    """Hits: a 3, b 2, c 1, d 0; the latest use is that of d, then c."""
    orders = []
    for policy in ("lfu", "slru"):
        cache = make_cache(page_size=1, policy=policy)
        for token in (1, 2, 3):
            insert(cache, [token])
        for token in (1, 1, 1, 2, 2, 3):
            use(cache, [token])
        insert(cache, [4])
        orders.append(pages(cache))

    assert orders == [[4, 3, 2, 1], [3, 4, 1, 2]]


def test_every_policy_has_a_name_and_others_are_refused_with_the_list() -> None:
    for name, policy in POLICIES.items():
        index = make_eviction_index(name)
        assert isinstance(index, RecencyIndex if name == "lru" else KeyedIndex)
        assert isinstance(make_eviction_index(policy), KeyedIndex)

    with pytest.raises(ConfigError, match="lru, lfu, fifo, mru, filo, slru, priority"):
        make_eviction_index("tlru")


@each_policy
@pytest.mark.parametrize("cut", [0, 1])
def test_b22_the_lower_half_of_a_split_keeps_its_place(policy: str, cut: int) -> None:
    texts = [[1, 2, 3, 4], [5, 6, 7, 8]]
    cache = make_cache(page_size=1, policy=policy)
    for text, priority in zip(texts, (2, 1), strict=True):
        insert(cache, text, priority=priority)
    for text in (texts[0], texts[0], texts[1], texts[0], texts[1]):
        use(cache, text)
    before = pages(cache)
    admit(cache, [*texts[cut][:2], 99])
    upper = [4 * cut + 1, 4 * cut + 2]

    assert [page for page in before if page not in upper] == pages(cache)


@each_policy
def test_b28_recency_breaks_ties_and_never_ties(policy: str) -> None:
    """The same calls have the same order, whichever tokens are used."""
    orders: set[str] = set()
    for first in (1, 50):
        cache = make_cache(page_size=1, policy=policy)
        for token in span(first, first + 5):
            insert(cache, [token])
        for token in (first + 2, first, first + 4):
            use(cache, [token])
        orders.add(str(pages(cache)))

    assert len(orders) == 1


@each_policy
@pytest.mark.parametrize("step", [4, 12])
def test_b29_the_end_of_a_chain_goes_first(policy: str, step: int) -> None:
    """As nodes that were published page by page, and as one."""
    cache = make_cache(3, 4, policy=policy)
    request = admit(cache, span(1, 12))
    for stop in range(step, 13, step):
        cache.alloc_for_extend([request], [stop])
        cache.commit(request, stop)
        cache.cache_unfinished_req(request, span(1, 12))
    cache.cache_finished_req(request, span(1, 12))
    assert starts(cache) == [8, 4, 0]
    run(cache, [50])

    assert cache.match_prefix(span(1, 12)) == 8
    assert law(cache) == (0, 8, 0, 4)


@each_policy
def test_b159_a_node_that_got_a_child_is_no_candidate(policy: str) -> None:
    cache = make_cache(16, 4, policy=policy)
    a, b, c, d = span(1, 4), span(5, 8), span(9, 12), span(20, 23)
    for tokens in (a, a + b, a + b + c):
        insert(cache, tokens)
    cache.evict(4)
    assert cache.match_prefix(a + b + c) == 8
    insert(cache, a + b + d)
    assert starts(cache) == [8, 4, 0]
    cache.evict(4)
    assert cache.match_prefix(a + b + d) == 8
    cache.evict(4)

    assert cache.match_prefix(a + b) == 4


# What an eviction costs -----------------------------------------------------


def count_calls(cache: RadixCache, num_pages: int, *, evict: bool) -> int:
    """How many functions run: what would be a visit runs at least one."""
    calls = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        if evict:
            cache.evict(num_pages)
        else:
            cache.eviction_order(num_pages)
    finally:
        sys.setprofile(None)
    return calls


@each_policy
def test_b26_an_eviction_does_not_look_at_all_leaves(policy: str) -> None:
    num_leaves = 5_000
    cache = make_cache(num_leaves, 1, policy=policy)
    for token in range(num_leaves):
        insert(cache, [token])
    num_calls = 0
    for token in range(200):
        num_calls += count_calls(cache, 1, evict=True)
        insert(cache, [num_leaves + token])

    assert num_calls / 200 <= 100


class Spy:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.num_calls = 0

    def key(self, node: RadixNode) -> int:
        self.num_calls += 1
        return node.num_hits


@each_policy
def test_b26_a_list_of_few_does_not_look_at_all_leaves(policy: str) -> None:
    cache = make_cache(2_000, 1, policy=policy)
    for token in range(1_000):
        insert(cache, [token, token])

    assert count_calls(cache, 6, evict=False) <= 100


def test_a_list_walks_up_no_path_twice() -> None:
    """A chain of nodes with a leaf at each."""
    num_pages = 800
    cache = make_cache(num_pages, 1, policy="lfu", max_context_len=num_pages)
    for length in range(1, num_pages // 2 + 1):
        insert(cache, length * [0])
        insert(cache, [*length * [0], 1])
    num_calls = count_calls(cache, num_pages, evict=False)

    assert len(cache.eviction_order(num_pages)) == num_pages
    assert num_calls <= 40 * num_pages


def test_a_list_asks_the_policy_for_parents_only() -> None:
    spy = Spy()
    cache = make_cache(100, 1, policy=spy)
    for token in range(20):
        insert(cache, [token])
        insert(cache, [token, 50])
    spy.num_calls = 0
    cache.eviction_order(10)

    assert spy.num_calls == 10  # each parent has one leaf, with the same key


def test_a_policy_is_asked_once_for_a_leaf_whoever_compares_it() -> None:
    spy = Spy()
    index = KeyedIndex(spy)
    tree = RadixTree(4, index)
    node, _ = tree.acquire(None, b"")
    leaf = tree.publish(node, bytes(8), bytes(8))[0]
    tree.unlock(leaf)
    rank = index.rank(leaf)

    assert (0, 0, leaf.last_use) == rank
    assert spy.num_calls == 1
    tree.lock(leaf)
    assert rank == index.rank(leaf)
    assert spy.num_calls == 2  # in no index, so nobody has kept it


@each_policy
def test_a_chain_deeper_than_the_stack_is_listed(policy: str) -> None:
    num_nodes = sys.getrecursionlimit() + 100
    tree = RadixTree(4, make_eviction_index(policy))
    node, _ = tree.acquire(None, b"")
    leases = [node]
    for _ in range(num_nodes):
        node, _ = tree.publish(node, bytes(4), bytes(4))
        tree.lock(node)  # so that no policy grows it
        leases.append(node)
    for lease in leases:
        tree.unlock(lease)
    while node.lock_ref:
        tree.unlock(node)

    assert sum(node.num_pages for node in tree.index.order()) == num_nodes


# Growth in place ------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "grows"),
    [
        ("lru", True),
        pytest.param(LRU(), True, id="keyed lru"),
        ("mru", True),
        ("fifo", False),
        ("filo", False),
        ("lfu", False),
        ("slru", False),
        ("priority", False),
        pytest.param(Spy(), False, id="own"),
    ],
)
def test_leaves_grow_where_only_the_last_release_counts(
    policy: EvictionPolicy, grows: bool
) -> None:
    tree = RadixTree(4, make_eviction_index(policy))
    for stop in (2, 3):
        node, known = tree.acquire(None, bytes(4 * stop))
        rest = bytes(4 * stop - len(known))
        tree.unlock(tree.publish(node, rest, rest)[0])

    assert [node.num_pages for node in tree.nodes()] == ([3] if grows else [2, 1])


def test_leaves_with_levels_and_policies_of_ones_own_do_not_grow() -> None:
    class Mine(LRU):
        def key(self, node: RadixNode) -> int:
            return node.created

    assert not KeyedIndex(Mine()).grows_leaves
    assert not make_eviction_index("lru", level=lambda node: 0).grows_leaves


# Levels ---------------------------------------------------------------------


def make_level_tree() -> tuple[RadixTree, EvictionIndex, dict[RadixNode, int]]:
    """Three leaves of one page, released in this order."""
    levels: dict[RadixNode, int] = {}
    index = make_eviction_index("lru", level=lambda node: levels.get(node, 0))
    tree = RadixTree(4, index)
    for token in (1, 2, 3):
        raw = np.array([token], np.int32).tobytes()
        node, _ = tree.acquire(None, b"")
        tree.unlock(tree.publish(node, raw, raw)[0])
    return tree, index, levels


def test_a_level_goes_before_the_policy_and_recency() -> None:
    tree, index, levels = make_level_tree()
    assert isinstance(index, KeyedIndex)
    a, b, c = index
    levels[a] = 2
    levels[c] = -1
    assert list(index) == [a, b, c]
    for node in (a, b, c):
        index.rerank(node)

    assert list(index) == list(index.order()) == [c, b, a]
    assert index.first() is c
    assert tree.evict(1) == np.array([3], np.int32).tobytes()


def test_a_node_that_the_index_does_not_hold_stays_outside() -> None:
    tree, index, _ = make_level_tree()
    assert isinstance(index, KeyedIndex)
    node = next(iter(index))
    tree.lock(node)
    index.rerank(node)

    assert node not in index
    assert len(index) == 2
    tree.unlock(node)
    assert list(index)[-1] is node


# Who would go ---------------------------------------------------------------


def test_a_victim_says_whose_page_begins_where() -> None:
    cache = make_cache(page_size=2)
    insert(cache, [1, 2, 3, 4], "a")
    insert(cache, [1, 2, 5, 6], "a")
    insert(cache, [1, 2], "b")

    assert cache.eviction_order(3) == [
        Victim("a", 2, 2),
        Victim("a", 2, 3),
        Victim("a", 0, 1),
    ]
    assert cache.eviction_order(99)[3:] == [Victim("b", 0, 4)]
    assert cache.eviction_order(0) == []
    with pytest.raises(FrozenInstanceError):
        cache.eviction_order(1)[0].page = 0  # type: ignore[misc]


@each_policy
def test_protected_pages_are_not_listed(policy: str) -> None:
    cache = make_cache(page_size=1, policy=policy)
    insert(cache, [1, 2, 3, 4])
    request = admit(cache, [1, 2, 9])

    assert cache.eviction_order(9) == [Victim(None, 3, 4), Victim(None, 2, 3)]
    cache.release(request)
    assert starts(cache) == [3, 2, 1, 0]


def test_a_cache_that_caches_nothing_lists_nothing() -> None:
    cache = make_chunk_cache()
    insert(cache, span(1, 9))

    assert cache.eviction_order(9) == []


@pytest.mark.parametrize("num_pages", [-1, 1.5, None, True])
def test_what_is_no_number_of_pages_is_refused(num_pages: Wrong) -> None:
    with pytest.raises(LengthError, match="num_pages must be"):
        make_cache().eviction_order(num_pages)


def dump(tree: RadixTree) -> list[object]:
    """All that is known of the tree and its index."""
    return [
        tree.num_evictable_pages,
        tree.num_protected_pages,
        [
            (
                node.key,
                node.pages,
                [*node.children.items()],
                node.parent,
                node.lock_ref,
                node.num_hits,
                node.created,
                node.last_use,
                node.priority,
            )
            for node in tree.nodes()
        ],
        list(tree.index),
        len(tree.index),
    ]


@each_policy
def test_a_list_changes_no_node_and_no_place_in_the_index(policy: str) -> None:
    tree = RadixTree(4, make_eviction_index(policy))
    root, _ = tree.acquire(None, b"")
    for text in ([1, 2, 3], [1, 2, 4, 5], [6], [1, 7], [6, 8]):
        raw = np.array(text, np.int32).tobytes()
        node, known = tree.acquire(None, raw)
        tree.unlock(tree.publish(node, raw[len(known) :], raw[len(known) :])[0])
    before = dump(tree)
    first = list(tree.index.order())

    assert before == dump(tree)
    assert first == list(tree.index.order())
    assert sum(node.num_pages for node in first) == tree.num_evictable_pages == 8
    tree.unlock(root)


class FailsForParents:
    """Can only be asked for those who are leaves by their own release."""

    def key(self, node: RadixNode) -> int:
        if node.num_hits:
            raise LookupError("a parent")
        return 0


def test_a_policy_that_will_fail_is_told_and_nothing_changes() -> None:
    cache = make_cache(page_size=1, policy=FailsForParents())
    insert(cache, [1])
    insert(cache, [1, 2])  # a hit on what becomes its parent
    insert(cache, [3, 4])
    before = law(cache)

    with pytest.raises(PolicyError, match="a parent") as caught:
        cache.eviction_order(3)
    assert isinstance(caught.value.__cause__, LookupError)
    assert before == law(cache)
    assert cache.evict(1) == 1  # it has not failed yet
    with pytest.raises(PolicyError, match="a parent"):
        cache.evict(1)
    with pytest.raises(PolicyError, match="a parent"):
        cache.eviction_order(1)
    assert cache.eviction_order(0) == []


# Policies that learn --------------------------------------------------------


class Diary(LFU):
    """Writes down what it is told; tokens are numbers again."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []

    def used(self, nodes: list[RadixNode]) -> None:
        self.events.append(("used", *[numbers(node.key) for node in nodes]))

    def published(self, node: RadixNode, start: int) -> None:
        self.events.append(("published", numbers(node.key[start:])))

    def evicted(self, node: RadixNode, key: bytes, pages: bytes) -> None:
        kept = numbers(node.key)
        self.events.append(("evicted", kept, numbers(key), numbers(pages)))


def numbers(raw: bytes) -> list[int]:
    return np.frombuffer(raw, np.int32).tolist()


def test_a_policy_is_told_what_happens() -> None:
    diary = Diary()
    cache = make_cache(page_size=1, policy=diary)
    insert(cache, [1, 2, 3])
    insert(cache, [1, 2, 4])
    cache.evict(1)
    cache.evict(3)

    assert diary.events == [
        ("used",),
        ("published", [1, 2, 3]),
        ("used", [1, 2]),
        ("published", [4]),
        ("evicted", [], [3], [3]),
        ("evicted", [], [4], [4]),
        ("evicted", [], [1, 2], [1, 2]),
    ]


def test_a_reset_and_a_trimmed_tail_are_told_too() -> None:
    diary = Diary()
    cache = make_cache(page_size=1, policy=diary)
    insert(cache, [1, 2, 3])
    cache.evict(1)
    cache.reset()

    assert diary.events[2:] == [
        ("evicted", [1, 2], [3], [3]),
        ("evicted", [], [1, 2], [1, 2]),
    ]


class OnlyNamed(LFU):
    """Has attributes that are called like the methods, but are none."""

    used = 0
    published = "last week"
    evicted: tuple[int, ...] = ()


def test_what_cannot_be_called_is_not_called() -> None:
    cache = make_cache(page_size=1, policy=OnlyNamed())
    insert(cache, [1, 2])
    use(cache, [1])

    assert [cache.evict(1), cache.evict(9)] == [1, 1]


class AgingLFU:
    """LFU with dynamic aging: what goes lifts all that come after it."""

    def __init__(self) -> None:
        self.age = 0
        self.worths: dict[RadixNode, int] = {}

    def key(self, node: RadixNode) -> int:
        worth = self.worths[node] = node.num_hits + self.age
        return worth

    def evicted(self, node: RadixNode, key: bytes, pages: bytes) -> None:
        self.age = max(self.age, self.worths[node])
        if not node.key:
            del self.worths[node]


def test_a_policy_that_learns_lets_old_fame_fade() -> None:
    policy = AgingLFU()
    hits = []
    for each in (policy, "lfu"):
        cache = make_cache(3, 1, policy=each)
        insert(cache, [1])
        for _ in range(3):
            use(cache, [1])
        for token in range(10, 20):
            insert(cache, [token])
            use(cache, [token])
        hits.append(cache.match_prefix([1]))

    assert hits == [0, 1]
    assert len(policy.worths) == 3


class FailsTo:
    """Fails in one of its methods."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.num_failures = 0

    def key(self, node: RadixNode) -> int:
        return 0

    def used(self, nodes: list[RadixNode]) -> None:
        self.told("used")

    def published(self, node: RadixNode, start: int) -> None:
        self.told("published")

    def evicted(self, node: RadixNode, key: bytes, pages: bytes) -> None:
        self.told("evicted")

    def told(self, method: str) -> None:
        if method == self.method:
            self.num_failures += 1
            raise ArithmeticError(f"{method} {self.num_failures}")


@pytest.mark.parametrize("method", ["used", "published", "evicted"])
def test_a_policy_that_fails_to_learn_breaks_nothing_and_evicts_no_more(
    method: str,
) -> None:
    cache = make_cache(16, 1, policy=FailsTo(method))
    insert(cache, [1, 2, 3])
    insert(cache, [1, 2, 4])
    if method == "evicted":
        assert cache.evict(2) == 2  # it comes too late to refuse this one
        insert(cache, [1, 2, 3, 4])
    assert law(cache) == (12, 4, 0, 0)

    for call in (cache.evict, cache.eviction_order):
        with pytest.raises(PolicyError, match=rf"ArithmeticError.*{method} 1") as error:
            call(1)
        assert isinstance(error.value.__cause__, ArithmeticError)
    assert law(cache) == (12, 4, 0, 0)
    cache.reset()
    assert law(cache) == (16, 0, 0, 0)


def test_the_keys_of_a_policy_may_be_numbers_of_numpy() -> None:
    """What they compare to is no bool."""

    class Hits:
        def key(self, node: RadixNode) -> np.int64:
            return np.int64(node.num_hits)

    cache = make_cache(page_size=1, policy=Hits())
    for tokens in ([1, 2], [1, 3], [4]):
        insert(cache, tokens)
    order = [victim.page for victim in cache.eviction_order(9)]
    before = set(cache.memory.allocator.in_use().tolist())
    cache.evict(2)
    gone = before - set(cache.memory.allocator.in_use().tolist())

    assert len(order) == 4
    assert set(order[:2]) == gone

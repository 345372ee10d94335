"""The radix tree by itself: its shape, its locks, its splits and its evictions."""

from __future__ import annotations

import sys
from itertools import pairwise

import numpy as np
import pytest

from radixkv.mem_cache import RadixNode
from radixkv.mem_cache.eviction import make_eviction_index
from radixkv.mem_cache.radix_tree import MAX_GROWN_SIZE, MAX_NODE_SIZE, RadixTree


def make_tree(page_size: int = 1, policy: str = "lru") -> RadixTree:
    return RadixTree(4 * page_size, make_eviction_index(policy))


def raw(numbers: range | list[int]) -> bytes:
    return np.array(numbers, np.int32).tobytes()


def ids(pages: bytes) -> list[int]:
    return np.frombuffer(pages, np.int32).tolist()


def lease(tree: RadixTree, tokens: list[int], first_page: int = 1) -> RadixNode:
    """Publish `tokens` with page size 1, and keep the lease on their end."""
    node, known = tree.acquire(None, raw(tokens))
    start = len(ids(known))
    if start == len(tokens):
        return node
    pages = range(first_page, first_page + len(tokens) - start)
    return tree.publish(node, raw(tokens[start:]), raw(pages))[0]


def insert(tree: RadixTree, tokens: list[int], first_page: int = 1) -> None:
    tree.unlock(lease(tree, tokens, first_page))


def match(tree: RadixTree, tokens: list[int]) -> int:
    return tree.match(None, raw(tokens)) // 4


def sizes(tree: RadixTree) -> tuple[int, int]:
    """Evictable and protected pages, recounted."""
    evictable = sum(node.num_pages for node in tree.nodes() if not node.lock_ref)
    protected = sum(node.num_pages for node in tree.nodes() if node.lock_ref)
    assert (evictable, protected) == (
        tree.num_evictable_pages,
        tree.num_protected_pages,
    )
    return evictable, protected


# Growth in place ------------------------------------------------------------


def test_a_chat_that_nobody_shares_stays_one_node() -> None:
    tree = make_tree()
    for turn in range(1, 31):
        insert(tree, list(range(10 * turn)), 10 * turn)

    (node,) = tree.nodes()
    assert node.num_pages == 300


def test_depth_follows_branching_not_turns() -> None:
    """Two users continue one system prompt, ten turns each."""
    tree = make_tree()
    for turn in range(1, 11):
        for user in (100, 200):
            insert(tree, [*range(8), *range(user, user + 5 * turn)], user + 5 * turn)

    assert sorted(node.num_pages for node in tree.nodes()) == [8, 50, 50]


def test_a_node_grows_up_to_a_bound() -> None:
    tree = make_tree()
    for end in (MAX_GROWN_SIZE - 1, MAX_GROWN_SIZE, MAX_GROWN_SIZE + 1):
        insert(tree, list(range(end)), end)

    assert sorted(node.num_pages for node in tree.nodes()) == [1, MAX_GROWN_SIZE]


def test_a_leaf_grows_by_what_is_new_however_much_comes_before() -> None:
    tree = make_tree()
    text = raw(range(MAX_GROWN_SIZE))
    first = text[: len(text) - 4]
    leaf = tree.publish(tree.acquire(None, b"")[0], first, first)[0]
    end, known = tree.publish(leaf, text, raw([7]), start=len(first))

    assert end is leaf
    assert (text, first + raw([7]), b"") == (leaf.key, leaf.pages, known)


@pytest.mark.parametrize("page_size", [1, 3, 16, 2 * MAX_NODE_SIZE])
def test_no_node_is_larger_than_the_bound(page_size: int) -> None:
    tree = make_tree(page_size)
    num_tokens = (3 * MAX_NODE_SIZE + page_size) // page_size * page_size
    pages = range(1, num_tokens // page_size + 1)
    node, _ = tree.acquire(None, b"")
    end = tree.publish(node, raw(range(num_tokens)), raw(pages))[0]
    nodes = list(tree.nodes())

    assert max(node.num_pages * page_size for node in nodes) <= max(
        MAX_NODE_SIZE, page_size
    )
    assert [page for node in nodes for page in ids(node.pages)] == list(pages)
    assert end is nodes[-1]
    assert num_tokens * 4 == tree.match(None, raw(range(num_tokens)))


def test_a_leaf_that_somebody_else_uses_does_not_grow() -> None:
    tree = make_tree()
    node = lease(tree, [1, 2, 3])
    assert node is lease(tree, [1, 2, 3])
    end = tree.publish(node, raw([4]), raw([9]))[0]

    assert end is not node
    assert node.num_pages == 3


def test_a_node_with_children_does_not_grow() -> None:
    tree = make_tree()
    insert(tree, [1, 2, 3, 4])
    insert(tree, [1, 2, 3, 5], 9)
    node = lease(tree, [1, 2, 3])
    tree.publish(node, raw([6]), raw([10]))

    assert node.num_pages == 3
    assert len(node.children) == 3


def test_keyed_policies_keep_the_pages_of_each_publication_apart() -> None:
    """Pages of one node share one key, so new pages must not join old ones."""
    tree = make_tree(policy="lfu")
    insert(tree, [1, 2])
    insert(tree, [1, 2, 3], 9)

    assert [2, 1] == [node.num_pages for node in tree.nodes()]


@pytest.mark.parametrize(
    ("policy", "expected"), [("lru", [(2, 0), (3, 2)]), ("lfu", [(2, 0), (1, 0)])]
)
def test_it_is_told_where_the_new_part_of_a_node_starts(
    policy: str, expected: list[tuple[int, int]]
) -> None:
    """The first publication makes a node; the second makes it longer, or another."""
    tree = make_tree(policy=policy)
    told: list[tuple[int, int]] = []
    tree.on_published.append(
        lambda node, start: told.append((node.num_pages, start // 4))
    )
    insert(tree, [1, 2])
    insert(tree, [1, 2, 3], 9)

    assert expected == told


def test_every_publication_and_every_release_is_a_tick() -> None:
    """Policies of the user's own see these times."""
    tree = make_tree(policy="lfu")
    insert(tree, [1, 2])
    insert(tree, [1, 2, 3], 9)
    upper, lower = tree.nodes()

    assert (upper.created, lower.created, lower.last_use, upper.last_use) == (
        1,
        3,
        4,
        5,
    )


def test_a_publication_without_a_priority_raises_none() -> None:
    tree = make_tree()
    insert(tree, [1, 2])

    assert [0] == [node.priority for node in tree.nodes()]
    assert [0] == [root.priority for root in tree.roots]


# Matching -------------------------------------------------------------------


def test_a_match_may_end_inside_a_node_and_splits_nothing() -> None:
    tree = make_tree()
    insert(tree, [1, 2, 3, 4])
    (before,) = tree.nodes()

    assert match(tree, [1, 2, 3, 9]) == 3
    assert match(tree, [1, 2]) == 2
    assert [before] == list(tree.nodes())
    assert before.num_pages == 4


def test_a_match_counts_whole_pages_only() -> None:
    tree = make_tree(page_size=2)
    node, _ = tree.acquire(None, b"")
    tree.publish(node, raw([1, 2, 3, 4]), raw([1, 2]))

    assert match(tree, [1, 2, 3, 9]) == 2
    assert match(tree, [1, 9, 3, 4]) == 0


def test_an_unknown_namespace_matches_nothing_and_is_not_remembered() -> None:
    tree = make_tree()
    insert(tree, [1, 2])

    assert tree.match("other", raw([1, 2])) == 0
    assert [None] == [root.namespace for root in tree.roots]


def test_the_nodes_of_a_match_are_found_up_to_the_one_that_it_ends_in() -> None:
    tree = make_tree()
    insert(tree, [1, 2, 3])
    insert(tree, [1, 2, 4, 5], 7)
    _, lower = tree.find(None, raw([1, 2, 4, 9]))[0]

    assert [4, 5] == ids(lower.key)
    assert ([lower.parent, lower], 12) == tree.find(None, raw([1, 2, 4, 9]))
    assert ([], 0) == tree.find(None, raw([9]))
    assert ([], 0) == tree.find("other", raw([1, 2]))
    assert [None] == [root.namespace for root in tree.roots]


# Splits ---------------------------------------------------------------------


def test_a_split_keeps_the_lower_object_and_its_lease() -> None:
    tree = make_tree()
    lower = lease(tree, [1, 2, 3, 4])
    upper = lease(tree, [1, 2, 9], 8).parent

    assert lower.parent is upper
    assert [3, 4] == ids(lower.key)
    assert [1, 2] == ids(upper.key)
    tree.unlock(lower)
    assert sizes(tree) == (2, 3)


def test_a_split_is_invisible() -> None:
    tree = make_tree()
    held = lease(tree, [1, 2, 3, 4])
    insert(tree, [1, 2, 3, 4, 5, 6], 5)
    before = sizes(tree)
    node, pages = tree.acquire(None, raw([1, 2]))
    tree.unlock(node)

    assert [1, 2] == ids(pages)
    assert before == sizes(tree)
    assert match(tree, [1, 2, 3, 4, 5, 6]) == 6
    tree.unlock(held)
    assert sizes(tree) == (6, 0)


def test_a_split_carries_hits_creation_and_priority() -> None:
    tree = make_tree(policy="lfu")
    node, _ = tree.acquire(None, b"")
    end = tree.publish(node, raw([1, 2, 3, 4]), raw([1, 2, 3, 4]), priority=3)[0]
    tree.unlock(end)
    for _ in range(2):
        again, _ = tree.acquire(None, raw([1, 2, 3, 4]))
        tree.unlock(again)
    upper, _ = tree.acquire(None, raw([1, 2]))

    assert (upper.num_hits, end.num_hits) == (3, 2)
    assert upper.created == end.created
    assert upper.priority == end.priority == 3


def test_a_split_of_an_unprotected_leaf_carries_its_last_use() -> None:
    """The upper part is evictable when the lower one goes, by the same recency."""
    tree = make_tree(policy="lfu")
    insert(tree, [1, 2])
    insert(tree, [8, 9], 3)
    later, lower = tree.nodes()
    upper = tree.split(lower, 4)

    assert upper.last_use == lower.last_use < later.last_use
    assert [2, 1, 4] == [ids(tree.evict(1))[0] for _ in range(3)]


def test_a_split_keeps_no_large_key_alive() -> None:
    tree = make_tree()
    insert(tree, list(range(1000)))
    insert(tree, [*range(10), 7], 2000)
    nodes = list(tree.nodes())

    assert sum(len(node.key) for node in nodes) == 4 * 1001
    assert all(type(node.key) is type(node.pages) is bytes for node in nodes)


@pytest.mark.parametrize("page_size", [1, 2, 3])
def test_the_children_stand_under_their_first_page(page_size: int) -> None:
    tree = make_tree(page_size)
    first_page = 1
    for letters in ([1, 1, 1], [1, 1, 2], [1, 3, 3], [4], [1, 1, 1, 1], [1, 1, 2, 5]):
        tokens = [letter for letter in letters for _ in range(page_size)]
        node, known = tree.acquire(None, raw(tokens))
        rest = tokens[len(ids(known)) * page_size :]
        pages = range(first_page, first_page + len(rest) // page_size)
        tree.unlock(tree.publish(node, raw(rest), raw(pages))[0])
        first_page += len(pages)

    for node in tree.nodes():
        assert node.parent.children[node.key[: 4 * page_size]] is node
        assert len(node.key) == 4 * page_size * node.num_pages > 0
    assert tree.num_evictable_pages == first_page - 1


# Locks ----------------------------------------------------------------------


def test_a_second_lease_does_not_touch_the_ancestors() -> None:
    tree = make_tree(policy="lfu")
    insert(tree, [1, 2])
    node = lease(tree, [1, 2, 3])
    parent = node.parent
    again = lease(tree, [1, 2, 3])

    assert again is node
    assert (node.lock_ref, parent.lock_ref) == (2, 1)
    tree.unlock(node)
    assert (node.lock_ref, parent.lock_ref) == (1, 1)
    tree.unlock(node)
    assert (node.lock_ref, parent.lock_ref) == (0, 0)


def test_a_parent_counts_its_protected_children() -> None:
    tree = make_tree()
    left = lease(tree, [1, 2, 3])
    right = lease(tree, [1, 2, 4], 7)
    shared = left.parent

    assert shared is right.parent
    assert shared.lock_ref == 2
    tree.unlock(left)
    assert shared.lock_ref == 1
    assert sizes(tree) == (1, 3)


def test_unlock_after_lock_restores_the_sizes() -> None:
    tree = make_tree()
    insert(tree, [1, 2, 3])
    insert(tree, [1, 2, 4], 7)
    before = sizes(tree)
    for tokens in ([1, 2, 3], [1, 2], [1], [1, 2, 4]):
        node, _ = tree.acquire(None, raw(tokens))
        assert sizes(tree) == (4 - len(tokens), len(tokens))
        tree.unlock(node)

        assert before == sizes(tree)


def test_publishing_moves_the_lease() -> None:
    tree = make_tree()
    insert(tree, [1, 2])
    insert(tree, [1, 3], 5)
    node, _ = tree.acquire(None, raw([1]))
    end = tree.publish(node, raw([4, 5]), raw([8, 9]))[0]

    assert end.lock_ref == 1
    assert node.lock_ref == 1  # its protected child
    tree.unlock(end)
    assert sizes(tree) == (5, 0)


def test_publishing_what_is_known_gives_the_pages_of_the_tree() -> None:
    tree = make_tree()
    first, _ = tree.acquire(None, b"")
    second, _ = tree.acquire(None, b"")
    tree.publish(first, raw([1, 2, 3]), raw([1, 2, 3]))
    end, pages = tree.publish(second, raw([1, 2, 9]), raw([4, 5, 6]))

    assert [1, 2] == ids(pages)
    assert [6] == ids(end.pages)
    assert sizes(tree) == (0, 4)


def test_a_root_goes_with_its_last_lease_and_its_last_page() -> None:
    tree = make_tree()
    node, _ = tree.acquire("a", raw([1]))
    assert ["a"] == [root.namespace for root in tree.roots]
    tree.unlock(node)
    assert [] == tree.roots

    node, _ = tree.acquire("b", b"")
    tree.unlock(tree.publish(node, raw([1]), raw([1]))[0])
    assert ["b"] == [root.namespace for root in tree.roots]
    tree.evict(1)
    assert [] == tree.roots


def test_a_root_stays_while_a_request_without_a_prefix_runs() -> None:
    tree = make_tree()
    waiting, _ = tree.acquire("a", raw([1]))
    node, _ = tree.acquire("a", raw([1]))
    tree.unlock(tree.publish(node, raw([1]), raw([1]))[0])
    tree.evict(1)
    end = tree.publish(waiting, raw([1]), raw([2]))[0]
    tree.unlock(end)

    assert tree.match("a", raw([1])) == 4
    assert sizes(tree) == (1, 0)


# Eviction -------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_eviction_trims_the_tail_and_takes_exactly_the_shortfall(policy: str) -> None:
    tree = make_tree(policy=policy)
    insert(tree, list(range(10)), 11)
    (node,) = tree.nodes()

    assert [18, 19, 20] == ids(tree.evict(3))
    assert [node] == list(tree.nodes())
    assert match(tree, list(range(10))) == 7
    assert sizes(tree) == (7, 0)


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_eviction_goes_on_with_the_parent_of_the_last_child(policy: str) -> None:
    tree = make_tree(policy=policy)
    insert(tree, [1, 2, 3])
    insert(tree, [1, 2, 4], 7)

    assert [3, 7, 2] == [ids(tree.evict(1))[0] for _ in range(3)]
    assert match(tree, [1, 2, 3]) == 1


def test_eviction_stops_at_what_is_protected() -> None:
    tree = make_tree()
    lease(tree, [1, 2])
    insert(tree, [1, 2, 3, 4], 7)

    assert [7, 8] == ids(tree.evict(100))
    assert b"" == tree.evict(1)
    assert sizes(tree) == (0, 2)


def test_who_listens_can_ask_why() -> None:
    tree = make_tree()
    causes: list[str | None] = []
    tree.on_evicted.append(lambda node, key, pages: causes.append(tree.cause))
    insert(tree, [1, 2, 3])
    tree.evict(1)
    with tree.because("quota"):
        tree.evict(1)
    tree.evict(1)

    assert [None, "quota", None] == causes


def test_evicting_nothing_does_nothing() -> None:
    tree = make_tree()
    insert(tree, [1, 2])

    assert b"" == tree.evict(0) == tree.evict(-1)
    assert sizes(tree) == (2, 0)


def test_an_evicted_leaf_does_not_come_back_with_a_new_node() -> None:
    tree = make_tree()
    insert(tree, [1, 2, 3])
    tree.evict(2)
    insert(tree, [1, 8, 9], 7)

    assert match(tree, [1, 2, 3]) == 1
    assert match(tree, [1, 8, 9]) == 3


def test_clear_forgets_everything() -> None:
    for policy in ("lru", "lfu"):
        tree = make_tree(policy=policy)
        insert(tree, [1, 2, 3])
        insert(tree, [1, 4], 7)
        tree.clear()

        assert [] == list(tree.nodes()) == tree.roots
        assert len(tree.index) == 0
        assert sizes(tree) == (0, 0)
        insert(tree, [1, 2])
        assert match(tree, [1, 2]) == 2


# Depth ----------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_b138_a_chain_deeper_than_the_stack_works(policy: str) -> None:
    """5,000 publications, each one token longer than the one before.

    One lease stays on each end, so that no node can grow: the chain is 5,000 deep.
    """
    depth = 5 * sys.getrecursionlimit()
    tree = make_tree(policy=policy)
    node, _ = tree.acquire(None, b"")
    ends = []
    for i in range(depth):
        node = tree.publish(node, raw([i]), raw([i + 1]))[0]
        tree.lock(node)
        ends.append(node)
    tree.unlock(node)
    tokens = list(range(depth))

    assert sum(1 for _ in tree.nodes()) == depth
    assert all(child.parent is parent for parent, child in pairwise(ends))
    assert match(tree, tokens) == depth
    assert "num_pages=1" in repr(node)
    for end in ends:
        tree.unlock(end)
    assert sizes(tree) == (depth, 0)
    again, pages = tree.acquire(None, raw(tokens))
    assert list(range(1, depth + 1)) == ids(pages)
    tree.unlock(again)
    assert [depth] == ids(tree.evict(1))
    assert depth - 1 == len(ids(tree.evict(depth)))


def test_nodes_come_parents_first() -> None:
    tree = make_tree()
    for i in range(4):
        insert(tree, [1, 2, i], 10 * i + 10)
        insert(tree, [1, 2, i, 7], 10 * i + 15)
    seen: set[RadixNode] = set(tree.roots)
    for node in tree.nodes():
        assert node.parent in seen
        seen.add(node)


def test_the_version_counts_what_may_change_a_match_and_nothing_else() -> None:
    tree = make_tree()
    versions = [tree.version]

    def note() -> None:
        versions.append(tree.version)

    leaf = tree.publish(tree.acquire(None, b"")[0], raw([1, 2]), raw([1, 2]))[0]
    note()  # a new node
    leaf = tree.publish(leaf, raw([3]), raw([3]))[0]
    note()  # a leaf that grew
    other, _ = tree.acquire(None, raw([1, 2, 3]))
    note()  # a lease
    again, _ = tree.acquire(None, b"")
    tree.unlock(tree.publish(again, raw([1, 2, 3]), raw([7, 8, 9]))[0])
    note()  # nothing but duplicates
    tree.unlock(leaf)
    tree.unlock(other)
    note()  # and its end
    tree.evict(1)
    note()  # a page of a leaf
    tree.evict(2)
    note()  # the rest of it
    tree.unlock(tree.publish(tree.acquire(None, b"")[0], raw([4]), raw([4]))[0])
    tree.retire(None)
    note()  # a new node, and the end of an epoch
    tree.retire(None)
    note()  # one that has nothing

    assert [0, 1, 2, 2, 2, 2, 3, 4, 6, 6] == versions

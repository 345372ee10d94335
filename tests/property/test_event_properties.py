"""The seam between the tree and the rooms beside it: its four events, and its index."""

from __future__ import annotations

from collections import Counter

import pytest

from radixkv.mem_cache import RadixNode
from radixkv.mem_cache.eviction import KeyedIndex, RecencyIndex
from radixkv.mem_cache.quota_index import QuotaIndex
from radixkv.mem_cache.radix_tree import RadixTree
from radixkv.mem_cache.stale_first import StaleFirst

from .soak_life import POLICIES, Chance, Life

NUM_OPERATIONS = 2_000


class Mirror:
    """The tokens of all nodes, known from the events alone."""

    def __init__(self, tree: RadixTree) -> None:
        self.keys: dict[RadixNode, bytes] = {}
        self.events: Counter[str] = Counter()
        tree.on_used.append(self.on_used)
        tree.on_published.append(self.on_published)
        tree.on_split.append(self.on_split)
        tree.on_evicted.append(self.on_evicted)

    def on_used(self, path: list[RadixNode]) -> None:
        self.events["used"] += 1
        above: RadixNode | None = path[0].root if path else None
        for node in path:
            assert node.parent is above
            assert node.lock_ref > 0
            assert node.num_hits > 0
            assert self.keys[node] == node.key
            above = node

    def on_published(self, node: RadixNode, start: int) -> None:
        self.events["grown" if start else "published"] += 1
        assert self.keys.get(node, b"") == node.key[:start]
        assert len(node.key) > start
        assert node.lock_ref > 0
        assert node in node.parent.children.values()
        self.keys[node] = node.key

    def on_split(self, upper: RadixNode, lower: RadixNode) -> None:
        self.events["split"] += 1
        assert self.keys[lower] == upper.key + lower.key
        assert lower.parent is upper
        assert [lower] == list(upper.children.values())
        assert upper in upper.parent.children.values()
        self.keys[upper], self.keys[lower] = upper.key, lower.key

    def on_evicted(self, node: RadixNode, tokens: bytes, pages: bytes) -> None:
        self.events["trimmed" if node.key else "evicted"] += 1
        assert self.keys[node] == node.key + tokens
        assert not node.children
        assert node.lock_ref == 0
        # Whoever comes before it is still there.
        assert node.parent in self.keys or node.parent is node.root
        if node.key:
            self.keys[node] = node.key
        else:
            assert node not in node.parent.children.values()
            del self.keys[node]


class Guard:
    """Stands first and last in each list: nobody between may change the tree."""

    def __init__(self, tree: RadixTree) -> None:
        self.tree = tree
        self.seen: object = None

    def stand(self) -> None:
        """Take both places, since rooms come and go."""
        tree = self.tree
        for listeners in (
            tree.on_used,
            tree.on_published,
            tree.on_split,
            tree.on_evicted,
        ):
            for own in (self.before, self.after):
                if own in listeners:
                    listeners.remove(own)
            listeners.insert(0, self.before)
            listeners.append(self.after)

    def before(self, *event: object) -> None:
        self.seen = self.look()

    def after(self, *event: object) -> None:
        assert self.seen == self.look()

    def look(self) -> object:
        tree = self.tree
        nodes = [
            (
                node,
                (node.key, node.pages, node.parent, list(node.children.values())),
                (node.lock_ref, node.num_hits, node.created, node.last_use),
                node.priority,
            )
            for node in (*tree.roots, *tree.nodes())
        ]
        sizes = tree.num_evictable_pages, tree.num_protected_pages, len(tree.index)
        return nodes, sizes, tree.index


def base_of(tree: RadixTree) -> KeyedIndex | RecencyIndex:
    """The innermost index; each may be wrapped by the next in one order only."""
    index = tree.index
    if isinstance(index, StaleFirst):
        index = index.inner
    if isinstance(index, QuotaIndex):
        index = index.shared
    assert isinstance(index, KeyedIndex | RecencyIndex)
    return index


def make_life(page_size: int, policy: str) -> Life:
    chance = Chance([page_size, POLICIES.index(policy), 7])
    return Life(page_size, policy, chance, has_all=policy != "lru")


@pytest.mark.parametrize("policy", ["lru", "lfu", "priority"])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_the_events_tell_all_that_happens_in_the_tree(
    policy: str, page_size: int
) -> None:
    life = make_life(page_size, policy)
    tree = life.cache._tree
    mirror = Mirror(tree)
    for _ in range(NUM_OPERATIONS):
        life.operate()
        assert mirror.keys == {node: node.key for node in tree.nodes()}

    assert {"used", "published", "split", "trimmed", "evicted"} <= mirror.events.keys()


@pytest.mark.parametrize("policy", ["lru", "fifo"])
def test_no_room_changes_the_tree_from_within_an_event(policy: str) -> None:
    life = make_life(2, policy)
    guard = Guard(life.cache._tree)
    for _ in range(NUM_OPERATIONS):
        guard.stand()
        life.operate()

    assert guard.seen is not None


@pytest.mark.parametrize("policy", ["keyed lru", "slru"])
def test_levels_never_decrease_towards_the_root(policy: str) -> None:
    life = make_life(2, policy)
    life.operations += [life.retain] * 20
    tree = life.cache._tree
    levels: Counter[int] = Counter()
    for _ in range(NUM_OPERATIONS):
        life.operate()
        base = base_of(tree)
        assert isinstance(base, KeyedIndex)
        assert base.level is not None
        for node in tree.nodes():
            if node.parent is not node.root and not node.root.is_stale:
                levels[base.level(node)] += 1
                assert base.level(node.parent) >= base.level(node)

    assert {-1, 0, 1} <= levels.keys()

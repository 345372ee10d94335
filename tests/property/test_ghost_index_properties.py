"""The ghost index equals a dictionary of evicted page prefixes, page by page."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.mem_cache.eviction import make_eviction_index
from radixkv.mem_cache.ghost_index import GhostIndex
from radixkv.mem_cache.radix_node import RadixNode, RadixRoot
from radixkv.mem_cache.radix_tree import RadixTree

NUM_STEPS = 80
PAGE_ID = b"\0\0\0\0"

Prefix = tuple[RadixRoot, bytes]
"""A root, and all tokens up to the end of a page."""


def prefix_of(node: RadixNode) -> bytes:
    keys: list[bytes] = []
    while node.parent is not node:
        keys.append(node.key)
        node = node.parent
    return b"".join(reversed(keys))


class GhostLife:
    """Publishes, grows, splits and evicts at random, in a tree and in a dictionary.

    Attributes:
        young: By whom and when each page was evicted, of the young generation.
        old: The same of the old one.
        leases: The nodes that are locked, and all tokens up to their end.
    """

    def __init__(self, policy: str, page_size: int, bound: int, random: Random) -> None:
        self.page_bytes = 4 * page_size
        self.most = max(1, bound // 2)
        self.random = random
        self.tree = RadixTree(self.page_bytes, make_eviction_index(policy))
        self.ghosts = GhostIndex(self.tree, self.page_bytes, bound, "policy")
        self.tree.on_published.append(self.forget_published)
        self.tree.on_evicted.append(self.remember)
        self.roots: dict[str, RadixRoot] = {}
        self.young: dict[Prefix, tuple[str, int]] = {}
        self.old: dict[Prefix, tuple[str, int]] = {}
        self.leases: list[tuple[RadixNode, bytes]] = []
        self.texts: dict[tuple[str, bytes], None] = {}

    # What the tree tells ----------------------------------------------------

    def ends(self, start: int, stop: int) -> range:
        return range(start + self.page_bytes, stop + 1, self.page_bytes)

    def forget_published(self, node: RadixNode, start: int) -> None:
        prefix = prefix_of(node)
        first = len(prefix) - len(node.key) + start
        for end in self.ends(first, len(prefix)):
            self.young.pop((node.root, prefix[:end]), None)
            self.old.pop((node.root, prefix[:end]), None)

    def remember(self, node: RadixNode, key: bytes, pages: bytes) -> None:
        if node.root.is_stale:
            return
        by = self.tree.cause or "policy"
        before = prefix_of(node if node.key else node.parent)
        prefix = before + key
        ends = self.ends(len(before), len(prefix))
        if len(self.young) + len(ends) > self.most:
            self.old, self.young = self.young, {}
        if len(ends) > self.most:
            self.old = {}
            ends = ends[: self.most]
        for end in reversed(ends):
            assert (node.root, prefix[:end]) not in self.lost
            self.young[node.root, prefix[:end]] = (by, self.ghosts.now)

    @property
    def lost(self) -> dict[Prefix, tuple[str, int]]:
        """Both generations."""
        return {**self.old, **self.young}

    # What happens -----------------------------------------------------------

    def step(self) -> None:
        self.ghosts.now += 1
        chances = {
            self.serve: 6,
            self.grow: 3,
            self.unlock: 4,
            self.evict: 5,
            self.resize: 1,
            self.retire: 0.3,
        }
        self.random.choices(list(chances), list(chances.values()))[0]()

        assert len(self.young) + len(self.old) == self.ghosts.num_pages
        self.check_places()

    def pages(self) -> bytes:
        letters = self.random.choices(
            [0, 0, 0, 1], k=self.random.choice([1, 1, 2, 3, 5])
        )
        return b"".join(bytes([letter]) * self.page_bytes for letter in letters)

    def text(self) -> tuple[str, bytes]:
        namespace, start = self.random.choice("xxxy"), b""
        if self.texts and self.random.random() < 0.8:
            namespace, start = self.random.choice(list(self.texts))
            cut = self.random.choice([len(start), self.random.randint(0, len(start))])
            start = start[: cut // self.page_bytes * self.page_bytes]
        return namespace, start + (self.pages() if self.random.random() < 0.7 else b"")

    def acquire(self, namespace: str, raw: bytes) -> tuple[RadixNode, int]:
        """Lock what is cached of a text; how much that is, and its end."""
        hit = self.tree.match(namespace, raw)
        node, _ = self.tree.acquire(namespace, raw)
        known = self.roots.get(namespace)
        if known is not None and known is not node.root:
            # All pages went, but the namespace is the same.
            self.ghosts.move_root(known, node.root)
            for lost in (self.young, self.old):
                moved = {
                    (node.root if root is known else root, prefix): value
                    for (root, prefix), value in lost.items()
                }
                lost.clear()
                lost.update(moved)
        self.roots[namespace] = node.root
        return node, hit

    def serve(self) -> None:
        namespace, raw = self.text()
        self.texts[namespace, raw] = None
        node, hit = self.acquire(namespace, raw)
        if hit < len(raw) and self.random.random() < 0.8:
            node = self.publish(node, raw[hit:])
        self.leases.append((node, raw[: len(prefix_of(node))]))

    def grow(self) -> None:
        """Publish more behind a lease: a leaf grows in place if it can."""
        if not self.leases:
            return
        node, prefix = self.leases.pop(self.random.randrange(len(self.leases)))
        if node.root.is_stale:
            self.tree.unlock(node)
            return
        raw = self.pages()
        self.texts[node.root.namespace, prefix + raw] = None  # type: ignore[index]
        self.leases.append((self.publish(node, raw), prefix + raw))

    def publish(self, node: RadixNode, raw: bytes) -> RadixNode:
        pages = PAGE_ID * (len(raw) // self.page_bytes)
        return self.tree.publish(node, raw, pages)[0]

    def unlock(self) -> None:
        if self.leases:
            at = self.random.randrange(len(self.leases))
            self.tree.unlock(self.leases.pop(at)[0])

    def evict(self) -> None:
        num_pages = self.random.choice([1, 1, 2, 3, 8])
        if self.random.random() < 0.5:
            self.tree.evict(num_pages)
        else:
            with self.tree.because("manual"):
                self.tree.evict(num_pages)

    def resize(self) -> None:
        bound = max(1, 2 * self.most + self.random.randint(-4, 4))
        self.most = max(1, bound // 2)
        self.ghosts.resize(bound)

    def retire(self) -> None:
        namespace = self.random.choice("xy")
        root = self.tree.retire(namespace) or self.roots.get(namespace)
        self.roots.pop(namespace, None)
        if root is not None:
            self.ghosts.drop(root)

    # What must be found -----------------------------------------------------

    def check_gaps(self) -> None:
        """What follows a page is forgotten before it, as it was evicted before it."""
        cached = {
            (node.root, prefix_of(node)[:end])
            for node in self.tree.nodes()
            for end in self.ends(0, len(prefix_of(node)))
        }
        roots = [root for root in self.roots.values() if not root.is_stale]
        for lost, before in ((self.young, self.young), (self.old, self.lost)):
            for root, prefix in lost:
                previous = (root, prefix[: -self.page_bytes])
                if root in roots and previous[1]:
                    assert previous in cached or previous in before

    def check_places(self) -> None:
        """Each generation has its pages, and all that is kept can be found."""
        ghosts = self.ghosts
        assert set(self.tree.nodes()) >= ghosts._inside.keys()
        for node, places in ghosts._inside.items():
            assert all(0 < offset < len(node.key) for offset in places)
        for lost, kept in ((self.young, ghosts._young), (self.old, ghosts._old)):
            num_bytes = sum(len(ghost.run) for ghost in kept.ghosts())
            assert len(lost) * self.page_bytes == num_bytes == kept.num_bytes
            for place, ghost in kept.tails.items():
                assert place == ghost.place
            for page, ghost in kept.heads.items():
                assert ghost.run.startswith(page) or not ghost.place
            for (place, page), ghost in kept.more.items():
                assert kept.heads[page].place != place == ghost.place
                assert ghost.run.startswith(page)

    def check(self) -> None:
        self.check_gaps()
        for namespace, raw in self.texts:
            node, hit = self.acquire(namespace, raw)
            found: list[tuple[str, int]] = []
            start = hit
            if hit < len(raw):
                for stop, by, when in self.ghosts.follow(node, raw, hit, len(raw)):
                    found += [(by, when)] * len(self.ends(start, stop))
                    start = stop
            expected = [
                self.lost.get((node.root, raw[:end]))
                for end in self.ends(hit, len(raw))
            ]
            assert found == expected[: len(found)]
            assert not any(expected[len(found) :])
            self.tree.unlock(node)


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@given(
    page_size=st.sampled_from([1, 2, 3, 16]),
    bound=st.sampled_from([1, 2, 3, 5, 20, 64, 1000]),
    seed=st.integers(0, 2**32 - 1),
)
def test_what_is_remembered_equals_the_reference(
    policy: str, page_size: int, bound: int, seed: int
) -> None:
    life = GhostLife(policy, page_size, bound, Random(seed))
    for _ in range(NUM_STEPS):
        life.step()
    life.check()
    # Now that every text was split where its hit ends, it goes on.
    for _ in range(NUM_STEPS // 2):
        life.step()
    life.check()

"""What is called cold was never cached before: an oracle remembers all that was."""

from __future__ import annotations

from collections.abc import Hashable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.mem_cache import HitReport, MemoryManager, OutOfPagesError, RadixCache

NUM_STEPS = 60
NAMESPACES = (None, "a", ("b", 1))


class ColdLife:
    """A cache of very few pages, and all prefixes of whole pages that it ever had.

    Attributes:
        seen: By namespace, the prefixes that were cached in this epoch.
        told: How many tokens of each reason were told.
    """

    def __init__(self, policy: str, num_pages: int, page_size: int, seed: int) -> None:
        self.random = Random(seed)
        self.page_size = page_size
        memory = MemoryManager(
            num_pages, page_size, max_num_requests=2, max_context_len=16 * page_size
        )
        self.cache = RadixCache(memory, policy)
        self.seen: set[tuple[Hashable, tuple[int, ...]]] = set()
        self.told = {"cold": 0, "forgotten": 0, "evicted": 0}

    def text(self) -> list[int]:
        """Pages of two kinds, so that texts part and meet everywhere."""
        num_pages = self.random.randint(1, 7)
        pages = [self.random.choice((1, 2)) for _ in range(num_pages)]
        return [token for token in pages for _ in range(self.page_size)]

    def step(self) -> None:
        namespace = self.random.choice(NAMESPACES[: self.random.choice((1, 1, 3))])
        choice = self.random.random()
        if choice < 0.6:
            self.serve(self.text(), namespace)
        elif choice < 0.8:
            self.cache.evict(self.page_size * self.random.randint(1, 6))
        elif choice < 0.97:
            self.look(self.text(), namespace)
        elif choice < 0.99:
            self.cache.bump_epoch(namespace)
            self.seen = {(name, text) for name, text in self.seen if name != namespace}
        else:
            self.cache.reset()
            self.seen.clear()

    def serve(self, tokens: list[int], namespace: Hashable) -> None:
        """Take a prompt through the cache, in one part or two."""
        request = self.cache.admit([*tokens, 9], namespace=namespace)
        assert request is not None
        self.check(request.hit_report, tokens, namespace)
        ends = {len(tokens), self.random.randint(1, len(tokens))}
        for end in sorted(ends):
            if end <= request.committed_len:
                continue
            try:
                self.cache.alloc_for_extend([request], [end])
            except OutOfPagesError:
                break
            self.cache.commit(request, end)
            self.cache.cache_unfinished_req(request, tokens)
            self.see(tokens[: request.protected_len], namespace)
        self.cache.release(request)

    def look(self, tokens: list[int], namespace: Hashable) -> None:
        request = self.cache.admit([*tokens, 9], namespace=namespace)
        assert request is not None
        self.check(request.hit_report, tokens, namespace)
        self.cache.release(request)

    def see(self, tokens: list[int], namespace: Hashable) -> None:
        for end in range(self.page_size, len(tokens) + 1, self.page_size):
            self.seen.add((namespace, tuple(tokens[:end])))

    def check(
        self, report: HitReport | None, tokens: list[int], namespace: Hashable
    ) -> None:
        assert report is not None
        for reason in self.told:
            self.told[reason] += getattr(report, f"num_{reason}_tokens")
        if report.num_cold_tokens:
            first = len(tokens) - report.num_cold_tokens
            cold = tuple(tokens[: first + self.page_size])

            assert (namespace, cold) not in self.seen


@pytest.mark.parametrize("policy", ["lru", "lfu", "mru"])
@given(
    num_pages=st.integers(1, 12),
    page_size=st.sampled_from([1, 2]),
    seed=st.integers(0, 2**32 - 1),
)
def test_cold_is_only_said_of_what_was_never_cached(
    policy: str, num_pages: int, page_size: int, seed: int
) -> None:
    life = ColdLife(policy, num_pages, page_size, seed)
    for _ in range(NUM_STEPS):
        life.step()
    life.cache.check_integrity()


def test_a_long_life_tells_all_reasons() -> None:
    life = ColdLife("lru", 8, 1, 0)
    for _ in range(3000):
        life.step()

    assert min(life.told.values()) > 100


def test_new_texts_are_cold_where_others_were_forgotten() -> None:
    """Behind a prefix that stays cached, what was seen is told from what was not."""
    memory = MemoryManager(16, 1, max_num_requests=2, max_context_len=64)
    cache = RadixCache(memory)
    keep = cache.admit([1, 2, 3, 9])
    assert keep is not None
    cache.alloc_for_extend([keep], [3])
    cache.commit(keep, 3)
    cache.cache_unfinished_req(keep, [1, 2, 3])
    cold = forgotten = 0
    for again in range(2):
        for first in range(100, 300):
            request = cache.admit([1, 2, 3, first, 5, 6, 7])
            assert request is not None
            report = request.hit_report
            assert report is not None
            cold += report.num_cold_tokens
            forgotten += report.num_forgotten_tokens
            cache.alloc_for_extend([request], [6])
            cache.commit(request, 6)
            cache.cache_finished_req(request, [1, 2, 3, first, 5, 6, 7])
        if not again:
            assert (600, 0) == (cold, forgotten)

    assert (600, 600) == (cold, forgotten)

"""The allocator against a set of free pages and a set of pages in use."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from radixkv.mem_cache import (
    DoubleFreeError,
    ForeignPageError,
    PageError,
    PagesInUseError,
    TokenToKVPoolAllocator,
)

from .caches import free_order


class AllocatorMachine(RuleBasedStateMachine):
    """Allocations, frees, wrong frees and resizes."""

    @initialize(num_pages=st.integers(1, 20), page_size=st.integers(1, 64))
    def start(self, num_pages: int, page_size: int) -> None:
        self.allocator = TokenToKVPoolAllocator(num_pages, page_size)
        self.num_pages = num_pages
        self.page_size = page_size
        self.used: set[int] = set()
        self.results: list[tuple[np.ndarray, list[int]]] = []

    @rule(num_pages=st.integers(0, 8))
    def alloc(self, num_pages: int) -> None:
        next_ones = free_order(self.allocator)[:num_pages]
        pages = self.allocator.alloc(num_pages)
        if num_pages > self.num_pages - len(self.used):
            assert pages is None
            return
        assert pages is not None
        assert pages.dtype == np.int32
        assert sorted(next_ones) == pages.tolist()
        self.used |= set(pages.tolist())
        self.results.append((pages, pages.tolist()))

    @rule(data=st.data(), dtype=st.sampled_from([None, np.int32, np.int64, np.uint8]))
    def free(self, data: st.DataObject, dtype: type | None) -> None:
        used = st.sampled_from(sorted(self.used)) if self.used else st.nothing()
        pages = data.draw(st.lists(used, unique=True))
        self.allocator.free(np.array(pages, dtype) if dtype else pages)
        self.used -= set(pages)

    @rule(
        good=st.lists(st.integers(1, 20), unique=True),
        bad=st.lists(st.integers(-3, 24), min_size=1),
        dtype=st.sampled_from([np.int32, np.int64]),
    )
    def refuse_to_free(self, good: list[int], bad: list[int], dtype: type) -> None:
        pages = [page for page in good if page in self.used] + bad
        is_foreign = any(not 1 <= page <= self.num_pages for page in pages)
        if set(pages) <= self.used and len(set(pages)) == len(pages):
            return
        before = free_order(self.allocator)
        with pytest.raises(PageError) as caught:
            self.allocator.free(np.array(pages, dtype))

        assert (ForeignPageError if is_foreign else DoubleFreeError) is caught.type
        assert before == free_order(self.allocator)

    @rule(num_pages=st.integers(1, 24))
    def resize(self, num_pages: int) -> None:
        before = free_order(self.allocator)
        last_page = max(self.used, default=0)
        if last_page > num_pages:
            with pytest.raises(PagesInUseError) as caught:
                self.allocator.resize(num_pages)
            assert last_page == caught.value.needed
            assert num_pages == caught.value.available
            assert before == free_order(self.allocator)
            return
        self.allocator.resize(num_pages)
        stay = [page for page in before if page <= num_pages]
        new = list(range(self.num_pages + 1, num_pages + 1))
        self.num_pages = num_pages

        assert stay + new == free_order(self.allocator)

    @rule()
    def free_all(self) -> None:
        self.allocator.free_all()
        self.used.clear()
        fresh = TokenToKVPoolAllocator(self.num_pages, self.page_size)

        assert free_order(fresh) == free_order(self.allocator)

    @invariant()
    def counts_agree(self) -> None:
        self.allocator.check_integrity()

        assert self.num_pages - len(self.used) == self.allocator.num_free_pages
        assert self.num_pages == self.allocator.num_pages
        assert self.page_size == self.allocator.page_size
        assert sorted(self.used) == self.allocator.in_use().tolist()

    @invariant()
    def free_pages_are_the_others(self) -> None:
        others = set(range(1, self.num_pages + 1)) - self.used

        assert sorted(others) == sorted(free_order(self.allocator))

    @invariant()
    def earlier_results_keep_their_content(self) -> None:
        for pages, content in self.results:
            assert content == pages.tolist()


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(stateful_step_count=30)


@given(
    num_pages=st.integers(1, 30),
    taken=st.integers(0, 30),
    random=st.randoms(use_true_random=False),
)
def test_fragmentation_counts_the_runs_of_free_pages(
    num_pages: int, taken: int, random: Random
) -> None:
    allocator = TokenToKVPoolAllocator(num_pages, 1)
    pages = list(range(1, num_pages + 1))
    random.shuffle(pages)
    allocator.alloc(num_pages)
    free = sorted(pages[taken:])
    allocator.free(free)
    runs = sum(1 for page in free if page - 1 not in free)

    assert allocator.fragmentation() == (1000 * runs / len(free) if free else 0)


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=8), data=st.data())
def test_runs_survive_any_order_of_frees(sizes: list[int], data: st.DataObject) -> None:
    """What was allocated together comes back together, whoever was freed first."""
    allocator = TokenToKVPoolAllocator(sum(sizes), 16)
    runs: list[list[int]] = []
    for size in sizes:
        run = allocator.alloc(size)
        assert run is not None
        runs.append(run.tolist())
    freed = data.draw(st.permutations(runs))
    for pages in freed:
        allocator.free(pages)

    for pages in reversed(freed):
        again = allocator.alloc(len(pages))
        assert again is not None
        assert pages == again.tolist()


@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    orders=st.lists(st.sampled_from(["up", "down", "mixed"]), min_size=6, max_size=6),
    wanted=st.integers(17, 120),
    random=st.randoms(use_true_random=False),
)
def test_many_pages_are_handed_out_in_order_however_they_lay(
    sizes: list[int], orders: list[str], wanted: int, random: Random
) -> None:
    allocator = TokenToKVPoolAllocator(sum(sizes) + 40, 1)
    owned = [allocator.take(size) for size in sizes]
    random.shuffle(owned)
    for pages, order in zip(owned, orders, strict=False):
        ids = np.frombuffer(pages, np.int32).tolist()
        if order == "down":
            ids.reverse()
        elif order == "mixed":
            random.shuffle(ids)
        allocator.free(ids)
    wanted = min(wanted, allocator.num_free_pages)
    next_ones = allocator.free_pages()[-wanted:]
    taken = np.frombuffer(allocator.take(wanted), np.int32)

    assert sorted(next_ones.tolist()) == taken.tolist()
    assert taken.tolist() == allocator.in_use().tolist()
    allocator.check_integrity()

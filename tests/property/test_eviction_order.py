"""Who is evicted, page by page: the order of a reference that sorts all leaves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .checked_cache import CheckedCache

NUM_PAGES = 60
POLICIES = ["lru", "lfu", "priority", "filo"]

texts = st.lists(st.integers(0, 1), min_size=1, max_size=12)
visits = st.lists(
    st.tuples(texts, st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=30
)


def finish_one_of(checked: CheckedCache, number: int) -> None:
    live = checked.live[number % len(checked.live)]
    checked.extend([live], [len(live.tokens)])
    checked.commit(live, live.computed_len)
    checked.finish(live)


@pytest.mark.parametrize("policy", POLICIES)
@given(visits=visits, page_size=st.sampled_from([1, 2]))
def test_pages_go_in_the_order_of_the_reference(
    policy: str, visits: list[tuple[list[int], int, int]], page_size: int
) -> None:
    """Requests overlap: they are published in another order than they were admitted."""
    checked = CheckedCache(policy, NUM_PAGES, page_size, num_rows=3, max_len=30)
    for letters, number, priority in visits:
        if len(checked.live) == 3:
            finish_one_of(checked, number)
        tokens = [letter for letter in letters for _ in range(page_size)]
        checked.admit([*tokens, 0], priority=priority)
    while checked.live:
        finish_one_of(checked, 0)
    checked.check()
    checked.drain()


@pytest.mark.parametrize("policy", POLICIES)
@given(visits=visits, num_pages=st.integers(1, 5))
def test_pages_go_in_the_same_order_one_by_one_and_together(
    policy: str, visits: list[tuple[list[int], int, int]], num_pages: int
) -> None:
    checked = CheckedCache(policy, NUM_PAGES, 1, num_rows=3, max_len=30)
    for letters, _, priority in visits:
        checked.admit([*letters, 0], priority=priority)
        finish_one_of(checked, 0)
    while checked.cache.evictable_size:
        checked.evict(num_pages)
        checked.check_cached()
        checked.check_sizes()


@pytest.mark.parametrize("policy", POLICIES)
@given(visits=visits, shortfall=st.integers(1, 8))
def test_an_allocation_evicts_exactly_the_shortfall(
    policy: str, visits: list[tuple[list[int], int, int]], shortfall: int
) -> None:
    checked = CheckedCache(policy, NUM_PAGES, 1, num_rows=3, max_len=NUM_PAGES)
    for letters, _, priority in visits:
        checked.admit([*letters, 0], priority=priority)
        finish_one_of(checked, 0)
    cached = checked.cache.evictable_size
    needed = checked.cache.available_size + min(shortfall, cached)
    live = checked.admit([2] * needed)
    assert live is not None
    checked.extend([live], [needed])
    checked.check()

    assert cached - min(shortfall, cached) == checked.cache.evictable_size

"""Epochs end at any time: stale pages match nobody, and go first, in a known order."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.mem_cache.testing import CheckedCache, PastEpoch

from .caches import make_checked

NUM_PAGES = 16
NAMES = [None, "tenant"]


@dataclass(frozen=True)
class Step:
    """Something that happens to a cache; `number` chooses what it happens to."""

    action: str
    letters: list[int]
    number: int


actions = st.sampled_from(
    2 * ["serve", "open", "bump", "evict"]
    + ["publish", "finish", "release", "resize", "reset"]
)
letters = st.lists(st.integers(0, 1), min_size=1, max_size=6)
steps = st.lists(
    st.builds(Step, actions, letters, st.integers(0, 11)), min_size=10, max_size=40
)


def take(step: Step, checked: CheckedCache) -> None:
    page_size = checked.page_size
    name = NAMES[step.number % 3 // 2]
    if step.action in ("serve", "open"):
        tokens = [letter for letter in step.letters for _ in range(page_size)]
        live = checked.admit([*tokens, 0], name, step.number % 3)
        if live is not None:
            checked.extend([live], [len(live.tokens)])
            checked.commit(live, live.computed_len)
            if step.action == "serve":
                checked.finish(live)
    elif step.action == "bump":
        checked.bump_epoch(name)
    elif step.action == "evict":
        checked.evict(step.number % 4 * page_size)
    elif step.action == "resize":
        checked.resize(NUM_PAGES - step.number)
    elif step.action == "reset":
        checked.reset()
    elif checked.live:
        live = checked.live[step.number % len(checked.live)]
        getattr(checked, step.action)(live)


def check_order(checked: CheckedCache, num_pages: int) -> None:
    """Who would go next is told before, and telling it changes nothing."""
    for _ in range(2):
        victims = checked.cache.eviction_order(num_pages)
        expected = checked.oracle.eviction_order(num_pages)
        assert [page for _, page in expected] == [victim.page for victim in victims]


@pytest.mark.parametrize("policy", ["lru", "lfu", "filo"])
@given(steps=steps, page_size=st.sampled_from([1, 2, 3, 16, 64]))
def test_epochs_end_at_any_time(policy: str, steps: list[Step], page_size: int) -> None:
    """Suspended walks, late releases, shrinks and resets: the oracle knows no walk."""
    checked = make_checked(policy, NUM_PAGES, page_size, 3, 8 * page_size)
    for step in steps:
        take(step, checked)
        checked.check()
        check_order(checked, 3)
    check_order(checked, NUM_PAGES)
    checked.drain()
    checked.check()


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@given(steps=steps)
def test_nobody_goes_while_something_stale_is_left(
    policy: str, steps: list[Step]
) -> None:
    checked = make_checked(policy, NUM_PAGES, 1, num_rows=3, max_len=8)
    for step in steps:
        take(step, checked)
    checked.bump_epoch(None)
    before = [checked.cache.match_prefix(text, name) for name, text in checked.texts]
    stale = [
        page
        for key, page in checked.oracle.cached.items()
        if isinstance(key[0], PastEpoch) and not page.num_locks
    ]
    checked.evict(len(stale))

    after = [checked.cache.match_prefix(text, name) for name, text in checked.texts]
    assert before == after
    in_use = set(checked.cache.memory.allocator.in_use().tolist())
    assert not in_use & {page.page for page in stale}

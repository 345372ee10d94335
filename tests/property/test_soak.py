"""The soak: a million random operations with everything that a cache can do, mixed.

`make soak` runs all of it, `make test` a part.
"""

from __future__ import annotations

from collections import Counter

import pytest

from .soak_life import PAGE_SIZES, POLICIES, Chance, Life

EVENTS = {
    *("admitted", "hit", "partial page", "resumed", "no row", "published"),
    *("accepted draft", "rejected draft", "recalled", "content", "out of contents"),
    *("evicted", "out of pages", "quota", "quota refused", "retained", "epoch"),
    *("moved", "resize refused", "reset"),
}
"""What must have happened, or the soak shows less than it says."""


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_thousands_of_random_operations_keep_every_promise(page_size: int) -> None:
    events: Counter[str] = Counter()
    for number, policy in enumerate(POLICIES):
        chance = Chance([page_size, number])
        life = Life(page_size, policy, chance, has_all=policy != "lru")
        life.live(500)
        events += life.events

    assert EVENTS - events.keys() <= ({"partial page"} if page_size == 1 else set())


@pytest.mark.slow
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_million_random_operations_keep_every_promise(
    policy: str, page_size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """40 cases of 25,000 operations each: short lives, and one with everything."""
    events: Counter[str] = Counter()
    num_operations = 0
    for number, length in enumerate([12_500, 2_500, 2_500, 2_500, 2_500, 2_500]):
        chance = Chance([page_size, POLICIES.index(policy), number + 1])
        life = Life(page_size, policy, chance, has_all=number == 0)
        life.live(length)
        events += life.events
        num_operations += length
    with capsys.disabled():
        print(f"\n{policy}, page size {page_size}: {num_operations:,} operations, ")
        print(", ".join(f"{count:,} {name}" for name, count in sorted(events.items())))

    assert num_operations == 25_000
    assert EVENTS - events.keys() <= ({"partial page"} if page_size == 1 else set())

"""Known faults, group C: splitting a node."""

from __future__ import annotations

import pytest

from radixkv.mem_cache import RadixCache

from .driver import admit, insert, law, make_cache, span


def use(cache: RadixCache, tokens: list[int]) -> None:
    """Admit a request that goes on where `tokens` end, and abort it."""
    cache.release(admit(cache, [*tokens, 99]))


def test_b22_both_halves_of_a_split_carry_the_hits() -> None:
    cache = make_cache(32, 1, policy="lfu")
    a, b = span(1, 8), span(50, 57)
    insert(cache, a)
    insert(cache, b)
    for _ in range(4):
        use(cache, a)
    for _ in range(2):
        use(cache, b)
    use(cache, span(1, 4))
    cache.evict(8)

    assert (cache.match_prefix(a), cache.match_prefix(b)) == (8, 0)
    insert(cache, b)
    for _ in range(4):
        use(cache, b)  # as often as the lower half of a, and later
    cache.evict(4)
    assert (cache.match_prefix(a), cache.match_prefix(b)) == (4, 8)
    cache.evict(8)
    assert (cache.match_prefix(a), cache.match_prefix(b)) == (4, 0)


def test_b22_a_split_changes_no_page_no_size_and_no_namespace() -> None:
    cache = make_cache(32, 1)
    insert(cache, span(1, 8), "a")
    request = admit(cache, span(1, 9), "a")
    before = (cache.slots(request).tolist(), law(cache))
    use(cache, [1])
    other = admit(cache, [*span(1, 4), 99], "a")

    assert cache.slots(other).tolist() == cache.slots(request, 0, 4).tolist()
    cache.release(other)
    assert before == (cache.slots(request).tolist(), law(cache))
    assert cache.match_prefix(span(1, 8), "a") == 8
    assert cache.match_prefix(span(1, 8)) == 0


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_b23_every_child_stands_under_its_own_first_page(policy: str) -> None:
    """The integrity check compares each key with the place of its node."""
    cache = make_cache(16, 2, policy=policy)
    for tokens in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 9, 9], [1, 2, 8, 8]):
        insert(cache, tokens)
        law(cache)
    for num_left in (4, 3, 2, 1, 0):
        assert cache.evict(1) == 2
        assert law(cache) == (32 - 2 * num_left, 2 * num_left, 0, 0)

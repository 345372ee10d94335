"""Known faults, group B: the evictable and protected sizes.

Sizes are (free, evictable, protected, held), in tokens.
"""

from __future__ import annotations

import pytest

from radixkv.mem_cache import LengthError

from .driver import admit, insert, law, make_cache, run, span


def test_b16_sizes_survive_a_split_under_a_lock() -> None:
    cache = make_cache(64, 1)
    insert(cache, span(1, 8))
    request = admit(cache, [*span(1, 5), 99])
    assert law(cache) == (56, 3, 5, 0)
    insert(cache, [*span(1, 5), *span(20, 22)])
    assert law(cache) == (53, 6, 5, 0)
    cache.release(request)

    assert law(cache) == (53, 11, 0, 0)


def test_b17_keys_shorter_than_a_page_change_nothing() -> None:
    cache = make_cache(4, 4)
    assert cache.match_prefix([1, 2, 3]) == 0
    assert cache.match_prefix([]) == 0
    request = run(cache, [1, 2, 3])
    cache.cache_unfinished_req(request, [1, 2, 3])

    assert law(cache) == (12, 0, 0, 4)
    with pytest.raises(LengthError):
        cache.admit([])
    cache.cache_finished_req(request, [1, 2, 3])
    assert law(cache) == (16, 0, 0, 0)


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6])
def test_b20_the_node_where_a_match_ends_is_protected(policy: str, length: int) -> None:
    """The tree is three nodes deep: 1 2, 3 4, 5 6."""
    cache = make_cache(16, 1, policy=policy)
    for tokens in (span(1, 6), [1, 2, 3, 4, 9], [1, 2, 8]):
        insert(cache, tokens)
    request = admit(cache, [*span(1, length), 99])

    assert cache.evict(100) == 8 - length
    assert cache.evict(100) == 0
    assert cache.match_prefix(span(1, 6)) == length
    cache.release(request)
    assert cache.evict(100) == length
    assert law(cache) == (16, 0, 0, 0)

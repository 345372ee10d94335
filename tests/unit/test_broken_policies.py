"""A policy of the caller that fails: nothing is lost, and no eviction is a guess."""

from __future__ import annotations

import numpy as np
import pytest

from radixkv.mem_cache import EvictionPolicy, PolicyError, RadixCache, RadixNode

from .driver import Wrong, compute, law, make_cache, span


class Fails:
    def key(self, node: RadixNode) -> int:
        raise KeyError(node.num_hits)


class Forgets:
    def key(self) -> int:  # the node is missing
        return 0


class DoesNotCompare:
    def key(self, node: RadixNode) -> int | None:
        return None if node.num_hits else 0


class IsNoNumber:
    def key(self, node: RadixNode) -> float:
        return float("nan")


class IsAnArray:
    def key(self, node: RadixNode) -> Wrong:
        return np.arange(2)


class FailsOnce:
    def __init__(self) -> None:
        self.has_failed = False

    def key(self, node: RadixNode) -> int:
        if not self.has_failed:
            self.has_failed = True
            raise ValueError("once")
        return 0


class DoesNotOrder:
    """Sets compare, but of two that differ here none is less."""

    def key(self, node: RadixNode) -> frozenset[int]:
        return frozenset(node.key[:1])


def serve(cache: RadixCache, *firsts: int) -> None:
    """Run requests of 9 tokens, one after another, from admission to end."""
    for first in firsts:
        tokens = span(first, first + 8)
        request = cache.admit(tokens)
        assert request is not None
        try:
            compute(cache, request, 9)
        except PolicyError:
            cache.release(request)
            raise
        cache.cache_finished_req(request, tokens)


@pytest.mark.parametrize(
    "policy", [Fails, Forgets, DoesNotCompare, IsNoNumber, IsAnArray, FailsOnce]
)
def test_a_broken_policy_refuses_to_evict_and_breaks_nothing(
    policy: type[EvictionPolicy],
) -> None:
    cache = make_cache(num_pages=6, policy=policy())
    for first in (10, 10, 30, 30):
        serve(cache, first)
        cache.check_integrity()

    with pytest.raises(PolicyError, match="failed") as error:
        serve(cache, 50, 70)

    assert error.value.__cause__ is not None
    cache.check_integrity()
    assert sum(law(cache)) == cache.total_size
    assert cache.held_size == cache.protected_size == 0
    assert cache.match_prefix(span(10, 17)) == 8
    for call in (cache.evict, cache.evict_if_needed):
        with pytest.raises(PolicyError):
            call(cache.total_size)
    cache.reset()
    cache.check_integrity()


def test_a_key_that_does_not_equal_itself_is_shown() -> None:
    cache = make_cache(policy=IsNoNumber())
    serve(cache, 10)

    with pytest.raises(PolicyError) as caught:
        cache.evict(4)
    assert "a key must equal itself, got nan" == str(caught.value.__cause__)


def test_keys_without_an_order_are_noticed_when_a_leaf_is_not_where_it_was() -> None:
    """In the middle of a lock, which must not stop half-way."""
    cache = make_cache(num_pages=20, policy=DoesNotOrder())
    for first in (10, 20, 30, 40, 20):
        serve(cache, first)
        cache.check_integrity()

    for call in (cache.evict, cache.eviction_order):
        with pytest.raises(PolicyError, match=r"DoesNotOrder.* failed") as caught:
            call(1)
        assert isinstance(caught.value.__cause__, ValueError)
    assert law(cache) == (48, 32, 0, 0)
    request = cache.admit(span(30, 38))
    assert request is not None
    assert law(cache) == (48, 24, 8, 0)
    cache.release(request)
    for first in (40, 50, 10):
        serve(cache, first)
        cache.check_integrity()
    assert law(cache) == (40, 40, 0, 0)
    cache.reset()
    assert law(cache) == (80, 0, 0, 0)

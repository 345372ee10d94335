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


def make_with(rooms: str, policy: EvictionPolicy) -> RadixCache:
    """Make a cache whose order goes through other indexes than the policy's own."""
    cache = make_cache(num_pages=20, policy=policy)
    if "quota" in rooms:
        cache.set_quota("tenant", ceiling_size=64)
    if "retained" in rooms:
        serve(cache, 100)
        cache.retain(span(100, 107))
    if "stale" in rooms:
        cache.bump_epoch("other")
    return cache


@pytest.mark.parametrize("rooms", ["", "quota", "retained", "stale", "quota retained"])
@pytest.mark.parametrize("policy", [FailsOnce, DoesNotOrder])
def test_a_reset_forgets_that_the_policy_failed(
    policy: type[EvictionPolicy], rooms: str
) -> None:
    cache = make_with(rooms, policy())
    for first in (10, 20, 30, 40, 20):
        serve(cache, first)
    with pytest.raises(PolicyError):
        cache.evict(4)

    cache.reset()

    serve(cache, 10)
    assert 4 == cache.evict(4)
    assert 1 == len(cache.eviction_order(9))
    cache.check_integrity()


class Counts:
    """Learns something, and fails when it is told that something was evicted."""

    def __init__(self) -> None:
        self.num_published = 0
        self.num_resets = 0
        self.may_reset = True

    def key(self, node: RadixNode) -> int:
        return 0

    def published(self, node: RadixNode, start: int) -> None:
        self.num_published += 1

    def evicted(self, node: RadixNode, key: bytes, pages: bytes) -> None:
        raise KeyError("evicted")

    def reset(self) -> None:
        self.num_resets += 1
        self.num_published = 0
        if not self.may_reset:
            raise KeyError("reset")


def test_a_reset_tells_the_policy_to_forget_what_it_learned() -> None:
    policy = Counts()
    cache = make_cache(policy=policy)
    serve(cache, 10)
    assert 1 == policy.num_published

    cache.reset()  # the failure of `evicted` comes before, and is forgotten

    assert (0, 1) == (policy.num_published, policy.num_resets)
    serve(cache, 10)
    assert 4 == cache.evict(4)


def test_a_policy_that_fails_to_reset_evicts_nothing() -> None:
    policy = Counts()
    policy.may_reset = False
    cache = make_cache(policy=policy)
    cache.reset()
    serve(cache, 10)

    with pytest.raises(PolicyError) as caught:
        cache.evict(4)
    assert "reset" in str(caught.value.__cause__)
    assert law(cache) == (56, 8, 0, 0)


class Notes:
    """Takes down the last uses of the nodes that it is shown."""

    def __init__(self) -> None:
        self.used_nodes: list[list[int]] = []
        self.last_uses: dict[str, list[int]] = {"key": [], "published": []}

    def key(self, node: RadixNode) -> int:
        self.last_uses["key"].append(node.last_use)
        return 0

    def used(self, nodes: list[RadixNode]) -> None:
        self.used_nodes.append([node.last_use for node in nodes])

    def published(self, node: RadixNode, start: int) -> None:
        self.last_uses["published"].append(node.last_use)


def test_a_policy_is_told_of_admissions_that_found_nothing() -> None:
    policy = Notes()
    serve(make_cache(policy=policy), 10, 50)

    assert [[], []] == policy.used_nodes


def test_the_last_use_is_0_until_the_first_release_and_no_key_sees_that() -> None:
    policy = Notes()
    cache = make_cache(policy=policy)
    request = cache.admit(span(1, 9))
    assert request is not None
    compute(cache, request, 9)
    cache.cache_unfinished_req(request, span(1, 9))
    other = cache.admit(span(1, 9))
    assert other is not None
    assert [[], [0]] == policy.used_nodes
    cache.release(other)
    cache.release(request)

    assert [0] == policy.last_uses["published"]
    assert policy.last_uses["key"]
    assert 0 not in policy.last_uses["key"]

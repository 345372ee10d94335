"""Admission that proves: whoever is admitted can finish, and nobody waits in vain."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from radixkv.mem_cache import RadixCache

from .busy_load import BusyLoad, Look, make_load, num_pages_at_longest

seeds = st.integers(0, 2**32 - 1)


def head_that_was_passed_over(load: BusyLoad, look: Look) -> bool:
    """Tell whether the oldest waited though it fits; it was looked at, and first."""
    scheduler, cache = load.scheduler, load.cache
    limits = scheduler.limits
    waiting = load.waiting
    num_tokens = look.batch.num_tokens if look.batch else 0
    if (
        look.started
        or not waiting
        or waiting[0].num_deferrals
        or waiting[0].num_retractions
        or len(load.running) >= limits.max_running_requests
        or num_tokens >= limits.max_batched_tokens
        or not cache.memory.request_table.num_free_rows
    ):
        return False
    owners = [r for r in load.requests if r.kv is not None]  # those at an end included
    needed = num_pages_at_longest(cache, owners, waiting[0])
    return needed * cache.page_size <= cache.total_size


def check_proof(seed: int, num_turns: int) -> Counter[str]:
    """Run a load to its end, and look at every step."""
    load = make_load(seed)
    cache, random = load.cache, load.random
    seen: Counter[str] = Counter()
    turn = 0
    while turn < num_turns or load.scheduler.has_requests:
        if turn < num_turns:
            for _ in range(random.choice([0, 0, 1, 3])):
                load.arrive()
            if random.random() < 0.03:
                load.abort_one()
        for look in load.turn():
            assert not look.retracted
            if load.scheduler.limits.max_overtakes == 256:
                assert not head_that_was_passed_over(load, look)
            seen["started"] += len(look.started)
            seen["beside others"] += bool(look.started and look.ran)
        cache.check_integrity()
        needed = num_pages_at_longest(cache, load.running)
        assert needed * cache.page_size <= cache.total_size
        seen["full"] += needed * cache.page_size == cache.total_size
        seen["waited"] += len(load.waiting)
        turn += 1
        assert turn <= num_turns + load.max_num_steps
    load.check_end()
    assert load.scheduler.num_retractions == 0
    return seen


@given(seed=seeds)
def test_whoever_is_admitted_by_proof_is_never_retracted_and_ends(seed: int) -> None:
    check_proof(seed, num_turns=15)


def test_the_proof_is_no_stricter_than_the_pages_and_fills_the_pool() -> None:
    seen: Counter[str] = Counter()
    for seed in range(60):
        seen += check_proof(seed, num_turns=25)

    assert all(
        seen[key] > 200 for key in ("started", "beside others", "full", "waited")
    )


def check_quotas(seed: int, num_turns: int, admission: str) -> Counter[str]:
    """Run a load in namespaces with floors and ceilings to its end."""
    load = make_load(seed, is_cached=True, admission=admission)
    cache, random = load.cache, load.random
    assert isinstance(cache, RadixCache)
    load.namespaces = (None, "a", "b")
    load.shares = (0.3, 0.6, 1.0)
    rest = num_pages = cache.total_size // cache.page_size
    ceilings: dict[str, int] = {}
    for namespace in ("a", "b"):
        floor = random.choice([0, rest // 2, rest // 3])
        rest -= floor
        ceilings[namespace] = random.randint(max(1, floor), num_pages)
        cache.set_quota(
            namespace,
            floor_size=floor * cache.page_size,
            ceiling_size=ceilings[namespace] * cache.page_size,
        )
    seen: Counter[str] = Counter()
    turn = 0
    while turn < num_turns or load.scheduler.has_requests:
        if turn < num_turns:
            for _ in range(random.choice([0, 0, 1, 3])):
                load.arrive()
            if random.random() < 0.03:
                load.abort_one()
        for look in load.turn():
            seen["started"] += len(look.started)
            seen["retracted"] += len(look.retracted)
        cache.check_integrity()
        for namespace, ceiling in ceilings.items():
            used = cache.namespace_stats(namespace).used_size // cache.page_size
            assert used <= ceiling
            seen["at its ceiling"] += used == ceiling
        turn += 1
        assert turn <= num_turns + load.max_num_steps
    load.check_end()
    return seen


@given(seed=seeds)
def test_the_proof_holds_with_quotas(seed: int) -> None:
    assert check_quotas(seed, 15, "worst-case")["retracted"] == 0


def test_the_proof_holds_with_quotas_that_are_used_up() -> None:
    seen: Counter[str] = Counter()
    for seed in range(60):
        seen += check_quotas(seed, 25, "worst-case")

    assert seen["retracted"] == 0
    assert min(seen["started"], seen["at its ceiling"]) > 200


@given(seed=seeds)
def test_with_quotas_all_end_where_room_is_estimated(seed: int) -> None:
    check_quotas(seed, 15, "estimate")

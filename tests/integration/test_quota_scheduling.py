"""A scheduler over a cache whose namespaces have quotas."""

from __future__ import annotations

import pytest

from radixkv.mem_cache import LengthError, MemoryManager, RadixCache
from radixkv.scheduling import (
    Engine,
    Estimate,
    FinishReason,
    NullRunner,
    Request,
    SamplingParams,
    Scheduler,
)


def make_engine(num_pages: int = 16, page_size: int = 1) -> tuple[RadixCache, Engine]:
    memory = MemoryManager(num_pages, page_size, max_num_requests=8, max_context_len=64)
    cache = RadixCache(memory)
    return cache, Engine(Scheduler(cache), NullRunner(99))


def make_request(name: str, num_prompt: int, num_new: int, namespace: str) -> Request:
    return Request(
        name,
        range(num_prompt),
        SamplingParams(max_new_tokens=num_new, ignore_eos=True),
        namespace=namespace,
    )


def test_what_never_fits_below_a_ceiling_is_refused_at_once() -> None:
    cache, engine = make_engine()
    cache.set_quota("a", ceiling_size=4)

    engine.generate([make_request("fits", 2, 3, "a")])
    with pytest.raises(LengthError, match="need 5 slots, the longest that fits is 4"):
        engine.scheduler.add_request(make_request("does not", 2, 4, "a"))


def test_what_never_fits_beside_the_floors_of_others_is_refused_at_once() -> None:
    cache, engine = make_engine()
    engine.generate([make_request("a", 8, 1, "a")])
    cache.set_quota("a", floor_size=8)

    fits = make_request("fits", 4, 5, "b")
    engine.generate([fits])
    with pytest.raises(LengthError, match="need 9 slots, the longest that fits is 8"):
        engine.scheduler.add_request(make_request("does not", 4, 6, "b"))

    assert fits.num_output_tokens == 5
    assert cache.namespace_stats("a").evictable_size == 8


def test_a_request_that_a_new_ceiling_shuts_out_stands_in_nobodys_way() -> None:
    cache, engine = make_engine()
    requests = [make_request("a", 2, 6, "a"), make_request("b", 2, 6, "b")]
    for request in requests:
        engine.scheduler.add_request(request)
    engine.step()
    cache.set_quota("a", ceiling_size=3)

    for _ in engine.run():
        cache.check_integrity()

    reasons = [request.finish_reason for request in requests]
    assert reasons == [FinishReason.REFUSED, FinishReason.LENGTH]


@pytest.mark.parametrize("page_size", [1, 3])
def test_all_end_although_ceilings_and_floors_let_few_run_at_a_time(
    page_size: int,
) -> None:
    cache, engine = make_engine(14, page_size)
    cache.set_quota("a", floor_size=3 * page_size, ceiling_size=5 * page_size)
    cache.set_quota("b", ceiling_size=6 * page_size)
    cache.set_quota("c", floor_size=4 * page_size)
    requests = [
        make_request(
            f"{namespace}{i}", (1 + i % 3) * page_size, page_size + i, namespace
        )
        for i in range(4)
        for namespace in ("a", "b", "c", "d")
    ]
    for request in requests:
        engine.scheduler.add_request(request)

    for _ in engine.run():
        cache.check_integrity()
        for namespace, ceiling in [("a", 5), ("b", 6)]:
            assert cache.namespace_stats(namespace).used_size <= ceiling * page_size

    assert all(request.finish_reason is FinishReason.LENGTH for request in requests)
    # What was set aside for each was there when it needed it.
    assert engine.scheduler.num_retractions == 0


def test_a_ceiling_that_is_too_low_for_all_takes_pages_back_only_there() -> None:
    """With an estimate, both tenants start more than they can carry to the end."""
    memory = MemoryManager(20, 1, max_num_requests=8, max_context_len=64)
    cache = RadixCache(memory)
    cache.set_quota("a", ceiling_size=8)
    gamble = Estimate(initial_ratio=0.01, min_ratio=0)
    engine = Engine(Scheduler(cache, admission=gamble), NullRunner(99))
    requests = [
        make_request(f"{namespace}{i}", 1, 7, namespace)
        for i in range(2)
        for namespace in ("a", "b")
    ]

    engine.generate(requests)

    retracted = [r.request_id for r in requests if r.num_retractions]
    assert retracted == ["a1"]
    assert all(request.num_output_tokens == 7 for request in requests)


def test_a_flood_of_one_tenant_does_not_keep_the_others_waiting() -> None:
    cache, engine = make_engine(64, 2)
    cache.set_quota("a", ceiling_size=8)
    flood = [make_request(f"a{i}", 3, 4, "a") for i in range(40)]
    others = [make_request(f"b{i}", 3, 4, f"b{i % 2}") for i in range(8)]
    for request in [*flood, *others]:
        engine.scheduler.add_request(request)

    while any(request.finish_reason is None for request in others):
        engine.step()

    num_done = sum(request.finish_reason is not None for request in flood)
    assert num_done <= 4
    for _ in engine.run():
        pass
    assert all(request.num_output_tokens == 4 for request in flood)

"""A scheduler over a cache whose namespaces have quotas."""

from __future__ import annotations

import pytest

from radixkv.mem_cache import LengthError, MemoryManager, RadixCache
from radixkv.scheduling import (
    Engine,
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

"""A cache has one scheduler, and does not outgrow the pools that it is for."""

from __future__ import annotations

import gc

import pytest

from radixkv.mem_cache import (
    CacheBusyError,
    ConfigError,
    KVPool,
    MemoryManager,
    PoolSizeError,
    RadixCache,
    RequestStateError,
)
from radixkv.scheduling import Engine, NullRunner, Request, SamplingParams, Scheduler


def make_cache(kv_pool: KVPool | None = None) -> RadixCache:
    return RadixCache(
        MemoryManager(8, 4, max_num_requests=4, max_context_len=64, kv_pool=kv_pool)
    )


def make_pool(num_pages: int = 8) -> KVPool:
    return KVPool.uniform(
        num_pages=num_pages, page_size=4, num_layers=1, num_kv_heads=1, head_dim=2
    )


class PooledNullRunner(NullRunner):
    """A runner with a pool, which it does not use."""

    def __init__(self, pool: object) -> None:
        super().__init__(99)
        self.pool = pool


def a_request(name: str = "a") -> Request:
    return Request(name, range(5), SamplingParams(4))


# One scheduler ------------------------------------------------------------------


def test_a_second_scheduler_is_refused_and_changes_nothing() -> None:
    cache = make_cache()
    scheduler = Scheduler(cache)

    with pytest.raises(RequestStateError, match="must have one scheduler"):
        Scheduler(cache)

    Engine(scheduler, NullRunner(99)).generate([a_request()])


def test_a_scheduler_that_was_dropped_leaves_the_cache_at_once() -> None:
    """By reference counts: nobody has to wait for the collector."""
    cache = make_cache()
    gc.collect()
    gc.disable()
    try:
        for overlap in (False, True):
            engine = Engine(Scheduler(cache, overlap=overlap), NullRunner(99))
            engine.generate([a_request()])
            del engine
    finally:
        gc.enable()
    Scheduler(cache)


def test_a_scheduler_that_is_closed_leaves_the_cache_and_takes_no_requests() -> None:
    cache = make_cache()
    first = Scheduler(cache)
    (request,) = Engine(first, NullRunner(99)).generate([a_request()])
    first.close()
    second = Scheduler(cache)
    first.close()  # the cache is not its any more

    with pytest.raises(RequestStateError, match="must have one scheduler"):
        Scheduler(cache)
    with pytest.raises(RequestStateError, match="closed takes no requests"):
        first.add_request(a_request("b"))
    (again,) = Engine(second, NullRunner(99)).generate([a_request()])
    assert request.output_tokens == again.output_tokens
    assert 4 == again.num_cached_tokens


def test_a_scheduler_with_requests_cannot_be_closed() -> None:
    scheduler = Scheduler(make_cache())
    scheduler.add_request(a_request())

    with pytest.raises(CacheBusyError, match="got 1, 0 batches in flight"):
        scheduler.close()

    Engine(scheduler, NullRunner(99)).generate([a_request("b")])
    scheduler.close()


def test_a_scheduler_that_was_refused_leaves_the_cache_free() -> None:
    cache = make_cache()
    with pytest.raises(ConfigError):
        Scheduler(cache, policy="none")
    Scheduler(cache)


# Growth -------------------------------------------------------------------------


def test_a_cache_does_not_grow_beyond_the_pool_of_the_runner() -> None:
    cache = make_cache()
    pool = make_pool()
    engine = Engine(Scheduler(cache), PooledNullRunner(pool))
    before = cache.stats()

    with pytest.raises(PoolSizeError, match=r"must be <= 8, .*, got 9") as refusal:
        cache.resize(9)

    assert (9, 8) == (refusal.value.num_pages, refusal.value.max_num_pages)
    assert before == cache.stats()
    cache.resize(4)
    cache.resize(8)
    pool.resize(12)  # the worker first
    cache.resize(12)
    (request,) = engine.generate([a_request()])
    assert request.error is None


def test_the_pool_of_the_memory_manager_grows_with_the_cache() -> None:
    pool = make_pool()
    cache = make_cache(pool)
    Engine(Scheduler(cache), PooledNullRunner(pool))

    cache.resize(12)

    assert (12, 12) == (pool.num_pages, cache.memory.num_pages)


def test_of_several_pools_the_smallest_counts_while_it_is_there() -> None:
    cache = make_cache()
    small, large = make_pool(9), make_pool(20)
    for pool in (large, small, small):
        cache.memory.join(pool)

    with pytest.raises(PoolSizeError):
        cache.memory.resize(10)
    del small, pool
    cache.resize(20)
    with pytest.raises(PoolSizeError, match="<= 20"):
        cache.resize(21)


@pytest.mark.parametrize("pool", [None, 5, object()])
def test_what_is_no_pool_bounds_nothing(pool: object) -> None:
    cache = make_cache()
    engine = Engine(Scheduler(cache), PooledNullRunner(pool))
    cache.resize(100)

    assert engine.generate([a_request()])

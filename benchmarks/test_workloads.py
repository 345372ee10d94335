"""What a request of each workload costs in the cache, in a pool that is too small.

A row of the table is one workload at one page size; its times are those of a request:
admit, allocate, publish, decode, finish, and the evictions that this needs.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from .replay import CacheClock, make_cache, replay
from .workloads import Workload, deep, few_shot, long

CLOCK = CacheClock()


@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("make", [few_shot, deep, long])
def test_a_request(
    benchmark: BenchmarkFixture, make: Callable[[], Workload], page_size: int
) -> None:
    workload = make()
    cache = make_cache(workload, page_size)
    requests = replay(workload, cache, CLOCK)
    benchmark.pedantic(next, args=(requests,), rounds=workload.num_requests)
    benchmark.extra_info["hit_rate"] = cache.stats().hit_rate

    cache.check_integrity()

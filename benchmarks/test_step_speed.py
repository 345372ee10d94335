"""What a step costs the host, scheduler and cache together, without a model.

256 requests decode, 100 prompt tokens each, page size 16. Nothing here is asserted on
time; run with `-s` for the profile.
"""

from __future__ import annotations

from collections import Counter
from cProfile import Profile
from pathlib import Path
from pstats import Stats
from time import perf_counter

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from radixkv.mem_cache import MemoryManager, RadixCache
from radixkv.scheduling import Request, SamplingParams, Scheduler, SchedulerLimits

NUM_RUNNING = 256
NUM_STEPS = 250


def make(num_waiting: int, num_pages: int, policy: str = "fcfs") -> Scheduler:
    """Make a scheduler in which 256 requests decode, and others wait."""
    memory = MemoryManager(num_pages, 16, max_num_requests=512, max_context_len=1024)
    limits = SchedulerLimits(max_running_requests=NUM_RUNNING)
    scheduler = Scheduler(
        RadixCache(memory), limits, policy=policy, eos_token_ids=[2], vocab_size=10**6
    )
    for i in range(NUM_RUNNING + num_waiting):
        if i == NUM_RUNNING:
            while scheduler.num_waiting:
                step(scheduler)
        params = SamplingParams(max_new_tokens=2 * NUM_STEPS)
        scheduler.add_request(Request(i, np.arange(100) + 100 * i, params))
    step(scheduler)
    return scheduler


def step(scheduler: Scheduler) -> None:
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.update(batch, np.full(batch.num_samples, 7, np.int32))


@pytest.mark.parametrize("num_waiting", [0, 1000])
def test_step_of_256_decodes(benchmark: BenchmarkFixture, num_waiting: int) -> None:
    """Nobody else may run."""
    scheduler = make(num_waiting, num_pages=12_000)

    benchmark.pedantic(step, (scheduler,), rounds=NUM_STEPS)

    assert scheduler.num_running == NUM_RUNNING


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_step_while_1000_wait_for_pages(
    benchmark: BenchmarkFixture, policy: str
) -> None:
    """Others might run, but there is no room: every step looks for it again."""
    scheduler = make(1000, num_pages=150 * 38, policy=policy)
    num_running = scheduler.num_running
    assert 100 < num_running < 200

    benchmark.pedantic(step, (scheduler,), rounds=NUM_STEPS)

    assert scheduler.num_running == num_running


def test_where_the_time_of_a_step_goes(capsys: pytest.CaptureFixture[str]) -> None:
    """Shares are those under a profiler, the sum is what it takes without one."""
    scheduler = make(0, num_pages=12_000)
    start = perf_counter()
    for _ in range(100):
        step(scheduler)
    us_per_step = 1e6 * (perf_counter() - start) / 100
    # Built-in functions count for whoever calls them.
    profile = Profile(builtins=False)
    profile.runcall(lambda: [step(scheduler) for _ in range(100)])

    times: Counter[str] = Counter()
    for (filename, *_), (_, _, own_time, *_) in Stats(profile).stats.items():
        path = Path(filename)
        if path.parent.name in ("mem_cache", "scheduling"):
            times[f"{path.parent.name}/{path.stem}"] += own_time
    with capsys.disabled():
        print(f"\n{us_per_step:.0f} us a step of {NUM_RUNNING} decodes")
        for module, seconds in times.most_common(12):
            share = seconds / times.total()
            print(f"{share * us_per_step:6.0f} us {share:6.1%}  {module}")

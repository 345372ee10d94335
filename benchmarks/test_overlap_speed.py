"""What a step takes, when the next one is scheduled while a device computes.

256 requests decode, page size 16. The device is a sleep of 5 ms, which leaves the host
to whoever needs it, as a GPU does.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import sleep

import numpy as np
import pytest
from numpy.typing import NDArray
from pytest_benchmark.fixture import BenchmarkFixture

from radixkv.mem_cache import MemoryManager, RadixCache
from radixkv.scheduling import (
    Batch,
    Engine,
    Request,
    SamplingParams,
    Scheduler,
    SchedulerLimits,
)

NUM_RUNNING = 256
NUM_STEPS = 200


class Device:
    """Takes its time, and says 7."""

    def run(self, batch: Batch) -> NDArray[np.int32]:
        """Wait, and sample."""
        sleep(0.005)
        return np.full(batch.num_samples, 7, np.int32)


@pytest.fixture(params=[False, True], ids=["in turns", "overlap"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    memory = MemoryManager(12_000, 16, max_num_requests=512, max_context_len=1024)
    scheduler = Scheduler(
        RadixCache(memory),
        SchedulerLimits(max_running_requests=NUM_RUNNING),
        overlap=request.param,
    )
    for i in range(NUM_RUNNING):
        params = SamplingParams(max_new_tokens=2 * NUM_STEPS)
        scheduler.add_request(Request(i, np.arange(100) + 100 * i, params))
    with Engine(scheduler, Device()) as engine:
        for _ in range(8):  # prompts
            engine.step()
        yield engine


def test_step_of_256_decodes_on_a_device(
    benchmark: BenchmarkFixture, engine: Engine
) -> None:
    benchmark.pedantic(engine.step, rounds=NUM_STEPS)

    assert engine.scheduler.num_running == NUM_RUNNING

"""What scheduling costs: the order of a thousand requests that wait.

Fixed seeds, page size 16. Nothing here is asserted on time.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from pytest_benchmark.fixture import BenchmarkFixture

from radixkv.mem_cache import MemoryManager, RadixCache
from radixkv.scheduling import SCHEDULING_POLICIES, Request, SamplingParams
from radixkv.scheduling.scheduling_policies import order_of
from radixkv.scheduling.waiting_queue import WaitingQueue

PAGE_SIZE = 16
NUM_WAITING = 1000
NUM_SYSTEM_PROMPTS = 20


def random_tokens(count: int, seed: int) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, 128_000, count, dtype=np.int32)


def serve(cache: RadixCache, tokens: NDArray[np.int32]) -> None:
    """Take a prompt through the cache."""
    request = cache.admit(tokens)
    assert request is not None
    cache.alloc_for_extend([request], [len(tokens)])
    cache.commit(request, len(tokens))
    cache.cache_finished_req(request, tokens)


def make_queue(cache: RadixCache, num_tokens: int) -> WaitingQueue:
    """Queue prompts with one of twenty system prompts as their first half.

    A tenth of them has been there before: half of the rest is cached as well.
    """
    queue = WaitingQueue(cache, max_overtakes=256)
    half = num_tokens // 2
    for number in range(NUM_WAITING):
        system = random_tokens(half, number % NUM_SYSTEM_PROMPTS)
        prompt = np.concatenate([system, random_tokens(half, 1000 + number)])
        if number < NUM_SYSTEM_PROMPTS:
            serve(cache, system)
        if number % 10 == 0:
            serve(cache, prompt[: half + half // 2])
        request = Request(number, prompt, SamplingParams(1 + number % 7))
        request.arrival = number
        queue.add(request)
    return queue


@pytest.mark.parametrize("changes", [False, True], ids=["unchanged", "changed"])
@pytest.mark.parametrize("num_tokens", [2_000, 14_000])
@pytest.mark.parametrize("policy", SCHEDULING_POLICIES)
def test_order_of_1000_waiting_requests(
    benchmark: BenchmarkFixture, policy: str, num_tokens: int, changes: bool
) -> None:
    """The cache has published a page since the last step, or it is as it was."""
    num_pages = NUM_WAITING * num_tokens // PAGE_SIZE // 4
    cache = RadixCache(
        MemoryManager(
            num_pages, PAGE_SIZE, max_num_requests=1, max_context_len=num_tokens
        )
    )
    queue = make_queue(cache, num_tokens)
    chosen = SCHEDULING_POLICIES[policy]()
    order_of(chosen, queue)
    seeds = iter(range(10_000, 20_000))

    def change() -> None:
        if changes:
            serve(cache, random_tokens(PAGE_SIZE, next(seeds)))

    order = benchmark.pedantic(
        order_of, (chosen, queue), setup=change, rounds=50, warmup_rounds=2
    )

    assert len(order) == NUM_WAITING

"""What cache management costs: a request, a decode step, a long prompt, an eviction.

Fixed seeds, page size 16. Nothing here is asserted on time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from pytest_benchmark.fixture import BenchmarkFixture

from radixkv.mem_cache import MemoryManager, RadixCache, RadixKey, RequestKV
from radixkv.mem_cache.tokens import Tokens

PAGE_SIZE = 16


def make_cache(num_pages: int, *, max_context_len: int = 16_384) -> RadixCache:
    return RadixCache(
        MemoryManager(
            num_pages, PAGE_SIZE, max_num_requests=256, max_context_len=max_context_len
        )
    )


def random_tokens(count: int, seed: int) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, 128_000, count, dtype=np.int32)


def prefill(cache: RadixCache, prompt: Tokens | RadixKey) -> RequestKV:
    request = cache.admit(prompt)
    assert request is not None
    cache.alloc_for_extend([request], [len(prompt)])
    cache.commit(request, len(prompt))
    cache.cache_unfinished_req(request, prompt)
    return request


def run(cache: RadixCache, prompt: NDArray[np.int32], full: NDArray[np.int32]) -> None:
    request = prefill(cache, prompt)
    cache.alloc_for_decode([request], len(full) - len(prompt))
    cache.commit(request, len(full))
    cache.cache_finished_req(request, full)


def test_match_of_a_long_cached_prompt(benchmark: BenchmarkFixture) -> None:
    cache = make_cache(2000)
    prompt = random_tokens(14_000, 0)
    run(cache, prompt[:13_999], prompt)

    assert benchmark(cache.match_prefix, prompt) == 14_000


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("spelling", ["array", "list", "list in a key"])
def test_a_long_new_prompt(
    benchmark: BenchmarkFixture, spelling: str, page_size: int
) -> None:
    """A tokenizer returns a list, which is read in each call, or once for its key."""
    memory = MemoryManager(
        60_000 // page_size, page_size, max_num_requests=4, max_context_len=16_384
    )
    cache = RadixCache(memory)
    seeds = iter(range(100))

    def request() -> tuple[tuple[RadixCache, Any], dict[str, Any]]:
        prompt = random_tokens(14_200, next(seeds))
        return (cache, prompt if spelling == "array" else prompt.tolist()), {}

    run = run_key if spelling == "list in a key" else run_prompt
    benchmark.pedantic(run, setup=request, rounds=100)


def run_prompt(cache: RadixCache, prompt: Tokens | RadixKey) -> None:
    """Make the calls of a request, as a scheduler that asks before it admits."""
    cache.match_prefix(prompt)
    cache.admission_obstacle(prompt, len(prompt))
    cache.cache_finished_req(prefill(cache, prompt), prompt)


def run_key(cache: RadixCache, prompt: Tokens) -> None:
    run_prompt(cache, RadixKey(prompt))


def test_decode_step_of_256_requests(benchmark: BenchmarkFixture) -> None:
    cache = make_cache(8000)
    requests = [prefill(cache, random_tokens(200, seed)) for seed in range(256)]

    def step() -> None:
        cache.alloc_for_decode(requests)
        for request in requests:
            cache.commit(request, request.committed_len + 1)

    benchmark.pedantic(step, rounds=200)


@pytest.mark.parametrize("num_leaves", [1_000, 10_000, 100_000, 1_000_000])
def test_request_among_many_leaves(
    benchmark: BenchmarkFixture, num_leaves: int
) -> None:
    """A request of one page evicts one, whatever the number of leaves."""
    cache = make_cache(num_leaves, max_context_len=64)
    prompts = iter(leaves(num_leaves + 500))
    for _ in range(num_leaves):
        run_one_page(cache, next(prompts))

    benchmark.pedantic(
        run_one_page, setup=lambda: ((cache, next(prompts)), {}), rounds=500
    )


def leaves(count: int) -> NDArray[np.int32]:
    """Prompts of one page each, no two of which begin alike."""
    tokens = np.zeros((count, PAGE_SIZE), np.int32)
    tokens[:, 0] = np.arange(count)
    return tokens


def run_one_page(cache: RadixCache, prompt: NDArray[np.int32]) -> None:
    cache.cache_finished_req(prefill(cache, prompt), prompt)

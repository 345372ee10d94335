"""How long the longest request waits among many leaves; run with `-s` to see it.

Python's cyclic collector walks all that it tracks, now and then, in the middle of some
request. It runs here at its defaults, and then not at all: that is the floor. Times
are those of the thread on a processor, so that other programs do not count.
"""

from __future__ import annotations

import gc
from time import thread_time_ns

import numpy as np
import pytest

from .test_cache_speed import leaves, make_cache, run_one_page

NUM_REQUESTS = 200_000


@pytest.mark.parametrize("num_leaves", [100_000, 1_000_000])
def test_the_longest_request_among_many_leaves(num_leaves: int) -> None:
    """A request of one page evicts one; nothing is asserted on time."""
    cache = make_cache(num_leaves, max_context_len=64)
    prompts = iter(leaves(num_leaves + 2 * NUM_REQUESTS))
    for _ in range(num_leaves):
        run_one_page(cache, next(prompts))

    for collects in (True, False):
        times = np.zeros(NUM_REQUESTS, np.int64)
        if not collects:
            gc.disable()
        try:
            for i in range(NUM_REQUESTS):
                prompt = next(prompts)
                start = thread_time_ns()
                run_one_page(cache, prompt)
                times[i] = thread_time_ns() - start
        finally:
            gc.enable()
        p50, p999, longest = np.quantile(times, [0.5, 0.999, 1]) / 1000
        print(
            f"\n{num_leaves} leaves, collector {'on' if collects else 'off'}: "
            f"p50 {p50:.1f} us, p99.9 {p999:.1f} us, longest {longest / 1000:.1f} ms",
            end="",
        )

"""Runs a workload through a cache as a scheduler would, and times the cache alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from time import perf_counter

from radixkv.mem_cache import MemoryManager, RadixCache, RadixKey, RequestKV

from .workloads import Tokens, Workload

WINDOW = 32
"""Requests that run at a time."""


class CacheClock:
    """A clock that runs while the cache works, so that making tokens costs nothing."""

    def __init__(self) -> None:
        """Start at 0."""
        self.seconds = 0.0

    def __call__(self) -> float:
        """Tell the time, in seconds."""
        return self.seconds


def make_cache(
    workload: Workload, page_size: int, *, explain: bool = True
) -> RadixCache:
    """Make a cache whose pool holds a fifth of the workload's distinct tokens."""
    room = max(0.2 * workload.num_unique_tokens, 2 * workload.max_len)
    memory = MemoryManager(
        int(room) // page_size,
        page_size,
        max_num_requests=WINDOW,
        max_context_len=workload.max_len,
    )
    return RadixCache(memory, explain=explain)


def replay(workload: Workload, cache: RadixCache, clock: CacheClock) -> Iterator[None]:
    """Run the requests, at most `WINDOW` at a time; the oldest finishes first.

    Yields:
        Nothing, after each request that was prefilled.
    """
    running: deque[tuple[RequestKV, RadixKey, Tokens]] = deque()
    num_waiting_tokens = 0  # what the running requests will still decode, rounded up

    for prompt, output in workload.make():
        needed = len(prompt) + len(output) + 2 * cache.page_size
        while len(running) == WINDOW or (
            running
            and cache.available_size + cache.evictable_size - num_waiting_tokens
            < needed
        ):
            request, key, answer = running.popleft()
            num_waiting_tokens -= len(answer) + cache.page_size
            start = perf_counter()
            key.extend(answer)
            cache.alloc_for_decode([request], len(answer))
            cache.commit(request, len(key))
            cache.cache_finished_req(request, key)
            clock.seconds += perf_counter() - start
        start = perf_counter()
        key = RadixKey(prompt)
        admitted = cache.admit(key)
        assert admitted is not None
        cache.alloc_for_extend([admitted], [len(prompt)])
        cache.commit(admitted, len(prompt))
        cache.cache_unfinished_req(admitted, key)
        clock.seconds += perf_counter() - start
        running.append((admitted, key, output))
        num_waiting_tokens += len(output) + cache.page_size
        yield

"""How many bytes of bookkeeping a cached token costs; run with `-s` to see them."""

from __future__ import annotations

import tracemalloc

import pytest

from .replay import CacheClock, make_cache, replay
from .workloads import few_shot


@pytest.mark.parametrize("explain", [True, False])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_bookkeeping_of_a_cached_token(page_size: int, explain: bool) -> None:
    """Everything counts: tree, allocator, request table, ghosts, running requests."""
    workload = few_shot()
    tracemalloc.start()
    cache = make_cache(workload, page_size, explain=explain)
    for _ in replay(workload, cache, CacheClock()):
        pass
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    num_tokens = cache.evictable_size + cache.protected_size

    bytes_per_token = num_bytes / num_tokens
    print(
        f"\npage size {page_size}, explain={explain}: {bytes_per_token:.1f} bytes a "
        f"cached token ({num_tokens} tokens)"
    )

"""Caches of every kind, with an oracle beside them."""

from __future__ import annotations

from radixkv.mem_cache import (
    LRU,
    ChunkCache,
    MemoryManager,
    PrefixCache,
    RadixCache,
    TokenToKVPoolAllocator,
)
from radixkv.mem_cache.testing import CacheOracle, CheckedCache

MAX_NUM_PAGES = 16


def make_cache(
    policy: str,
    num_pages: int,
    page_size: int,
    num_rows: int,
    max_len: int,
    *,
    partial_pages: bool = False,
) -> PrefixCache:
    """A cache with a policy by its name; "none" caches nothing."""
    memory = MemoryManager(
        num_pages, page_size, max_num_requests=num_rows, max_context_len=max_len
    )
    if policy == "none":
        return ChunkCache(memory)
    by_name = LRU() if policy == "keyed lru" else policy
    return RadixCache(memory, by_name, partial_pages=partial_pages)


def make_checked(
    policy: str,
    num_pages: int,
    page_size: int,
    num_rows: int,
    max_len: int,
    *,
    partial_pages: bool = False,
) -> CheckedCache:
    """Such a cache with its oracle."""
    cache = make_cache(
        policy, num_pages, page_size, num_rows, max_len, partial_pages=partial_pages
    )
    oracle = CacheOracle(
        num_pages, page_size, num_rows, policy, partial_pages=partial_pages
    )
    return CheckedCache(cache, oracle, max_num_pages=MAX_NUM_PAGES)


def free_order(allocator: TokenToKVPoolAllocator) -> list[int]:
    """The pages that would be handed out next; leaves the stack as it was."""
    pages: list[int] = []
    while (page := allocator.alloc(1)) is not None:
        pages += page.tolist()
    for taken in reversed(pages):
        allocator.free([taken])
    return pages

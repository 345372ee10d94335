"""Short ways to drive a cache, for tests that need it in a certain state."""

from __future__ import annotations

import ast
from collections.abc import Hashable
from pathlib import Path
from typing import Any, TypeAlias

import radixkv
from radixkv.mem_cache import (
    ChunkCache,
    EvictionPolicy,
    KVCacheInfo,
    MemoryManager,
    PrefixCache,
    RadixCache,
    RequestKV,
    TokenToKVPoolAllocator,
)

Wrong: TypeAlias = Any
"""An argument that no type checker would let through."""


def make_memory(
    num_pages: int = 16,
    page_size: int = 4,
    *,
    max_num_requests: int = 8,
    max_context_len: int = 64,
) -> MemoryManager:
    return MemoryManager(
        num_pages,
        page_size,
        max_num_requests=max_num_requests,
        max_context_len=max_context_len,
    )


def make_cache(
    num_pages: int = 16,
    page_size: int = 4,
    *,
    policy: str | EvictionPolicy = "lru",
    max_num_requests: int = 8,
    max_context_len: int = 64,
) -> RadixCache:
    memory = make_memory(
        num_pages,
        page_size,
        max_num_requests=max_num_requests,
        max_context_len=max_context_len,
    )
    return RadixCache(memory, policy)


def make_chunk_cache(num_pages: int = 16, page_size: int = 4) -> ChunkCache:
    return ChunkCache(make_memory(num_pages, page_size))


def span(first: int, last: int) -> list[int]:
    """The tokens `first`..`last`, both included."""
    return list(range(first, last + 1))


def admit(
    cache: PrefixCache,
    tokens: list[int],
    namespace: Hashable = None,
    priority: int = 0,
) -> RequestKV:
    """Admit a request; there must be a row."""
    request = cache.admit(tokens, namespace=namespace, priority=priority)
    assert request is not None
    return request


def compute(cache: PrefixCache, request: RequestKV, new_len: int) -> KVCacheInfo:
    """Extend a request to `new_len` and commit it."""
    info = cache.alloc_for_extend([request], [new_len])
    cache.commit(request, new_len)
    return info


def decode(cache: PrefixCache, request: RequestKV) -> KVCacheInfo:
    """Decode one token of a request."""
    info = cache.alloc_for_decode([request])
    cache.commit(request, request.committed_len + 1)
    return info


def run(
    cache: PrefixCache,
    tokens: list[int],
    namespace: Hashable = None,
    priority: int = 0,
) -> RequestKV:
    """Admit a request and compute its whole prompt."""
    request = admit(cache, tokens, namespace, priority)
    compute(cache, request, len(tokens))
    return request


def insert(
    cache: PrefixCache,
    tokens: list[int],
    namespace: Hashable = None,
    priority: int = 0,
) -> None:
    """Take a prompt through the cache, so that its whole pages are cached."""
    request = run(cache, tokens, namespace, priority)
    cache.cache_finished_req(request, tokens)


def law(cache: PrefixCache) -> tuple[int, int, int, int]:
    """Free, evictable, protected and held tokens, after a check of everything."""
    cache.check_integrity()
    sizes = (
        cache.available_size,
        cache.evictable_size,
        cache.protected_size,
        cache.held_size,
    )
    assert sum(sizes) == cache.total_size
    return sizes


def free_order(allocator: TokenToKVPoolAllocator) -> list[int]:
    """The pages that would be handed out next; leaves the stack as it was."""
    pages: list[int] = []
    while (page := allocator.alloc(1)) is not None:
        pages += page.tolist()
    for taken in reversed(pages):
        allocator.free([taken])
    return pages


def docstring_of(kind: type, method: str) -> str:
    """Read the docstring of a method in the source, as compiled ones have none."""
    file = Path(radixkv.__file__).parent.parent.joinpath(*kind.__module__.split("."))
    for node in ast.walk(ast.parse(file.with_suffix(".py").read_text())):
        if isinstance(node, ast.ClassDef) and node.name == kind.__name__:
            for part in node.body:
                if isinstance(part, ast.FunctionDef) and part.name == method:
                    return ast.get_docstring(part) or ""
    raise LookupError(f"{kind.__name__} defines no {method}")

"""The memory manager: it holds the parts together and has no state of pages."""

from __future__ import annotations

from typing import Any, cast

import pytest

from radixkv.mem_cache import (
    ChunkCache,
    ConfigError,
    MemoryManager,
    PagesInUseError,
    RadixCache,
)

from .driver import Wrong, make_memory


class FakePool:
    """Stands for a KV pool: remembers its size."""

    def __init__(self, num_pages: int, page_size: int = 2) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.calls: list[int] = []

    def resize(self, num_pages: int) -> None:
        self.calls.append(num_pages)
        self.num_pages = num_pages


class FullPool(FakePool):
    """A pool on a device without memory left."""

    def resize(self, num_pages: int) -> None:
        raise MemoryError(f"no room for {num_pages} pages")


def make(pool: FakePool) -> MemoryManager:
    return MemoryManager(
        4, 2, max_num_requests=1, max_context_len=8, kv_pool=cast("Any", pool)
    )


def test_a_resize_keeps_a_pool_in_step() -> None:
    pool = FakePool(4)
    memory = make(pool)
    memory.resize(7)
    memory.resize(2)

    assert memory.num_pages == pool.num_pages == 2
    assert [7, 2] == pool.calls


def test_a_resize_to_the_same_size_changes_nothing() -> None:
    memory = make(FakePool(4))
    memory.resize(4)

    assert memory.num_pages == 4


def test_a_refused_shrink_does_not_touch_the_pool() -> None:
    pool = FakePool(4)
    memory = make(pool)
    memory.allocator.alloc(4)

    with pytest.raises(PagesInUseError):
        memory.resize(3)

    assert [] == pool.calls
    assert memory.num_pages == 4


@pytest.mark.parametrize("num_pages", [2, 8])
def test_a_pool_that_cannot_be_resized_keeps_every_page_that_is_handed_out(
    num_pages: int,
) -> None:
    pool = FullPool(4)
    memory = make(pool)

    with pytest.raises(MemoryError):
        memory.resize(num_pages)

    assert memory.num_pages <= pool.num_pages


@pytest.mark.parametrize(
    "name", ["num_pages", "page_size", "max_num_requests", "max_context_len"]
)
@pytest.mark.parametrize("size", [0, -1, 2**31, 1.5, "x", None])
def test_sizes_out_of_range_are_refused_by_name(name: str, size: Wrong) -> None:
    sizes: dict[str, Wrong] = {"num_pages": 4, "page_size": 2}
    sizes |= {"max_num_requests": 1, "max_context_len": 8, name: size}

    with pytest.raises(ConfigError, match=rf"{name} must be .*, got"):
        MemoryManager(**sizes)


def test_two_caches_cannot_share_one_memory() -> None:
    memory = make_memory()
    RadixCache(memory)

    with pytest.raises(ConfigError, match="one cache"):
        ChunkCache(memory)


def test_a_refused_cache_leaves_the_memory_to_the_next_one() -> None:
    memory = make_memory()
    with pytest.raises(ConfigError, match=r"lru, .*, priority, got 'best'"):
        RadixCache(memory, "best")

    RadixCache(memory).check_integrity()


@pytest.mark.parametrize(
    "pool", [FakePool(3, 2), FakePool(4, 16)], ids=["pages", "slots"]
)
def test_a_pool_of_other_sizes_is_refused(pool: FakePool) -> None:
    with pytest.raises(ConfigError, match="kv_pool"):
        make(pool)

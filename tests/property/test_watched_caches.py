"""A cache that is watched does what any other does, and its counters keep up."""

from __future__ import annotations

from hypothesis import settings
from hypothesis.stateful import invariant

from radixkv.mem_cache import (
    ChunkCache,
    MemoryManager,
    PrefixCache,
    RadixCache,
    SharedCounters,
)
from radixkv.mem_cache.testing import CacheMachine, CacheOracle


class WatchedMachine(CacheMachine):
    """Debug mode finds no fault in a sound cache, whatever is asked and refused."""

    counters: SharedCounters | None = None

    def make_cache(self, memory: MemoryManager) -> PrefixCache:
        self.counters = SharedCounters.create()
        return RadixCache(memory, debug=True, counters=self.counters)

    @invariant()
    def s4_12_the_counters_equal_the_cache(self) -> None:
        assert self.counters is not None
        values = self.counters.read()
        shared = (
            values.available_size,
            values.evictable_size,
            values.protected_size,
            values.held_size,
            values.total_size,
        )

        assert self.checked.sizes() == shared

    def teardown(self) -> None:
        if self.counters is not None:
            self.counters.close()
            self.counters.unlink()


class WatchedChunkMachine(WatchedMachine):
    def make_cache(self, memory: MemoryManager) -> PrefixCache:
        self.counters = SharedCounters.create()
        return ChunkCache(memory, debug=True, counters=self.counters)

    def make_oracle(self, num_pages: int, page_size: int, num_rows: int) -> CacheOracle:
        return CacheOracle(num_pages, page_size, num_rows, "none")


TestWatchedMachine = WatchedMachine.TestCase
TestWatchedMachine.settings = settings(stateful_step_count=25)
TestWatchedChunkMachine = WatchedChunkMachine.TestCase
TestWatchedChunkMachine.settings = settings(stateful_step_count=15)

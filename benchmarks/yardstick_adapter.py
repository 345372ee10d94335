"""RadixKV behind the yardstick's adapter, over its public API only."""

from __future__ import annotations

import numpy as np
from yardstick.adapters import Adapter

from radixkv.mem_cache import MemoryManager, RadixCache, RadixKey, RequestKV


class Handle:
    """One request of the workload."""

    __slots__ = ("key", "kv", "output", "prompt")

    def __init__(self, prompt: np.ndarray, output: np.ndarray) -> None:
        """Keep the tokens."""
        self.prompt = prompt
        self.output = output
        self.key: RadixKey | None = None
        self.kv: RequestKV | None = None


class RadixKV(Adapter):
    """`RadixCache` with everything on that is on by default."""

    name = "radixkv"
    native = "numpy int32; encoding is timed"

    def setup(self) -> None:
        """Make memory and cache."""
        memory = MemoryManager(
            self.capacity // self.page_size,
            self.page_size,
            max_num_requests=self.window + 1,
            max_context_len=self.max_len + self.page_size,
        )
        self.cache = RadixCache(memory)

    def prepare(self, prompt: np.ndarray, output: np.ndarray) -> Handle:
        """Untimed."""
        return Handle(prompt, output)

    def match(self, h: Handle) -> int:
        """Admit: match and lock."""
        h.key = RadixKey(h.prompt)
        h.kv = self.cache.admit(h.key)
        return h.kv.committed_len

    def alloc(self, h: Handle) -> None:
        """Give slots to the rest of the prompt."""
        self.cache.alloc_for_extend([h.kv], [len(h.prompt)])

    def publish(self, h: Handle) -> None:
        """Publish the prefilled prompt."""
        self.cache.commit(h.kv, len(h.prompt))
        self.cache.cache_unfinished_req(h.kv, h.key)

    def decode(self, h: Handle) -> None:
        """Give slots to all output tokens."""
        h.key.extend(h.output)
        self.cache.alloc_for_decode([h.kv], len(h.output))
        self.cache.commit(h.kv, len(h.key))

    def finish(self, h: Handle) -> None:
        """Publish all of it and release."""
        self.cache.cache_finished_req(h.kv, h.key)

    def stats(self) -> dict[str, float]:
        """Report what the table shows."""
        stats = self.cache.stats()
        return {"evicted_tokens": stats.num_evicted_tokens}

    def check(self) -> None:
        """No page may be lost."""
        self.cache.check_integrity()
        assert self.cache.held_size == self.cache.protected_size == 0

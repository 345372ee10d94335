"""The batch in the making."""

from __future__ import annotations

from radixkv.mem_cache import KVCacheInfo, PrefixCache, RequestKV

from .batch import Batch, BatchEntry
from .request import Request


class BatchBuilder:
    """Collects what one step computes, and gives it slots; it dies with its step.

    Attributes:
        entries: What was added so far.
    """

    def __init__(self, cache: PrefixCache) -> None:
        """Start an empty batch on a cache."""
        self._cache = cache
        self._infos: list[KVCacheInfo] = []
        self.entries: list[BatchEntry] = []

    def decode(self, requests: list[Request]) -> None:
        """Add one token of each request, or raise and add nothing."""
        if requests:
            info = self._cache.alloc_for_decode([kv_of(r) for r in requests])
            self._infos.append(info)
            self.entries += [
                BatchEntry(r, r.num_tokens - 1, r.num_tokens) for r in requests
            ]

    def extend(self, request: Request, budget: int) -> int:
        """Add at most `budget` tokens of a request; how many. Or raise and add none."""
        kv = kv_of(request)
        start = kv.committed_len
        stop = min(request.num_tokens, start + budget)
        self._infos.append(self._cache.alloc_for_extend([kv], [stop]))
        self.entries.append(BatchEntry(request, start, stop))
        return stop - start

    def recall(self) -> None:
        """Take note that no worker will hear of the batch."""
        for info in reversed(self._infos):
            self._cache.recall(info)

    def batch(self) -> Batch | None:
        """Return what was added, if anything."""
        if not self.entries:
            return None
        return Batch(tuple(self.entries), KVCacheInfo.merge(self._infos), self._cache)


def kv_of(request: Request) -> RequestKV:
    """Return the part of the cache that a running request holds."""
    assert request.kv is not None
    return request.kv

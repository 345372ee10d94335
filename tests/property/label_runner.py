"""A runner without a model that knows whose K and V every slot holds."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from radixkv.mem_cache import KVCacheInfo, PrefixCache
from radixkv.mem_cache.testing import LabelWorker
from radixkv.scheduling import Batch, BatchEntry, NullRunner, RequestStatus


class LabelRunner:
    """Writes labels where a model would write K and V, and checks what it would read.

    Its page table comes from the messages alone, as on a real worker.
    """

    def __init__(
        self, cache: PrefixCache, vocab_size: int, *, is_late: bool = False
    ) -> None:
        """Make a worker of a cache's size.

        Args:
            cache: Whose messages it gets.
            vocab_size: Tokens that it samples from.
            is_late: Whether a step runs after the next has been scheduled. By then,
                a row may list the tree's copies of its pages, or the places where a
                shrinking pool moves them. The worker uses the old ones once more; the
                next message tells it, and brings the content along.
        """
        self._is_late = is_late
        memory = cache.memory
        self.worker = LabelWorker(
            max_num_pages=memory.num_pages,
            page_size=memory.page_size,
            num_rows=memory.max_num_requests,
            num_columns=-(-memory.max_context_len // memory.page_size),
        )
        self._null = NullRunner(vocab_size)

    def run(self, batch: Batch) -> NDArray[np.int32]:
        """Check that each position attends to its own prefix, before and after."""
        info = self.worker.receive(batch.kv_cache_info)
        rows = info.rows.tolist()
        pairs = list(zip(batch.entries, rows, strict=True))
        # Who ended meanwhile may depend on a step that failed, as who waits again does.
        alive = [
            (entry, row)
            for entry, row in pairs
            if entry.request.status is RequestStatus.RUNNING
        ]
        for entry, row in alive:
            # What another request of this step computes is not there yet.
            self._check(entry, row, entry.start)
        for entry, row in pairs:
            self.worker.compute(row, entry.start, entry.stop, self._labels(entry))
        for entry, row in alive:
            self._check(entry, row, entry.stop)
        self._check_slots(batch, info)
        return self._null.run(batch)

    def _labels(self, entry: BatchEntry) -> list[int]:
        tokens = entry.tokens.tolist()
        return self.worker.labels_of(entry.request.namespace, tokens)

    def _check(self, entry: BatchEntry, row: int, stop: int) -> None:
        slots = self.worker.slots(row, 0, stop)

        assert self._labels(entry)[:stop] == self.worker.labels[slots].tolist()

    def _check_slots(self, batch: Batch, info: KVCacheInfo) -> None:
        """The engine's own view of the slots is the worker's."""
        if self._is_late:
            return
        for entry, row in zip(batch.entries, info.rows.tolist(), strict=True):
            kv = entry.request.kv
            assert kv is not None
            assert kv.req_pool_idx == row
            slots = self.worker.slots(row, 0, entry.stop)
            assert slots.tolist() == batch.cache.slots(kv, 0, entry.stop).tolist()
        written = [
            slot
            for entry, row in zip(batch.entries, info.rows.tolist(), strict=True)
            for slot in self.worker.slots(row, entry.start, entry.stop).tolist()
        ]
        assert written == batch.out_cache_loc().tolist()
        assert len(written) == len(set(written))

"""A worker without a model: a page table in numpy, and a label in every slot.

The label of a position stands for its K and V: it names the namespace and all tokens
up to that position, so a slot that holds another request's KV is seen at once.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from radixkv.mem_cache import KVCacheInfo


class LabelWorker:
    """Applies the messages of one cache in order, and writes labels."""

    def __init__(
        self, *, max_num_pages: int, page_size: int, num_rows: int, num_columns: int
    ) -> None:
        self.page_size = page_size
        self.table = np.zeros((num_rows + 1, num_columns), dtype=np.int32)
        self.labels = np.zeros((max_num_pages + 1) * page_size, dtype=np.int64)
        self._ids: dict[tuple[Hashable, int | None], int] = {}

    def labels_of(self, namespace: Hashable, tokens: Sequence[int]) -> list[int]:
        """Number every prefix: equal numbers, equal prefixes."""
        labels = []
        label = self._ids.setdefault((("root", namespace), None), len(self._ids) + 1)
        for token in tokens:
            label = self._ids.setdefault((label, token), len(self._ids) + 1)
            labels.append(label)
        return labels

    def receive(self, info: KVCacheInfo) -> KVCacheInfo:
        """Decode a message from its wire form and apply it."""
        wire = msgspec.msgpack.encode(info)
        info = msgspec.msgpack.decode(wire, type=KVCacheInfo)
        self.labels = self.labels_after(info.copies)
        self.table[info.forgotten_rows] = 0
        bounds = info.page_indptr.tolist()
        for i, row in enumerate(info.rows.tolist()):
            pages = info.new_pages[bounds[i] : bounds[i + 1]]
            column = int(info.page_starts[i])
            self.table[row, column : column + len(pages)] = pages
        return info

    def labels_after(self, copies: dict[int, int]) -> NDArray[np.int64]:
        """What the slots hold when these copies, source by target, are made."""
        before = self.labels.reshape(-1, self.page_size)
        after = before.copy()
        for target, source in copies.items():
            after[target] = before[source]
        return after.reshape(-1)

    def slots(self, row: int, start: int, stop: int) -> NDArray[np.int64]:
        positions = np.arange(start, stop)
        pages = self.table[row, positions // self.page_size].astype(np.int64)
        return pages * self.page_size + positions % self.page_size

    def compute(self, row: int, start: int, stop: int, labels: list[int]) -> None:
        """Write the labels of the positions ``[start, stop)`` to their slots."""
        self.labels[self.slots(row, start, stop)] = labels[start:stop]

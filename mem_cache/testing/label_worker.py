"""A worker without a model: a page table in numpy, and a label in every slot."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..kv_cache_info import KVCacheInfo


class LabelWorker:
    """Applies the messages of one cache in order, and writes labels for K and V.

    The label of a position names the namespace and all tokens up to that position. So a
    slot that holds another prefix than it should is seen at once, whoever wrote it.

    Attributes:
        page_size: Slots a page.
        table: Page ids by row and column, int32 `[num_rows + 1, num_columns]`.
        labels: The label in every slot, int64 `[(max_num_pages + 1) * page_size]`.

    Example:
        >>> from radixkv.mem_cache import MemoryManager, RadixCache
        >>> memory = MemoryManager(8, 4, max_num_requests=2, max_context_len=32)
        >>> cache = RadixCache(memory)
        >>> worker = LabelWorker(
        ...     max_num_pages=8, page_size=4, num_rows=2, num_columns=8
        ... )
        >>> prompt = [5, 6, 7]
        >>> request = cache.admit(prompt)
        >>> info = worker.receive(cache.alloc_for_extend([request], [3]))
        >>> labels = worker.labels_of(None, prompt)
        >>> worker.compute(request.req_pool_idx, 0, 3, labels)
        >>> worker.labels[cache.slots(request)].tolist() == labels
        True
    """

    def __init__(
        self, *, max_num_pages: int, page_size: int, num_rows: int, num_columns: int
    ) -> None:
        """Make a worker that knows of no request.

        Args:
            max_num_pages: Highest page id that will ever be used.
            page_size: Slots a page.
            num_rows: Rows of the request table, the padding row not counted.
            num_columns: Most pages of a request.
        """
        self.page_size = page_size
        self.table = np.zeros((num_rows + 1, num_columns), dtype=np.int32)
        self.labels = np.zeros((max_num_pages + 1) * page_size, dtype=np.int64)
        self._ids: dict[tuple[object, int | None], int] = {}

    def labels_of(self, namespace: Hashable, tokens: Sequence[int]) -> list[int]:
        """Return the label of each position: equal labels, equal prefixes.

        Args:
            namespace: Whose they are.
            tokens: All tokens from the first one on.
        """
        labels: list[int] = []
        label = self._label(("root", namespace), None)
        for token in tokens:
            label = self._label(label, token)
            labels.append(label)
        return labels

    def receive(self, info: KVCacheInfo) -> KVCacheInfo:
        """Take a message in its wire form, make its copies, and apply it.

        Args:
            info: The next message of the cache.

        Returns:
            The message as it was decoded.
        """
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

    def labels_after(self, copies: Mapping[int, int]) -> NDArray[np.int64]:
        """Return what the slots hold once pages are copied, all at a time.

        Args:
            copies: Source page by target page.
        """
        before = self.labels.reshape(-1, self.page_size)
        after = before.copy()
        for target, source in copies.items():
            after[target] = before[source]
        return after.reshape(-1)

    def slots(self, row: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return the slots of the positions ``[start, stop)`` by the worker's table.

        Args:
            row: The request's row.
            start: First position.
            stop: End of the positions.
        """
        positions = np.arange(start, stop)
        pages = self.table[row, positions // self.page_size].astype(np.int64)
        slots: NDArray[np.int64] = pages * self.page_size + positions % self.page_size
        return slots

    def compute(self, row: int, start: int, stop: int, labels: Sequence[int]) -> None:
        """Write the labels of the positions ``[start, stop)`` to their slots.

        Args:
            row: The request's row.
            start: First position.
            stop: End of the positions.
            labels: The label of each position from 0 on.
        """
        self.labels[self.slots(row, start, stop)] = labels[start:stop]

    def _label(self, before: object, token: int | None) -> int:
        return self._ids.setdefault((before, token), len(self._ids) + 1)

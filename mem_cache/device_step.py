"""The numbers of a step on a worker's device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from radixkv.kernels import (
    KVIndices,
    block_table,
    kv_indices,
    last_loc,
    slot_mapping_decode,
    slot_mapping_extend,
)
from radixkv.kernels.backend import Backend
from radixkv.kernels.checks import check_count

from .errors import LengthError
from .kv_cache_info import KVCacheInfo


@dataclass(frozen=True, slots=True, eq=False)
class DeviceStep:
    """A step as the kernels take it: its numbers are on the device, in one upload.

    Each method is one launch. None waits for the device: how large a result is, the
    host knows from the message.

    Attributes:
        info: The message.
        page_table: Page ids after the message, int32
            `[max_num_requests + 1, max_pages_per_request]`.
        rows: Row of each request, int32 `[num_reqs]`.
        starts: First position to compute, int32 `[num_reqs]`.
        stops: End of the positions to compute, int32 `[num_reqs]`.
        backend: Which implementation of the ops; see `pick_backend`.
        extra: What went up with the message, int32 `[n]`; see `PageTable.apply`.
    """

    info: KVCacheInfo
    page_table: torch.Tensor
    rows: torch.Tensor
    starts: torch.Tensor
    stops: torch.Tensor
    backend: Backend
    extra: torch.Tensor

    def slot_mapping(self, *, page_size: int) -> torch.Tensor:
        """Return the slots of the step's tokens, `out_cache_loc`, int64 `[num_tokens]`.

        Args:
            page_size: Slots a page.

        Raises:
            ConfigError: The size is out of range.
            LengthError: A request is longer than the table has room for.
        """
        self._longest(page_size)
        info = self.info
        lengths = info.stops - info.starts
        # A decode step, with or without drafts, is less work.
        if info.num_reqs > 0 and (lengths == lengths[0]).all():
            return slot_mapping_decode(
                self.page_table,
                self.rows,
                self.starts,
                page_size=page_size,
                num_tokens=int(lengths[0]),
                backend=self.backend,
            )
        return slot_mapping_extend(
            self.page_table,
            self.rows,
            self.starts,
            self.stops,
            page_size=page_size,
            num_tokens=info.num_tokens,
            backend=self.backend,
        )

    def last_loc(self, *, page_size: int) -> torch.Tensor:
        """Return the slot before the first one to compute, int64 `[num_reqs]`, or -1.

        Args:
            page_size: Slots a page.

        Raises:
            ConfigError: The size is out of range.
            LengthError: A request is longer than the table has room for.
        """
        self._longest(page_size)
        return last_loc(
            self.page_table,
            self.rows,
            self.starts,
            page_size=page_size,
            backend=self.backend,
        )

    def kv_indices(self, *, page_size: int) -> KVIndices:
        """Return the pages of each request, as FlashInfer takes them.

        Args:
            page_size: Slots a page.

        Raises:
            ConfigError: The size is out of range.
            LengthError: A request is longer than the table has room for.
        """
        self._longest(page_size)
        return kv_indices(
            self.page_table,
            self.rows,
            self.stops,
            page_size=page_size,
            num_pages=int((-(-self.info.stops // page_size)).sum()),
            backend=self.backend,
        )

    def block_table(self, *, page_size: int) -> torch.Tensor:
        """Return the pages of each request, as FlashAttention takes them.

        Args:
            page_size: Slots a page.

        Returns:
            int32 `[num_reqs, pages of the longest request]`, 0 where there is none.

        Raises:
            ConfigError: The size is out of range.
            LengthError: A request is longer than the table has room for.
        """
        longest = self._longest(page_size)
        return block_table(
            self.page_table,
            self.rows,
            self.stops,
            page_size=page_size,
            width=-(-longest // page_size),
            backend=self.backend,
        )

    def _longest(self, page_size: int) -> int:
        """Return the length of the longest request, or refuse what has no room."""
        check_count("page_size", page_size, minimum=1)
        longest = int(self.info.stops.max(initial=0))
        room = self.page_table.shape[1] * page_size
        if longest > room:
            raise LengthError(
                f"a request must have <= {room} tokens, for which the page table has "
                f"room, got {longest}"
            )
        return longest

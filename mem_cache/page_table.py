"""The page table: a worker's mirror of the engine's request table."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.kernels import apply_page_table_delta
from radixkv.kernels.backend import Backend
from radixkv.kernels.upload import upload

from .device_step import DeviceStep
from .errors import LengthError, RequestStateError
from .kv_cache_info import KVCacheInfo
from .sizes import as_size


class PageTable:
    """Page ids by request row and column, on the worker's device.

    Column ``c`` of a row is the page of the positions ``[c * page_size, (c + 1) *
    page_size)``. Row 0, the padding row, lists the hold page only.

    Attributes:
        table: Page ids, int32 `[max_num_requests + 1, max_pages_per_request]`.
        backend: Which implementation of the ops; see `pick_backend`.
    """

    def __init__(
        self,
        *,
        max_num_requests: int,
        max_pages_per_request: int,
        device: torch.device | str = "cpu",
        backend: Backend = "auto",
    ) -> None:
        """Make a table that lists the hold page only.

        Args:
            max_num_requests: Rows besides the padding row, at least 1.
            max_pages_per_request: Columns, at least 1.
            device: Where the table lives.
            backend: Which implementation of the ops; see `pick_backend`.

        Raises:
            ConfigError: A number is out of range.
        """
        shape = (
            as_size("max_num_requests", max_num_requests) + 1,
            as_size("max_pages_per_request", max_pages_per_request),
        )
        self.table = torch.zeros(shape, dtype=torch.int32, device=device)
        self.backend: Backend = backend

    def apply(
        self, info: KVCacheInfo, extra: NDArray[np.int32] | None = None
    ) -> DeviceStep:
        """Bring the table up to a step. Each message is applied once, in order.

        The message goes to the device in one copy, and one launch does the rest.

        Args:
            info: The message.
            extra: What else the step needs on the device, such as the tokens to
                compute, int32 `[n]`: it goes up in the same copy.

        Returns:
            The step's numbers on the device, for the kernels that come after.

        Raises:
            LengthError: A request has more pages than the table has columns.
            RequestStateError: A row is outside the table.
        """
        self._check(info)
        extra = np.empty(0, np.int32) if extra is None else extra
        numbers = upload(np.concatenate([info.numbers, extra]), self.table.device)
        parts = torch.split(numbers, [*info.part_lengths, len(extra)])
        rows, starts, stops, page_starts, page_indptr, new_pages, forgotten_rows = (
            parts[:7]
        )
        apply_page_table_delta(
            self.table,
            rows,
            page_starts,
            page_indptr,
            new_pages,
            forgotten_rows,
            backend=self.backend,
        )
        return DeviceStep(
            info, self.table, rows, starts, stops, self.backend, parts[-1]
        )

    def _check(self, info: KVCacheInfo) -> None:
        num_rows, width = self.table.shape
        last_row = np.concatenate([info.rows, info.forgotten_rows]).max(initial=0)
        if last_row >= num_rows:
            raise RequestStateError(f"rows must be < {num_rows}, got {last_row}")
        longest = (info.page_starts + np.diff(info.page_indptr)).max(initial=0)
        if longest > width:
            raise LengthError(f"a request must have <= {width} pages, got {longest}")

"""The page table: a worker's mirror of the engine's request table."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.kernels import apply_page_table_delta, pick_backend
from radixkv.kernels.backend import Backend
from radixkv.kernels.checks import as_device
from radixkv.kernels.upload import upload

from .device_step import DeviceStep
from .errors import ConfigError, ForeignPageError, LengthError, RequestStateError
from .kv_cache_info import KVCacheInfo, check_lengths
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
            BackendUnavailableError: The device is not here, or the backend cannot run
                on it.
            ConfigError: A number is out of range, or there is no such backend or
                device.
        """
        shape = (
            as_size("max_num_requests", max_num_requests) + 1,
            as_size("max_pages_per_request", max_pages_per_request),
        )
        device = as_device(device)
        pick_backend(backend, device)
        self.table = torch.zeros(shape, dtype=torch.int32, device=device)
        self.backend: Backend = backend

    def apply(
        self, info: KVCacheInfo, extra: NDArray[np.int32] | None = None
    ) -> DeviceStep:
        """Bring the table up to a step. Each message is applied once, in order.

        The message goes to the device in one copy, and one launch does the rest. It is
        checked before, on the host; of a request that is longer than its pages, which
        is a question of their size, `DeviceStep` tells.

        Args:
            info: The message.
            extra: What else the step needs on the device, such as the tokens to
                compute, int32 `[n]`: it goes up in the same copy.

        Returns:
            The step's numbers on the device, for the kernels that come after.

        Raises:
            ConfigError: The numbers of the message or of `extra` are no whole message,
                or no int32.
            ForeignPageError: A new page is below 1.
            LengthError: A request has more pages than the table has columns, a
                position is below 0 or after its end, or `page_indptr` does not rise
                from 0 to the number of new pages.
            RequestStateError: A row is outside the table or used twice, or the padding
                row is given pages or forgotten.
        """
        check_lengths(info)
        self._check_pages(info)
        self._check_rows(info)
        extra = np.empty(0, np.int32) if extra is None else extra
        if extra.dtype != np.int32 or extra.ndim != 1:
            raise ConfigError(
                f"extra must be int32 [n], got {extra.dtype} {list(extra.shape)}"
            )
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

    def _check_rows(self, info: KVCacheInfo) -> None:
        last, rows = len(self.table) - 1, info.rows
        for name, numbers, first in (
            ("rows", rows, 0),
            ("forgotten_rows", info.forgotten_rows, 1),
        ):
            if not _is_within(numbers, first, last):
                raise RequestStateError(
                    f"{name} must be in {first}..{last}, got {numbers.tolist()}"
                )
        # Padded requests share the padding row.
        if np.bincount(rows)[1:].max(initial=0) > 1:
            raise RequestStateError(f"rows must be all different, got {rows.tolist()}")
        if np.diff(info.page_indptr)[rows == 0].any():
            raise RequestStateError(
                "row 0, the padding row, must have no pages, got page_indptr "
                f"{info.page_indptr.tolist()} for rows {rows.tolist()}"
            )

    def _check_pages(self, info: KVCacheInfo) -> None:
        width, indptr, new_pages = self.table.shape[1], info.page_indptr, info.new_pages
        counts = np.diff(indptr)
        if indptr[0] != 0 or indptr[-1] != len(new_pages) or counts.min(initial=0) < 0:
            raise LengthError(
                f"page_indptr must rise from 0 to num_new_pages {len(new_pages)}, got "
                f"{indptr.tolist()}"
            )
        if not _is_within(info.page_starts, 0, width):
            raise LengthError(
                f"page_starts must be in 0..{width}, got {info.page_starts.tolist()}"
            )
        longest = (info.page_starts + counts).max(initial=0)
        if longest > width:
            raise LengthError(f"a request must have <= {width} pages, got {longest}")
        if info.starts.min(initial=0) < 0 or (info.starts > info.stops).any():
            raise LengthError(
                f"starts must be >= 0 and <= stops, got {info.starts.tolist()} to "
                f"{info.stops.tolist()}"
            )
        if new_pages.min(initial=1) < 1:
            raise ForeignPageError(f"new pages must be >= 1, got {new_pages.min()}")


def _is_within(numbers: NDArray[np.int32], first: int, last: int) -> bool:
    """Tell whether all numbers are in ``first..last``."""
    lowest, highest = numbers.min(initial=first), numbers.max(initial=first)
    return bool(lowest >= first and highest <= last)

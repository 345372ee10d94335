"""The page table: a worker's mirror of the engine's request table."""

from __future__ import annotations

import numpy as np
import torch

from radixkv.kernels import apply_page_table_delta

from .errors import LengthError, RequestStateError
from .kv_cache_info import KVCacheInfo
from .sizes import as_size


class PageTable:
    """Page ids by request row and column, on the worker's device.

    Column ``c`` of a row is the page of the positions ``[c * page_size, (c + 1) *
    page_size)``. Row 0, the padding row, lists the hold page only.

    Attributes:
        table: Page ids, int32 `[max_num_requests + 1, max_pages_per_request]`.
    """

    def __init__(
        self,
        *,
        max_num_requests: int,
        max_pages_per_request: int,
        device: torch.device | str = "cpu",
    ) -> None:
        """Make a table that lists the hold page only.

        Args:
            max_num_requests: Rows besides the padding row, at least 1.
            max_pages_per_request: Columns, at least 1.
            device: Where the table lives.

        Raises:
            ConfigError: A number is out of range.
        """
        shape = (
            as_size("max_num_requests", max_num_requests) + 1,
            as_size("max_pages_per_request", max_pages_per_request),
        )
        self.table = torch.zeros(shape, dtype=torch.int32, device=device)

    def apply(self, info: KVCacheInfo) -> None:
        """Bring the table up to a step. Each message is applied once, in order.

        Raises:
            LengthError: A request has more pages than the table has columns.
            RequestStateError: A row is outside the table.
        """
        num_rows, width = self.table.shape
        last_row = np.concatenate([info.rows, info.forgotten_rows]).max(initial=0)
        if last_row >= num_rows:
            raise RequestStateError(f"rows must be < {num_rows}, got {last_row}")
        longest = (info.page_starts + np.diff(info.page_indptr)).max(initial=0)
        if longest > width:
            raise LengthError(f"a request must have <= {width} pages, got {longest}")
        apply_page_table_delta(
            self.table,
            torch.tensor(info.rows),
            torch.tensor(info.page_starts),
            torch.tensor(info.page_indptr),
            torch.tensor(info.new_pages, device=self.table.device),
            torch.tensor(info.forgotten_rows),
        )

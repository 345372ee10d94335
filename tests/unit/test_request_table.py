"""The request table: rows come and go, the padding row stays."""

from __future__ import annotations

import numpy as np
import pytest

from radixkv.mem_cache import PADDING_ROW, ConfigError, RequestStateError, RequestTable

from .driver import Wrong


def test_rows_begin_behind_the_padding_row() -> None:
    table = RequestTable(3, 4)

    assert [1, 2, 3] == [table.alloc() for _ in range(3)]
    assert PADDING_ROW == 0


def test_an_empty_table_answers_none() -> None:
    table = RequestTable(1, 4)
    table.alloc()

    assert table.alloc() is None
    assert table.num_free_rows == 0


def test_a_row_that_came_back_can_be_taken_again() -> None:
    table = RequestTable(2, 4)
    table.alloc()
    table.alloc()
    table.free(1)

    assert [1] == table.free_rows()
    assert table.alloc() == 1


def test_free_all_equals_a_fresh_table() -> None:
    table = RequestTable(2, 4)
    row = table.alloc()
    assert row is not None
    table.write(row, 0, np.array([7], np.int32).tobytes())
    table.free_all()

    assert RequestTable(2, 4).free_rows() == table.free_rows()
    assert not table.pages.any()


def test_what_is_written_is_read_back_and_nothing_else_changes() -> None:
    table = RequestTable(3, 4)
    pages = np.array([5, 6], np.int32).tobytes()
    table.write(2, 1, pages)

    assert pages == table.read(2, 1, 3)
    assert [0, 5, 6, 0] == table.pages[2].tolist()
    assert np.count_nonzero(table.pages) == 2


def test_a_whole_row_fits() -> None:
    table = RequestTable(2, 3)
    pages = np.array([1, 2, 3], np.int32).tobytes()
    table.write(2, 0, pages)

    assert pages == table.read(2, 0, 3)


@pytest.mark.parametrize("size", [0, -1, 2.0, None, True])
def test_sizes_out_of_range_are_refused(size: Wrong) -> None:
    with pytest.raises(ConfigError, match="max_num_requests"):
        RequestTable(size, 4)
    with pytest.raises(ConfigError, match="max_pages_per_request"):
        RequestTable(4, size)


def test_sizes_can_be_read() -> None:
    table = RequestTable(3, 4)

    assert (table.max_num_requests, table.pages.shape) == (3, (4, 4))


@pytest.mark.parametrize("row", [0, 1, 3, -1])
def test_a_row_that_is_not_in_use_cannot_be_freed(row: int) -> None:
    table = RequestTable(2, 4)
    assert table.alloc() == 1
    table.free(1)

    with pytest.raises(RequestStateError, match="not in use"):
        table.free(row)
    assert table.num_free_rows == 2

"""The request table: rows come and go, the padding row stays."""

from __future__ import annotations

import pytest

from radixkv.mem_cache import PADDING_ROW, ConfigError, RequestStateError, RequestTable

from .driver import Wrong


def test_rows_begin_behind_the_padding_row() -> None:
    table = RequestTable(3)

    assert [1, 2, 3] == [table.alloc() for _ in range(3)]
    assert PADDING_ROW == 0


def test_an_empty_table_answers_none() -> None:
    table = RequestTable(1)
    table.alloc()

    assert table.alloc() is None
    assert table.num_free_rows == 0


def test_a_row_that_came_back_can_be_taken_again() -> None:
    table = RequestTable(2)
    table.alloc()
    table.alloc()
    table.free(1)

    assert [1] == table.free_rows()
    assert table.alloc() == 1


def test_free_all_equals_a_fresh_table() -> None:
    table = RequestTable(2)
    table.alloc(b"page")
    table.free_all()

    assert RequestTable(2).free_rows() == table.free_rows()
    assert [b"", b"", b""] == table.rows


def test_a_row_lists_what_it_was_taken_with_and_no_other_does() -> None:
    table = RequestTable(3)
    table.alloc(b"page")
    table.alloc(b"more")
    table.rows[2] += b"page"

    assert [b"", b"page", b"morepage", b""] == table.rows


def test_a_row_that_was_given_back_lists_nothing() -> None:
    table = RequestTable(2)
    table.alloc(b"page")
    table.free(1)

    assert [b"", b"", b""] == table.rows


@pytest.mark.parametrize("size", [0, -1, 2.0, None, True])
def test_sizes_out_of_range_are_refused(size: Wrong) -> None:
    with pytest.raises(ConfigError, match="max_num_requests"):
        RequestTable(size)


def test_its_size_can_be_read() -> None:
    assert RequestTable(3).max_num_requests == 3


@pytest.mark.parametrize("row", [0, 1, 3, -1])
def test_a_row_that_is_not_in_use_cannot_be_freed(row: int) -> None:
    table = RequestTable(2)
    assert table.alloc() == 1
    table.free(1)

    with pytest.raises(RequestStateError, match="not in use"):
        table.free(row)
    assert table.num_free_rows == 2

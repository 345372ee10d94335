"""The page-table delta against assignments one by one."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from radixkv.kernels import apply_page_table_delta

GUARD = -7


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@given(
    num_rows=st.integers(1, 6),
    width=st.integers(1, 6),
    forgotten=st.sets(st.integers(0, 5)),
    data=st.data(),
)
def test_delta_writes_its_cells_and_no_other(
    num_rows: int, width: int, forgotten: set[int], data: st.DataObject
) -> None:
    around = torch.full((num_rows + 2, width + 2), GUARD, dtype=torch.int32)
    table = around[1:-1, 1:-1]
    table[:] = 1 + torch.arange(table.numel()).view(table.shape)
    forgotten_rows = [row for row in forgotten if row < num_rows]
    rows = data.draw(st.permutations(range(num_rows)))[: data.draw(st.integers(0, 6))]
    starts = [data.draw(st.integers(0, width)) for _ in rows]
    counts = [data.draw(st.integers(0, width - start)) for start in starts]
    indptr = [sum(counts[:i]) for i in range(len(rows) + 1)]
    # Page ids up to the last that int32 holds.
    pages = [2**31 - 1 - i for i in range(indptr[-1])]
    expected = around.clone()
    for row in forgotten_rows:
        for column in range(width):
            expected[row + 1, column + 1] = 0
    for i, row in enumerate(rows):
        for j in range(counts[i]):
            expected[row + 1, starts[i] + j + 1] = pages[indptr[i] + j]

    apply_page_table_delta(
        table,
        int32(list(rows)),
        int32(starts),
        int32(indptr),
        int32(pages),
        int32(forgotten_rows),
    )

    assert torch.equal(expected, around)


def test_empty_delta_changes_nothing() -> None:
    table = int32([1, 2, 3]).view(1, 3)

    apply_page_table_delta(
        table, int32([]), int32([]), int32([0]), int32([]), int32([])
    )

    assert table.numpy().tolist() == [[1, 2, 3]]


def test_forgotten_row_can_be_used_again_in_the_same_step() -> None:
    table = torch.full((2, 3), 9, dtype=torch.int32)

    apply_page_table_delta(
        table, int32([1]), int32([0]), int32([0, 1]), int32([5]), int32([1])
    )

    assert table.numpy().tolist() == [[9, 9, 9], [5, 0, 0]]

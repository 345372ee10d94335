"""Slot mapping against a walk over positions, one by one."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixkv.kernels import last_loc, slot_mapping_decode, slot_mapping_extend

PAGE_SIZES = st.sampled_from([1, 2, 3, 16])
WIDTH = 5


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def scattered_table(num_rows: int, seed: int) -> torch.Tensor:
    """Make rows of any pages that int32 can name, the last one among them."""
    rng = random.Random(seed)
    pages = [2**31 - 1, *rng.sample(range(2**31 - 1), num_rows * WIDTH - 1)]
    rng.shuffle(pages)
    return int32(pages).view(num_rows, WIDTH)


def walk(table: list[list[int]], row: int, start: int, stop: int, ps: int) -> list[int]:
    return [table[row][p // ps] * ps + p % ps for p in range(start, stop)]


@given(
    page_size=PAGE_SIZES,
    num_rows=st.integers(1, 6),
    seed=st.integers(0, 999),
    data=st.data(),
)
def test_extend_equals_walk_over_positions(
    page_size: int, num_rows: int, seed: int, data: st.DataObject
) -> None:
    table = scattered_table(num_rows, seed)
    rows = list(data.draw(st.permutations(range(num_rows))))
    rows = rows[: data.draw(st.integers(0, num_rows))]
    bounds = st.integers(0, WIDTH * page_size)
    ranges = [sorted([data.draw(bounds), data.draw(bounds)]) for _ in rows]
    starts = [start for start, _ in ranges]
    stops = [stop for _, stop in ranges]
    expected = [
        slot
        for row, start, stop in zip(rows, starts, stops, strict=True)
        for slot in walk(table.numpy().tolist(), row, start, stop, page_size)
    ]

    padding = data.draw(st.integers(0, 3))

    slots = slot_mapping_extend(
        table,
        int32(rows),
        int32(starts),
        int32(stops),
        page_size=page_size,
        num_tokens=len(expected) + padding,
    )

    assert slots.dtype == torch.int64
    assert [*expected, *[0] * padding] == slots.numpy().tolist()


@given(
    page_size=PAGE_SIZES,
    num_rows=st.integers(1, 6),
    num_tokens=st.integers(1, 4),
    seed=st.integers(0, 999),
    data=st.data(),
)
def test_decode_equals_walk_over_positions(
    page_size: int, num_rows: int, num_tokens: int, seed: int, data: st.DataObject
) -> None:
    table = scattered_table(num_rows, seed)
    rows = list(data.draw(st.permutations(range(num_rows))))
    rows = rows[: data.draw(st.integers(0, num_rows))]
    last = WIDTH * page_size - num_tokens
    starts = [data.draw(st.integers(0, last)) for _ in rows]
    expected = [
        slot
        for row, start in zip(rows, starts, strict=True)
        for slot in walk(
            table.numpy().tolist(), row, start, start + num_tokens, page_size
        )
    ]

    slots = slot_mapping_decode(
        table, int32(rows), int32(starts), page_size=page_size, num_tokens=num_tokens
    )

    assert slots.dtype == torch.int64
    assert expected == slots.numpy().tolist()


@given(
    page_size=PAGE_SIZES,
    num_rows=st.integers(1, 6),
    seed=st.integers(0, 999),
    data=st.data(),
)
def test_last_loc_is_the_slot_before_the_first_position(
    page_size: int, num_rows: int, seed: int, data: st.DataObject
) -> None:
    table = scattered_table(num_rows, seed)
    rows = list(data.draw(st.permutations(range(num_rows))))
    starts = [data.draw(st.integers(0, WIDTH * page_size)) for _ in rows]
    cells = table.numpy().tolist()
    expected = [
        walk(cells, row, start - 1, start, page_size)[0] if start else -1
        for row, start in zip(rows, starts, strict=True)
    ]

    slots = last_loc(table, int32(rows), int32(starts), page_size=page_size)

    assert slots.dtype == torch.int64
    assert expected == slots.numpy().tolist()


def test_decode_maps_one_token_unless_told() -> None:
    slots = slot_mapping_decode(
        int32([5, 6]).view(1, 2), int32([0]), int32([3]), page_size=2
    )

    assert slots.numpy().tolist() == [13]


def test_b136_slots_of_a_row_need_not_be_neighbours() -> None:
    table = int32([9, 4, 7, 1]).view(1, 4)

    slots = slot_mapping_extend(
        table, int32([0]), int32([1]), int32([4]), page_size=1, num_tokens=3
    )

    assert slots.numpy().tolist() == [4, 7, 1]


@pytest.mark.parametrize(
    ("page", "page_size", "expected"),
    [
        (2**25 - 1, 64, 2**31 - 1),
        (2**25, 64, 2**31 + 63),
        (2**31 - 1, 16, 2**35 - 1),
    ],
)
def test_b131_slots_pass_32_bits(page: int, page_size: int, expected: int) -> None:
    table = int32([page]).view(1, 1)

    slots = slot_mapping_decode(
        table, int32([0]), int32([page_size - 1]), page_size=page_size
    )

    assert slots.numpy().tolist() == [expected]


def test_padding_row_maps_to_the_hold_page() -> None:
    table = torch.zeros(2, 3, dtype=torch.int32)

    slots = slot_mapping_decode(table, int32([0, 0]), int32([0, 9]), page_size=4)

    assert slots.numpy().tolist() == [0, 1]

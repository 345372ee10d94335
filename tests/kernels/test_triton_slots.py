"""The kernels of page tables and slots, interpreted, against their references."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from radixkv.kernels import (
    apply_page_table_delta,
    block_table,
    kv_indices,
    last_loc,
    slot_mapping_decode,
    slot_mapping_extend,
)

from .guards import GUARD, amid_garbage, both, small_blocks

WIDTH = 5
LAST_PAGE = 2**31 - 1

PAGE_SIZES = (1, 3, 16, 64, 128)


@dataclass(frozen=True)
class Batch:
    """Requests as ``(row, start, stop)``, and how much more a result has to hold."""

    page_size: int
    requests: tuple[tuple[int, int, int], ...]
    padding: int = 0
    seed: int = 0

    def table(self, width: int = WIDTH) -> torch.Tensor:
        """Make a table of any pages that int32 can name, inside a larger one."""
        generator = torch.Generator().manual_seed(self.seed)
        num_rows = max((row for row, _, _ in self.requests), default=0) + 1
        shape = (num_rows + 2, width + 2)
        pages = torch.randint(0, LAST_PAGE, shape, generator=generator)
        pages[1, 1] = LAST_PAGE
        return pages.int()[1:-1, 1:-1]

    def numbers(self) -> list[torch.Tensor]:
        """Return rows, starts and stops."""
        return amid_garbage(*([r[i] for r in self.requests] for i in range(3)))

    def num_tokens(self) -> int:
        return sum(stop - start for _, start, stop in self.requests) + self.padding

    def num_pages(self) -> int:
        stops = [stop for _, _, stop in self.requests]
        return sum(-(-stop // self.page_size) for stop in stops) + self.padding


@st.composite
def batches(
    draw: st.DrawFn, room: int = 0, page_sizes: tuple[int, ...] = PAGE_SIZES
) -> Batch:
    """Make a batch whose rows have `room` for so many more positions."""
    page_size = draw(st.sampled_from(page_sizes))
    end = WIDTH * page_size - room
    edges = [k * page_size + d for k in range(WIDTH + 1) for d in (-1, 0, 1)]
    bound = st.sampled_from([e for e in edges if 0 <= e <= end]) | st.integers(0, end)
    rows = draw(st.lists(st.integers(0, 5), unique=True, max_size=4))
    bounds = [sorted((draw(bound), draw(bound))) for _ in rows]
    return Batch(
        page_size,
        tuple((row, low, high) for row, (low, high) in zip(rows, bounds, strict=True)),
        padding=draw(st.integers(0, 3)),
        seed=draw(st.integers(0, 99)),
    )


@given(batches())
@example(Batch(16, (), padding=0))
@example(Batch(16, (), padding=3))
@example(Batch(3, ((1, 5, 5), (0, 2, 9), (2, 0, 0), (3, 14, 15))))
def test_slot_mapping_of_extend_equals_the_reference(batch: Batch) -> None:
    expected, slots = both(
        slot_mapping_extend,
        batch.table(),
        *batch.numbers(),
        page_size=batch.page_size,
        num_tokens=batch.num_tokens(),
    )

    assert torch.equal(expected, slots)
    assert slots.dtype == torch.int64


@given(batches(room=4), st.integers(1, 4))
@example(Batch(16, ()), 1)
@example(Batch(16, ((1, 15, 0), (0, 14, 0), (2, 16, 0))), 3)
def test_slot_mapping_of_decode_equals_the_reference(
    batch: Batch, num_tokens: int
) -> None:
    rows, starts, _ = batch.numbers()

    expected, slots = both(
        slot_mapping_decode,
        batch.table(),
        rows,
        starts,
        page_size=batch.page_size,
        num_tokens=num_tokens,
    )

    assert torch.equal(expected, slots)
    assert slots.dtype == torch.int64


@given(batches())
@example(Batch(16, ()))
@example(Batch(16, ((0, 0, 0), (1, 1, 0), (2, 16, 0), (3, 17, 0))))
def test_last_loc_equals_the_reference(batch: Batch) -> None:
    rows, starts, _ = batch.numbers()

    expected, slots = both(
        last_loc, batch.table(), rows, starts, page_size=batch.page_size
    )

    assert torch.equal(expected, slots)
    assert slots.dtype == torch.int64


@given(batches())
@example(Batch(16, (), padding=2))
def test_kv_indices_equal_the_reference(batch: Batch) -> None:
    rows, _, stops = batch.numbers()

    expected, indices = both(
        kv_indices,
        batch.table(),
        rows,
        stops,
        page_size=batch.page_size,
        num_pages=batch.num_pages(),
    )

    for name in ("kv_indptr", "kv_indices", "last_page_len"):
        assert torch.equal(getattr(expected, name), getattr(indices, name)), name
        assert getattr(expected, name).dtype == torch.int32
        assert getattr(indices, name).dtype == torch.int32


@given(batches(), st.integers(0, WIDTH))
@example(Batch(16, ()), 3)
def test_block_table_equals_the_reference(batch: Batch, width: int) -> None:
    rows, _, stops = batch.numbers()

    expected, table = both(
        block_table,
        batch.table(),
        rows,
        stops,
        page_size=batch.page_size,
        width=width,
    )

    assert torch.equal(expected, table)
    assert table.dtype == torch.int32


@pytest.mark.parametrize("lengths", [(3000, 1, 0, 1025), (1024, 1024), (2049,)])
def test_long_requests_take_several_blocks(lengths: tuple[int, ...]) -> None:
    requests = ((row, 7, 7 + length) for row, length in enumerate(lengths))
    batch = Batch(3, tuple(requests), padding=1500)
    table, (rows, starts, stops) = batch.table(width=1100), batch.numbers()

    slots = both(
        slot_mapping_extend,
        table,
        rows,
        starts,
        stops,
        page_size=3,
        num_tokens=batch.num_tokens(),
    )
    indices = both(
        kv_indices, table, rows, stops, page_size=3, num_pages=batch.num_pages()
    )
    tables = both(block_table, table, rows, stops, page_size=3, width=1100)

    assert torch.equal(*slots)
    assert torch.equal(*(each.kv_indices for each in indices))
    assert torch.equal(*tables)


few_small_pages = batches(page_sizes=(1, 3))
in_many_blocks = [
    Batch(3, ((1, 5, 5), (0, 2, 9), (2, 0, 0), (3, 14, 15))),
    Batch(3, ((1, 0, 15), (0, 0, 15), (2, 0, 15)), padding=40),
]


@given(few_small_pages)
@example(in_many_blocks[0])
@example(in_many_blocks[1])
def test_slots_in_many_blocks_equal_those_in_one(batch: Batch) -> None:
    table, (rows, starts, stops) = batch.table(), batch.numbers()
    options = {"page_size": batch.page_size, "num_tokens": batch.num_tokens()}

    with small_blocks("slot_mapping", 4):
        slots = both(slot_mapping_extend, table, rows, starts, stops, **options)
        last = both(last_loc, table, rows, starts, page_size=batch.page_size)

    assert torch.equal(*slots)
    assert torch.equal(*last)


@given(few_small_pages)
@example(in_many_blocks[0])
@example(in_many_blocks[1])
def test_pages_in_many_blocks_equal_those_in_one(batch: Batch) -> None:
    table, (rows, _, stops) = batch.table(), batch.numbers()
    page_size = batch.page_size
    options = {"page_size": page_size, "num_pages": batch.num_pages()}

    with small_blocks("attention_indices", 4):
        indices = both(kv_indices, table, rows, stops, **options)
        tables = both(block_table, table, rows, stops, page_size=page_size, width=WIDTH)

    assert torch.equal(*(each.kv_indptr for each in indices))
    assert torch.equal(*(each.kv_indices for each in indices))
    assert torch.equal(*tables)


@given(
    num_rows=st.integers(1, 6),
    width=st.integers(1, 6),
    forgotten=st.lists(st.integers(0, 5), max_size=6),
    block=st.sampled_from([1, 2, 4, 1024]),
    data=st.data(),
)
def test_page_table_delta_equals_the_reference(
    num_rows: int, width: int, forgotten: list[int], block: int, data: st.DataObject
) -> None:
    rows = data.draw(st.permutations(range(num_rows)))[: data.draw(st.integers(0, 6))]
    starts = [data.draw(st.integers(0, width)) for _ in rows]
    counts = [data.draw(st.integers(0, width - start)) for start in starts]
    numbers = amid_garbage(
        rows,
        starts,
        [sum(counts[:i]) for i in range(len(rows) + 1)],
        [LAST_PAGE - i for i in range(sum(counts))],
        [row for row in forgotten if row < num_rows],
    )
    around = torch.full((num_rows + 2, width + 2), GUARD, dtype=torch.int32)
    expected = around.clone()

    apply_page_table_delta(expected[1:-1, 1:-1], *numbers, backend="reference")
    with small_blocks("page_table", block):
        apply_page_table_delta(around[1:-1, 1:-1], *numbers, backend="triton")

    assert torch.equal(expected, around)


def test_padding_row_lists_the_hold_page() -> None:
    rows, stops = amid_garbage([0, 0], [1, 1])
    table = torch.zeros(2, 3, dtype=torch.int32)

    indices = kv_indices(table, rows, stops, page_size=4, num_pages=2, backend="triton")

    assert [0, 0] == indices.kv_indices.tolist()
    assert [1, 1] == indices.last_page_len.tolist()

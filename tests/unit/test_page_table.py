"""The worker's page table against a log of messages replayed into lists."""

from __future__ import annotations

from array import array

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.mem_cache.errors import ConfigError, LengthError, RequestStateError
from radixkv.mem_cache.kv_cache_info import KVCacheInfo
from radixkv.mem_cache.page_table import PageTable

NUM_REQUESTS, WIDTH = 4, 5


def make_table() -> PageTable:
    return PageTable(max_num_requests=NUM_REQUESTS, max_pages_per_request=WIDTH)


def make_info(
    pages: dict[int, list[int]],
    starts: dict[int, int] | None = None,
    forgotten: tuple[int, ...] = (),
) -> KVCacheInfo:
    """Make the message that gives each row its new pages."""
    rows = list(pages)
    lists = list(pages.values())
    return KVCacheInfo.pack(
        rows=rows,
        starts=[0] * len(rows),
        stops=[1] * len(rows),
        page_starts=[(starts or {}).get(row, 0) for row in rows],
        page_indptr=[sum(map(len, lists[:i])) for i in range(len(rows) + 1)],
        new_pages=array("i", [page for part in lists for page in part]).tobytes(),
        forgotten_rows=forgotten,
    )


@st.composite
def steps(
    draw: st.DrawFn,
) -> tuple[dict[int, list[int]], dict[int, int], tuple[int, ...]]:
    row = st.integers(1, NUM_REQUESTS)
    page = st.integers(1, 2**31 - 1)
    rows = draw(st.lists(row, unique=True))
    starts = {row: draw(st.integers(0, WIDTH)) for row in rows}
    pages = {row: draw(st.lists(page, max_size=WIDTH - starts[row])) for row in rows}
    return pages, starts, tuple(draw(st.lists(row, unique=True)))


@given(log=st.lists(steps(), max_size=6))
def test_s0_4_messages_alone_rebuild_the_table(
    log: list[tuple[dict[int, list[int]], dict[int, int], tuple[int, ...]]],
) -> None:
    page_table = make_table()
    data_ptr = page_table.table.data_ptr()
    expected = [[0] * WIDTH for _ in range(NUM_REQUESTS + 1)]

    for pages, starts, forgotten in log:
        wire = msgspec.msgpack.encode(make_info(pages, starts, forgotten))
        page_table.apply(msgspec.msgpack.decode(wire, type=KVCacheInfo))
        for row in forgotten:
            expected[row] = [0] * WIDTH
        for row, new in pages.items():
            expected[row][starts[row] : starts[row] + len(new)] = new

        assert expected == page_table.table.numpy().tolist()
    assert data_ptr == page_table.table.data_ptr()


def test_fresh_table_lists_the_hold_page_only() -> None:
    table = make_table().table

    assert table.shape == (NUM_REQUESTS + 1, WIDTH)
    assert not table.any()


def test_merged_messages_apply_like_one_after_the_other() -> None:
    infos = [make_info({1: [7, 8]}), make_info({3: [9]}, {3: 2}, forgotten=(4,))]
    merged, single = make_table(), make_table()

    merged.apply(KVCacheInfo.merge(infos))
    for info in infos:
        single.apply(info)

    assert single.table.numpy().tolist() == merged.table.numpy().tolist()


@pytest.mark.parametrize("start", [3, WIDTH])
def test_b132_request_longer_than_its_row_is_refused(start: int) -> None:
    page_table = make_table()
    page_table.apply(make_info({1: [1, 2], 2: [3, 4]}))
    before = page_table.table.clone()

    with pytest.raises(LengthError, match=f"<= {WIDTH} pages, got {start + 3}"):
        page_table.apply(make_info({1: [7, 8, 9]}, {1: start}, forgotten=(2,)))

    assert before.numpy().tolist() == page_table.table.numpy().tolist()


@pytest.mark.parametrize(
    "info",
    [
        make_info({1: [5], NUM_REQUESTS + 1: [6]}),
        make_info({1: [5]}, forgotten=(NUM_REQUESTS + 1,)),
    ],
)
def test_row_outside_the_table_is_refused(info: KVCacheInfo) -> None:
    page_table = make_table()

    with pytest.raises(RequestStateError, match=r"rows must be in [01]\.\.4, got .*5"):
        page_table.apply(info)

    assert not page_table.table.any()


def test_numbers_beside_the_message_go_up_with_it() -> None:
    page_table = make_table()
    info = make_info({1: [5], 3: [7, 8]}, forgotten=(2,))

    step = page_table.apply(info.with_copies({4: 6}), np.array([9, -1], np.int32))

    assert [9, -1] == step.extra.tolist()
    assert [1, 3] == step.rows.tolist()
    assert [5, 7] == page_table.table[[1, 3], 0].tolist()
    assert [] == page_table.apply(make_info({})).extra.tolist()


@pytest.mark.parametrize("value", [0, -1, True])
def test_bad_sizes_are_refused(value: int) -> None:
    with pytest.raises(ConfigError, match="max_num_requests must be"):
        PageTable(max_num_requests=value, max_pages_per_request=1)
    with pytest.raises(ConfigError, match="max_pages_per_request must be"):
        PageTable(max_num_requests=1, max_pages_per_request=value)

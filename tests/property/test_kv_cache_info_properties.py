"""The message to the workers: what is packed comes out, and merging changes nothing."""

from __future__ import annotations

import pickle
from itertools import pairwise

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from radixkv.mem_cache import KVCacheInfo

NUM_ROWS = 12
NUM_COLUMNS = 9
NUM_PAGES = 5

int32 = st.integers(0, 2**31 - 1)


@st.composite
def steps(draw: st.DrawFn, rows: list[int] | None = None) -> dict[str, list[int]]:
    """The numbers of a step with distinct rows."""
    if rows is None:
        numbers = st.integers(1, NUM_ROWS)
        rows = draw(st.lists(numbers, unique=True, max_size=NUM_ROWS))
    count = len(rows)
    starts = draw(st.lists(st.integers(0, 99), min_size=count, max_size=count))
    stops = [start + draw(st.integers(1, 99)) for start in starts]
    page_starts, page_indptr = [], [0]
    for _ in rows:
        page_starts.append(draw(st.integers(0, NUM_COLUMNS)))
        num_new = draw(st.integers(0, NUM_COLUMNS - page_starts[-1]))
        page_indptr.append(page_indptr[-1] + num_new)
    pages = draw(st.lists(int32, min_size=page_indptr[-1], max_size=page_indptr[-1]))
    forgotten = draw(st.lists(st.integers(1, NUM_ROWS), unique=True))
    copies = draw(st.dictionaries(st.integers(1, NUM_PAGES), st.integers(1, NUM_PAGES)))
    return {
        "rows": rows,
        "starts": starts,
        "stops": stops,
        "page_starts": page_starts,
        "page_indptr": page_indptr,
        "new_pages": pages,
        "forgotten_rows": forgotten,
        "copy_sources": list(copies.values()),
        "copy_targets": list(copies),
    }


def pack(step: dict[str, list[int]]) -> KVCacheInfo:
    info = KVCacheInfo.pack(
        step["rows"],
        step["starts"],
        step["stops"],
        step["page_starts"],
        step["page_indptr"],
        np.array(step["new_pages"], np.int32).tobytes(),
        step["forgotten_rows"],
    )
    copies = zip(step["copy_targets"], step["copy_sources"], strict=True)
    return info.with_copies(dict(copies))


def fields(info: KVCacheInfo) -> dict[str, list[int]]:
    return {
        "rows": info.rows.tolist(),
        "starts": info.starts.tolist(),
        "stops": info.stops.tolist(),
        "page_starts": info.page_starts.tolist(),
        "page_indptr": info.page_indptr.tolist(),
        "new_pages": info.new_pages.tolist(),
        "forgotten_rows": info.forgotten_rows.tolist(),
        "copy_sources": info.copy_sources.tolist(),
        "copy_targets": info.copy_targets.tolist(),
    }


def apply(table: np.ndarray, info: KVCacheInfo) -> None:
    """Bring a page table up to a step: the definition, as a loop."""
    table[info.forgotten_rows] = 0
    bounds = info.page_indptr.tolist()
    for i, row in enumerate(info.rows.tolist()):
        pages = info.new_pages[bounds[i] : bounds[i + 1]]
        column = int(info.page_starts[i])
        table[row, column : column + len(pages)] = pages


def copied(pool: list[int], info: KVCacheInfo) -> list[int]:
    """What is in the pages of a pool when a message's copies are made."""
    return [pool[info.copies.get(page, page)] for page in range(len(pool))]


@given(step=steps())
def test_what_is_packed_comes_out(step: dict[str, list[int]]) -> None:
    info = pack(step)

    assert step == fields(info)
    assert len(step["rows"]) == info.num_reqs
    assert len(step["new_pages"]) == info.num_new_pages
    assert len(step["copy_sources"]) == info.num_copies == len(info.copies)


@given(step=steps())
def test_s0_3_a_round_trip_over_the_wire_is_equal(step: dict[str, list[int]]) -> None:
    info = pack(step)
    wire = msgspec.msgpack.encode(info)

    assert info == msgspec.msgpack.decode(wire, type=KVCacheInfo)
    assert info == pickle.loads(pickle.dumps(info))


@given(step=steps())
def test_s0_3_a_message_costs_a_few_bytes_a_number(step: dict[str, list[int]]) -> None:
    wire = msgspec.msgpack.encode(pack(step))
    num_numbers = sum(len(numbers) for numbers in step.values())

    assert len(wire) <= 4 * num_numbers + 16


@given(data=st.data())
def test_merged_messages_say_what_they_said_one_by_one(data: st.DataObject) -> None:
    """Each request is in one of them, and rows that are forgotten are in none."""
    rows = data.draw(st.permutations(range(1, NUM_ROWS + 1)))
    cuts = sorted(data.draw(st.lists(st.integers(0, NUM_ROWS), min_size=2, max_size=4)))
    parts = [rows[a:b] for a, b in pairwise(cuts)]
    named = {row for part in parts for row in part}
    infos = []
    for part in parts:
        step = data.draw(steps(list(part)))
        step["forgotten_rows"] = [
            row for row in step["forgotten_rows"] if row not in named
        ]
        infos.append(pack(step))
    apart = np.full((NUM_ROWS + 1, NUM_COLUMNS), 7, np.int32)
    for info in infos:
        apply(apart, info)
    merged = KVCacheInfo.merge(infos)
    together = np.full((NUM_ROWS + 1, NUM_COLUMNS), 7, np.int32)
    apply(together, merged)

    assert apart.tolist() == together.tolist()
    pool = list(range(NUM_PAGES + 1))
    for info in infos:
        pool = copied(pool, info)
    assert pool == copied(list(range(NUM_PAGES + 1)), merged)
    for name in ("rows", "starts", "stops", "page_starts", "new_pages"):
        expected = [x for info in infos for x in getattr(info, name).tolist()]
        assert expected == getattr(merged, name).tolist()


def test_merging_nothing_is_an_empty_message() -> None:
    merged = KVCacheInfo.merge([])

    assert merged.num_reqs == merged.num_new_pages == 0
    assert [0] == merged.page_indptr.tolist()

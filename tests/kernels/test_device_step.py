"""A step on the device: what its methods return, from a message alone."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixkv.kernels.backend import Backend
from radixkv.kernels.upload import upload
from radixkv.mem_cache import KVCacheInfo, PageTable

BACKENDS: tuple[Backend, ...] = ("reference", "triton")


def make_info(page_size: int, ranges: list[tuple[int, int]]) -> KVCacheInfo:
    """Make the first message of requests that compute ``[start, stop)``."""
    counts = [-(-stop // page_size) for _, stop in ranges]
    indptr = np.cumsum([0, *counts])
    return KVCacheInfo.pack(
        rows=range(len(ranges), 0, -1),
        starts=[start for start, _ in ranges],
        stops=[stop for _, stop in ranges],
        page_starts=[0] * len(ranges),
        page_indptr=indptr.tolist(),
        new_pages=np.arange(indptr[-1], 0, -1, dtype=np.int32).tobytes(),
        forgotten_rows=[1],
    ).with_copies({3: 1})


lengths = st.tuples(st.integers(0, 20), st.integers(1, 20)).map(
    lambda pair: (pair[0], sum(pair))
)


@given(
    page_size=st.sampled_from([1, 3, 16]),
    ranges=st.lists(lengths, max_size=4),
    backend=st.sampled_from(BACKENDS),
)
def test_a_step_lists_slots_and_pages_of_its_requests(
    page_size: int, ranges: list[tuple[int, int]], backend: Backend
) -> None:
    info = make_info(page_size, ranges)
    pages = [
        info.new_pages[begin:end].tolist()
        for begin, end in pairwise(info.page_indptr.tolist())
    ]

    def slot(i: int, position: int) -> int:
        return int(pages[i][position // page_size]) * page_size + position % page_size

    width = max(map(len, pages), default=0)
    table = PageTable(max_num_requests=4, max_pages_per_request=40, backend=backend)
    step = table.apply(info)
    indices = step.kv_indices(page_size=page_size)

    assert step.slot_mapping(page_size=page_size).tolist() == [
        slot(i, position)
        for i, (start, stop) in enumerate(ranges)
        for position in range(start, stop)
    ]
    assert step.last_loc(page_size=page_size).tolist() == [
        slot(i, start - 1) if start else -1 for i, (start, _) in enumerate(ranges)
    ]
    assert indices.kv_indptr.tolist() == info.page_indptr.tolist()
    assert indices.kv_indices.tolist() == [page for row in pages for page in row]
    assert step.block_table(page_size=page_size).tolist() == [
        row + [0] * (width - len(row)) for row in pages
    ]


@pytest.mark.parametrize("backend", BACKENDS)
def test_b137_last_pages_are_never_empty_and_never_too_full(backend: Backend) -> None:
    info = make_info(4, [(0, 1), (0, 4), (0, 5), (0, 8), (0, 0)])
    table = PageTable(max_num_requests=5, max_pages_per_request=2, backend=backend)

    indices = table.apply(info).kv_indices(page_size=4)

    assert indices.kv_indptr.tolist() == [0, 1, 2, 4, 6, 6]
    assert len(indices.kv_indices) == 6
    assert indices.last_page_len.tolist() == [1, 4, 1, 4, 4]


def test_an_upload_is_a_copy() -> None:
    numbers = np.array([1, 2, 3], np.int32)

    uploaded = upload(numbers, torch.device("cpu"))
    numbers[:] = 7

    assert uploaded.tolist() == [1, 2, 3]
    assert uploaded.dtype == torch.int32


def test_the_parts_of_a_message_are_all_of_it() -> None:
    info = make_info(4, [(0, 9), (3, 4)])

    rows, starts, stops, page_starts, page_indptr, new_pages, forgotten, copies = (
        np.split(info.numbers, np.cumsum(info.part_lengths)[:-1])
    )

    assert rows.tolist() == info.rows.tolist()
    assert starts.tolist() == info.starts.tolist()
    assert stops.tolist() == info.stops.tolist()
    assert page_starts.tolist() == info.page_starts.tolist()
    assert page_indptr.tolist() == info.page_indptr.tolist()
    assert new_pages.tolist() == info.new_pages.tolist()
    assert forgotten.tolist() == info.forgotten_rows.tolist()
    assert copies.tolist() == [*info.copy_sources, *info.copy_targets]
    assert info.num_tokens == 10

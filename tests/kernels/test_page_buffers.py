"""Where pages lie: as bytes, in any layout that has no gaps within a page."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixkv.kernels import PageBuffers
from radixkv.kernels.page_buffers import CHUNK_BYTES
from radixkv.mem_cache import ConfigError


@given(
    sizes=st.lists(st.integers(1, 3 * CHUNK_BYTES), min_size=1, max_size=3),
    num_pages=st.integers(1, 3),
)
def test_chunks_cover_each_page_once(sizes: list[int], num_pages: int) -> None:
    buffers = [torch.zeros(num_pages, size, dtype=torch.uint8) for size in sizes]
    pages = PageBuffers(buffers)
    places = [
        (b.data_ptr() + i, b.stride(0)) for b in buffers for i in range(b.shape[1])
    ]

    covered = [
        (address + i, stride, before + i)
        for address, stride, before, size in pages.chunks.tolist()
        for i in range(size)
    ]

    assert covered == [(*place, i) for i, place in enumerate(places)]
    assert max(pages.chunks[:, 3]) <= CHUNK_BYTES
    assert pages.page_bytes == sum(sizes)
    assert pages.num_pages == num_pages


def test_buffers_are_seen_as_the_bytes_of_their_pages() -> None:
    pool = torch.arange(2 * 3 * 4 * 5 * 2, dtype=torch.int16).view(3, 4, 2, 5, 2)
    k, v = pool[:, :2, 0], pool[:, 2:, 1].transpose(1, 2)
    pages = PageBuffers([pool[:, 0], pool[:, 1, :1].transpose(1, 3)])

    first, second = pages.buffers

    assert torch.equal(first.view(torch.int16), pool[:, 0].flatten(1))
    assert torch.equal(second.view(torch.int16), pool[:, 1, 0].flatten(1))
    assert first.data_ptr() == pool.data_ptr()
    with pytest.raises(ConfigError, match="must have no gaps, got strides"):
        PageBuffers([k])
    with pytest.raises(ConfigError, match="must have no gaps, got strides"):
        PageBuffers([v])


def test_the_stride_of_a_single_head_says_nothing() -> None:
    pool = torch.arange(24.0).view(3, 8)

    (pages,) = PageBuffers([pool.as_strided((3, 2, 1, 4), (8, 4, 99, 1))]).buffers

    assert torch.equal(pages.view(torch.float32), pool)


def test_buffers_that_do_not_belong_together_are_refused() -> None:
    one, two = torch.zeros(1, 4), torch.zeros(2, 4)

    with pytest.raises(ConfigError, match=r"numbers of pages, got \[1, 2\]"):
        PageBuffers([one, two])
    with pytest.raises(ConfigError, match=r"devices, got \['cpu', 'meta'\]"):
        PageBuffers([one, one.to("meta")])
    with pytest.raises(ConfigError, match=r"devices, got \[\]"):
        PageBuffers([])


@pytest.mark.parametrize(
    ("page_bytes", "alignment", "expected"),
    [
        (4096, 16, (8, 16, 512)),
        (4096, 4, (4, 4, 1024)),
        (48, 16, (8, 16, 8)),
        (24, 16, (8, 8, 4)),
        (4, 16, (4, 4, 1)),
        (5001, 16, (1, 1, 4096)),
    ],
)
def test_words_are_as_long_as_the_alignment_allows(
    page_bytes: int, alignment: int, expected: tuple[int, int, int]
) -> None:
    pages = PageBuffers([torch.zeros(3, page_bytes, dtype=torch.uint8)])

    words = pages.words(alignment)

    assert expected == (words["WORD_BYTES"], words["ALIGNMENT"], words["BLOCK"])

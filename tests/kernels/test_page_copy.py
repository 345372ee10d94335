"""Copying pages: all at a time, the given targets change, and no other page."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixkv.kernels import PageBuffers, copy_pages
from radixkv.kernels.page_copy import SAVED, plan_copies

copies_of_ten = st.dictionaries(st.integers(0, 9), st.integers(0, 9))
"""Source page by target page: every chain and every cycle among ten pages."""


def loop(buffer: torch.Tensor, copies: dict[int, int]) -> torch.Tensor:
    """The definition, page by page."""
    after = buffer.clone()
    for target, source in copies.items():
        after[target] = buffer[source]
    return after


@given(
    copies=copies_of_ten,
    page_size=st.sampled_from([1, 2, 3, 16, 64]),
    dims=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 5)), min_size=1),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.int8]),
    seed=st.integers(0, 999),
)
def test_copies_equal_a_walk_over_the_pages(
    copies: dict[int, int],
    page_size: int,
    dims: list[tuple[int, int]],
    dtype: torch.dtype,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    # One guard page on each side of a buffer.
    around = [
        torch.randint(0, 100, (12, page_size, *dim), generator=generator).to(dtype)
        for dim in dims[:4]
    ]
    buffers = [buffer[1:-1] for buffer in around]
    expected = [buffer.clone() for buffer in around]
    for buffer in expected:
        buffer[1:-1] = loop(buffer[1:-1], copies)

    copy_pages(PageBuffers(buffers), list(copies.values()), list(copies))

    assert all(map(torch.equal, expected, around))


def test_two_pages_change_places() -> None:
    buffer = torch.arange(6.0).view(3, 2)

    copy_pages(PageBuffers([buffer]), [1, 2], [2, 1])

    assert [0, 1, 4, 5, 2, 3] == buffer.flatten().tolist()


@pytest.mark.parametrize("target", [2**15 - 1, 2**15])
def test_b131_pages_are_addressed_past_2_31_elements(target: int) -> None:
    # 1,024 elements a slot in pages of 64: page 32,768 begins at element 2**31. One
    # byte an element, of which the system provides only what is touched.
    buffer = torch.empty(2**15 + 1, 64, 1024, dtype=torch.int8)
    buffer[1] = 5

    copy_pages(PageBuffers([buffer]), [1], [target])

    assert (buffer.view(-1)[65536 * target : 65536 * (target + 1)] == 5).all()


@given(copies=copies_of_ten)
def test_a_plan_reads_each_page_before_it_is_written(copies: dict[int, int]) -> None:
    before = [f"page {page}" for page in range(10)]
    pages = before.copy()

    groups = plan_copies(copies)

    for group in groups:
        saved = "nothing"
        for source, target in group:
            read = saved if source == SAVED else pages[source]
            if target == SAVED:
                saved = read
            else:
                pages[target] = read
    assert [before[copies.get(page, page)] for page in range(10)] == pages


@given(copies=copies_of_ten)
def test_groups_of_a_plan_can_run_at_the_same_time(copies: dict[int, int]) -> None:
    groups = plan_copies(copies)

    written = [{to for _, to in group if to != SAVED} for group in groups]
    read = [{source for source, _ in group if source != SAVED} for group in groups]
    for i, one in enumerate(written):
        for j in range(len(groups)):
            assert i == j or one.isdisjoint(read[j] | written[j])


def test_a_plan_for_thousands_of_pages_nests_nothing() -> None:
    count = 20_000
    chain = {page: page - 1 for page in range(1, count)}

    (steps,) = plan_copies(chain)
    (cycle,) = plan_copies(chain | {0: count - 1})

    assert steps == [(page - 1, page) for page in range(count - 1, 0, -1)]
    assert len(cycle) == count + 1


def test_copies_that_have_no_page_in_common_are_a_group_each() -> None:
    assert [[(5, 1)], [(5, 2)], [(7, 3)]] == plan_copies({1: 5, 2: 5, 3: 7, 4: 4})

"""Copying pages: all at a time, the given targets change, and no other slot."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixkv.kernels import copy_pages

copies_of_ten = st.dictionaries(st.integers(0, 9), st.integers(0, 9))
"""Source page by target page: every chain and every cycle among ten pages."""


def pages(numbers: Iterable[int]) -> torch.Tensor:
    return torch.tensor(list(numbers), dtype=torch.int32)


def loop(buffer: torch.Tensor, copies: dict[int, int], page_size: int) -> torch.Tensor:
    """The definition, slot by slot."""
    after = buffer.clone()
    for target, source in copies.items():
        for i in range(page_size):
            after[target * page_size + i] = buffer[source * page_size + i]
    return after


@given(
    copies=copies_of_ten,
    page_size=st.sampled_from([1, 2, 3, 16, 64]),
    dims=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 5)), min_size=1),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.int8]),
    seed=st.integers(0, 999),
)
def test_copies_equal_a_walk_over_the_slots(
    copies: dict[int, int],
    page_size: int,
    dims: list[tuple[int, int]],
    dtype: torch.dtype,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    # One guard page on each side of a buffer.
    around = [
        torch.randint(0, 100, (12 * page_size, *dim), generator=generator).to(dtype)
        for dim in dims[:4]
    ]
    buffers = [buffer[page_size:-page_size] for buffer in around]
    expected = [buffer.clone() for buffer in around]
    for buffer in expected:
        inside = buffer[page_size:-page_size]
        inside[:] = loop(inside, copies, page_size)

    copy_pages(buffers, pages(copies.values()), pages(copies), page_size=page_size)

    assert all(map(torch.equal, expected, around))


@given(copies=copies_of_ten, page_size=st.sampled_from([1, 3]))
def test_one_tensor_of_all_layers_is_a_list_of_them(
    copies: dict[int, int], page_size: int
) -> None:
    stacked = torch.arange(3.0 * 10 * page_size).view(3, 10 * page_size, 1, 1)
    expected = torch.stack([loop(buffer, copies, page_size) for buffer in stacked])

    copy_pages(stacked, pages(copies.values()), pages(copies), page_size=page_size)

    assert torch.equal(expected, stacked)


def test_two_pages_change_places() -> None:
    buffer = torch.arange(6.0).view(6, 1, 1)

    copy_pages([buffer], pages([1, 2]), pages([2, 1]), page_size=2)

    assert [0, 1, 4, 5, 2, 3] == buffer.flatten().tolist()


@pytest.mark.parametrize("target", [2**15 - 1, 2**15])
def test_b131_pages_are_addressed_past_2_31_elements(target: int) -> None:
    # 1,024 elements a slot in pages of 64: page 32,768 begins at element 2**31. One
    # byte an element, of which the system provides only what is touched.
    buffer = torch.empty(64 * (2**15 + 1), 1, 1024, dtype=torch.int8)
    buffer[64:128] = 5

    copy_pages([buffer], pages([1]), pages([target]), page_size=64)

    assert (buffer.view(-1)[65536 * target : 65536 * (target + 1)] == 5).all()

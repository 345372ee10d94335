"""The allocator, example by example; tests/property has the rest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from radixkv.mem_cache import (
    HOLD_PAGE,
    ConfigError,
    DoubleFreeError,
    ForeignPageError,
    IntegrityError,
    PageError,
    PagesInUseError,
    RequestTable,
    TokenToKVPoolAllocator,
)

from .driver import Wrong, free_order


def test_a_fresh_allocator_hands_out_ascending_pages() -> None:
    allocator = TokenToKVPoolAllocator(5, 16)

    assert [1, 2, 3, 4, 5] == free_order(allocator)


def test_the_hold_page_is_never_handed_out() -> None:
    allocator = TokenToKVPoolAllocator(5, 16)
    pages = allocator.alloc(5)

    assert pages is not None
    assert HOLD_PAGE not in pages


def test_alloc_of_more_than_is_free_changes_nothing() -> None:
    allocator = TokenToKVPoolAllocator(4, 16)
    allocator.alloc(2)
    before = free_order(allocator)

    assert allocator.alloc(3) is None
    assert before == free_order(allocator)


def test_alloc_of_all_is_allowed() -> None:
    allocator = TokenToKVPoolAllocator(4, 16)

    assert allocator.alloc(4) is not None
    assert allocator.num_free_pages == 0
    assert allocator.alloc(0) is not None


def test_alloc_of_none_gives_an_empty_array() -> None:
    pages = TokenToKVPoolAllocator(4, 16).alloc(0)

    assert pages is not None
    assert (pages.dtype, pages.shape) == (np.int32, (0,))


def test_alloc_of_a_negative_number_is_refused() -> None:
    allocator = TokenToKVPoolAllocator(4, 16)

    with pytest.raises(ConfigError, match=r"^num_pages must be >= 0, got -1$"):
        allocator.alloc(-1)
    assert allocator.num_free_pages == 4


def test_results_are_int32_and_ascending() -> None:
    allocator = TokenToKVPoolAllocator(6, 16)
    allocator.alloc(6)
    allocator.free([5, 2, 6])
    pages = allocator.alloc(3)

    assert pages is not None
    assert pages.dtype == np.int32
    assert [2, 5, 6] == pages.tolist()


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize(
    ("pages", "error"),
    [
        ([2, 2], DoubleFreeError),
        ([5, 2, 5], DoubleFreeError),
        ([2, 1], DoubleFreeError),
        ([3], DoubleFreeError),
        ([0], ForeignPageError),
        ([2, 0], ForeignPageError),
        ([-1], ForeignPageError),
        ([2, -(2**31)], ForeignPageError),
        ([9], ForeignPageError),
        ([2, 2**31 - 1], ForeignPageError),
        ([2**31], ForeignPageError),
        ([2 + 2**32], ForeignPageError),
        ([2**70], ForeignPageError),
        ([2.0], ForeignPageError),
        ([True], ForeignPageError),
        (["2"], ForeignPageError),
        ([None], ForeignPageError),
        ([[2], [5]], ForeignPageError),
        ([[2], [5, 5]], ForeignPageError),
        (2, ForeignPageError),
        (None, ForeignPageError),
        (np.array([-2], np.int64), ForeignPageError),
        (np.array([2**64 - 1], np.uint64), ForeignPageError),
        (np.arange(1, 9).repeat(2), DoubleFreeError),
    ],
    ids=repr,
)
def test_b06_a_wrong_free_is_refused_as_a_whole(
    page_size: int, pages: Wrong, error: type[Exception]
) -> None:
    allocator = TokenToKVPoolAllocator(8, page_size)
    allocator.alloc(8)
    allocator.free([1, 3, 4, 6, 7, 8])
    before = free_order(allocator)

    with pytest.raises(error):
        allocator.free(pages)

    assert before == free_order(allocator)
    assert [2, 5] == allocator.in_use().tolist()
    allocator.check_integrity()


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int32, np.int64, np.uint64])
def test_pages_come_back_as_integers_of_any_type(dtype: type[np.integer[Any]]) -> None:
    allocator = TokenToKVPoolAllocator(4, 1)
    allocator.alloc(4)
    allocator.free(np.array([3, 1], dtype))

    assert [1, 3] == sorted(allocator.free_pages().tolist())
    allocator.check_integrity()


class OnADevice:
    """As much of a tensor as the allocator asks for."""

    def __init__(self, *pages: int) -> None:
        self.pages = pages

    def cpu(self) -> tuple[int, ...]:
        return self.pages


def test_pages_on_a_device_are_copied_to_the_host() -> None:
    allocator = TokenToKVPoolAllocator(4, 1)
    allocator.alloc(4)
    pages: Wrong = OnADevice(2, 4)
    allocator.free(pages)

    assert [1, 3] == allocator.in_use().tolist()


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ([[1], [2, 3]], "pages must be flat: "),
        ([[1], [2]], "pages must be flat, got 2 dimensions"),
        (np.ones((2, 2), np.int32), "pages must be flat, got 2 dimensions"),
        (1, "pages must be flat, got 0 dimensions"),
        ([1.0], "page ids must be integers, got float64"),
        (["1"], "page ids must be integers, got "),
        ([-1, 2, 0], "page ids must be in 1..4, got [-1, 0]"),
        (np.array([2, 0, 5], np.int32), "page ids must be in 1..4, got [0, 5]"),
        ([4, 3], "pages are free already: [4, 3]"),
        ([1, 2, 1, 2], "pages are named twice: [1, 2]"),
    ],
)
def test_a_refused_free_says_what_and_why(pages: Wrong, message: str) -> None:
    allocator = TokenToKVPoolAllocator(4, 1)
    allocator.alloc(2)

    with pytest.raises(PageError) as caught:
        allocator.free(pages)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("pages", "error"),
    [
        ([0], ForeignPageError),
        ([5], ForeignPageError),
        ([-1], ForeignPageError),
        ([-(2**31)], ForeignPageError),
        ([1, 0], ForeignPageError),
        ([3], DoubleFreeError),
        ([4], DoubleFreeError),
        ([2, 3], DoubleFreeError),
        ([2, 2], DoubleFreeError),
    ],
    ids=repr,
)
def test_bytes_are_refused_as_arrays_are(
    pages: list[int], error: type[Exception]
) -> None:
    allocator = TokenToKVPoolAllocator(4, 1)
    allocator.alloc(2)

    with pytest.raises(error):
        allocator.give_back(np.array(pages, np.int32).tobytes())
    assert [3, 4] == free_order(allocator)
    assert [1, 2] == allocator.in_use().tolist()


@pytest.mark.parametrize("pages", [[], [1], [4], [2, 3], [4, 1, 3, 2]], ids=repr)
def test_bytes_are_taken_back_as_arrays_are(pages: list[int]) -> None:
    with_bytes, with_arrays = (TokenToKVPoolAllocator(4, 1) for _ in range(2))
    for allocator in (with_bytes, with_arrays):
        allocator.alloc(4)
    with_bytes.give_back(np.array(pages, np.int32).tobytes())
    with_arrays.free(pages)

    assert with_arrays.free_pages().tolist() == with_bytes.free_pages().tolist()
    assert with_arrays.in_use().tolist() == with_bytes.in_use().tolist()


def test_a_wrong_free_names_the_pages() -> None:
    allocator = TokenToKVPoolAllocator(8, 1)
    allocator.alloc(4)

    with pytest.raises(DoubleFreeError, match=r"free already: \[5, 6\]"):
        allocator.free([1, 5, 6])
    with pytest.raises(DoubleFreeError, match=r"named twice: \[2\]"):
        allocator.free([2, 1, 2])
    with pytest.raises(ForeignPageError, match=r"must be in 1\.\.8, got \[9\]"):
        allocator.free([1, 9])


def test_a_refused_free_does_not_spoil_the_next_one() -> None:
    allocator = TokenToKVPoolAllocator(4, 1)
    allocator.alloc(4)
    for wrong in ([1, 1], [2, 3, 2], [1, 2, 3, 4, 1]):
        with pytest.raises(DoubleFreeError):
            allocator.free(wrong)
    allocator.free([4, 1, 3, 2])

    assert allocator.num_free_pages == 4
    allocator.check_integrity()


def test_pages_that_are_in_nobodys_hands_cannot_come_back() -> None:
    allocator = TokenToKVPoolAllocator(4, 1)

    with pytest.raises(DoubleFreeError):
        allocator.free([1])


def test_freeing_nothing_is_allowed() -> None:
    allocator = TokenToKVPoolAllocator(4, 1)
    allocator.free([])
    allocator.free(np.zeros(0, np.int32))

    assert allocator.num_free_pages == 4


def test_growth_keeps_every_allocation_and_adds_pages_at_the_end() -> None:
    allocator = TokenToKVPoolAllocator(4, 1)
    allocator.alloc(2)
    allocator.resize(7)

    assert allocator.num_pages == 7
    assert allocator.num_free_pages == 5
    assert [1, 2] == allocator.in_use().tolist()
    assert [3, 4, 5, 6, 7] == free_order(allocator)
    allocator.free([1, 2])
    allocator.check_integrity()


def test_a_shrink_forgets_the_free_pages_above_the_new_end() -> None:
    allocator = TokenToKVPoolAllocator(8, 1)
    allocator.alloc(2)
    allocator.resize(3)

    assert [3] == free_order(allocator)
    with pytest.raises(ForeignPageError):
        allocator.free([4])


def test_a_shrink_is_refused_with_the_least_size_that_is_possible() -> None:
    allocator = TokenToKVPoolAllocator(8, 1)
    allocator.alloc(6)
    before = free_order(allocator)

    with pytest.raises(PagesInUseError) as caught:
        allocator.resize(4)

    assert (caught.value.needed, caught.value.available) == (6, 4)
    assert allocator.num_pages == 8
    assert before == free_order(allocator)


@pytest.mark.parametrize("num_pages", [1, 3, 8])
def test_free_all_equals_a_fresh_allocator(num_pages: int) -> None:
    allocator = TokenToKVPoolAllocator(5, 2)
    allocator.alloc(5)
    allocator.free([4, 1, 2, 3, 5])
    allocator.resize(num_pages)
    allocator.free_all()

    fresh = TokenToKVPoolAllocator(num_pages, 2)
    assert free_order(fresh) == free_order(allocator)
    assert repr(fresh) == repr(allocator)


@pytest.mark.parametrize("size", [0, -1, 2**31, 1.0, "4", None, True])
def test_sizes_out_of_range_are_refused(size: Wrong) -> None:
    with pytest.raises(ConfigError, match=r"^page_size must"):
        TokenToKVPoolAllocator(4, size)
    with pytest.raises(ConfigError, match=r"^num_pages must"):
        TokenToKVPoolAllocator(size, 4)
    allocator = TokenToKVPoolAllocator(4, 4)
    with pytest.raises(ConfigError, match=r"^num_pages must"):
        allocator.resize(size)
    assert allocator.num_pages == 4


@pytest.mark.parametrize("num_pages", [1.0, "1", None, True])
def test_alloc_of_what_is_no_integer_is_refused(num_pages: Wrong) -> None:
    allocator = TokenToKVPoolAllocator(4, 1)

    with pytest.raises(ConfigError, match=r"^num_pages must be an integer, got"):
        allocator.alloc(num_pages)
    assert allocator.num_free_pages == 4


def test_sizes_may_be_numpy_integers() -> None:
    sizes: Wrong = (np.int64(4), np.int32(2))
    allocator = TokenToKVPoolAllocator(*sizes)

    assert (allocator.num_pages, allocator.page_size) == (4, 2)
    assert type(allocator.num_pages) is int


def test_fragmentation_of_an_empty_free_list_is_0() -> None:
    allocator = TokenToKVPoolAllocator(2, 1)
    assert allocator.fragmentation() == 500
    allocator.alloc(2)

    assert allocator.fragmentation() == 0


@pytest.mark.parametrize(
    ("array", "at", "value", "message"),
    [
        ("_stack", 0, 0, "the free list holds a foreign page"),
        ("_stack", 0, 5, "the free list holds a foreign page"),
        ("_stack", 0, 3, "no owner: pages [4]; two owners: pages [3]"),
        ("_stack", 0, 1, "no owner: pages [4]; two owners: pages [1]"),
        ("_state", 4, 4, "two owners: pages [4]"),
        ("_state", 2, 0, "no owner: pages [2]"),
        ("_state", 2, 1, "a page has a state that is not its own"),
        ("_state", 0, 0, "a page has a state that is not its own"),
    ],
)
def test_every_fault_has_its_words(
    array: str, at: int, value: int, message: str
) -> None:
    """Pages 1 and 2 are in use, 3 and 4 are free, 4 at the bottom."""
    allocator = TokenToKVPoolAllocator(4, 1)
    allocator.alloc(2)
    allocator.check_integrity()
    getattr(allocator, array)[at] = value

    with pytest.raises(IntegrityError) as caught:
        allocator.check_integrity()
    assert f"allocator: {message}" == str(caught.value)


def test_repr_shows_the_sizes() -> None:
    allocator = TokenToKVPoolAllocator(4, 16)
    allocator.alloc(1)

    assert (
        "TokenToKVPoolAllocator(num_pages=4, page_size=16, num_free_pages=3)"
    ) == repr(allocator)


def test_pages_that_are_handed_out_are_in_use_and_no_others() -> None:
    allocator = TokenToKVPoolAllocator(4, 1)
    allocator.alloc(4)
    allocator.free([3])

    expected = {0: False, 1: True, 2: True, 3: False, 4: True, 5: False, 2**31: False}
    assert expected == {page: allocator.is_in_use(page) for page in expected}


def test_pages_and_rows_may_be_numbers_of_numpy() -> None:
    allocator = TokenToKVPoolAllocator(4, 1)
    table = RequestTable(2)
    row = table.alloc()
    pages = allocator.alloc(2)
    assert pages is not None
    assert row is not None
    assert allocator.is_in_use(pages[0])
    allocator.give_back(memoryview(pages.tobytes()))
    table.free(np.int64(row))

    assert not allocator.is_in_use(pages[0])
    assert allocator.take(np.int64(2)) == pages.tobytes()
    assert table.num_free_rows == 2


def test_a_resize_that_lacks_memory_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allocator = TokenToKVPoolAllocator(4, 1)
    pages = allocator.alloc(2)
    before = (allocator.num_pages, allocator.num_free_pages, free_order(allocator))

    def fail(*args: object, **kwargs: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(np, "zeros", fail)
        with pytest.raises(MemoryError):
            allocator.resize(8)

    after = (allocator.num_pages, allocator.num_free_pages, free_order(allocator))
    assert before == after
    assert pages is not None

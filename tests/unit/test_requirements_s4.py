"""Requirements of seed 4: the allocator is embedded in the memory manager."""

from __future__ import annotations

import inspect
import typing

import numpy as np
import pytest
import torch

from radixkv.mem_cache import (
    HOLD_PAGE,
    PADDING_ROW,
    DoubleFreeError,
    MemoryManager,
    OutOfPagesError,
    PageError,
    PrefixCache,
    RadixCache,
    RadixKVError,
    RequestTable,
    TokenToKVPoolAllocator,
)

from .driver import admit, free_order, law, make_cache, make_memory, run, span


def test_s4_1_s4_2_the_state_of_pages_is_in_the_allocator_alone() -> None:
    memory = make_memory(4, 2)
    memory.allocator.resize(9)

    assert memory.num_pages == 9
    memory.resize(5)
    assert memory.allocator.num_pages == 5


def test_s4_3_what_is_short_says_what_was_needed_and_what_is_left() -> None:
    cache = make_cache(2, 4)

    assert cache.memory.allocator.alloc(3) is None
    with pytest.raises(OutOfPagesError) as caught:
        run(cache, span(1, 12))
    assert (caught.value.needed, caught.value.available) == (3, 2)
    assert law(cache) == (8, 0, 0, 0)


def test_s4_4_a_result_is_the_callers_own() -> None:
    allocator = TokenToKVPoolAllocator(6, 1)
    pages = allocator.alloc(3)
    assert pages is not None
    before = pages.tolist()
    allocator.free(pages)
    allocator.alloc(6)
    allocator.free_all()
    assert before == pages.tolist()
    pages[:] = 5

    assert span(1, 6) == free_order(allocator)
    allocator.check_integrity()


def test_s4_4_freed_pages_are_copied_in() -> None:
    allocator = TokenToKVPoolAllocator(6, 1)
    pages = allocator.alloc(6)
    assert pages is not None
    allocator.free(pages)
    pages[:] = 5

    assert span(1, 6) == sorted(free_order(allocator))


def test_s4_5_results_in_flight_never_overlap() -> None:
    """Peers hand out views of a ring buffer, which wraps around."""
    allocator = TokenToKVPoolAllocator(8, 1)
    in_flight = []
    for _ in range(20):
        for size in (3, 5):
            pages = allocator.alloc(size)
            assert pages is not None
            in_flight.append((pages, pages.tolist()))
        for pages, _ in in_flight[-2:]:
            allocator.free(pages)

    for i, (pages, content) in enumerate(in_flight):
        assert content == pages.tolist()
        assert not any(np.shares_memory(pages, other) for other, _ in in_flight[:i])


@pytest.mark.parametrize(
    "kind",
    [list, tuple, np.array, torch.tensor, lambda pages: torch.tensor(pages).int()],
    ids=["list", "tuple", "array", "int64 tensor", "int32 tensor"],
)
def test_s4_6_free_takes_an_array_a_list_or_a_tensor(
    kind: typing.Callable[[list[int]], list[int]],
) -> None:
    allocator = TokenToKVPoolAllocator(6, 1)
    allocator.alloc(6)
    allocator.free(kind([4, 2]))

    assert [1, 3, 5, 6] == allocator.in_use().tolist()


def test_s4_7_free_of_more_than_is_in_use_is_refused() -> None:
    allocator = TokenToKVPoolAllocator(4, 1)
    allocator.alloc(2)

    with pytest.raises(DoubleFreeError):
        allocator.free([1, 2, 3])
    with pytest.raises(PageError):
        allocator.free([1, 2, 1, 2, 1])
    assert allocator.num_free_pages == 2


def test_s4_8_an_idle_cache_has_everything_free_or_cached() -> None:
    cache = make_cache()
    cache.cache_finished_req(run(cache, span(1, 10)), span(1, 10))
    assert law(cache) == (56, 8, 0, 0)
    cache.evict(64)

    assert cache.memory.allocator.num_free_pages == cache.memory.num_pages


def test_s4_9_free_all_restores_the_order() -> None:
    allocator = TokenToKVPoolAllocator(6, 1)
    allocator.alloc(6)
    allocator.free([3, 1, 6])
    allocator.free_all()

    assert free_order(TokenToKVPoolAllocator(6, 1)) == free_order(allocator)


@pytest.mark.parametrize("num_pages", [2, 4, 9])
def test_s4_10_the_hold_page_is_valid_and_never_handed_out_after_a_resize(
    num_pages: int,
) -> None:
    allocator = TokenToKVPoolAllocator(4, 1)
    allocator.resize(num_pages)

    assert HOLD_PAGE not in free_order(allocator)
    assert span(1, num_pages) == sorted(free_order(allocator))
    with pytest.raises(PageError):
        allocator.free([HOLD_PAGE])


@pytest.mark.parametrize("num_pages", [3, 8, 20])
def test_s4_11_after_a_resize_everything_derived_is_that_of_a_fresh_one(
    num_pages: int,
) -> None:
    cache, fresh = make_cache(8, 4), make_cache(num_pages, 4)
    run(cache, span(1, 9))
    cache.resize(num_pages)
    run(fresh, span(1, 9))

    assert law(fresh) == law(cache)
    assert fresh.stats() == cache.stats()
    assert free_order(fresh.memory.allocator) == free_order(cache.memory.allocator)


@pytest.mark.parametrize(
    "owner",
    [TokenToKVPoolAllocator, RequestTable, MemoryManager, PrefixCache, RadixCache],
)
def test_s4_13_every_public_call_is_typed(owner: type) -> None:
    for name, method in inspect.getmembers(owner, inspect.isfunction):
        if name.startswith("_") and name != "__init__":
            continue
        parameters = list(inspect.signature(method).parameters.values())
        for parameter in parameters[1:]:
            assert parameter.annotation is not parameter.empty, f"{name}: {parameter}"
        assert (
            inspect.signature(method).return_annotation is not inspect.Signature.empty
        )


def test_s4_14_messages_have_no_newline_at_the_end() -> None:
    cache = make_cache(1, 1)
    request = admit(cache, [1, 2])
    calls = [
        lambda: cache.admit([]),
        lambda: cache.evict(-1),
        lambda: cache.reset(),
        lambda: cache.resize(0),
        lambda: cache.alloc_for_extend([request], [2]),
        lambda: cache.memory.allocator.free([9]),
        lambda: cache.memory.allocator.free([1]),
    ]
    for call in calls:
        with pytest.raises(RadixKVError) as caught:
            call()
        assert str(caught.value) == str(caught.value).strip() != ""


def test_s4_15_the_padding_row_and_the_hold_page_belong_to_nobody() -> None:
    cache = make_cache(16, 4, max_num_requests=3)
    requests = [run(cache, span(1, 9)) for _ in range(3)]

    assert PADDING_ROW not in [request.req_pool_idx for request in requests]
    assert min(cache.slots(request).min() for request in requests) >= cache.page_size
    assert not cache.memory.request_table.rows[PADDING_ROW]

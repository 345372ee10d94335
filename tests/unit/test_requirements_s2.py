"""Requirements of seed 2: allocation is apart from the scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from radixkv.mem_cache import (
    ChunkCache,
    LengthError,
    OutOfPagesError,
    PrefixCache,
    RadixCache,
    RadixNode,
)

from .driver import (
    admit,
    compute,
    decode,
    docstring_of,
    free_order,
    insert,
    law,
    make_cache,
    make_chunk_cache,
    make_memory,
    run,
    span,
)


def test_s2_2_there_are_two_ways_to_get_memory() -> None:
    assert [name for name in dir(PrefixCache) if name.startswith("alloc")] == [
        "alloc_for_decode",
        "alloc_for_extend",
    ]


def test_s2_3_a_decode_allocates_before_the_length_grows() -> None:
    cache = make_cache(page_size=4)
    request = run(cache, span(1, 4))
    info = cache.alloc_for_decode([request])

    assert request.committed_len == 4
    assert (info.starts.tolist(), info.stops.tolist()) == ([4], [5])
    assert cache.slots(request, 4).tolist() == [2 * 4]


@pytest.mark.parametrize("lens", [[], [5], [5, 6, 7], [5, 0], [0, 5]])
def test_s2_4_an_extend_without_its_lengths_is_refused(lens: list[int]) -> None:
    cache = make_cache()
    requests = [admit(cache, span(1, 5)), admit(cache, span(1, 6))]

    with pytest.raises(LengthError):
        cache.alloc_for_extend(requests, lens)
    assert law(cache) == (64, 0, 0, 0)


def test_s2_5_after_out_of_memory_everything_is_as_before() -> None:
    cache = make_cache(4, 4)
    insert(cache, span(1, 8))
    request = admit(cache, span(1, 5))
    greedy = admit(cache, span(20, 40))
    before = (law(cache), free_order(cache.memory.allocator), cache.stats())

    with pytest.raises(OutOfPagesError):
        cache.alloc_for_extend([request, greedy], [5, 21])

    assert before == (law(cache), free_order(cache.memory.allocator), cache.stats())
    assert cache.match_prefix(span(1, 8)) == 8
    assert (request.allocated_len, greedy.allocated_len) == (4, 0)


@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("num_drafts", [2, 3, 5, 17])
def test_s2_6_drafts_are_accepted_in_part_at_every_page_border(
    page_size: int, num_drafts: int
) -> None:
    cache = make_cache(64, page_size, max_context_len=64)
    for length in range(1, 20):
        request = run(cache, span(1, length))
        for num_accepted in range(num_drafts + 1):
            cache.alloc_for_decode([request], num_drafts)
            start = request.committed_len
            assert request.allocated_len == start + num_drafts
            accepted = min(num_accepted, 40 - start)
            cache.commit(request, start + max(accepted, 0))
            cache.truncate(request, request.committed_len)
            assert cache.held_size // page_size == -(
                -request.committed_len // page_size
            )
        cache.release(request)

    assert law(cache) == (cache.total_size, 0, 0, 0)


def test_s2_7_a_placeholder_cache_works_with_every_call() -> None:
    cache = ChunkCache(make_memory(16, 4))
    request = run(cache, span(1, 5))
    decode(cache, request)
    cache.cache_unfinished_req(request, span(1, 6))
    cache.cache_finished_req(request, span(1, 6))

    assert cache.evict(100) == cache.evict_if_needed(100) == 0
    assert law(cache) == (64, 0, 0, 0)


def test_s2_8_nothing_is_evicted_when_enough_is_free() -> None:
    cache = make_cache(8, 4)
    insert(cache, span(1, 16))
    cache.evict_if_needed(16)
    run(cache, span(20, 35))

    assert cache.stats().num_evicted_tokens == 0
    assert cache.match_prefix(span(1, 16)) == 16


def test_s2_9_s2_10_one_call_evicts_if_needed_the_other_in_any_case() -> None:
    cache = make_cache(8, 4)
    insert(cache, span(1, 16))

    assert cache.evict_if_needed(8) == 0
    assert cache.evict(8) == 8
    assert cache.evict_if_needed(28) == 4


class NewestFirst:
    """A policy that the library does not have."""

    def key(self, node: RadixNode) -> int:
        return -node.created


def test_s2_11_a_policy_can_be_swapped_from_outside() -> None:
    left = []
    for policy in ("lru", NewestFirst()):
        cache = make_cache(policy=policy)
        insert(cache, span(1, 4))
        insert(cache, span(11, 14))
        cache.evict(4)
        left.append([cache.match_prefix(span(1, 4)), cache.match_prefix(span(11, 14))])

    assert left == [[0, 4], [4, 0]]


def test_s2_12_no_cache_is_a_cache_too() -> None:
    """Instead of ``None``, a scheduler holds a `ChunkCache`."""
    cache: PrefixCache = make_chunk_cache(2, 4)
    compute(cache, admit(cache, span(1, 8)), 8)

    with pytest.raises(OutOfPagesError):
        compute(cache, admit(cache, [1]), 1)


def test_s2_13_the_page_size_has_one_source() -> None:
    cache: Any = RadixCache(make_memory(4, 2))
    for owner in (cache, cache.memory):
        assert owner.page_size == cache.memory.allocator.page_size == 2
        with pytest.raises(AttributeError):
            owner.page_size = 4
    options: dict[str, Any] = {"page_size": 4}
    with pytest.raises(TypeError):
        RadixCache(make_memory(4, 2), **options)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_s2_15_a_cache_works_at_every_page_size(page_size: int) -> None:
    cache = make_cache(1024 // page_size, page_size, max_context_len=512)
    prompt = span(1, 200)
    insert(cache, prompt)
    request = run(cache, prompt)
    for token in range(70):
        prompt.append(1000 + token)
        decode(cache, request)
    cache.cache_finished_req(request, prompt)

    assert cache.match_prefix(prompt) == 270 // page_size * page_size
    assert sum(law(cache)) == 1024


@pytest.mark.parametrize("name", ["alloc_for_extend", "alloc_for_decode"])
def test_s2_16_each_wrapper_is_documented_and_measured(name: str) -> None:
    root = Path(__file__).parents[2]
    pages = [page.read_text() for page in (root / "docs").glob("*/*.md")]
    measured = [file.read_text() for file in (root / "benchmarks").glob("*.py")]

    assert sum(name in page for page in pages) > 1
    assert any(f".{name}(" in code for code in measured)
    assert docstring_of(PrefixCache, name)


def test_s2_17_one_object_holds_what_a_process_needs() -> None:
    memory = make_memory(4, 2)

    assert memory.allocator.num_free_pages == memory.num_pages == 4
    assert memory.request_table.num_free_rows == memory.max_num_requests == 8
    assert memory.kv_pool is None

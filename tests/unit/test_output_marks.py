"""Outputs before prompts: what requests generated goes before what they were asked."""

from __future__ import annotations

import pytest

from radixkv.mem_cache import (
    IntegrityError,
    LengthError,
    PrefixCache,
    RadixCache,
    TokenError,
)
from radixkv.mem_cache.eviction import RecencyIndex
from radixkv.mem_cache.radix_node import make_node

from .driver import (
    Wrong,
    admit,
    compute,
    insert,
    law,
    make_cache,
    make_chunk_cache,
    make_memory,
    run,
    span,
)

A, B = span(1, 16), span(101, 116)


def make_marking(policy: str = "lru", num_pages: int = 16) -> RadixCache:
    return RadixCache(
        make_memory(num_pages, 4), policy, outputs_first=True, retention_share=1
    )


def answer(cache: RadixCache, tokens: list[int], prompt_len: int | None) -> None:
    """Take a request through the cache that was asked the first of its tokens."""
    request = run(cache, tokens)
    cache.cache_finished_req(request, tokens, prompt_len=prompt_len)


def cached(cache: RadixCache, *texts: list[int]) -> list[int]:
    law(cache)
    return [cache.match_prefix(text) for text in texts]


@pytest.mark.parametrize("policy", ["lru", "mru", "lfu", "priority"])
def test_outputs_go_before_prompts(policy: str) -> None:
    cache = make_marking(policy)
    answer(cache, A, 8)
    answer(cache, B, 8)
    cache.evict(16)
    assert [8, 8] == cached(cache, A, B)

    cache.evict(8)
    assert 8 == sum(cached(cache, A, B))


def test_outputs_go_by_the_policy_among_themselves() -> None:
    cache = make_marking()
    answer(cache, A, 4)
    answer(cache, B, 12)
    answer(cache, [*A[:8], *B[:8]], 16)  # uses A's first output, and is all prompt
    cache.evict(8)

    assert [8, 16, 16] == cached(cache, A, B, [*A[:8], *B[:8]])
    cache.evict(4)
    assert [8, 12, 16] == cached(cache, A, B, [*A[:8], *B[:8]])


@pytest.mark.parametrize(
    ("prompt_len", "num_left"), [(0, 0), (1, 4), (4, 4), (5, 8), (15, 16), (16, 16)]
)
def test_a_page_with_any_token_of_the_prompt_is_prompt(
    prompt_len: int, num_left: int
) -> None:
    cache = make_marking()
    insert(cache, B)  # older, and all prompt
    answer(cache, A, prompt_len)
    cache.evict(16 - num_left)

    assert [num_left, 16] == cached(cache, A, B)


def test_a_cache_that_is_debugged_publishes_and_marks_the_same() -> None:
    kept = []
    for debug in (False, True):
        cache = RadixCache(make_memory(16, 4), outputs_first=True, debug=debug)
        insert(cache, B)
        request = run(cache, A)
        cache.cache_unfinished_req(request, A, prompt_len=8)
        cache.release(request)
        cache.evict(8)
        kept.append(cached(cache, A, B))

    assert [[8, 16], [8, 16]] == kept


@pytest.mark.parametrize("prompt_len", [None, 16])
def test_without_an_output_all_is_prompt(prompt_len: int | None) -> None:
    cache = make_marking()
    answer(cache, A, prompt_len)
    answer(cache, B, 0)
    cache.evict(16)

    assert [16, 0] == cached(cache, A, B)


def test_an_admission_makes_a_prompt_of_what_it_uses() -> None:
    cache = make_marking()
    answer(cache, A, 4)
    answer(cache, B, 4)
    cache.release(admit(cache, A[:13]))  # the next turn of a chat uses 12 tokens
    cache.evict(12 + 4)
    assert [12, 4] == cached(cache, A, B)

    cache.evict(4)  # all that is left is prompt, and A was used last
    assert [12, 0] == cached(cache, A, B)


def test_what_another_request_computed_as_its_prompt_is_prompt() -> None:
    cache = make_marking()
    asked = run(cache, [*A, *B])  # before A was published
    answer(cache, A, 4)
    cache.cache_unfinished_req(asked, [*A, *B], prompt_len=20)

    law(cache)
    cache.cache_finished_req(asked, [*A, *B], prompt_len=20)
    cache.evict(12)
    assert [20] == cached(cache, [*A, *B])


def test_what_is_a_prompt_already_stays_so() -> None:
    cache = make_marking()
    generating = run(cache, A)
    insert(cache, A)
    insert(cache, B)
    cache.cache_finished_req(generating, A, prompt_len=0)
    cache.evict(16)

    assert [16, 0] == cached(cache, A, B)


def test_a_request_that_publishes_in_parts_marks_its_outputs() -> None:
    cache = make_marking()
    request = admit(cache, A)
    for length in (3, 6, 9, 12, 14, 16):
        compute(cache, request, length)
        cache.cache_unfinished_req(request, A, prompt_len=6)
        law(cache)
    cache.cache_finished_req(request, A, prompt_len=6)
    insert(cache, B)
    cache.evict(8)

    assert [8, 16] == cached(cache, A, B)


def test_an_admission_makes_no_prompt_of_what_it_does_not_use() -> None:
    cache = make_marking()
    answer(cache, A, 4)
    request = run(cache, [*A[:8], *B[:8]])  # A's second page is prompt now
    cache.release(request)
    insert(cache, B)
    cache.evict(8)

    assert [8, 16] == cached(cache, A, B)


def test_marks_follow_the_splits_of_their_nodes() -> None:
    cache = make_marking()
    insert(cache, B)
    generating = run(cache, [*A[:12], *B[:4]])
    answer(cache, A, 4)
    cache.cache_finished_req(generating, [*A[:12], *B[:4]], prompt_len=4)
    cache.evict(16)

    assert [4, 16] == cached(cache, A, B)


@pytest.mark.parametrize(("prompt_len", "kept"), [(64, [64, 64]), (None, [0, 128])])
def test_long_texts_are_marked_and_unmarked_over_many_nodes(
    prompt_len: int | None, kept: list[int]
) -> None:
    cache = RadixCache(
        make_memory(1_000, 64, max_context_len=64_000), outputs_first=True
    )
    older, text = [7] * 64, list(range(40_000))
    insert(cache, older)
    asked = run(cache, text)
    answer(cache, text[:20_032], 64)
    cache.cache_finished_req(asked, text, prompt_len=prompt_len)
    law(cache)
    cache.evict(39_936)

    assert kept == cached(cache, older, text)


def test_retention_is_stronger_than_a_mark() -> None:
    cache = make_marking()
    answer(cache, A, 4)
    insert(cache, B)
    cache.retain(A[:12])
    cache.evict(4)
    assert [12, 16] == cached(cache, A, B)

    cache.evict(16)
    assert [12, 0] == cached(cache, A, B)


def test_the_end_of_a_grant_leaves_the_mark() -> None:
    time = [0.0]
    cache = RadixCache(
        make_memory(16, 4), outputs_first=True, retention_share=1, clock=lambda: time[0]
    )
    answer(cache, A, 4)
    insert(cache, B)
    cache.retain(A, ttl=1)
    time[0] = 1
    cache.evict(12)

    assert [4, 16] == cached(cache, A, B)


def test_the_parts_are_counted_as_one() -> None:
    cache = make_marking()
    first, second = run(cache, A), run(cache, A)
    cache.cache_finished_req(first, A, prompt_len=6)
    cache.cache_finished_req(second, A, prompt_len=6)
    stats = cache.stats()

    assert (16, 16) == (stats.num_published_tokens, stats.num_duplicate_tokens)
    assert (48, 16, 0, 0) == law(cache)


def test_stale_requests_mark_nothing() -> None:
    cache = make_marking()
    request = run(cache, A)
    cache.bump_epoch(None)
    cache.cache_finished_req(request, A, prompt_len=4)

    assert (64, 0, 0, 0) == law(cache)


def test_nothing_is_marked_unless_outputs_go_first() -> None:
    cache = make_cache(16, 4)
    answer(cache, A, 4)
    answer(cache, B, 16)
    nodes = list(cache._tree.nodes())
    cache.evict(16)

    assert [0, 16] == cached(cache, A, B)
    assert len(nodes) == 2
    assert isinstance(cache._tree.index, RecencyIndex)


def test_a_reset_forgets_all_marks() -> None:
    cache = make_marking()
    answer(cache, A, 4)
    cache.reset()
    insert(cache, A)
    answer(cache, B, 4)
    cache.evict(12)

    assert [16, 4] == cached(cache, A, B)


@pytest.mark.parametrize("make", [make_marking, make_cache, make_chunk_cache])
@pytest.mark.parametrize("prompt_len", [-1, 17, 0.5, True, "1"])
def test_a_wrong_prompt_len_is_refused(make: Wrong, prompt_len: Wrong) -> None:
    cache: PrefixCache = make()
    request = run(cache, A)
    before = law(cache)

    for publish in (cache.cache_unfinished_req, cache.cache_finished_req):
        with pytest.raises(LengthError, match="prompt_len must be"):
            publish(request, A, prompt_len=prompt_len)
    assert before == law(cache)
    assert request.protected_len == 0
    cache.cache_finished_req(request, A, prompt_len=16)


def test_a_wrong_token_of_the_output_publishes_no_prompt() -> None:
    cache = make_marking()
    request = run(cache, A)

    with pytest.raises(TokenError):
        cache.cache_unfinished_req(request, [*A[:15], -1], prompt_len=4)
    assert (48, 0, 0, 16) == law(cache)


def test_wrong_marks_are_told() -> None:
    cache = make_marking()
    answer(cache, A, 8)
    marks = cache._output_marks
    assert marks is not None
    upper, lower = cache._tree.nodes()

    marks._marked.add(upper)
    marks._marked.remove(lower)
    with pytest.raises(IntegrityError, match="is prompt, but what comes before it is"):
        cache.check_integrity()
    marks._marked = {lower}
    marks._marked.add(make_node(b"", b"", lower))
    with pytest.raises(IntegrityError, match="1 nodes are output, but gone"):
        cache.check_integrity()

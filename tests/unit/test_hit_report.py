"""Why a request found what it found, and what the counters make of it."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import pairwise

import numpy as np
import pytest

from radixkv.mem_cache import (
    HitReport,
    LengthError,
    MemoryManager,
    OutOfPagesError,
    RadixCache,
    RadixNode,
    RequestKV,
)
from radixkv.mem_cache.eviction import make_eviction_index
from radixkv.mem_cache.explainer import Explainer
from radixkv.mem_cache.ghost_index import GhostIndex
from radixkv.mem_cache.radix_tree import RadixTree
from radixkv.mem_cache.root_directory import MAX_NUM_ROOTS

from .driver import (
    Wrong,
    admit,
    compute,
    insert,
    make_cache,
    make_chunk_cache,
    make_memory,
    run,
    span,
)

PROMPT = span(1, 14)
"""Three pages of 4 tokens, and 2 tokens of a fourth."""


def report_of(request: RequestKV) -> HitReport:
    assert request.hit_report is not None
    return request.hit_report


def look(
    cache: RadixCache,
    tokens: list[int],
    namespace: Hashable = None,
    *,
    computed_len: int = 0,
) -> HitReport:
    """What a request would be told now; it is given back at once."""
    request = cache.admit(tokens, namespace=namespace, computed_len=computed_len)
    assert request is not None
    cache.release(request)
    return report_of(request)


def reasons(report: HitReport) -> dict[str, int]:
    """The tokens of each reason that counts any."""
    names = ["evicted", "quota", "unpublished", "other_epoch", "other_namespace"]
    names += ["forgotten", "cold", "unaligned", "recomputed"]
    counts = {name: getattr(report, f"num_{name}_tokens") for name in names}
    assert report.num_tokens == report.granted_len + sum(counts.values())
    return {name: count for name, count in counts.items() if count}


def explainer_of(cache: RadixCache) -> Explainer:
    assert cache._explainer is not None
    return cache._explainer


# Reasons --------------------------------------------------------------------


def test_a_prompt_that_was_never_seen_is_cold() -> None:
    report = look(make_cache(), PROMPT)

    assert reasons(report) == {"cold": 12, "unaligned": 2}
    assert (report.available_len, report.granted_len) == (0, 0)
    assert (report.evicted_by, report.evicted_ago) == (None, None)


def test_of_a_prompt_that_is_cached_only_the_last_page_is_missing() -> None:
    cache = make_cache()
    insert(cache, PROMPT)
    report = look(cache, PROMPT)

    assert reasons(report) == {"unaligned": 2}
    assert (report.available_len, report.granted_len) == (12, 12)


def test_the_page_that_is_kept_back_is_available_but_not_granted() -> None:
    cache = make_cache()
    insert(cache, PROMPT)
    report = look(cache, PROMPT[:12])

    assert reasons(report) == {"unaligned": 4}
    assert (report.available_len, report.granted_len) == (12, 8)


def test_a_prompt_shorter_than_a_page_has_nothing_to_explain() -> None:
    report = look(make_cache(), [1, 2])

    assert reasons(report) == {"unaligned": 2}


def test_b54_a_second_prompt_in_flight_hits_nothing_and_is_told_why() -> None:
    cache = make_cache()
    request = run(cache, span(1, 9))
    report = look(cache, span(1, 9))

    assert reasons(report) == {"unpublished": 8, "unaligned": 1}
    cache.cache_unfinished_req(request, span(1, 9))
    assert look(cache, span(1, 9)).granted_len == 8


def test_a_prompt_is_remembered_until_it_is_published() -> None:
    cache = make_cache()
    request = run(cache, span(1, 9))
    assert np.array(span(1, 9), np.int32).tobytes() == request.awaited
    cache.cache_unfinished_req(request, span(1, 9))

    assert b"" == request.awaited


def test_what_others_publish_first_is_no_longer_waited_for() -> None:
    """Another request publishes the first page that both need; the rest is awaited."""
    cache = make_cache()
    admit(cache, PROMPT)
    insert(cache, PROMPT[:5])
    report = look(cache, [*PROMPT, 15])

    assert report.granted_len == 4
    assert reasons(report) == {"unpublished": 8, "unaligned": 3}


def test_the_last_full_page_of_a_running_prompt_is_awaited_too() -> None:
    cache = make_cache()
    admit(cache, PROMPT[:12])

    assert reasons(look(cache, PROMPT)) == {"unpublished": 12, "unaligned": 2}


def test_nobody_waits_for_a_request_that_was_aborted() -> None:
    cache = make_cache()
    cache.release(run(cache, PROMPT))

    assert reasons(look(cache, PROMPT)) == {"cold": 12, "unaligned": 2}


def test_evicted_pages_say_by_whom_and_how_many_admissions_ago() -> None:
    cache = make_cache(num_pages=4)
    insert(cache, PROMPT)
    insert(cache, span(21, 28))
    assert look(cache, span(31, 38)).evicted_by is None
    report = look(cache, PROMPT)

    assert report.granted_len == 8
    assert reasons(report) == {"evicted": 4, "unaligned": 2}
    # Of the two admissions since, the second was for another prompt.
    assert (report.evicted_by, report.evicted_ago) == ("lru", 1)


def test_the_last_eviction_counts() -> None:
    cache = make_cache()
    insert(cache, PROMPT)
    cache.evict(4)
    insert(cache, [99])
    cache.evict(4)
    report = look(cache, PROMPT)

    assert reasons(report) == {"evicted": 8, "unaligned": 2}
    assert report.evicted_ago == 0


class LargestTokenFirst:
    """A policy of the user's own."""

    def key(self, node: RadixNode) -> int:
        return -max(node.key)


def test_the_evictor_is_named() -> None:
    own, manual, resized = (
        make_cache(4, policy=LargestTokenFirst()),
        *(make_cache(), make_cache()),
    )
    for cache in (own, manual, resized):
        insert(cache, PROMPT)
    insert(own, span(21, 32))
    manual.evict_if_needed(60)
    resized.resize(1)

    assert look(own, PROMPT).evicted_by == "LargestTokenFirst"
    assert look(manual, PROMPT).evicted_by == "manual"
    assert look(resized, PROMPT).evicted_by == "resize"


def test_a_failing_eviction_names_nobody_later() -> None:
    """What follows a refused `evict` is the policy's again."""
    cache = make_cache(4)
    insert(cache, PROMPT)
    with pytest.raises(LengthError):
        cache.evict(-1)
    insert(cache, span(21, 32))

    assert look(cache, PROMPT).evicted_by == "lru"


def test_a_ceiling_is_told_apart() -> None:
    cache = make_cache(8)
    insert(cache, PROMPT, "a")
    cache.evict(4)
    cache.set_quota("a", ceiling_size=12)
    insert(cache, span(21, 28), "a")
    report = look(cache, PROMPT, "a")

    assert report.granted_len == 4
    assert reasons(report) == {"quota": 4, "evicted": 4, "unaligned": 2}
    assert report.evicted_by == "quota"


def test_another_namespace_is_told_apart() -> None:
    cache = make_cache()
    insert(cache, PROMPT, "a")

    assert reasons(look(cache, PROMPT, "b")) == {"other_namespace": 12, "unaligned": 2}
    insert(cache, PROMPT[:5], "b")
    assert reasons(look(cache, PROMPT, "b")) == {"other_namespace": 8, "unaligned": 2}
    assert reasons(look(cache, PROMPT, "a")) == {"unaligned": 2}


@pytest.mark.parametrize("num_shared", range(9))
def test_a_path_in_another_namespace_may_part_anywhere(num_shared: int) -> None:
    """Also behind the first page that is missing here, inside of a later node."""
    cache = make_cache(32, 1)
    text = span(1, 8)
    insert(cache, text, "a")
    insert(cache, [*text[:4], 90], "a")  # so that the path is two nodes

    report = look(cache, [*text[:num_shared], *span(70, 78)], "b")
    assert report.num_other_namespace_tokens == num_shared


def test_an_epoch_that_has_ended_is_told_apart() -> None:
    cache = make_cache()
    insert(cache, PROMPT, "a")
    insert(cache, [*PROMPT, 15, 16], "b")
    cache.bump_epoch("a")

    assert reasons(look(cache, [*PROMPT, 15, 16, 17], "a")) == {
        "other_epoch": 12,
        "other_namespace": 4,
        "unaligned": 1,
    }


def test_what_was_evicted_before_an_epoch_ended_is_cold() -> None:
    cache = make_cache()
    insert(cache, PROMPT)
    cache.evict(64)
    cache.bump_epoch(None)

    assert explainer_of(cache)._last_root is None  # or it would live on
    assert reasons(look(cache, PROMPT)) == {"cold": 12, "unaligned": 2}


def test_what_goes_because_its_epoch_has_ended_is_cold() -> None:
    cache = make_cache()
    insert(cache, PROMPT)
    cache.bump_epoch(None)
    cache.evict(64)

    assert reasons(look(cache, PROMPT)) == {"cold": 12, "unaligned": 2}


def test_the_first_reason_that_holds_counts() -> None:
    cache = make_cache(32)
    longer = [*PROMPT, *span(15, 25)]
    insert(cache, longer[:9])
    cache.evict(4)
    insert(cache, longer, "other")
    running = admit(cache, longer[:17])

    # 25 tokens: a hit of 4, 4 evicted, 8 awaited, 8 elsewhere.
    assert reasons(look(cache, longer)) == {
        "evicted": 4,
        "unpublished": 8,
        "other_namespace": 8,
        "unaligned": 1,
    }
    cache.release(running)


def test_pages_that_are_cached_again_are_no_longer_evicted() -> None:
    cache = make_cache()
    insert(cache, PROMPT)
    cache.evict(12)
    insert(cache, [*PROMPT[:8], 0, 0, 0, 0, 0])

    assert look(cache, PROMPT).granted_len == 8
    assert reasons(look(cache, PROMPT)) == {"evicted": 4, "unaligned": 2}


def test_a_namespace_that_comes_back_is_remembered() -> None:
    cache = make_cache()
    insert(cache, PROMPT, "a")
    cache.evict(64)

    assert reasons(look(cache, PROMPT, "a")) == {"evicted": 12, "unaligned": 2}
    assert reasons(look(cache, PROMPT, "b")) == {"cold": 12, "unaligned": 2}


def test_no_more_evicted_pages_are_remembered_than_the_pool_has() -> None:
    cache = make_cache(4)
    for first in (10, 20, 30):
        insert(cache, span(first, first + 8))
    cache.evict(16)

    # 6 pages went, of which the first two are forgotten.
    evicted = [
        reasons(look(cache, span(first, first + 8))).get("evicted", 0)
        for first in (10, 20, 30)
    ]
    assert evicted == [0, 8, 8]


def test_at_least_half_as_many_are_remembered() -> None:
    cache = make_cache(128, 1, max_context_len=128)
    texts = [span(first, first + 40) for first in (1, 101, 201)]
    for text in texts:
        insert(cache, text[:40])
        cache.evict(128)

    # Of the second text, there is no room for a part.
    assert explainer_of(cache)._ghosts.num_pages == 80
    evicted = [reasons(look(cache, text)).get("evicted", 0) for text in texts]
    assert evicted == [0, 40, 40]


def test_of_what_goes_at_once_the_first_pages_are_remembered() -> None:
    cache = make_cache(128, 1, max_context_len=128)
    for text in (span(201, 210), span(1, 100)):
        insert(cache, text)
        cache.evict(128)

    assert reasons(look(cache, span(1, 101))) == {
        "evicted": 64,
        "forgotten": 36,
        "unaligned": 1,
    }
    assert reasons(look(cache, span(201, 211))) == {"forgotten": 10, "unaligned": 1}
    assert reasons(look(cache, span(301, 311))) == {"cold": 10, "unaligned": 1}


def test_a_smaller_pool_forgets_as_more_is_evicted() -> None:
    cache = make_cache(16)
    text = span(30, 38)
    insert(cache, text)
    cache.resize(1)
    cache.evict(4)
    assert reasons(look(cache, text)) == {"evicted": 8, "unaligned": 1}
    for token in (1, 2):
        insert(cache, [token] * 4)
        cache.evict(4)

    assert reasons(look(cache, text)) == {"forgotten": 8, "unaligned": 1}
    assert explainer_of(cache)._ghosts.num_pages == 2


def test_after_a_reset_nothing_was_ever_seen() -> None:
    cache = make_cache()
    insert(cache, PROMPT)
    cache.evict(4)
    cache.reset()

    assert reasons(look(cache, PROMPT)) == {"cold": 12, "unaligned": 2}


def test_a_report_is_made_once() -> None:
    cache = make_cache()
    insert(cache, PROMPT)
    request = admit(cache, PROMPT)
    report = report_of(request)
    compute(cache, request, 14)
    cache.cache_finished_req(request, PROMPT)
    cache.evict(64)

    assert request.hit_report == report
    assert report.granted_len == 12


def test_only_a_few_namespaces_are_looked_at() -> None:
    cache = make_cache(64)
    for name in range(MAX_NUM_ROOTS + 1):
        # Only the last one has more than the first page.
        insert(cache, PROMPT if name == MAX_NUM_ROOTS else PROMPT[:5], name)

    assert reasons(look(cache, PROMPT, "new")) == {
        "other_namespace": 4,
        "cold": 8,
        "unaligned": 2,
    }


def test_without_explanations_there_are_no_reports() -> None:
    cache = RadixCache(make_memory(), explain=False)
    insert(cache, PROMPT)
    request = admit(cache, PROMPT)
    compute(cache, request, 14)
    stats = cache.stats()

    assert request.hit_report is None
    assert cache.namespace_stats(None).num_prompt_tokens == 28
    assert (stats.num_prompt_tokens, stats.num_cached_tokens) == (28, 12)
    assert stats.num_missed_cold_tokens == stats.num_missed_unaligned_tokens == 0
    resumed = cache.admit(PROMPT, computed_len=13)
    assert resumed is not None
    compute(cache, resumed, 14)
    stats = cache.stats()
    assert (stats.num_prompt_tokens, stats.num_cached_tokens) == (28, 12)
    assert (stats.num_resumed_cached_tokens, stats.num_recomputed_tokens) == (12, 1)
    chunked = make_chunk_cache()
    assert admit(chunked, PROMPT).hit_report is None


class Unequal:
    """A namespace that cannot be compared."""

    def __hash__(self) -> int:
        return 7

    def __eq__(self, other: object) -> bool:
        raise ArithmeticError("no")


def test_a_namespace_that_cannot_be_compared_is_served_all_the_same() -> None:
    """It meets one with the same hash that went, and of which only ghosts are left."""
    cache = make_cache()
    insert(cache, PROMPT, 7)
    cache.evict(64)
    name = Unequal()
    insert(cache, PROMPT, name)
    cache.bump_epoch(name)
    insert(cache, PROMPT, name)

    assert look(cache, PROMPT, name).granted_len == 12
    cache.check_integrity()
    assert cache.evict(64) == 24


def test_a_namespace_that_cannot_be_compared_is_that_of_no_past_epoch() -> None:
    cache = make_cache()
    insert(cache, PROMPT, 7)
    cache.bump_epoch(7)

    assert reasons(look(cache, PROMPT, Unequal())) == {"cold": 12, "unaligned": 2}


def test_a_tail_that_was_forgotten_leaves_no_trace() -> None:
    """A node loses its tail, that is forgotten, and others come and go behind it."""
    tree = RadixTree(4, make_eviction_index("lfu"))
    ghosts = GhostIndex(tree, 4, 2, "lfu")

    def publish(raw: bytes) -> None:
        known = tree.match(None, raw)
        node, _ = tree.acquire(None, raw)
        tree.unlock(tree.publish(node, raw[known:], raw[known:])[0])

    publish(b"aaaabbbbcccc")
    tree.evict(1)
    node, _ = tree.acquire(None, b"aaaabbbb")
    publish(b"xxxxyyyy")
    tree.evict(2)  # as many as are remembered
    tree.unlock(node)
    publish(b"aaaabbbbdddd")
    tree.evict(1)
    assert [12] == [at for at, _, _ in ghosts.follow(node, b"aaaabbbbdddd", 8, 12)]
    tree.evict(1)
    node, _ = tree.acquire(None, b"aaaa")

    assert [] == ghosts.follow(node, b"aaaacccc", 4, 8)
    assert [8, 12] == [at for at, _, _ in ghosts.follow(node, b"aaaabbbbdddd", 4, 12)]
    assert [8] == [at for at, _, _ in ghosts.follow(node, b"aaaabbbbcccc", 4, 12)]


def test_a_node_may_grow_where_its_tail_was_forgotten() -> None:
    tree = RadixTree(4, make_eviction_index("lru"))
    ghosts = GhostIndex(tree, 4, 2, "lru")
    leaf, _ = tree.acquire(None, b"")
    leaf, _ = tree.publish(leaf, b"aaaabbbb", b"....****")
    tree.unlock(leaf)
    tree.evict(1)
    tree.lock(leaf)
    other, _ = tree.acquire(None, b"")
    other, _ = tree.publish(other, b"xxxxyyyy", b"....****")
    tree.unlock(other)
    tree.evict(2)
    tree.publish(leaf, b"cccc", b"....")
    assert leaf.key == b"aaaacccc"
    assert ghosts._inside == {leaf: {4: 2}}
    tree.unlock(leaf)
    tree.evict(1)

    assert [] == ghosts.follow(leaf, b"aaaabbbb", 4, 8)
    assert ghosts.has_forgotten
    assert [] == ghosts.follow(leaf, b"aaaadddd", 4, 8)
    assert not ghosts.has_forgotten
    assert [8] == [at for at, _, _ in ghosts.follow(leaf, b"aaaacccc", 4, 8)]
    assert not ghosts._inside


def test_a_page_that_was_evicted_elsewhere_is_cold() -> None:
    cache = make_cache()
    for first, second in ((1, 11), (2, 12)):
        insert(cache, [*([first] * 4), *([second] * 4)])
    cache.evict(8)
    cache.evict(8)
    for first in (1, 2):
        insert(cache, [first] * 4)

    own, elsewhere = ([*([1] * 4), *([second] * 4), 9] for second in (11, 12))
    assert reasons(look(cache, own)) == {"evicted": 4, "unaligned": 1}
    assert reasons(look(cache, elsewhere)) == {"cold": 4, "unaligned": 1}


def test_a_node_that_grows_again_may_have_had_children() -> None:
    """It lost its tail and then a child; the tail comes back, the child does not."""
    tree = RadixTree(4, make_eviction_index("lru"))
    ghosts = GhostIndex(tree, 4, 16, "lru")

    def publish(raw: bytes) -> RadixNode:
        known = tree.match(None, raw)
        node, _ = tree.acquire(None, raw)
        end, _ = tree.publish(node, raw[known:], raw[known:])
        tree.unlock(end)
        return end

    leaf = publish(b"aaaabbbb")
    tree.evict(1)
    tree.lock(leaf)
    child, _ = tree.acquire(None, b"aaaa")
    child, _ = tree.publish(child, b"cccc", b"....")
    tree.unlock(child)
    tree.evict(1)
    tree.publish(leaf, b"bbbb", b"....")
    assert leaf.key == b"aaaabbbb"
    tree.unlock(leaf)
    assert 1 == ghosts.num_pages
    tree.evict(1)

    assert [8] == [at for at, _, _ in ghosts.follow(leaf, b"aaaacccc", 4, 8)]
    assert [8] == [at for at, _, _ in ghosts.follow(leaf, b"aaaabbbb", 4, 8)]


def test_many_may_begin_with_the_same_page() -> None:
    """Behind other pages; each is found, and forgotten, on its own."""
    cache = make_cache(64)
    texts = [[*([first] * 4), *span(51, 59)] for first in range(1, 6)]
    for text in texts:
        insert(cache, [*text[:4], 99])  # so that the rest is a node of its own
        insert(cache, text)
    for text in texts:
        insert(cache, [*text[:4], *span(71, 78)])  # more recent
    cache.evict(40)
    assert [8] * 5 == [look(cache, text).num_evicted_tokens for text in texts]
    for text in texts[::2]:
        insert(cache, text)

    counts = [look(cache, text).num_evicted_tokens for text in texts]
    assert counts == [0, 8, 0, 8, 0]


# Nothing piles up -----------------------------------------------------------


def test_requests_that_are_gone_are_forgotten() -> None:
    cache = make_cache()
    first, second = run(cache, PROMPT), admit(cache, PROMPT)
    cache.release(second)
    cache.cache_finished_req(first, PROMPT)

    assert len(explainer_of(cache)._in_flight) == 0
    assert cache.stats().num_admitted_requests == 1
    assert first.awaited == second.awaited == b""


def test_what_is_published_is_no_longer_awaited_while_the_request_runs() -> None:
    cache = make_cache()
    request = admit(cache, PROMPT)
    compute(cache, request, 8)
    cache.cache_unfinished_req(request, PROMPT)
    assert len(explainer_of(cache)._in_flight) == 1
    compute(cache, request, 14)
    cache.cache_unfinished_req(request, PROMPT)

    assert len(explainer_of(cache)._in_flight) == 0
    assert request.awaited == b""


@pytest.mark.parametrize("bumps", [False, True])
def test_namespaces_come_and_go(bumps: bool) -> None:
    cache = make_cache(4)
    for name in range(1000):
        insert(cache, [name, *PROMPT], name)
        if bumps:
            cache.bump_epoch(name - 7)

    explainer = explainer_of(cache)
    assert len(explainer._roots) < 200
    assert len(explainer._ghosts._young.roots) <= 2
    assert len(explainer._ghosts._old.roots) <= 2
    assert len(explainer._directory._roots) <= 4


def test_with_one_namespace_no_directory_is_kept() -> None:
    cache = make_cache()
    for _ in range(3):
        insert(cache, PROMPT, "a")
        cache.evict(64)
    cache.reset()
    insert(cache, PROMPT, "a")
    assert not explainer_of(cache)._directory.has_several
    insert(cache, PROMPT, "b")

    assert explainer_of(cache)._directory.has_several


def test_a_reset_lets_go_of_what_is_remembered() -> None:
    cache = make_cache()
    insert(cache, PROMPT)
    cache.evict(4)
    cache.reset()

    assert explainer_of(cache)._ghosts.num_pages == 0


def test_pages_that_go_and_come_back_leave_nothing() -> None:
    cache = make_cache()
    insert(cache, [*PROMPT, *span(1, 9)])
    for _ in range(1000):
        cache.evict(8)
        insert(cache, [*PROMPT, *span(1, 9)])

    ghosts = explainer_of(cache)._ghosts
    assert ghosts.num_pages == 0
    assert not [*ghosts._young.ghosts()]
    assert not [*ghosts._old.ghosts()]
    assert not ghosts._inside


def test_forgotten_ghosts_give_their_memory_back_a_few_at_a_time() -> None:
    cache = make_cache(200, page_size=1, max_context_len=4)
    ghosts = explainer_of(cache)._ghosts
    fading: list[int] = []
    for name in range(2000):
        insert(cache, [name])
        fading.append(sum(map(len, ghosts._to_let_go)))
    steps = [before - after for before, after in pairwise(fading)]

    assert max(fading) == 100  # a generation
    assert fading.count(0) > 1000
    assert max(steps) == 4
    cache.reset()
    assert not ghosts._fading


# Counters -------------------------------------------------------------------


def test_an_admission_counts_when_it_gets_its_first_pages() -> None:
    cache = make_cache()
    insert(cache, PROMPT)
    request = admit(cache, PROMPT)
    assert cache.stats().num_admitted_requests == 1
    compute(cache, request, 13)
    compute(cache, request, 14)
    stats = cache.stats()

    assert stats.num_admitted_requests == 2
    assert (stats.num_prompt_tokens, stats.num_cached_tokens) == (28, 12)
    assert stats.hit_rate == 12 / 28


def test_an_admission_that_got_no_pages_does_not_count() -> None:
    cache = make_cache(4)
    held = run(cache, span(21, 36))
    for _ in range(3):
        request = admit(cache, PROMPT)
        with pytest.raises(OutOfPagesError):
            cache.alloc_for_extend([request], [14])
        cache.release(request)
    assert cache.stats().num_admitted_requests == 1
    cache.release(held)
    run(cache, PROMPT)

    assert cache.stats().num_admitted_requests == 2
    assert cache.stats().num_prompt_tokens == 16 + 14


def test_an_empty_batch_counts_nobody() -> None:
    cache = make_cache()
    admit(cache, PROMPT)
    cache.alloc_for_extend([], [])

    assert cache.stats().num_admitted_requests == 0


def test_each_namespace_has_its_counters() -> None:
    cache = make_cache(32)
    for name, count in (("a", 3), ("b", 2), ("a", 1)):
        for _ in range(count):
            cache.cache_finished_req(run(cache, PROMPT, name), PROMPT)
    first, second = cache.namespace_stats("a"), cache.namespace_stats("b")

    assert (first.num_admitted_requests, second.num_admitted_requests) == (4, 2)
    assert (first.num_prompt_tokens, second.num_prompt_tokens) == (56, 28)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (36, 12)


def test_misses_are_counted_by_reason() -> None:
    cache = make_cache(32)
    insert(cache, PROMPT)  # 12 cold, 2 unaligned
    cache.evict(4)
    insert(cache, PROMPT)  # 8 cached, 4 evicted, 2 unaligned
    insert(cache, PROMPT, "b")  # 12 in another namespace, 2 unaligned
    cache.bump_epoch(None)
    running = run(cache, PROMPT)  # 12 in another epoch, 2 unaligned
    cache.release(run(cache, PROMPT))  # 12 not published, 2 unaligned
    cache.release(running)
    stats = cache.stats()

    assert stats.num_missed_cold_tokens == 12
    assert stats.num_missed_evicted_tokens == 4
    assert stats.num_missed_other_namespace_tokens == 12
    assert stats.num_missed_other_epoch_tokens == 12
    assert stats.num_missed_unpublished_tokens == 12
    assert stats.num_missed_unaligned_tokens == 10
    assert stats.num_missed_quota_tokens == 0
    assert (stats.num_prompt_tokens, stats.num_cached_tokens) == (70, 8)


# Retraction -----------------------------------------------------------------


def test_recomputation_is_no_miss_and_what_is_left_is_no_hit() -> None:
    cache = make_cache()
    insert(cache, PROMPT)
    before = cache.stats()
    cache.evict(4)
    # It had computed 13 tokens; of these, 8 are still cached. The 14th is new.
    request = cache.admit(PROMPT, computed_len=13)
    assert request is not None
    compute(cache, request, 14)
    stats = cache.stats()

    assert reasons(report_of(request)) == {"recomputed": 5, "unaligned": 1}
    assert report_of(request).evicted_by == "manual"
    assert stats.num_resumed_requests == 1
    assert stats.num_resumed_cached_tokens == 8
    assert stats.num_recomputed_tokens == 5
    assert stats.num_prompt_tokens == before.num_prompt_tokens
    assert stats.num_missed_unaligned_tokens == before.num_missed_unaligned_tokens
    assert stats.num_cached_tokens == before.num_cached_tokens
    assert stats.num_missed_evicted_tokens == 0


def test_b175_a_prompt_counts_once_even_if_only_a_part_was_computed() -> None:
    cache = make_cache()
    insert(cache, PROMPT)
    request = cache.admit(PROMPT, computed_len=3)
    assert request is not None
    compute(cache, request, 14)
    stats = cache.stats()

    assert (stats.num_resumed_cached_tokens, stats.num_recomputed_tokens) == (3, 0)
    assert (stats.num_prompt_tokens, stats.num_cached_tokens) == (14, 0)
    namespace = cache.namespace_stats(None)
    assert (namespace.num_admitted_requests, namespace.num_prompt_tokens) == (2, 14)


@pytest.mark.parametrize("computed_len", [-1, 15, 1.5, "1", True], ids=repr)
def test_a_wrong_computed_len_is_refused_and_changes_nothing(
    computed_len: Wrong,
) -> None:
    cache = make_cache()
    insert(cache, PROMPT)
    before = cache.stats(), look(cache, PROMPT)

    with pytest.raises(LengthError, match="computed_len"):
        cache.admit(PROMPT, computed_len=computed_len)

    assert before == (cache.stats(), look(cache, PROMPT))
    cache.check_integrity()


def test_partial_pages_are_granted() -> None:
    memory = MemoryManager(16, 4, max_num_requests=8, max_context_len=64)
    cache = RadixCache(memory, partial_pages=True)
    insert(cache, PROMPT)
    report = look(cache, [*PROMPT[:6], 99, 99, 99])

    assert (report.available_len, report.granted_len) == (4, 6)
    assert reasons(report) == {"cold": 2, "unaligned": 1}


def test_an_ended_epoch_is_told_whatever_two_namespaces_compare_to() -> None:
    cache = make_cache(page_size=4)
    tokens = [1, 2, 3, 4, 5]
    insert(cache, tokens, namespace=1)
    request = admit(cache, tokens, namespace=1)
    cache.bump_epoch(1)
    report = admit(cache, tokens, namespace=np.int64(1)).hit_report

    assert report is not None
    assert report.num_other_epoch_tokens == 4
    cache.release(request)


@pytest.mark.parametrize("name", ["a", 7, ("tenant", 1), frozenset("a")])
def test_a_namespace_that_was_let_go_is_not_called_cold(name: Hashable) -> None:
    """It has no ghosts any more, and hundreds came after it."""
    cache = make_cache(2)
    for i in range(300):
        tokens = [i, *PROMPT[1:4]] if i else PROMPT[:4]
        insert(cache, tokens, namespace=("other", i) if i else name)

    assert reasons(look(cache, PROMPT, name)) == {"forgotten": 12, "unaligned": 2}
    assert reasons(look(cache, PROMPT, "new")) == {"cold": 12, "unaligned": 2}
    cache.reset()
    assert reasons(look(cache, PROMPT, name)) == {"cold": 12, "unaligned": 2}


def test_what_is_forgotten_is_counted_apart() -> None:
    cache = make_cache(2)
    for first in (10, 20, 30, 40, 10):
        insert(cache, span(first, first + 7))
    stats = cache.stats()

    assert 16 == stats.num_missed_cold_tokens
    assert 4 == stats.num_missed_forgotten_tokens

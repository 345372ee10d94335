"""Content other than tokens: equal ones match, others never, and all are forgotten."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread

import numpy as np
import pytest

from radixkv.mem_cache import (
    ChunkCache,
    ConfigError,
    IntegrityError,
    OutOfContentsError,
    PrefixCache,
    RadixCache,
    RequestKV,
    TokenError,
    WrongThreadError,
)
from radixkv.mem_cache.eviction import RecencyIndex
from radixkv.mem_cache.radix_tree import RadixTree
from radixkv.mem_cache.virtual_tokens import LOWEST_TOKEN, VirtualTokens

from .driver import (
    Wrong,
    admit,
    compute,
    decode,
    insert,
    law,
    make_cache,
    make_memory,
    run,
    span,
)

A, B, C, D = (bytes([letter]) * 32 for letter in b"ABCD")


def make_bounded(max_num_contents: int, page_size: int = 1) -> RadixCache:
    memory = make_memory(page_size=page_size)
    return RadixCache(memory, max_num_contents=max_num_contents)


def is_alive(cache: PrefixCache, token: int) -> bool:
    try:
        cache.match_prefix([token])
    except TokenError:
        return False
    return True


def state(cache: PrefixCache) -> tuple[object, ...]:
    """Everything that a refused call must leave as it was."""
    alive = [token for token in range(-9, 0) if is_alive(cache, token)]
    return law(cache), cache.stats(), alive


def around(image: int, count: int = 4) -> list[int]:
    """A prompt with placeholders for an image in the middle."""
    return [1, 2, 3, 4, *[image] * count, 5, 6, 7, 8, 9]


# Equal contents match, others do not --------------------------------------------------


def test_b66_placeholders_of_different_images_do_not_match() -> None:
    cache = make_cache()
    insert(cache, around(cache.intern(A)))
    insert(cache, around(cache.intern(B)), namespace="elsewhere")

    assert cache.match_prefix(around(cache.intern(B))) == 4
    assert cache.match_prefix(around(cache.intern(A))) == 12


def test_b66_placeholders_of_different_images_do_not_match_in_pages_of_one() -> None:
    cache = make_cache(32, page_size=1)
    insert(cache, around(cache.intern(A)))
    insert(cache, around(cache.intern(B)))

    assert cache.match_prefix(around(cache.intern(A))) == 13
    assert cache.match_prefix(around(cache.intern(B))) == 13
    assert cache.match_prefix(around(cache.intern(C))) == 4


def test_contents_are_published_from_any_sequence() -> None:
    prompt = tuple(around(-1))
    for tokens in (prompt, list(prompt), np.array(prompt), range(-1, -14, -1)):
        cache = make_cache(32, page_size=1)
        for letter in range(13):
            cache.intern(bytes([letter]) * 32)
        request = run(cache, list(tokens))
        sequence: Wrong = tokens
        cache.cache_unfinished_req(request, sequence)

        assert cache.match_prefix(sequence) == request.protected_len == 13


@pytest.mark.parametrize(("page_size", "shared"), [(1, 4), (2, 4), (3, 3), (16, 0)])
def test_b66_images_of_different_sizes_do_not_match(
    page_size: int, shared: int
) -> None:
    cache = make_cache(64, page_size)
    insert(cache, around(cache.intern(A), 20))

    assert cache.match_prefix(around(cache.intern(B), 7)) == shared
    assert cache.match_prefix(around(cache.intern(B), 20)) == shared
    assert (
        cache.match_prefix(around(cache.intern(A), 20)) == 29 // page_size * page_size
    )


def test_b66_the_order_of_images_matters() -> None:
    cache = make_cache()
    first, second = cache.intern(A), cache.intern(B)
    insert(cache, [*[first] * 4, *[second] * 4])

    assert cache.match_prefix([*[second] * 4, *[first] * 4]) == 0
    assert cache.match_prefix([*[first] * 4, *[second] * 4]) == 8


def test_no_vocabulary_has_a_virtual_token() -> None:
    cache = make_cache(page_size=1)
    insert(cache, [cache.intern(A), 2**31 - 1])

    assert -1 == cache.intern(A)
    for token in [0, 1, 2**31 - 1]:
        assert 0 == cache.match_prefix([token])


def test_digests_are_compared_as_a_whole() -> None:
    cache = make_cache()
    digests = [
        bytes(16),
        bytes(17),
        bytes(64),
        bytes(63) + b"\x01",
        b"\x01" + bytes(63),
    ]
    tokens = [cache.intern(digest) for digest in digests]

    assert [-1, -2, -3, -4, -5] == tokens
    assert tokens == [cache.intern(bytearray(digest)) for digest in digests]
    assert tokens == [cache.intern(memoryview(digest)) for digest in digests]


@pytest.mark.parametrize(
    ("digest", "message"),
    [
        (b"", r"16\.\.64 bytes, got 0"),
        (bytes(15), r"16\.\.64 bytes, got 15"),
        (bytes(65), r"16\.\.64 bytes, got 65"),
        (list(bytes(32)), "must be bytes, got a list"),
        ("a" * 32, "must be bytes, got a str"),
        (7, "must be bytes, got a int"),
        (None, "must be bytes, got a NoneType"),
    ],
)
def test_what_is_no_digest_is_refused(digest: Wrong, message: str) -> None:
    cache = make_cache()
    before = state(cache)

    with pytest.raises(ConfigError, match=message):
        cache.intern(digest)

    assert before == state(cache)
    assert -1 == cache.intern(A)


def test_namespaces_share_virtual_tokens_but_no_pages() -> None:
    cache = make_cache()
    insert(cache, around(cache.intern(A)), namespace="red")

    assert cache.match_prefix(around(cache.intern(A)), "red") == 12
    assert cache.match_prefix(around(cache.intern(A)), "blue") == 0


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_every_spelling_of_virtual_tokens_works(
    kind: Callable[[list[int]], Wrong],
) -> None:
    cache = make_cache()
    prompt = kind(around(cache.intern(A)))
    insert(cache, prompt)

    assert 12 == cache.match_prefix(prompt)
    assert 12 == cache.match_prefix(np.array(prompt, np.int32))


# What is no virtual token is refused --------------------------------------------------


def test_unknown_virtual_tokens_are_refused() -> None:
    cache = make_cache()
    request = run(cache, around(cache.intern(A)))
    before = state(cache)

    for tokens in [around(-2), [1, -1, -3, -2], np.array([-(2**31), -1], np.int32)]:
        with pytest.raises(TokenError, match=r"\[0, 2\*\*31\), got -(2|3|2147483648),"):
            cache.admit(tokens)
        with pytest.raises(TokenError, match="no virtual token that is alive"):
            cache.match_prefix(tokens)
    for publish in [cache.cache_unfinished_req, cache.cache_finished_req]:
        with pytest.raises(TokenError, match="got -2"):
            publish(request, around(-2))

    assert before == state(cache)
    assert request.protected_len == 0


def test_numbers_beyond_int32_are_refused_below_zero_too() -> None:
    cache = make_cache()

    with pytest.raises(TokenError, match=r"\[0, 2\*\*31\), got -2147483649"):
        cache.match_prefix([cache.intern(A), -(2**31) - 1])


def test_an_output_may_hold_the_content_of_others_while_it_is_alive() -> None:
    """An audio model may go on with a clip that another request brought."""
    cache = make_cache(page_size=1)
    first = run(cache, [1, cache.intern(A)])
    other = run(cache, [2])
    decode(cache, other)
    cache.cache_unfinished_req(other, [2, -1])
    cache.release(first)
    cache.admit([-1])  # redeems the claim of the release

    assert is_alive(cache, -1)
    cache.cache_finished_req(other, [2, -1])
    assert cache.match_prefix([2, -1]) == 2
    cache.check_integrity()


def test_an_output_with_content_that_died_is_refused() -> None:
    cache = make_cache(page_size=1)
    first = run(cache, [cache.intern(A)])
    other = run(cache, [2])
    decode(cache, other)
    cache.cache_finished_req(first, [-1])
    cache.evict(1)
    before = state(cache)

    with pytest.raises(TokenError, match="got -1"):
        cache.cache_finished_req(other, [2, -1])
    assert before == state(cache)


# Contents are forgotten with their last use -------------------------------------------


def test_a_content_lives_until_its_last_page_is_evicted() -> None:
    cache = make_cache()
    insert(cache, [*[cache.intern(A)] * 8, *[cache.intern(B)] * 4, 5])
    assert cache.stats().num_contents == 2
    cache.evict(4)
    assert [True, False] == [is_alive(cache, token) for token in (-1, -2)]
    cache.evict(4)
    assert is_alive(cache, -1)
    cache.evict(4)

    assert not is_alive(cache, -1)
    assert cache.stats().num_contents == 0


def test_a_cache_that_lost_its_last_content_goes_on_without() -> None:
    cache = make_cache()
    insert(cache, [cache.intern(A)])
    insert(cache, span(1, 9))
    cache.evict(4)

    assert (60, 4, 0, 0) == law(cache)
    assert cache.match_prefix(span(1, 9)) == 4
    assert cache.stats().num_contents == 0


def test_a_leaf_that_grows_in_place_counts_what_is_new() -> None:
    cache = make_cache(page_size=2)
    image = cache.intern(A)
    tokens = [1, 2, image, image, 3, image, 4, 4]
    request = admit(cache, tokens)
    for length in [2, 4, 6, 8]:
        compute(cache, request, length)
        cache.cache_unfinished_req(request, tokens)
        cache.check_integrity()
    cache.cache_finished_req(request, tokens)
    cache.evict(4)
    assert is_alive(cache, image)
    cache.evict(2)

    assert not is_alive(cache, image)
    assert cache.match_prefix(tokens[:2]) == 2


def test_a_content_of_which_no_page_is_cached_goes_with_its_request() -> None:
    cache = make_cache()
    request = run(cache, [1, 2, cache.intern(A)])
    assert is_alive(cache, -1)
    cache.cache_finished_req(request, [1, 2, -1])

    assert not is_alive(cache, -1)


def test_a_running_request_keeps_its_contents_whatever_happens() -> None:
    cache = make_bounded(2, page_size=4)
    prompt = around(cache.intern(A))
    request = admit(cache, prompt)
    for number in range(20):
        cache.intern(bytes([number]) * 16)
    insert(cache, span(20, 40))
    cache.evict(cache.evictable_size)
    compute(cache, request, len(prompt))
    cache.cache_finished_req(request, prompt)

    assert cache.match_prefix(prompt) == 12
    assert -1 == cache.intern(A)


def test_duplicates_of_a_page_are_not_counted() -> None:
    cache = make_cache()
    prompt = around(cache.intern(A))
    requests = [run(cache, prompt), run(cache, prompt)]
    for request in requests:
        cache.cache_finished_req(request, prompt)
    cache.check_integrity()
    cache.evict(12)

    assert not is_alive(cache, -1)


def test_a_split_keeps_the_contents_of_both_parts() -> None:
    cache = make_cache(page_size=1)
    first, second = cache.intern(A), cache.intern(B)
    insert(cache, [1, first, 2, second])
    insert(cache, [1, first, 3])
    cache.check_integrity()
    cache.evict(2)

    assert [True, False] == [is_alive(cache, token) for token in (first, second)]


def test_the_number_of_a_forgotten_content_is_refused_not_given_away() -> None:
    cache = make_cache(page_size=1)
    insert(cache, [cache.intern(A)])
    cache.evict(1)

    assert -2 == cache.intern(B)
    assert -3 == cache.intern(A)
    with pytest.raises(TokenError, match="got -1"):
        cache.admit([-1])


# Claims: contents that are waiting for their turn -------------------------------------


def test_a_content_waits_for_its_admission() -> None:
    cache = make_cache(page_size=1)
    image = cache.intern(A)
    assert cache.match_prefix([image]) == 0
    insert(cache, span(1, 4))
    cache.evict(4)

    assert cache.admit([image]) is not None


def test_each_intern_waits_for_an_admission_of_its_own() -> None:
    """Two requests with one image are queued; the second runs when nothing is left."""
    cache = make_cache(page_size=1)
    prompts = [[cache.intern(A), 1], [cache.intern(A), 2]]
    insert(cache, prompts[0])
    cache.evict(2)
    insert(cache, prompts[1])
    cache.evict(2)

    assert not is_alive(cache, -1)


def test_an_intern_while_others_use_the_content_is_a_claim_too() -> None:
    cache = make_cache(page_size=1)
    request = run(cache, [cache.intern(A)])
    image = cache.intern(A)
    cache.cache_finished_req(request, [image])
    cache.evict(1)
    assert is_alive(cache, image)
    insert(cache, [image])
    cache.evict(1)

    assert not is_alive(cache, image)


def test_a_retracted_request_comes_again_with_the_same_tokens() -> None:
    cache = make_cache(page_size=1)
    prompt = [1, cache.intern(A), 2]
    for _ in range(3):
        request = run(cache, prompt)
        cache.cache_unfinished_req(request, prompt)
        cache.release(request)
        cache.evict(3)
    insert(cache, prompt)
    cache.evict(3)

    assert not is_alive(cache, -1)


def test_an_admission_without_a_row_redeems_nothing() -> None:
    cache = make_cache(page_size=1, max_num_requests=1)
    first = run(cache, [1])
    assert cache.admit([cache.intern(A)]) is None
    cache.release(first)

    assert cache.admit([-1]) is not None


def test_a_refused_admission_redeems_nothing() -> None:
    cache = make_cache(page_size=1)
    image = cache.intern(A)
    before = state(cache)
    bad: Wrong = []

    with pytest.raises(ConfigError):
        cache.admit([image], namespace=bad)
    with pytest.raises(TokenError):
        cache.admit([image, -2])
    assert before == state(cache)
    insert(cache, [image])
    cache.evict(1)
    assert not is_alive(cache, image)


# The bound ----------------------------------------------------------------------------


def test_the_oldest_claims_make_room() -> None:
    cache = make_bounded(3)
    for digest in [A, B, C, A, D]:
        cache.intern(digest)

    assert [True, False, True, True] == [is_alive(cache, -n) for n in (1, 2, 3, 4)]
    assert cache.stats().num_contents == 3


def test_a_content_that_was_used_is_younger_than_one_that_waited() -> None:
    cache = make_bounded(2)
    request = run(cache, [cache.intern(A)])
    cache.intern(B)
    cache.release(request)
    cache.intern(C)

    assert [True, False, True] == [is_alive(cache, -n) for n in (1, 2, 3)]


def test_what_is_in_use_makes_no_room() -> None:
    cache = make_bounded(2)
    insert(cache, [cache.intern(A)])
    request = run(cache, [cache.intern(B), -1])
    before = state(cache)

    with pytest.raises(OutOfContentsError) as caught:
        cache.intern(C)
    assert before == state(cache)
    assert (2, 2) == (caught.value.max_num_contents, caught.value.num_in_requests)
    assert -1 == cache.intern(A)  # what is known needs no room
    cache.cache_finished_req(request, [-2, -1])
    with pytest.raises(
        OutOfContentsError,
        match="max_num_contents is 2, and all are in use: 0 by running requests, "
        "2 by cached pages alone",
    ):
        cache.intern(C)
    cache.evict(2)
    assert -3 == cache.intern(C)


@pytest.mark.parametrize("bound", [0, -1, True, 2.0, None, 2**31], ids=repr)
@pytest.mark.parametrize("kind", [RadixCache, ChunkCache])
def test_a_wrong_bound_is_refused(
    kind: type[RadixCache] | type[ChunkCache], bound: Wrong
) -> None:
    memory = make_memory()

    with pytest.raises(ConfigError, match="max_num_contents must be"):
        kind(memory, max_num_contents=bound)
    kind(memory, max_num_contents=1)  # the memory is still nobody's


# The whole cache ----------------------------------------------------------------------


def test_a_reset_forgets_what_was_cached_and_keeps_what_waits() -> None:
    cache = make_cache(page_size=1)
    insert(cache, [cache.intern(A), cache.intern(B)])
    cache.intern(B)
    cache.intern(C)
    cache.reset()

    assert [False, True, True] == [is_alive(cache, -n) for n in (1, 2, 3)]
    assert cache.match_prefix([-2]) == 0
    insert(cache, [-2, -3])
    cache.reset()
    assert cache.stats().num_contents == 0


def test_a_shrink_forgets_what_it_evicts() -> None:
    cache = make_cache(8, page_size=1)
    insert(cache, [1, 2, cache.intern(A), cache.intern(B)])
    cache.resize(3)

    assert [True, False] == [is_alive(cache, -n) for n in (1, 2)]


def test_a_cache_without_sharing_interns_alike() -> None:
    cache = ChunkCache(make_memory(page_size=1), max_num_contents=2)
    prompt = [1, cache.intern(A)]
    assert cache.match_prefix(prompt) == 0
    request = run(cache, prompt)
    cache.cache_unfinished_req(request, prompt)
    cache.intern(B)
    cache.intern(C)
    assert [True, False, True] == [is_alive(cache, -n) for n in (1, 2, 3)]
    cache.cache_finished_req(request, prompt)

    assert not is_alive(cache, -1)
    with pytest.raises(TokenError):
        cache.admit(prompt)


def test_only_the_owner_thread_interns() -> None:
    cache = make_cache()
    insert(cache, [1])
    caught: list[Exception] = []

    def intrude() -> None:
        try:
            cache.intern(A)
        except WrongThreadError as error:
            caught.append(error)

    thread = Thread(target=intrude)
    thread.start()
    thread.join()

    assert len(caught) == 1
    assert cache.stats().num_contents == 0


# The room by itself -------------------------------------------------------------------


def make_room(max_num_contents: int = 4) -> tuple[RadixTree, VirtualTokens]:
    tree = RadixTree(4, RecencyIndex())
    return tree, VirtualTokens(tree, max_num_contents)


def test_a_tree_without_contents_tells_nobody() -> None:
    tree, virtual = make_room()
    assert [] == tree.on_published == tree.on_evicted
    virtual.intern(A)

    assert 1 == len(tree.on_published) == len(tree.on_evicted)
    virtual.intern(B)
    assert 1 == len(tree.on_published) == len(tree.on_evicted)


def test_numbers_go_round_past_those_that_are_alive() -> None:
    _, virtual = make_room()
    tokens = [virtual.intern(A), virtual.intern(B)]
    virtual.last_token = LOWEST_TOKEN + 1
    tokens += [virtual.intern(C), virtual.intern(D)]

    assert [-1, -2, -(2**31), -3] == tokens
    assert tokens == [virtual.intern(digest) for digest in (A, B, C, D)]


def broken(break_it: Callable[[RadixCache, RequestKV], object]) -> str:
    """Break a cache with A in a page and a request, and B in a claim; the report."""
    cache = make_cache(page_size=1)
    insert(cache, [cache.intern(A)])
    request = run(cache, [-1, 2])
    cache.intern(B)
    cache.check_integrity()
    break_it(cache, request)
    with pytest.raises(IntegrityError) as caught:
        cache.check_integrity()
    return str(caught.value)


def test_the_integrity_check_recounts_the_uses() -> None:
    def use(cache: RadixCache, request: RequestKV) -> None:
        cache._virtual._contents[-1].num_uses += 3

    def forget(cache: RadixCache, request: RequestKV) -> None:
        del cache._virtual._contents[-1]

    def drop_claim(cache: RadixCache, request: RequestKV) -> None:
        cache._virtual._contents[-2].num_claims = 0

    def queue(cache: RadixCache, request: RequestKV) -> None:
        cache._virtual._unused.clear()

    def swap(cache: RadixCache, request: RequestKV) -> None:
        cache._virtual._tokens[A] = -2

    def add(cache: RadixCache, request: RequestKV) -> None:
        cache._virtual._tokens[C] = -2

    def end(cache: RadixCache, request: RequestKV) -> None:
        cache._virtual.users.clear()

    assert "virtual token -1: num_uses is off by +3" in broken(use)
    assert "virtual token -1 is in use, but not alive" in broken(forget)
    assert "virtual token -2 is alive, but nobody needs it" in broken(drop_claim)
    assert "virtual token -2 is wrongly in or not in `unused`" in broken(queue)
    assert "virtual token -1 is not that of its content" in broken(swap)
    assert "two contents share a virtual token" in broken(add)
    assert "virtual token -1: num_uses is off by +1" in broken(end)

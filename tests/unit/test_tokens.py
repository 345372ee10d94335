"""Which token ids a cache takes, and how it compares them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from radixkv.mem_cache import LengthError, TokenError

from .driver import Wrong, compute, insert, law, make_cache, run

PROMPT = [7, 0, 2**31 - 1, 5, 9]

SPELLINGS: list[Any] = [
    PROMPT,
    tuple(PROMPT),
    np.array(PROMPT, np.int32),
    np.array(PROMPT, np.int64),
    np.array(PROMPT, np.uint64),
    np.array(PROMPT, ">i4"),
    np.repeat(np.array(PROMPT, np.int32), 2)[::2],
    [np.int64(token) for token in PROMPT],
]


@pytest.mark.parametrize("spelling", SPELLINGS, ids=repr)
def test_b70_every_spelling_of_the_same_ids_matches(spelling: Wrong) -> None:
    cache = make_cache(page_size=1)
    insert(cache, PROMPT)

    assert len(PROMPT) == cache.match_prefix(spelling)


@pytest.mark.parametrize("spelling", SPELLINGS, ids=repr)
def test_every_spelling_can_be_admitted_and_published(spelling: Wrong) -> None:
    cache = make_cache(page_size=1)
    insert(cache, spelling)

    assert len(PROMPT) == cache.match_prefix(PROMPT)


@pytest.mark.parametrize(
    "tokens",
    [
        [-1],
        [0, 2**31],
        [2**63],
        [2**64],
        [-(2**70)],
        [0.0],
        [float("nan")],
        [True],
        ["1"],
        [None],
        [[1, 2], [3, 4]],
        [[1], [2, 3]],
        np.zeros((0, 2), np.int32),
        np.array(3),
        np.array([1, -1], np.int8),
        np.array([0, 2**31], np.uint32),
        np.array([1.0]),
        np.array([1, 2], dtype=object),
        np.array([1, 2], "datetime64[s]"),
        {1, 2},
        "12",
        b"12",
        None,
        5,
    ],
    ids=repr,
)
def test_what_are_no_token_ids_is_refused(tokens: Wrong) -> None:
    cache = make_cache()
    before = law(cache)

    with pytest.raises(TokenError):
        cache.match_prefix(tokens)
    with pytest.raises(TokenError):
        cache.admit(tokens)

    assert before == law(cache)
    assert cache.stats().num_admitted_requests == 0


def test_published_tokens_are_checked_too() -> None:
    cache = make_cache()
    request = run(cache, [1, 2, 3, 4])
    before = law(cache)

    with pytest.raises(TokenError, match=r"\[0, 2\*\*31\), got -4"):
        cache.cache_unfinished_req(request, [1, 2, 3, -4])
    with pytest.raises(TokenError):
        cache.cache_finished_req(request, [1, 2, 3, 2**31])

    assert before == law(cache)
    assert request.protected_len == 0


def test_no_tokens_match_nothing_and_cannot_be_admitted() -> None:
    cache = make_cache()

    assert cache.match_prefix([]) == 0
    with pytest.raises(LengthError, match=r"1\.\.64 tokens, got 0"):
        cache.admit([])


def test_b69_ids_that_agree_in_their_low_bits_differ() -> None:
    cache = make_cache(page_size=1)
    insert(cache, [65, 1])

    assert cache.match_prefix([65, 1]) == 2
    assert cache.match_prefix([321, 1]) == 0
    assert cache.match_prefix([65 + 2**16, 1]) == 0
    with pytest.raises(TokenError):
        cache.match_prefix([65 + 2**32, 1])


def test_b70_digits_do_not_run_together() -> None:
    cache = make_cache(page_size=2)
    insert(cache, [1, 23])

    assert cache.match_prefix([12, 3]) == 0
    assert cache.match_prefix([1, 2]) == 0


def test_the_caller_may_change_its_tokens_afterwards() -> None:
    cache = make_cache(page_size=1)
    tokens = np.array([1, 2, 3], np.int32)
    request = cache.admit(tokens)
    assert request is not None
    cache.alloc_for_extend([request], [3])
    cache.commit(request, 3)
    cache.cache_finished_req(request, tokens)
    tokens[:] = 9

    assert cache.match_prefix([1, 2, 3]) == 3
    assert cache.match_prefix([9, 9, 9]) == 0


def test_equal_bytes_at_another_offset_are_no_match() -> None:
    """The bytes of 1 and 256 overlap, if one looks at odd places."""
    cache = make_cache(page_size=1)
    insert(cache, [1, 256, 65536, 2**24])

    assert cache.match_prefix([256, 65536, 2**24]) == 0
    assert cache.match_prefix([1, 256, 65536, 2**24 + 1]) == 3


def test_the_first_difference_is_found_wherever_it_is() -> None:
    """Long nodes are compared in pieces; every token of them counts."""
    prompt = list(range(1, 3001))
    cache = make_cache(4000, 1, max_context_len=3000)
    insert(cache, prompt)
    for at in [0, 1, 1022, 1023, 1024, 1025, 2047, 2048, 2998, 2999]:
        other = [*prompt[:at], 0, *prompt[at + 1 :]]

        assert at == cache.match_prefix(other)


def test_admission_copies_a_read_only_array_without_complaint() -> None:
    cache = make_cache(page_size=1)
    tokens = np.array([1, 2, 3], np.int32)
    tokens.flags.writeable = False
    request = cache.admit(tokens)

    assert request is not None


LONG = np.arange(1000, dtype=np.int32)


def test_what_is_published_is_what_is_given_then_not_what_was_admitted() -> None:
    cache = make_cache(num_pages=1000, page_size=1, max_context_len=1000)
    request = cache.admit(LONG)
    assert request is not None
    compute(cache, request, 1000)
    cache.cache_finished_req(request, LONG + 1)

    assert cache.match_prefix(LONG) == 0
    assert cache.match_prefix(LONG + 1) == 1000

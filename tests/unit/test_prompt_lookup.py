"""Prompt lookup: the guesses are those of a slow and obvious search."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from radixkv.mem_cache import ConfigError
from radixkv.scheduling import PromptLookup, Request

texts = st.lists(st.integers(0, 2), min_size=1, max_size=30)


def naive_guesses(
    tokens: list[int], max_tokens: int, max_ngram: int, min_ngram: int
) -> tuple[int, ...]:
    """Try every length from the longest, and every place from the last."""
    for length in range(max_ngram, min_ngram - 1, -1):
        for stop in range(len(tokens) - 1, length - 1, -1):
            if tokens[stop - length : stop] == tokens[len(tokens) - length :]:
                text = list(tokens)
                for i in range(max_tokens):
                    text.append(text[stop + i])
                return tuple(text[len(tokens) :])
    return ()


@given(
    tokens=texts,
    max_tokens=st.integers(1, 8),
    min_ngram=st.integers(1, 4),
    more=st.integers(0, 30),
)
@example(tokens=[1], max_tokens=1, min_ngram=1, more=0)
@example(tokens=[1, 1], max_tokens=3, min_ngram=1, more=5)
@example(tokens=[2, 1, 1], max_tokens=3, min_ngram=2, more=0)
@example(tokens=[0, 1, 0, 1, 0, 1], max_tokens=3, min_ngram=4, more=2)
def test_guesses_are_those_of_a_naive_search(
    tokens: list[int], max_tokens: int, min_ngram: int, more: int
) -> None:
    lookup = PromptLookup(max_ngram=min_ngram + more, min_ngram=min_ngram)

    guesses = lookup.propose(Request("a", tokens), max_tokens)

    expected = naive_guesses(tokens, max_tokens, min_ngram + more, min_ngram)
    assert expected == guesses


@given(prompt=texts, output=texts, max_tokens=st.integers(1, 8))
def test_the_output_is_searched_like_the_prompt(
    prompt: list[int], output: list[int], max_tokens: int
) -> None:
    request = Request("a", prompt)
    for token in output:
        request.append(token)

    guesses = PromptLookup().propose(request, max_tokens)

    whole = Request("b", [*prompt, *output])
    assert PromptLookup().propose(whole, max_tokens) == guesses
    assert [*prompt, *output] == request.tokens.tolist()


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        # Two tokens in common go before one, though that is more recent.
        ([1, 2, 8, 3, 2, 9, 1, 2], (8, 3)),
        # Of equals, the most recent.
        ([1, 2, 7, 1, 2, 8, 1, 2], (8, 1)),
        # No more than max_ngram tokens count.
        ([0, 1, 2, 3, 7, 5, 1, 2, 3, 8, 0, 1, 2, 3], (8, 0)),
        # Tokens are compared as a whole, not by their bytes.
        ([1, 256, 9, 256, 65536, 1], (256, 9)),
        ([0x01000000, 2, 1], ()),
        ([2**31 - 1, 5, 2**31 - 1], (5, 2**31 - 1)),
    ],
)
def test_which_occurrence_counts(tokens: list[int], expected: tuple[int, ...]) -> None:
    assert expected == PromptLookup().propose(Request("a", tokens), 2)


def test_guesses_are_integers_of_python() -> None:
    guesses = PromptLookup().propose(Request("a", np.array([3, 4, 3])), 2)

    assert [int, int] == [type(token) for token in guesses]


@pytest.mark.parametrize("name", ["max_ngram", "min_ngram"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, None, "3", 2**31])
def test_a_length_that_is_no_positive_integer_is_refused(
    name: str, value: object
) -> None:
    with pytest.raises(ConfigError, match=f"^{name} must be .*, got {value!r}"):
        PromptLookup(**{name: value})  # type: ignore[arg-type]


def test_the_longest_must_not_be_shorter_than_the_shortest() -> None:
    assert PromptLookup(max_ngram=2, min_ngram=2).propose(Request("a", [1]), 1) == ()
    with pytest.raises(ConfigError, match=r"max_ngram must be >= min_ngram \(3\), got"):
        PromptLookup(max_ngram=2, min_ngram=3)


def test_nothing_is_kept_of_a_request() -> None:
    lookup = PromptLookup()
    lookup.propose(Request("first", [1, 2, 1]), 2)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for i in range(50):
        lookup.propose(Request(i, np.arange(20_000) % 999), 2)
    gc.collect()
    kept = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()

    assert kept < 20_000

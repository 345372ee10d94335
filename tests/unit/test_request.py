"""Request: its tokens against a plain list, and the prompts it refuses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.mem_cache import LengthError, TokenError
from radixkv.mem_cache.tokens import Tokens
from radixkv.scheduling.request import Request, RequestStatus
from radixkv.scheduling.sampling_params import SamplingParams

TOKEN_IDS = st.integers(0, 2**31 - 1)


@given(st.lists(TOKEN_IDS, min_size=1), st.lists(TOKEN_IDS))
def test_tokens_are_the_prompt_and_what_was_appended(
    prompt: list[int], output: list[int]
) -> None:
    request = Request("a", prompt)
    for i, token in enumerate(output):
        before = request.tokens
        request.append(token)

        assert (prompt + output)[: len(prompt) + i] == before.tolist()

    assert prompt + output == request.tokens.tolist()
    assert np.int32 == request.tokens.dtype
    assert prompt == request.prompt_tokens.tolist()
    assert output == request.output_tokens
    assert len(prompt) == request.num_prompt_tokens
    assert len(output) == request.num_output_tokens
    assert len(prompt + output) == request.num_tokens


def test_tokens_are_a_view() -> None:
    request = Request("a", [1, 2, 3])

    assert np.shares_memory(request.tokens, request.prompt_tokens)


def test_the_callers_array_is_copied() -> None:
    prompt = np.array([1, 2, 3], np.int32)
    request = Request("a", prompt)
    prompt[0] = 9

    assert [1, 2, 3] == request.tokens.tolist()


def test_a_new_request_waits_and_is_greedy() -> None:
    request = Request(7, (1, 2), namespace="adapter", priority=3)

    assert RequestStatus.WAITING == request.status
    assert SamplingParams() == request.sampling_params
    assert request.kv is None
    assert request.finish_reason is None
    assert "Request(7, 2 tokens, waiting)" == repr(request)


@pytest.mark.parametrize(
    "prompt",
    [
        [-1],
        [2**31],
        [2**70],
        [1.0],
        [True, False],
        ["a"],
        [[1, 2]],
        "abc",
        None,
        np.array([1.5]),
        np.array([2**31], np.int64),
    ],
)
def test_prompts_that_are_no_token_ids_are_refused(prompt: object) -> None:
    with pytest.raises(TokenError, match=r"token"):
        Request("a", prompt)  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", [[], (), np.array([], np.int32)])
def test_an_empty_prompt_is_refused(prompt: Tokens) -> None:
    with pytest.raises(LengthError, match="a prompt must have >= 1 tokens, got 0"):
        Request("a", prompt)


@pytest.mark.parametrize("token", [-1, 2**31])
def test_an_output_token_out_of_range_is_refused_and_changes_nothing(
    token: int,
) -> None:
    request = Request("a", [1])

    with pytest.raises(TokenError, match=r"in \[0, 2\*\*31\), got"):
        request.append(token)

    assert [1] == request.tokens.tolist()

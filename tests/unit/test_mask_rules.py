"""What a query sees is asked of the mask itself."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from radixkv.mem_cache import ConfigError
from radixkv.scheduling.mask_rules import MaskFunction, Reach, mask_rule, reach_of

SIZES = st.integers(1, 300)
causal = cast(MaskFunction, causal_mask_function)
bidirectional = cast(MaskFunction, bidirectional_mask_function)


def test_a_causal_mask_has_no_bound() -> None:
    assert Reach() == reach_of(mask_rule(mask_function=causal))


@given(size=SIZES)
def test_a_window_is_found_whatever_its_size(size: int) -> None:
    function = sliding_window_causal_mask_function(size)

    assert Reach(window=size) == reach_of(
        mask_rule(mask_function=function, local_size=size, batch_size=1)
    )


@given(size=st.integers(2, 300))
def test_a_chunk_is_found_whatever_its_size(size: int) -> None:
    function = chunked_causal_mask_function(size, torch.zeros(1, dtype=torch.int))

    assert Reach(chunk=size) == reach_of(
        mask_rule(mask_function=function, local_size=size)
    )


def test_a_chunk_of_one_token_is_a_window_of_one() -> None:
    function = chunked_causal_mask_function(1, torch.zeros(1, dtype=torch.int))

    assert Reach(window=1) == reach_of(mask_rule(mask_function=function, local_size=1))


@pytest.mark.parametrize(
    ("function", "size"),
    [
        (bidirectional, None),
        (sliding_window_bidirectional_mask_function(8), 8),
        (sliding_window_causal_mask_function(8), None),
        (sliding_window_causal_mask_function(8), 9),
        (sliding_window_causal_mask_function(9), 8),
        (causal, 8),
    ],
)
def test_what_is_none_of_these_is_refused(
    function: MaskFunction, size: int | None
) -> None:
    with pytest.raises(ConfigError, match="windows or chunks, got a mask"):
        reach_of(mask_rule(mask_function=function, local_size=size))

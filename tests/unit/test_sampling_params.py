"""SamplingParams: what is allowed, and what is refused with which words."""

from __future__ import annotations

import math
from typing import Any

import pytest

from radixkv.mem_cache import ConfigError
from radixkv.scheduling.sampling_params import SamplingParams


def test_defaults_are_greedy() -> None:
    assert SamplingParams().is_greedy


def test_a_temperature_is_not_greedy() -> None:
    assert not SamplingParams(temperature=0.1).is_greedy


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 1},
        {"temperature": 1},
        {"top_k": 10**6},
        {"top_p": 1e-9},
        {"top_p": 1},
        {"seed": 2**64 - 1},
        {"stop_token_ids": (0, 2**31 - 1)},
    ],
)
def test_limits_are_allowed(options: dict[str, Any]) -> None:
    params = SamplingParams(**options)

    assert options == {name: getattr(params, name) for name in options}


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("max_new_tokens", 0, ">= 1"),
        ("max_new_tokens", 2.0, "an integer"),
        ("max_new_tokens", True, "an integer"),
        ("temperature", -0.1, "a finite number >= 0"),
        ("temperature", math.nan, "a finite number >= 0"),
        ("temperature", math.inf, "a finite number >= 0"),
        ("temperature", "1", "a finite number >= 0"),
        ("temperature", False, "a finite number >= 0"),
        ("top_k", -1, ">= 0"),
        ("top_k", 1.5, "an integer"),
        ("top_p", 0.0, "a number in (0, 1]"),
        ("top_p", 1.1, "a number in (0, 1]"),
        ("top_p", math.nan, "a number in (0, 1]"),
        ("top_p", True, "a number in (0, 1]"),
        ("seed", -1, "an integer in [0, 2**64)"),
        ("seed", 2**64, "an integer in [0, 2**64)"),
        ("seed", 0.5, "an integer in [0, 2**64)"),
        ("stop_token_ids", [1], "a tuple"),
        ("stop_token_ids", None, "a tuple"),
        ("stop_token_ids", (-1,), ">= 0"),
        ("stop_token_ids", (2**31,), "< 2**31"),
        ("ignore_eos", "no", "True or False"),
    ],
)
def test_refusal_says_what_and_what_is_allowed(
    name: str, value: object, allowed: str
) -> None:
    options: dict[str, Any] = {name: value}

    with pytest.raises(ConfigError) as refusal:
        SamplingParams(**options)

    message = str(refusal.value)
    assert name in message
    assert allowed in message
    assert "got" in message

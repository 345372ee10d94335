"""SchedulerLimits: what is allowed."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import pytest

from radixkv.mem_cache import ConfigError
from radixkv.scheduling import SchedulerLimits

NAMES = [field.name for field in fields(SchedulerLimits)]
MAY_BE_ZERO = ["max_overtakes", "max_deferrals"]


def test_the_defaults_are_allowed() -> None:
    limits = SchedulerLimits()

    assert limits.chunked_prefill_size <= limits.max_batched_tokens


def test_the_least_values_are_allowed() -> None:
    limits = SchedulerLimits(1, 1, 1)

    assert (limits.max_running_requests, limits.max_batched_tokens) == (1, 1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [0, -1, 1.5, "8", None, True, float("nan")])
def test_a_limit_that_is_no_positive_integer_is_refused(
    name: str, value: object
) -> None:
    if value == 0 and name in MAY_BE_ZERO:
        SchedulerLimits(**{name: value})  # type: ignore[arg-type]
        return
    with pytest.raises(ConfigError, match=f"{name} must be .*, got {value!r}"):
        SchedulerLimits(**{name: value})  # type: ignore[arg-type]


def test_every_running_request_must_be_able_to_decode() -> None:
    with pytest.raises(
        ConfigError, match=r"must be >= max_running_requests \(8\), got 7"
    ):
        SchedulerLimits(max_running_requests=8, max_batched_tokens=7)


def test_limits_do_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        SchedulerLimits().max_running_requests = 2  # type: ignore[misc]

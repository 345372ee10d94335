"""BenchConfig: what is allowed."""

from __future__ import annotations

import pytest

from radixkv.mem_cache import ConfigError
from radixkv.scheduling.benchmark import BenchConfig

SIZES = ["batch_size", "output_len", "page_size", "chunked_prefill_size"]
OPTIONAL = ["input_len", "num_pages"]


def test_the_defaults_are_allowed() -> None:
    config = BenchConfig()

    assert (config.input_len, config.num_pages, config.mem_fraction) == (None,) * 3


@pytest.mark.parametrize("name", [*SIZES, *OPTIONAL])
@pytest.mark.parametrize("value", [0, -1, 2**31, 1.5, True, "8"])
def test_a_size_that_is_no_positive_integer_is_refused(
    name: str, value: object
) -> None:
    option = name.replace("_", "-")

    with pytest.raises(ConfigError, match=f"^{option} must be .*, got {value!r}"):
        BenchConfig(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["shared_prefix_len", "seed", "speculative_num_draft_tokens"]
)
@pytest.mark.parametrize("value", [-1, None, 0.5])
def test_a_number_that_may_be_zero_must_not_be_less(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{name.replace('_', '-')} must be"):
        BenchConfig(input_len=8, **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("shared", [8, 9])
def test_a_shared_prefix_leaves_a_token(shared: int) -> None:
    assert BenchConfig(input_len=8, shared_prefix_len=7).shared_prefix_len == 7
    with pytest.raises(ConfigError, match=rf"< input-len \(8\), got {shared}"):
        BenchConfig(input_len=8, shared_prefix_len=shared)


def test_a_shared_prefix_goes_with_synthetic_prompts() -> None:
    with pytest.raises(ConfigError, match="goes with input-len"):
        BenchConfig(shared_prefix_len=1)


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.01, float("nan"), float("inf")])
def test_a_fraction_outside_0_to_1_is_refused(fraction: float) -> None:
    assert BenchConfig(mem_fraction=1.0).mem_fraction == 1
    with pytest.raises(ConfigError, match=r"mem-fraction must be in \(0, 1\]"):
        BenchConfig(mem_fraction=fraction)


def test_a_pool_has_one_size() -> None:
    with pytest.raises(ConfigError, match="num-pages or mem-fraction, got both"):
        BenchConfig(num_pages=8, mem_fraction=0.5)

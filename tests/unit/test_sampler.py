"""The sampler against a slow, obvious one, and the independence it promises."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixkv.scheduling import INVALID_TOKEN
from radixkv.scheduling.sampler import sample
from radixkv.scheduling.sampling_params import SamplingParams

VOCAB_SIZE = 6
# Few values, so that ties are common; -inf is a token that is never allowed.
LOGITS = st.lists(
    st.sampled_from([-math.inf, -3.0, 0.0, 0.5, 1.0, 4.0]),
    min_size=VOCAB_SIZE,
    max_size=VOCAB_SIZE,
).filter(lambda row: max(row) > -math.inf)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-320, 0.3, 1.0, 20.0]),
    top_k=st.integers(0, VOCAB_SIZE + 1),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 1.0)),
    seed=st.integers(0, 2**64 - 1),
)
ROWS = st.lists(
    st.tuples(LOGITS, PARAMS, st.integers(0, 2**31)), min_size=1, max_size=5
)


def uniform(seed: int, position: int) -> float:
    return np.random.Generator(np.random.Philox(key=seed, counter=position)).random()


def oracle(logits: list[float], params: SamplingParams, u: float, top_p: float) -> int:
    """Choose a token by loops: order, cut, cut again, walk up to `u`."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if params.temperature == 0:
        return order[0]
    kept = order[: params.top_k or len(order)]
    top = logits[kept[0]]
    weights = {t: math.exp((logits[t] - top) / params.temperature) for t in kept}
    total = sum(weights.values())
    nucleus: list[int] = []
    mass = 0.0
    for token in kept:
        if mass < top_p:
            nucleus.append(token)
        mass += weights[token] / total
    target = u * sum(weights[token] for token in nucleus)
    reached = 0.0
    for token in nucleus:
        reached += weights[token]
        if reached > target:
            return token
    return nucleus[0]


def run(rows: list[tuple[list[float], SamplingParams, int]]) -> list[int]:
    logits, params, positions = zip(*rows, strict=True)
    tokens = sample(torch.tensor(logits), params, positions)
    assert np.int32 == tokens.dtype
    return [int(token) for token in tokens]


@given(ROWS)
def test_sample_equals_the_obvious_sampler(
    rows: list[tuple[list[float], SamplingParams, int]],
) -> None:
    for token, (logits, params, position) in zip(run(rows), rows, strict=True):
        u = uniform(params.seed or 0, position)
        # Rounding may decide either way where a number falls on a border.
        allowed = {
            oracle(logits, params, u + nudge, params.top_p + cut)
            for nudge in (-1e-12, 0, 1e-12)
            for cut in (-1e-12, 0, 1e-12)
        }

        assert token in allowed


@given(ROWS)
def test_a_row_does_not_depend_on_the_others(
    rows: list[tuple[list[float], SamplingParams, int]],
) -> None:
    alone = [run([row])[0] for row in rows]

    assert alone == run(rows)
    assert alone[::-1] == run(rows[::-1])


@given(LOGITS, st.integers(0, 100))
def test_the_likeliest_token_alone_equals_greedy(
    logits: list[float], position: int
) -> None:
    greedy = int(np.argmax(logits))
    rows = [
        (logits, params, position)
        for params in (
            SamplingParams(),
            SamplingParams(temperature=5.0, top_k=1),
            SamplingParams(temperature=5.0, top_p=1e-9),
        )
    ]

    assert [greedy] * 3 == run(rows)


def test_frequencies_follow_the_distribution() -> None:
    probs = np.array([0.5, 0.3, 0.15, 0.05])
    num_draws = 4000
    params = SamplingParams(temperature=1.0, seed=7)
    row = np.log(probs).tolist()

    tokens = run([(row, params, position) for position in range(num_draws)])

    frequencies = np.bincount(tokens, minlength=4) / num_draws
    np.testing.assert_allclose(frequencies, probs, atol=0.03)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"top_p": 0.49}, {0}),
        ({"top_p": 0.51}, {0, 1}),
        ({"top_p": 0.79}, {0, 1}),
        ({"top_p": 0.81}, {0, 1, 2}),
        ({"top_p": 1.0}, {0, 1, 2, 3}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 9}, {0, 1, 2, 3}),
        # top_p counts among the tokens that top_k has left: 0.5 of 0.8 is 0.625.
        ({"top_k": 2, "top_p": 0.62}, {0}),
        ({"top_k": 2, "top_p": 0.63}, {0, 1}),
    ],
)
def test_exactly_the_kept_tokens_are_drawn(
    options: dict[str, Any], expected: set[int]
) -> None:
    params = SamplingParams(temperature=1.0, **options)
    row = np.log([0.5, 0.3, 0.15, 0.05]).tolist()

    tokens = run([(row, params, position) for position in range(300)])

    assert expected == set(tokens)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"top_p": 0.6}, [0, 0, 3 / 7, 4 / 7]),
        ({"top_k": 0}, [0.1, 0.2, 0.3, 0.4]),
        ({"top_k": 1000}, [0.1, 0.2, 0.3, 0.4]),
        ({"top_k": 2**31 - 1}, [0.1, 0.2, 0.3, 0.4]),
        ({"top_p": 5e-324}, [0, 0, 0, 1]),
        ({"temperature": 1e-300}, [0, 0, 0, 1]),
        ({"temperature": 1e308}, [0.25, 0.25, 0.25, 0.25]),
    ],
)
def test_b231_border_values_leave_the_right_distribution(
    options: dict[str, Any], expected: list[float]
) -> None:
    params = SamplingParams(**{"temperature": 1.0, "seed": 3} | options)
    row = np.log([0.1, 0.2, 0.3, 0.4]).tolist()

    tokens = run([(row, params, position) for position in range(2000)])

    frequencies = np.bincount(tokens, minlength=4) / 2000
    np.testing.assert_allclose(frequencies, expected, atol=0.04)
    assert [p == 0 for p in expected] == [f == 0 for f in frequencies]


def test_neither_seeds_nor_positions_share_their_numbers() -> None:
    numbers = {uniform(seed, position) for seed in range(30) for position in range(30)}

    assert 900 == len(numbers)


def test_no_global_random_state_is_used() -> None:
    before = torch.get_rng_state(), np.random.get_state(legacy=False)
    row = ([0.0] * VOCAB_SIZE, SamplingParams(temperature=1.0), 3)
    first = run([row])
    torch.manual_seed(1)
    again = run([row])
    torch.set_rng_state(before[0])

    assert first == again
    assert str(before[1]) == str(np.random.get_state(legacy=False))


# Rows that say no token ---------------------------------------------------------

BAD_ROWS = [
    [0.0, math.nan, 1.0, 2.0, 0.0, 0.0],
    [math.nan] * VOCAB_SIZE,
    [0.0, math.inf, 1.0, 2.0, 0.0, 0.0],
    [math.inf] * VOCAB_SIZE,
    [-math.inf] * VOCAB_SIZE,
    # The filters would have cut it off, or kept nothing else.
    [9.0, -math.inf, -math.inf, -math.inf, -math.inf, math.nan],
    [math.nan, -math.inf, -math.inf, -math.inf, -math.inf, math.inf],
]


@pytest.mark.parametrize("logits", BAD_ROWS)
@given(rows=ROWS, params=PARAMS, position=st.integers(0, 100), place=st.integers(0, 5))
def test_b170_a_row_that_is_not_finite_has_no_token_and_harms_no_other(
    logits: list[float],
    rows: list[tuple[list[float], SamplingParams, int]],
    params: SamplingParams,
    position: int,
    place: int,
) -> None:
    expected = run(rows)
    place = min(place, len(rows))

    tokens = run([*rows[:place], (logits, params, position), *rows[place:]])

    assert [*expected[:place], INVALID_TOKEN, *expected[place:]] == tokens


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_b170_every_dtype_tells_a_legal_mask_from_a_bad_row(
    dtype: torch.dtype, temperature: float
) -> None:
    masked = [-math.inf, torch.finfo(dtype).min, *[-math.inf] * 4]
    logits = torch.tensor([masked, *BAD_ROWS], dtype=dtype)
    params = [SamplingParams(temperature=temperature, top_p=0.5)] * len(logits)

    tokens = sample(logits, params, range(len(logits)))

    assert [1, *[INVALID_TOKEN] * len(BAD_ROWS)] == tokens.tolist()


def test_b170_no_index_is_out_of_bounds_on_the_way() -> None:
    """On a GPU it would end the process."""
    logits = torch.tensor(BAD_ROWS)
    params = [SamplingParams(temperature=1.0)] * len(logits)
    seen = []
    gather = torch.Tensor.gather

    def spy(self: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
        seen.append((int(index.min()), int(index.max())))
        return gather(self, dim, index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "gather", spy)
        sample(logits, params, range(len(logits)))

    assert seen
    assert all(0 <= low and high < VOCAB_SIZE for low, high in seen)


def test_an_empty_batch_gives_no_tokens() -> None:
    assert [] == sample(torch.empty(0, VOCAB_SIZE), [], []).tolist()

"""Numbers at the rim: scores, caps, factors and shapes that hardly anybody has.

Both backends, the kernels in Triton's interpreter, against the definition in float64.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from radixkv.kernels import store_kv
from radixkv.kernels.errors import ConfigError
from radixkv.kernels.triton import attention_tiles
from radixkv.kernels.triton.language import Pointer, constexpr, jit, tl

from .attention_batches import Batch, Case, make_batch

BACKENDS = ("reference", "triton")
CASE = Case(page_size=16, requests=((39, 1), (8, 1)), head_dim=16, v_head_dim=16)


def check(batch: Batch, *, tolerance: float = 1e-5, **options: Any) -> None:  # noqa: ANN401
    """Compare both ops of both backends with the definition; requests have a token."""
    expected = batch.expected()
    assert np.isfinite(expected).all()
    for backend in BACKENDS:
        for op in (batch.extend, batch.decode):
            out = op(backend=backend, **options).double().numpy()

            np.testing.assert_allclose(out, expected, rtol=tolerance, atol=tolerance)


@jit()
def tanh_kernel(x_ptr: Pointer, out_ptr: Pointer, BLOCK: constexpr) -> None:
    """Write `tanh` of numbers."""
    numbers = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + numbers)
    tl.store(out_ptr + numbers, attention_tiles.tanh(x))


def tanh(numbers: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(numbers)
    tanh_kernel[(1,)](numbers, out, BLOCK=len(numbers))
    return out


def test_b173_tanh_keeps_its_last_bits_at_every_size() -> None:
    magnitudes = torch.logspace(-30, 1.9, 2048)
    border = 0.5 + torch.linspace(-1e-3, 1e-3, 2048)
    x = torch.cat([magnitudes, -magnitudes, border, -border])

    exact = torch.tanh(x.double())
    error = ((tanh(x).double() - exact) / exact).abs()

    assert error.max() < 5e-7
    assert error[x.abs() < 0.5].max() < 1.2e-7


@pytest.mark.filterwarnings("ignore:(overflow|invalid):RuntimeWarning")
def test_b173_tanh_of_what_is_no_number() -> None:
    x = torch.tensor([0.0, math.inf, -math.inf, math.nan])

    torch.testing.assert_close(
        tanh(x), torch.tensor([0.0, 1.0, -1.0, math.nan]), equal_nan=True
    )


@pytest.mark.parametrize("softcap", [1e-3, 1.0, 30.0, 50.0, 1e4, 1e6, 1e8, 1e30])
def test_b173_a_cap_far_above_the_scores_loses_none(softcap: float) -> None:
    batch = make_batch(replace(CASE, softcap=softcap))
    batch.scale = 4.0  # scores of about 16

    check(batch)


@pytest.mark.parametrize(
    "factors",
    [
        {"scale": 2.0, "k_scale": 3e38},
        {"scale": 1e39},
        {"scale": -1e39},
        {"scale": 3e38},  # in units of log2 it is larger
        {"scale": 10**400},
        {"scale": Fraction(10**400)},
        {"scale": np.float32(3e38), "k_scale": np.float32(2.0)},
        {"k_scale": 1e39},
        {"v_scale": 1e39},
        {"softcap": 1e39},
        {"softcap": 3e38},
        {"softcap": 1e-39},
        {"softcap": 1e-30, "scale": 1e10},
    ],
    ids=str,
)
def test_b174_factors_out_of_the_range_of_float32_are_refused(
    factors: dict[str, Any],
) -> None:
    batch = replace(make_batch(CASE), **factors)

    for backend in BACKENDS:
        for op in (batch.extend, batch.decode):
            with pytest.raises(ConfigError, match=r"must be .*finite"):
                op(backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [1e39, 10**400, 1e-39, 1e-46])
def test_b174_scales_out_of_the_range_of_float32_are_not_stored_with(
    backend: Any,  # noqa: ANN401
    scale: float,
) -> None:
    x, buffer = torch.ones(1, 1, 8), torch.zeros(2, 1, 1, 8).to(torch.float8_e4m3fn)

    for scales in ({"k_scale": scale}, {"v_scale": scale}):
        with pytest.raises(ConfigError, match="scale must be > 0 and finite"):
            store_kv(x, x, buffer, buffer, torch.tensor([1]), **scales, backend=backend)
    assert not buffer.float().any()


def test_b174_numpy_factors_are_multiplied_as_floats() -> None:
    batch = make_batch(CASE)
    narrow: Any = np.float16(300.0)
    batch.scale = batch.k_scale = narrow  # together 90,000, which float16 has not
    batch.q = batch.q / 90_000

    check(batch)


EXPONENTS = st.integers(-36, 36)


@pytest.mark.parametrize("backend", BACKENDS)
@given(scale=EXPONENTS, k_scale=EXPONENTS, v_scale=EXPONENTS, cap=st.none() | EXPONENTS)
def test_b174_what_is_taken_gives_what_is_exact(
    backend: str, scale: int, k_scale: int, v_scale: int, cap: int | None
) -> None:
    # Else float32 has no queries that give scores of about 1, and others round off.
    assume(abs(scale + k_scale) <= 36)
    softcap = None if cap is None else 10.0**cap
    batch = make_batch(replace(CASE, requests=((4, 1),), softcap=softcap))
    batch.scale, batch.k_scale = 10.0**scale, 10.0**k_scale
    batch.v_scale = 10.0**v_scale
    batch.q = batch.q * 10.0 ** (-scale - k_scale)
    expected = batch.expected()

    try:
        out = batch.decode(backend=backend).double().numpy()
    except ConfigError:
        # Together with another factor; each alone is in range.
        assert max(abs(scale + k_scale), abs(scale + k_scale - (cap or 0))) >= 36
    else:
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5 * batch.v_scale)


# About 1e6 and 1e30. All sums are exact, so that no order of additions matters.
@pytest.mark.parametrize("score", [-(2.0**100), -(2.0**20), 2.0**20, 2.0**100])
@pytest.mark.parametrize("context", [9, 300])
def test_b222_scores_far_from_zero_make_no_zeros(score: float, context: int) -> None:
    batch = make_batch(replace(CASE, requests=((context - 1, 1),)))
    # All scores are alike, but for the last keys, which are halfway to zero.
    batch.q = torch.ones_like(batch.q)
    batch.k_buffer = torch.ones_like(batch.k_buffer)
    batch.k_buffer[int(batch.page_table[1, 0]), :4] = 0.5
    batch.scale = score / 16

    check(batch)


@pytest.mark.parametrize(
    ("window", "context"),
    sorted({(w, n) for w in (1, 2, 16, 17, 64) for n in (w - 1, w, w + 1, 70) if n}),
)
def test_b224_a_window_counts_its_own_position(window: int, context: int) -> None:
    check(make_batch(replace(CASE, requests=((context - 1, 1),), window=window)))


def test_b226_q_k_and_v_may_be_views_of_one_buffer() -> None:
    # 2**31 bytes from one token to the next: the system provides only what is touched.
    storage = torch.empty(2**31 + 48, dtype=torch.int8)
    parts = storage.as_strided((2, 3, 16), (2**31, 16, 1))
    numbers = torch.arange(2 * 3 * 16).view(2, 3, 16) % 100
    parts.copy_(numbers)
    q, k, v = (x.unsqueeze(1) for x in parts.unbind(1))

    for backend in BACKENDS:
        k_buffer, v_buffer = torch.zeros(2, 4, 1, 1, 16, dtype=torch.int8)
        store_kv(k, v, k_buffer, v_buffer, torch.tensor([3, 1]), backend=backend)

        assert torch.equal(numbers[:, 1], k_buffer[[3, 1], 0, 0])
        assert torch.equal(numbers[:, 2], v_buffer[[3, 1], 0, 0])
    assert torch.equal(numbers[:, 0], q[:, 0])


def test_b226_attention_reads_views_of_one_projection() -> None:
    batch = make_batch(replace(CASE, requests=((0, 1), (0, 1)), page_size=1))
    one = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0))
    q, k, v = one.split(1, dim=1)
    store_kv(k, v, batch.k_buffer, batch.v_buffer, batch.page_table[batch.rows, 0])

    check(replace(batch, q=q))


FLOATS = (
    *(0.0, 2**-10, 2**-9, 2**-7, 0.3, 447.0, 448.0, 449.0, 463.0, 464.0, 465.0, 1e5),
    *(1e30, 3e38, 1e-38, 1e-45, math.inf, math.nan),
)


# numpy, which the interpreter computes with, warns of infinity and NaN.
@pytest.mark.filterwarnings("ignore:(overflow|invalid|divide):RuntimeWarning")
@pytest.mark.parametrize("scale", [1, 0.37, 1e-30, 1e30])
def test_b228_float8_is_clamped_and_nan_stays(scale: float) -> None:
    x = torch.tensor([*FLOATS, *(-x for x in FLOATS)]).view(1, 1, -1)
    stored: list[torch.Tensor] = []
    for backend in BACKENDS:
        buffer = torch.zeros(2, 1, 1, x.shape[2]).to(torch.float8_e4m3fn)
        store_kv(
            x,
            x,
            buffer,
            buffer,
            torch.tensor([1]),
            k_scale=scale,
            v_scale=scale,
            backend=backend,
        )
        stored.append(buffer[1].flatten().float())

    torch.testing.assert_close(*stored, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(x.flatten().isnan(), stored[0].isnan())
    assert 448 == stored[0].nan_to_num().abs().max()


@pytest.mark.parametrize(
    ("head_dim", "v_head_dim"),
    [*((dim, dim) for dim in (1, 3, 40, 72, 80, 96, 100, 192, 320)), (72, 3)],
)
def test_b230_heads_of_any_size(head_dim: int, v_head_dim: int) -> None:
    batch = make_batch(
        replace(CASE, requests=((19, 1),), head_dim=head_dim, v_head_dim=v_head_dim)
    )
    batch.scale = head_dim**-0.5
    k, v = torch.randn(1, 1, head_dim), torch.randn(1, 1, v_head_dim)

    check(batch)
    for backend in BACKENDS:
        k_buffer, v_buffer = (torch.zeros(2, 1, 1, x.shape[2]) for x in (k, v))
        store_kv(k, v, k_buffer, v_buffer, torch.tensor([1]), backend=backend)
        assert torch.equal(k[0], k_buffer[1, 0])
        assert torch.equal(v[0], v_buffer[1, 0])

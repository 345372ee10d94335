"""Paged attention in torch against the definition, position by position."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from radixkv.mem_cache.errors import ConfigError

from .attention_batches import Case, cases, make_batch

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@given(case=cases(st.integers(0, 9)))
@example(case=Case(page_size=1, requests=()))
@example(case=Case(page_size=2, requests=((0, 0),)))
@example(case=Case(page_size=2, requests=((5, 0), (0, 1))))
@example(case=Case(page_size=16, requests=((15, 2), (16, 1), (0, 16), (0, 17))))
@example(case=Case(page_size=4, requests=((10, 4),), window=4))
@example(case=Case(page_size=4, requests=((10, 4), (0, 3)), window=3, softcap=0.5))
def test_extend_equals_the_definition(case: Case) -> None:
    # float32 K and V are exact in the float64 of q, so that any fault shows.
    batch = make_batch(case, q_dtype=torch.float64)

    out = batch.extend()

    assert out.dtype == torch.float64
    np.testing.assert_allclose(out.numpy(), batch.expected(), rtol=1e-10, atol=1e-12)


@given(case=cases(st.just(1)))
@example(case=Case(page_size=1, requests=()))
@example(case=Case(page_size=16, requests=((0, 1), (15, 1), (16, 1))))
@example(case=Case(page_size=2, requests=((7, 1), (1, 1)), window=3))
def test_decode_equals_the_definition(case: Case) -> None:
    batch = make_batch(case, q_dtype=torch.float64)

    out = batch.decode()

    assert out.dtype == torch.float64
    np.testing.assert_allclose(out.numpy(), batch.expected(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kv_dtype", [*DTYPES, torch.float8_e4m3fn])
@pytest.mark.parametrize("q_dtype", DTYPES)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_k_and_v_are_converted_to_the_dtype_of_q(
    q_dtype: torch.dtype, kv_dtype: torch.dtype, softcap: float | None
) -> None:
    case = Case(
        page_size=3,
        requests=((0, 7), (5, 4), (8, 1)),
        num_kv_heads=2,
        group_size=3,
        head_dim=16,
        v_head_dim=16,
        softcap=softcap,
    )
    batch = make_batch(case, q_dtype=q_dtype, kv_dtype=kv_dtype)

    out = batch.extend()

    assert out.dtype == q_dtype
    tolerance = 8 * torch.finfo(q_dtype).eps
    np.testing.assert_allclose(
        out.double().numpy(), batch.expected(), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_scales_are_factors_on_what_is_stored(softcap: float | None) -> None:
    case = Case(page_size=2, requests=((0, 3), (6, 2)), softcap=softcap)
    batch = make_batch(case, q_dtype=torch.float64, kv_dtype=torch.float8_e4m3fn)
    batch.k_scale, batch.v_scale = 0.25, 3.0

    out = batch.extend()

    np.testing.assert_allclose(out.numpy(), batch.expected(), rtol=1e-10, atol=1e-12)


def test_b136_slots_follow_the_table_and_not_each_other() -> None:
    batch = make_batch(Case(page_size=1, requests=((3, 1),)))
    batch.k_buffer = torch.randn(
        10, 1, 1, 4, generator=torch.Generator().manual_seed(0)
    )
    batch.v_buffer = torch.arange(10.0).view(10, 1, 1, 1).expand(10, 1, 1, 4)
    batch.page_table[1, :4] = torch.tensor([9, 4, 7, 1])
    batch.window = 3

    out = batch.decode(scale=0.0)

    torch.testing.assert_close(out, torch.full((1, 1, 4), (4 + 7 + 1) / 3))


def test_attention_leaves_its_inputs_alone() -> None:
    batch = make_batch(Case(page_size=2, requests=((0, 3), (4, 1))))
    tensors = [t for t in vars(batch).values() if isinstance(t, torch.Tensor)]
    before = [tensor.clone() for tensor in tensors]

    batch.extend()

    for old, tensor in zip(before, tensors, strict=True):
        torch.testing.assert_close(tensor, old, rtol=0, atol=0, equal_nan=True)


def test_padded_request_attends_to_the_hold_page() -> None:
    batch = make_batch(Case(page_size=2, requests=((0, 1), (4, 1))))
    batch.k_buffer[0] = 1.0
    batch.v_buffer[0] = 5.0
    batch.rows[0] = 0

    out = batch.decode()

    assert torch.equal(batch.v_buffer[0, 0], out[0])


def test_what_has_no_context_gets_zeros() -> None:
    batch = make_batch(Case(page_size=2, requests=((0, 1), (4, 1))))
    batch.stops[0] = 0

    assert not batch.decode()[0].any()

    batch.starts[1] = batch.stops[1]  # its token is a padded one now
    assert not batch.extend().any()


CASE = Case(page_size=2, requests=((0, 1),), num_kv_heads=2, group_size=2)


@pytest.mark.parametrize(
    ("case", "options", "message"),
    [
        (CASE, {"window": 0}, "window must be >= 1"),
        (CASE, {"softcap": 0.0}, "softcap must be > 0"),
        (CASE, {"page_size": 4}, "page_size 4, got .2, 2, 2, 4."),
        (CASE, {"num_kv_heads": 3}, "a divisor of 4 heads, of 4 numbers"),
        (CASE, {"head_dim": 5}, "got 2 heads of 5"),
        (CASE, {"v": 1}, "V must have the pages and heads of K"),
    ],
)
def test_what_does_not_fit_is_refused(
    case: Case, options: dict[str, int], message: str
) -> None:
    batch = make_batch(case)
    fields = {
        key: options.pop(key) for key in ("num_kv_heads", "head_dim") if key in options
    }
    if fields:
        other = make_batch(replace(case, **fields))
        batch.k_buffer, batch.v_buffer = other.k_buffer, other.v_buffer
    if options.pop("v", None):
        batch.v_buffer = batch.v_buffer[:, :, :1]

    for op in (batch.decode, batch.extend):
        with pytest.raises(ConfigError, match=message):
            op(**options)

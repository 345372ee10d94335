"""The kernels of paged attention, in Triton's interpreter, against the reference.

The interpreter is slow, so that programs are as small as they can be: then small
contexts have several tiles and parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from triton.runtime import interpreter

from radixkv.kernels import attention_decode, attention_tiling
from radixkv.kernels.attention_options import AttentionOptions
from radixkv.kernels.attention_tiling import Tiling, kernel_inputs
from radixkv.kernels.errors import ConfigError

from .attention_batches import Batch, Case, cases, make_batch

SMALL = {576: Tiling(16, 16, num_warps=4, num_stages=2)}


@pytest.fixture(autouse=True, scope="module")
def _small_programs() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_tiling, "EXTEND_TILINGS", SMALL)
        patch.setattr(attention_tiling, "DECODE_TILINGS", SMALL)
        patch.setattr(attention_decode, "MIN_SPLIT", 16)
        # The interpreter would multiply the bits of bfloat16, and its matrix product
        # depends on the row.
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_exact_dot)
        yield


def create_exact_dot(
    _: object,
    a: interpreter.TensorHandle,
    b: interpreter.TensorHandle,
    acc: interpreter.TensorHandle,
    *options: object,
) -> interpreter.TensorHandle:
    product = as_float64(a.data) @ as_float64(b.data)
    sums = acc.data + product.astype(acc.data.dtype)
    return interpreter.TensorHandle(sums, acc.dtype.scalar)


def as_float64(numbers: NDArray[Any]) -> NDArray[np.float64]:
    if numbers.dtype == np.uint16:
        numbers = (numbers.astype(np.uint32) << 16).view(np.float32)
    return numbers.astype(np.float64)


def assert_close(expected: torch.Tensor, out: torch.Tensor) -> None:
    tolerance = max(1e-5, 8 * torch.finfo(out.dtype).eps)
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


some_examples = settings(max_examples=settings().max_examples // 2)


@some_examples
@given(
    case=cases(st.integers(0, 9), longest=40, most=2),
    head_dims=st.sampled_from([(16, 16), (24, 8), (40, 80)]),
    max_new_len=st.sampled_from([None, 9]),
)
@example(Case(page_size=1, requests=()), (16, 16), None)
@example(Case(page_size=2, requests=((0, 0), (5, 0), (0, 1))), (16, 16), None)
@example(Case(page_size=16, requests=((15, 2), (0, 17), (16, 16))), (16, 16), None)
@example(Case(page_size=4, requests=((60, 9),), window=4), (16, 16), None)
@example(Case(page_size=4, requests=((9, 9),), group_size=8), (16, 16), None)
def test_extend_equals_the_reference(
    case: Case, head_dims: tuple[int, int], max_new_len: int | None
) -> None:
    batch = make_batch(replace(case, head_dim=head_dims[0], v_head_dim=head_dims[1]))

    out = batch.extend(backend="triton", max_new_len=max_new_len)

    assert_close(batch.extend(), out)


@some_examples
@given(
    case=cases(st.just(1), longest=70, most=2),
    head_dims=st.sampled_from([(16, 16), (24, 8), (40, 80)]),
    num_splits=st.integers(1, 5),
)
@example(Case(page_size=1, requests=()), (16, 16), 1)
@example(Case(page_size=16, requests=((0, 1), (15, 1), (16, 1))), (16, 16), 2)
@example(Case(page_size=4, requests=((60, 1), (300, 1)), window=4), (16, 16), 20)
@example(Case(page_size=4, requests=((300, 1),), window=299), (16, 16), 20)
@example(Case(page_size=4, requests=((20, 1),), group_size=40), (16, 16), 2)
def test_decode_equals_the_reference(
    case: Case, head_dims: tuple[int, int], num_splits: int
) -> None:
    batch = make_batch(replace(case, head_dim=head_dims[0], v_head_dim=head_dims[1]))

    out = batch.decode(backend="triton", num_splits=num_splits)

    assert_close(batch.decode(), out)


CASE = Case(
    page_size=4,
    requests=((0, 7), (24, 4), (8, 1)),
    num_kv_heads=2,
    group_size=3,
    head_dim=24,
    v_head_dim=16,
)


def both(batch: Batch, **options: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:  # noqa: ANN401
    """Yield the results of the reference and of the kernels, of both ops."""
    yield batch.extend(), batch.extend(backend="triton", **options)
    # Decode has the last tokens of the requests as they are now.
    batch.q = batch.q[: len(batch.rows)]
    yield batch.decode(), batch.decode(backend="triton", num_splits=2, **options)


@pytest.mark.parametrize(
    ("q_dtype", "kv_dtype"),
    [
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.float8_e4m3fn),
        (torch.bfloat16, torch.float8_e4m3fn),
        (torch.float32, torch.float8_e4m3fn),
    ],
)
def test_k_and_v_are_converted_to_the_dtype_of_q(
    q_dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    batch = make_batch(CASE, q_dtype=q_dtype, kv_dtype=kv_dtype)
    batch.k_scale, batch.v_scale = 0.5, 1.5

    for expected, out in both(batch):
        assert out.dtype == q_dtype
        assert_close(expected, out)


def test_every_float8_is_read_as_it_is() -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = [0x7F, 0xFF]  # nan has no place among weights
    numbers.view(torch.uint8)[finite] = 0
    batch = make_batch(Case(page_size=1, requests=((0, 1),), head_dim=256))
    batch.q = torch.zeros(1, 1, 256)
    batch.k_buffer = batch.v_buffer = numbers.repeat(2).view(2, 1, 1, 256)

    assert torch.equal(numbers.float(), batch.decode(backend="triton")[0, 0])


@pytest.mark.parametrize(
    ("head_dim", "v_head_dim"), [(48, 32), (24, 16), (32, 32), (40, 24)]
)
def test_v_may_be_a_part_of_k(head_dim: int, v_head_dim: int) -> None:
    case = replace(CASE, head_dim=head_dim, v_head_dim=v_head_dim, v_is_in_k=True)
    batch = make_batch(case)

    for expected, out in both(batch):
        assert_close(expected, out)


def test_absorbed_mla_reads_k_and_v_at_once() -> None:
    shape = 2, 16, 1, 576
    k = torch.zeros(shape)
    q, table = torch.zeros(1, 128, 576), torch.zeros(1, 4, dtype=torch.int32)
    options = AttentionOptions(page_size=16, scale=1.0)

    at_once, apart = (
        kernel_inputs(q, k, v[..., :512], table, options).constants
        for v in (k, torch.zeros(shape))
    )

    assert at_once["V_IS_IN_K"]
    assert not apart["V_IS_IN_K"]
    assert (512, 64) == (apart["DIM_MAIN"], apart["DIM_REST"])


@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
def test_all_page_sizes(page_size: int) -> None:
    requests = ((page_size - 1, 2), (page_size, 1))
    batch = make_batch(Case(page_size, requests, head_dim=16, v_head_dim=16))

    for expected, out in both(batch):
        assert_close(expected, out)


def test_requests_without_context_and_padded_tokens_get_zeros() -> None:
    batch = make_batch(replace(CASE, requests=((0, 1), (4, 1), (0, 3))))
    batch.rows, batch.starts, batch.stops = (
        torch.cat([numbers[:2], torch.zeros(2, dtype=torch.int32)])
        for numbers in (batch.rows, batch.starts, batch.stops)
    )

    for expected, out in both(replace(batch, q=batch.q[:4])):
        assert_close(expected, out)
        assert not out[2:].any()


# numpy, which the interpreter computes with, warns of nan.
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_nan_of_a_padded_request_reaches_nobody() -> None:
    batch = make_batch(replace(CASE, requests=((0, 1), (4, 1))))
    alone = batch.decode(backend="triton")
    batch.rows[0] = 0  # the hold page is nan here

    out = batch.decode(backend="triton")

    assert out[0].isnan().all()
    assert torch.equal(alone[1], out[1])


def test_padded_request_attends_to_the_hold_page() -> None:
    batch = make_batch(replace(CASE, requests=((0, 1), (4, 1))))
    batch.k_buffer[0] = 1.0
    batch.v_buffer[0] = 5.0
    batch.rows[0] = 0

    for _, out in both(batch):
        assert (out[0] == 5.0).all()


def test_a_result_does_not_depend_on_the_batch() -> None:
    batch = make_batch(CASE)
    extended = batch.extend(backend="triton").split([7, 4, 1])
    batch.q = batch.q[:3]
    decoded = batch.decode(backend="triton", num_splits=3).split(1)
    for i in range(3):
        request = slice(i, i + 1)
        alone = replace(
            batch,
            rows=batch.rows[request],
            starts=batch.starts[request],
            stops=batch.stops[request],
        )

        alone.q = batch.q[request]
        assert torch.equal(decoded[i], alone.decode(backend="triton", num_splits=3))

        alone.q = make_batch(CASE).q.split([7, 4, 1])[i]
        assert torch.equal(extended[i], alone.extend(backend="triton"))


def test_queries_may_be_parts_of_larger_tensors() -> None:
    batch = make_batch(CASE)
    num_heads, head_dim = batch.q.shape[1:]
    around = torch.full((13, num_heads + 2, 2 * head_dim), torch.nan)
    for inside in (
        around[1:, 1:-1, :head_dim],  # q, k and v of one projection
        around.view(num_heads + 2, 13, -1).transpose(0, 1)[1:, 1:-1, 3 : head_dim + 3],
        around[1:, 1:-1, ::2],
    ):
        around.fill_(torch.nan)
        inside.copy_(batch.q)

        for expected, out in both(replace(batch, q=inside)):
            assert_close(expected, out)


@pytest.mark.parametrize("page", [2**15 - 1, 2**15])
def test_b131_pages_are_addressed_past_2_31_elements(page: int) -> None:
    # 65,536 numbers from one page to the next, of which a page has only 256: page
    # 32,768 begins at number 2**31. The system provides only what is touched.
    storage = torch.empty(2**31 + 2**17, dtype=torch.float8_e4m3fn)
    buffer = storage.as_strided((2**15 + 1, 16, 1, 16), (2**16, 16, 16, 1))
    small = make_batch(
        Case(page_size=16, requests=((3, 2),), head_dim=16, v_head_dim=16),
        kv_dtype=torch.float8_e4m3fn,
    )
    large = replace(small, k_buffer=buffer, v_buffer=buffer)
    large.page_table = torch.full_like(small.page_table, page)
    buffer[page].view(torch.uint8).copy_(small.k_buffer[1].view(torch.uint8))

    expected = replace(small, v_buffer=small.k_buffer).extend()

    assert_close(expected, large.extend(backend="triton"))
    large.q = large.q[1:]
    assert_close(expected[1:], large.decode(backend="triton"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(2, 1, 4, dtype=torch.float64)}, "takes q in"),
        ({"k_buffer": torch.zeros(2, 2, 1, 8)[..., ::2]}, "in one piece"),
        ({"page_table": torch.zeros(2, 6, dtype=torch.int32)[:, ::2]}, "in one piece"),
        (
            {"q": torch.zeros(2, 1, 640), "k_buffer": torch.zeros(2, 2, 1, 640)},
            "at most 576 numbers",
        ),
    ],
)
def test_what_the_kernels_do_not_take_is_refused(
    changes: dict[str, torch.Tensor], message: str
) -> None:
    for new_len, op in ((1, Batch.decode), (2, Batch.extend)):
        batch = make_batch(Case(page_size=2, requests=((0, new_len),)))
        batch = replace(batch, **changes)
        batch.q = batch.q[:new_len]

        with pytest.raises(ConfigError, match=message):
            op(batch, backend="triton")


def test_no_parts_are_refused() -> None:
    batch = make_batch(Case(page_size=2, requests=((0, 1),)))

    with pytest.raises(ConfigError, match=r"num_splits must be >= 1 .*, got 0"):
        batch.decode(backend="triton", num_splits=0)

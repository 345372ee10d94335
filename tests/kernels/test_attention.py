"""Paged attention against the definition of attention, position by position."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from radixkv.kernels import paged_attention_decode, paged_attention_extend

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@dataclass(frozen=True)
class Case:
    """The shapes of a batch; requests are pairs of a prefix and new tokens."""

    page_size: int
    requests: tuple[tuple[int, int], ...]
    num_kv_heads: int = 1
    group_size: int = 1
    head_dim: int = 4
    v_head_dim: int = 4
    spare_pages: int = 0
    seed: int = 0


@dataclass
class Batch:
    """The arguments of an op."""

    q: torch.Tensor
    k_buffer: torch.Tensor
    v_buffer: torch.Tensor
    page_table: torch.Tensor
    rows: torch.Tensor
    starts: torch.Tensor
    stops: torch.Tensor
    page_size: int
    scale: float

    def extend(self) -> torch.Tensor:
        return paged_attention_extend(
            self.q,
            self.k_buffer,
            self.v_buffer,
            self.page_table,
            self.rows,
            self.starts,
            self.stops,
            page_size=self.page_size,
            scale=self.scale,
        )

    def decode(self) -> torch.Tensor:
        return paged_attention_decode(
            self.q,
            self.k_buffer,
            self.v_buffer,
            self.page_table,
            self.rows,
            self.stops,
            page_size=self.page_size,
            scale=self.scale,
        )

    def expected(self) -> NDArray[np.float64]:
        """Attend by the definition, in float64."""
        q = self.q.double().numpy()
        k = self.k_buffer.double().numpy()
        v = self.v_buffer.double().numpy()
        table = self.page_table.numpy()
        num_q_heads, num_kv_heads = q.shape[1], k.shape[1]
        out = np.zeros((len(q), num_q_heads, v.shape[2]))
        i = 0
        for row, start, stop in zip(self.rows, self.starts, self.stops, strict=True):
            for position in range(int(start), int(stop)):
                slots = [
                    int(table[int(row), p // self.page_size]) * self.page_size
                    + p % self.page_size
                    for p in range(position + 1)
                ]
                for head in range(num_q_heads):
                    kv_head = head // (num_q_heads // num_kv_heads)
                    scores = [self.scale * (q[i, head] @ k[s, kv_head]) for s in slots]
                    weights = [math.exp(score - max(scores)) for score in scores]
                    for weight, slot in zip(weights, slots, strict=True):
                        out[i, head] += weight / sum(weights) * v[slot, kv_head]
                i += 1
        return out


def make_batch(
    case: Case,
    *,
    q_dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype = torch.float32,
) -> Batch:
    """Scatter the pages of a batch; what no query may see is NaN."""
    rng = np.random.default_rng(case.seed)
    stops = [prefix + new for prefix, new in case.requests]
    counts = [-(-stop // case.page_size) for stop in stops]
    num_pages = sum(counts) + case.spare_pages
    pages = rng.permutation(np.arange(1, num_pages + 1, dtype=np.int32))
    rows = rng.permutation(np.arange(1, len(stops) + 1, dtype=np.int32))
    table = np.zeros((len(stops) + 1, max(counts, default=0) + 1), dtype=np.int32)
    num_slots = (num_pages + 1) * case.page_size
    k = np.full((num_slots, case.num_kv_heads, case.head_dim), np.nan)
    v = np.full((num_slots, case.num_kv_heads, case.v_head_dim), np.nan)
    used = 0
    for row, stop, count in zip(rows, stops, counts, strict=True):
        table[row, :count] = pages[used : used + count]
        used += count
        for p in range(stop):
            page = int(table[row, p // case.page_size])
            slot = page * case.page_size + p % case.page_size
            k[slot] = rng.standard_normal(k.shape[1:])
            v[slot] = rng.standard_normal(v.shape[1:])
    num_q_heads = case.num_kv_heads * case.group_size
    num_tokens = sum(new for _, new in case.requests)
    q = rng.standard_normal((num_tokens, num_q_heads, case.head_dim))
    return Batch(
        q=torch.tensor(q).to(q_dtype),
        k_buffer=torch.tensor(k).to(kv_dtype),
        v_buffer=torch.tensor(v).to(kv_dtype),
        page_table=torch.tensor(table),
        rows=torch.tensor(rows),
        starts=torch.tensor([prefix for prefix, _ in case.requests]).int(),
        stops=torch.tensor(stops).int(),
        page_size=case.page_size,
        scale=0.7,
    )


def cases(new_tokens: st.SearchStrategy[int]) -> st.SearchStrategy[Case]:
    requests = st.lists(st.tuples(st.integers(0, 20), new_tokens), max_size=4)
    return st.builds(
        Case,
        page_size=st.sampled_from([1, 2, 3, 16]),
        requests=requests.map(tuple),
        num_kv_heads=st.integers(1, 3),
        group_size=st.integers(1, 3),
        head_dim=st.sampled_from([1, 4, 8]),
        v_head_dim=st.sampled_from([1, 4, 8]),
        spare_pages=st.integers(0, 2),
        seed=st.integers(0, 999),
    )


@given(case=cases(st.integers(0, 9)))
@example(case=Case(page_size=1, requests=()))
@example(case=Case(page_size=2, requests=((0, 0),)))
@example(case=Case(page_size=2, requests=((5, 0), (0, 1))))
@example(case=Case(page_size=16, requests=((15, 2), (16, 1), (0, 16), (0, 17))))
def test_extend_equals_the_definition(case: Case) -> None:
    # float32 K and V are exact in the float64 of q, so that any fault shows.
    batch = make_batch(case, q_dtype=torch.float64)

    out = batch.extend()

    assert out.dtype == torch.float64
    np.testing.assert_allclose(out.numpy(), batch.expected(), rtol=1e-10, atol=1e-12)


@given(case=cases(st.just(1)))
@example(case=Case(page_size=1, requests=()))
@example(case=Case(page_size=16, requests=((0, 1), (15, 1), (16, 1))))
def test_decode_equals_the_definition(case: Case) -> None:
    batch = make_batch(case, q_dtype=torch.float64)

    out = batch.decode()

    assert out.dtype == torch.float64
    np.testing.assert_allclose(out.numpy(), batch.expected(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("q_dtype", DTYPES)
def test_k_and_v_are_converted_to_the_dtype_of_q(
    q_dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    case = Case(
        page_size=3,
        requests=((0, 7), (5, 4), (8, 1)),
        num_kv_heads=2,
        group_size=3,
        head_dim=16,
        v_head_dim=16,
    )
    batch = make_batch(case, q_dtype=q_dtype, kv_dtype=kv_dtype)

    out = batch.extend()

    assert out.dtype == q_dtype
    tolerance = 8 * torch.finfo(q_dtype).eps
    np.testing.assert_allclose(
        out.double().numpy(), batch.expected(), rtol=tolerance, atol=tolerance
    )


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

    assert torch.equal(batch.v_buffer[0], out[0])


def test_index_tensors_on_a_device_are_refused() -> None:
    # Reading them would wait for the device, in every layer.
    batch = make_batch(Case(page_size=2, requests=((0, 1),)))
    batch.rows = batch.rows.to("meta")

    with pytest.raises((TypeError, RuntimeError), match="meta"):
        batch.extend()

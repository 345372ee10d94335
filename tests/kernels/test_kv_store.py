"""Storing K and V: the given slots change, to the given values, and no other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixkv.kernels import paged_attention_decode, store_kv

GUARD = 7.0


def randn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(
    num_slots=st.integers(1, 40),
    num_kv_heads=st.integers(1, 3),
    head_dims=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 999),
    data=st.data(),
)
def test_store_changes_the_given_slots_and_no_other(
    num_slots: int,
    num_kv_heads: int,
    head_dims: tuple[int, int],
    dtype: torch.dtype,
    seed: int,
    data: st.DataObject,
) -> None:
    slots = list(data.draw(st.permutations(range(num_slots))))
    slots = slots[: data.draw(st.integers(0, num_slots))]
    k, v = (randn(seed, len(slots), num_kv_heads, dim) for dim in head_dims)
    # One guard slot on each side of a buffer.
    around_k, around_v = (
        torch.full((num_slots + 2, num_kv_heads, dim), GUARD, dtype=dtype)
        for dim in head_dims
    )
    expected_k, expected_v = around_k.clone(), around_v.clone()
    for i, slot in enumerate(slots):
        expected_k[slot + 1] = k[i].to(dtype)
        expected_v[slot + 1] = v[i].to(dtype)

    store_kv(
        k, v, around_k[1:-1], around_v[1:-1], torch.tensor(slots, dtype=torch.int64)
    )

    assert torch.equal(expected_k, around_k)
    assert torch.equal(expected_v, around_v)


def test_store_takes_k_and_v_as_attention_layers_hold_them() -> None:
    # [num_heads, num_tokens, head_dim], seen from the side.
    k, v = randn(0, 2, 3, 4).transpose(0, 1), randn(1, 2, 3, 4).transpose(0, 1)
    k_buffer, v_buffer = torch.zeros(8, 2, 4), torch.zeros(8, 2, 4)

    store_kv(k, v, k_buffer, v_buffer, torch.tensor([6, 1, 4]))

    assert torch.equal(k, k_buffer[[6, 1, 4]])
    assert torch.equal(v, v_buffer[[6, 1, 4]])


def test_s4_15_padded_tokens_write_to_the_hold_page_only() -> None:
    k, v = randn(0, 5, 1, 2), randn(1, 5, 1, 2)
    k_buffer, v_buffer = torch.zeros(8, 1, 2), torch.zeros(8, 1, 2)

    store_kv(k, v, k_buffer, v_buffer, torch.tensor([0, 5, 0, 1, 0]))

    padding = [0, 2, 4]
    assert any(torch.equal(k[i], k_buffer[0]) for i in padding)
    assert any(torch.equal(v[i], v_buffer[0]) for i in padding)
    assert torch.equal(k[[1, 3]], k_buffer[[5, 1]])
    assert torch.equal(v[[1, 3]], v_buffer[[5, 1]])
    assert not k_buffer[[2, 3, 4, 6, 7]].any()
    assert not v_buffer[[2, 3, 4, 6, 7]].any()


@pytest.mark.parametrize("page", [2**15 - 1, 2**15])
def test_b131_slots_are_addressed_past_2_31_elements(page: int) -> None:
    # 1,024 elements a slot in pages of 64: page 32,768 begins at element 2**31. One
    # byte an element, of which the system provides only what is touched.
    k_buffer = torch.empty(64 * (2**15 + 1), 1, 1024, dtype=torch.int8)
    v_buffer = torch.empty(64 * (2**15 + 1), 1, 1, dtype=torch.int8)
    table = torch.tensor([[page]], dtype=torch.int32)
    ones = torch.ones(64, 1, 1024)
    v = torch.arange(64.0).view(64, 1, 1)
    stops = torch.tensor([64], dtype=torch.int32)

    store_kv(ones, v, k_buffer, v_buffer, 64 * page + torch.arange(64))
    out = paged_attention_decode(
        ones[:1],
        k_buffer,
        v_buffer,
        table,
        torch.tensor([0], dtype=torch.int32),
        stops,
        page_size=64,
        scale=1.0,
    )

    # All scores are equal, so the result is the mean of V.
    assert out.item() == pytest.approx(31.5)
    assert k_buffer.view(-1)[65536 * page : 65536 * (page + 1)].all()

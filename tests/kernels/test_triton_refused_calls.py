"""Calls that do not fit are refused before anything is written, by each backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixkv.kernels import (
    PageBuffers,
    apply_page_table_delta,
    block_table,
    copy_pages,
    gather_pages,
    kv_indices,
    last_loc,
    paged_attention_decode,
    paged_attention_extend,
    scatter_pages,
    slot_mapping_decode,
    slot_mapping_extend,
    store_kv,
)
from radixkv.kernels.backend import Backend
from radixkv.mem_cache import ConfigError, ForeignPageError, KVPool

BACKENDS: tuple[Backend, ...] = ("reference", "triton")
each_backend = pytest.mark.parametrize("backend", BACKENDS)

TABLE = torch.tensor([[0] * 4, [2, 1, 0, 0], [3, 4, 0, 0]], dtype=torch.int32)


def int32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def spread(tensor: torch.Tensor, step: int) -> torch.Tensor:
    """Return the same numbers, with others between them."""
    wide = torch.full((len(tensor) * step,), 77, dtype=tensor.dtype)
    wide[::step] = tensor
    return wide[::step]


def run_all_ops(
    backend: Backend, same: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor]:
    """Run each op on a small step, its numbers passed through `same`."""
    rows, starts, stops = (same(int32(*x)) for x in ((1, 2), (3, 6), (5, 7)))
    step: dict[str, Any] = {"page_size": 4, "backend": backend}
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 4, 8, generator=generator)
    k = torch.randn(6, 4, 2, 8, generator=generator)
    table, stored = TABLE.clone(), k.clone()
    pages = same(int32(5, 1))
    apply_page_table_delta(
        table,
        rows,
        same(int32(2, 2)),
        same(int32(0, 1, 2)),
        pages,
        same(int32(2)),
        backend=backend,
    )
    slots = same(torch.tensor([9, 4]))
    store_kv(k[:2, 0], k[:2, 1], stored, stored.clone(), slots, backend=backend)
    buffers = PageBuffers([k.clone()])
    staging = torch.zeros(2, buffers.page_bytes, dtype=torch.uint8)
    gather_pages(buffers, pages, staging, backend=backend)
    scatter_pages(buffers, same(int32(2, 3)), staging, backend=backend)
    lists = kv_indices(TABLE, rows, stops, num_pages=4, **step)
    return [
        slot_mapping_extend(TABLE, rows, starts, stops, num_tokens=4, **step),
        slot_mapping_decode(TABLE, rows, starts, num_tokens=2, **step),
        last_loc(TABLE, rows, starts, **step),
        lists.kv_indptr,
        lists.kv_indices,
        lists.last_page_len,
        block_table(TABLE, rows, stops, width=3, **step),
        table,
        stored,
        staging,
        *buffers.buffers,
        paged_attention_extend(q, k, k, TABLE, rows, starts, stops, scale=1.0, **step),
        paged_attention_decode(q[:2], k, k, TABLE, rows, stops, scale=1.0, **step),
    ]


@each_backend
@pytest.mark.parametrize("step", [2, 3])
def test_numbers_that_are_not_one_after_another_mean_the_same(
    backend: Backend, step: int
) -> None:
    expected = run_all_ops(backend, lambda tensor: tensor)

    results = run_all_ops(backend, lambda tensor: spread(tensor, step))

    for one, other in zip(expected, results, strict=True):
        assert torch.equal(one, other)


@given(
    slots=st.lists(st.sampled_from([*range(-9, 0), *range(8, 30), 2**40]), max_size=5),
    real=st.sets(st.integers(0, 7), max_size=4),
    page_size=st.sampled_from([1, 2, 4]),
    dtype=st.sampled_from([torch.float32, torch.float8_e4m3fn]),
    data=st.data(),
)
def test_a_slot_outside_the_buffers_is_not_written(
    slots: list[int],
    real: set[int],
    page_size: int,
    dtype: torch.dtype,
    data: st.DataObject,
) -> None:
    mixed = data.draw(st.permutations([*slots, *real]))
    k = torch.arange(1.0, len(mixed) + 1).view(-1, 1, 1).expand(-1, 2, 3)
    expected = torch.zeros(24)
    for i, slot in enumerate(mixed):
        if slot in range(8):
            expected[8 + slot] = k[i, 0, 0]
    for backend in BACKENDS:
        around = torch.zeros(2, 24 // page_size, page_size, 2, 3).to(dtype)
        k_buffer, v_buffer = around[:, 8 // page_size : 16 // page_size]

        store_kv(k, k, k_buffer, v_buffer, torch.tensor(mixed).long(), backend=backend)

        for stored in around.float():
            assert torch.equal(
                expected.view(24, 1, 1).expand(24, 2, 3), stored.flatten(0, 1)
            )


STORE: dict[str, Any] = {
    "k": torch.ones(2, 2, 8),
    "v": torch.ones(2, 2, 6),
    "k_buffer": torch.zeros(6, 4, 2, 8),
    "v_buffer": torch.zeros(6, 4, 2, 6),
    "slots": torch.tensor([4, 9]),
}
ATTEND: dict[str, Any] = {
    "q": torch.ones(2, 4, 8),
    "k_buffer": torch.ones(6, 4, 2, 8),
    "v_buffer": torch.ones(6, 4, 2, 8),
    "page_table": TABLE,
    "rows": int32(1, 2),
    "stops": int32(5, 7),
    "page_size": 4,
    "scale": 1.0,
}
EXTEND: dict[str, Any] = {**ATTEND, "starts": int32(4, 6)}
STEP: dict[str, Any] = {"page_table": TABLE, "rows": int32(1, 2), "page_size": 4}
BLOCKS: dict[str, Any] = {**STEP, "stops": int32(5, 7), "width": 2}
MAPPED: dict[str, Any] = {
    **STEP,
    "starts": int32(4, 6),
    "stops": int32(5, 7),
    "num_tokens": 2,
}
BUFFERS = PageBuffers([torch.zeros(4, 3, 8), torch.zeros(4, 5)])
STAGED: dict[str, Any] = {
    "pages": BUFFERS,
    "page_ids": torch.tensor([1, 3]),
    "staging": torch.ones(2, 116, dtype=torch.uint8),
}
COPIED: dict[str, Any] = {"pages": BUFFERS, "sources": [1, 2], "targets": [2, 3]}
DELTA: dict[str, Any] = {
    "page_table": TABLE.clone(),
    "rows": int32(1, 2),
    "page_starts": int32(2, 2),
    "page_indptr": int32(0, 1, 2),
    "new_pages": int32(5, 1),
    "forgotten_rows": int32(),
}

CASES: list[tuple[Callable[..., Any], dict[str, Any], dict[str, Any], str]] = [
    (store_kv, STORE, {"k": torch.ones(2, 1, 8)}, "k must be .2, 2, 8"),
    (store_kv, STORE, {"k": torch.ones(2, 3, 8)}, "k must be .2, 2, 8"),
    (store_kv, STORE, {"k": torch.ones(2, 2, 4)}, "k must be .2, 2, 8"),
    (store_kv, STORE, {"k": torch.ones(2, 16)}, "k must be .2, 2, 8"),
    (store_kv, STORE, {"v": torch.ones(2, 1, 6)}, "v must be .2, 2, 6"),
    (store_kv, STORE, {"v": torch.ones(2, 2, 6).half()}, "v must be torch.float32"),
    (store_kv, STORE, {"slots": torch.tensor([4])}, "for 1 slots"),
    (store_kv, STORE, {"slots": torch.tensor([4, 5, 6])}, "for 3 slots"),
    (store_kv, STORE, {"slots": torch.tensor([4.0, 9.0])}, "slots must be a tensor"),
    (store_kv, STORE, {"slots": torch.tensor([[4, 9]])}, "slots must be a tensor"),
    (store_kv, STORE, {"slots": [4, 9]}, "slots must be a tensor .* got list"),
    (store_kv, STORE, {"v_buffer": torch.zeros(12, 2, 2, 6)}, "k_buffer and v_buffer"),
    (store_kv, STORE, {"v_buffer": torch.zeros(6, 4, 2, 6).half()}, "v_buffer must be"),
    (store_kv, STORE, {"k_scale": 0.0}, "k_scale must be > 0 and finite"),
    (store_kv, STORE, {"v_scale": torch.tensor(2.0)}, "v_scale must be > 0"),
    *(
        (op, arguments, change, message)
        for op, arguments in (
            (paged_attention_decode, ATTEND),
            (paged_attention_extend, EXTEND),
        )
        for change, message in (
            ({"page_size": 0}, "page_size must be >= 1"),
            ({"page_size": 4.0}, "page_size must be >= 1 .*, got 4.0"),
            ({"scale": float("nan")}, "scale must be finite"),
            ({"softcap": float("inf")}, "softcap must be > 0 and finite"),
            ({"softcap": float("nan")}, "softcap must be > 0 and finite"),
            ({"window": 2.5}, "window must be >= 1 .*, an integer, got 2.5"),
            ({"k_scale": float("nan")}, "k_scale must be finite"),
            ({"rows": int32(1, 2, 2)}, "must be as many as rows, 3, got 2"),
            ({"stops": int32(5)}, "stops must be as many as rows, 2, got 1"),
            ({"page_table": TABLE[0]}, "page_table must be int32 or int64"),
            ({"q": torch.ones(2, 8)}, "q must be .num_tokens"),
        )
    ),
    (paged_attention_decode, ATTEND, {"q": torch.ones(3, 4, 8)}, "q must be as many"),
    (paged_attention_decode, ATTEND, {"num_splits": 0}, "num_splits must be >= 1"),
    (paged_attention_decode, ATTEND, {"max_stop": -1}, "max_stop must be >= 0"),
    (paged_attention_extend, EXTEND, {"starts": int32(4)}, "starts must be as many"),
    (paged_attention_extend, EXTEND, {"max_new_len": -1}, "max_new_len must be >= 0"),
    (block_table, BLOCKS, {"width": 5}, "width must be >= 0 and <= 4"),
    (block_table, BLOCKS, {"width": -1}, "width must be >= 0"),
    (block_table, BLOCKS, {"page_size": 0}, "page_size must be >= 1"),
    (block_table, BLOCKS, {"stops": int32(5)}, "stops must be as many"),
    (slot_mapping_extend, MAPPED, {"num_tokens": -1}, "num_tokens must be >= 0"),
    (slot_mapping_extend, MAPPED, {"page_size": 0}, "page_size must be >= 1"),
    (slot_mapping_extend, MAPPED, {"stops": int32(5)}, "stops must be as many"),
    (gather_pages, STAGED, {"staging": STAGED["staging"][:1]}, "staging must be uint8"),
    (gather_pages, STAGED, {"staging": torch.ones(3, 116).byte()}, "staging must be"),
    (gather_pages, STAGED, {"staging": torch.ones(2, 115).byte()}, "staging must be"),
    (gather_pages, STAGED, {"staging": torch.ones(2, 116)}, "staging must be uint8"),
    (gather_pages, STAGED, {"staging": torch.ones(2, 232).byte()[:, ::2]}, "one piece"),
    (scatter_pages, STAGED, {"staging": torch.ones(1, 116).byte()}, "staging must be"),
    (scatter_pages, STAGED, {"staging": torch.ones(2, 58).half()}, "staging must be"),
    (scatter_pages, STAGED, {"page_ids": [1, 3]}, "page_ids must be a tensor"),
    (copy_pages, COPIED, {"targets": [3, 3]}, "targets must be all different"),
    (copy_pages, COPIED, {"targets": [3]}, "targets must be as many as sources, 2"),
    (copy_pages, COPIED, {"sources": [1.5, 2]}, "sources must be a list of integers"),
    (copy_pages, COPIED, {"sources": [1, 4]}, r"page ids must be in 0\.\.3"),
    (copy_pages, COPIED, {"targets": [-1, 2]}, r"page ids must be in 0\.\.3"),
    (apply_page_table_delta, DELTA, {"page_starts": int32(2)}, "page_starts must be"),
    (apply_page_table_delta, DELTA, {"page_indptr": int32(0, 1)}, "one more than rows"),
]


def tensors_of(arguments: dict[str, Any]) -> list[torch.Tensor]:
    """Return copies of all that a call could have changed."""
    tensors = [x for x in arguments.values() if isinstance(x, torch.Tensor)]
    return [x.clone() for x in (*tensors, *BUFFERS.buffers)]


@each_backend
@pytest.mark.parametrize(("op", "arguments", "change", "message"), CASES)
def test_what_does_not_fit_is_refused_and_changes_nothing(
    op: Callable[..., Any],
    arguments: dict[str, Any],
    change: dict[str, Any],
    message: str,
    backend: Backend,
) -> None:
    called = arguments | change
    before = tensors_of(called)

    with pytest.raises(ConfigError, match=message):
        op(**called, backend=backend)

    assert all(map(torch.equal, before, tensors_of(called)))


@pytest.mark.parametrize(
    ("op", "arguments"), {op: call for op, call, *_ in CASES}.items()
)
def test_the_same_calls_are_taken_as_they_should_be(
    op: Callable[..., Any], arguments: dict[str, Any]
) -> None:
    for backend in BACKENDS:
        op(**arguments, backend=backend)


@each_backend
def test_a_pool_refuses_pages_that_it_does_not_have(backend: Backend) -> None:
    pool = KVPool.uniform(
        num_pages=4, page_size=2, num_layers=1, num_kv_heads=1, head_dim=2
    )
    pool = KVPool(pool.config, backend=backend)
    pool.buffer[:] = torch.arange(len(pool.buffer)) % 251
    before = pool.buffer.clone()
    staging = torch.zeros(2, pool.page_bytes, dtype=torch.uint8)
    not_integers: Any = np.array([1.0])

    for ids in ([1, 5], [-1, 1]):
        for op in (pool.gather_pages, pool.scatter_pages):
            with pytest.raises(ForeignPageError, match=r"page ids must be in 0\.\.4"):
                op(torch.tensor(ids), staging)
    with pytest.raises(ForeignPageError, match=r"in 1\.\.4, got 1\.\.1099511627776"):
        pool.copy_pages([1], [2**40])
    with pytest.raises(ConfigError, match="targets must be all different"):
        pool.copy_pages([1, 2], [3, 3])
    with pytest.raises(ConfigError, match="sources must be a list of integers"):
        pool.copy_pages(not_integers, [2])
    with pytest.raises(ConfigError, match="k must be"):
        pool.store(0, torch.ones(1, 2, 2), torch.ones(1, 1, 2), torch.tensor([4]))
    pool.store(0, torch.ones(1, 1, 2), torch.ones(1, 1, 2), torch.tensor([-1]))

    assert torch.equal(before, pool.buffer)
    assert not staging.any()

"""The KV pool: shapes, bytes, in-place writes, and resizes that lose nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixkv.mem_cache.errors import ConfigError
from radixkv.mem_cache.kv_pool import KVPool

SIZES: dict[str, Any] = {
    "num_pages": 4,
    "page_size": 2,
    "num_layers": 3,
    "num_kv_heads": 2,
    "head_dim": 4,
}


def make_pool(**changes: object) -> KVPool:
    arguments = SIZES.copy()
    arguments.update(changes)
    return KVPool(**arguments)


def buffers(pool: KVPool) -> list[torch.Tensor]:
    layers = range(pool.num_layers)
    return [b for i in layers for b in (pool.k_buffer(i), pool.v_buffer(i))]


def fill(pool: KVPool) -> None:
    """Give every number in the pool its own value."""
    first = 1.0
    for buffer in buffers(pool):
        buffer[:] = first + torch.arange(buffer.numel()).view(buffer.shape)
        first += buffer.numel()


def data_ptrs(pool: KVPool) -> list[int]:
    return [buffer.data_ptr() for buffer in buffers(pool)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_buffers_have_the_hold_page_on_top(dtype: torch.dtype) -> None:
    pool = make_pool(num_pages=7, page_size=3, dtype=dtype, v_head_dim=5)

    for layer in range(pool.num_layers):
        k, v = pool.k_buffer(layer), pool.v_buffer(layer)

        assert k.shape == (24, 2, 4)
        assert v.shape == (24, 2, 5)
        assert k.dtype == v.dtype == pool.dtype == dtype
        assert k.device == v.device == pool.device
        assert k.is_contiguous()
        assert v.is_contiguous()


def test_fresh_pool_is_zero() -> None:
    assert not any(buffer.any() for buffer in buffers(make_pool()))


def test_bytes_count_k_and_v_of_all_layers() -> None:
    pool = make_pool(
        num_pages=7, page_size=3, num_layers=5, v_head_dim=6, dtype=torch.float16
    )

    assert pool.page_bytes == 3 * 5 * 2 * (4 + 6) * 2
    assert pool.size_bytes == 8 * pool.page_bytes
    assert pool.size_bytes == sum(buffer.nbytes for buffer in buffers(pool))


@pytest.mark.parametrize(
    "name",
    ["num_pages", "page_size", "num_layers", "num_kv_heads", "head_dim", "v_head_dim"],
)
@pytest.mark.parametrize("value", [0, -1, True, 1.5, 2**31])
def test_bad_sizes_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{name} must be .* got {value}$"):
        make_pool(**{name: value})


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.complex64])
def test_dtypes_that_hold_no_kv_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=f"dtype must be one of .* got {dtype}"):
        make_pool(dtype=dtype)


@pytest.mark.parametrize("layer", [-1, 3])
def test_layers_that_do_not_exist_are_refused(layer: int) -> None:
    pool = make_pool()
    k = torch.ones(1, 2, 4)

    with pytest.raises(ConfigError, match=f"layer must be in 0..2, got {layer}"):
        pool.k_buffer(layer)
    with pytest.raises(ConfigError, match=f"layer must be in 0..2, got {layer}"):
        pool.v_buffer(layer)
    with pytest.raises(ConfigError, match=f"layer must be in 0..2, got {layer}"):
        pool.store(layer, k, k, torch.tensor([1]))


def test_store_writes_one_layer_in_the_dtype_of_the_pool() -> None:
    pool = make_pool(dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(2, 2, 4, generator=generator)
    v = torch.randn(2, 2, 4, generator=generator)

    pool.store(1, k, v, torch.tensor([9, 2]))

    others = [0, 1, 3, 4, 5, 6, 7, 8]
    assert torch.equal(k.bfloat16(), pool.k_buffer(1)[[9, 2]])
    assert torch.equal(v.bfloat16(), pool.v_buffer(1)[[9, 2]])
    assert not pool.k_buffer(1)[others].any()
    assert not pool.v_buffer(1)[others].any()
    assert not any(pool.k_buffer(layer).any() for layer in (0, 2))
    assert not any(pool.v_buffer(layer).any() for layer in (0, 2))


def test_s0_5_steps_update_the_buffers_in_place() -> None:
    pool = make_pool()
    before = data_ptrs(pool)

    for step in range(10):
        for layer in range(pool.num_layers):
            k = torch.full((2, 2, 4), float(step))
            pool.store(layer, k, k, torch.tensor([step, 9 - step]))

    assert before == data_ptrs(pool)
    assert len(set(before)) == 2 * pool.num_layers


def test_s0_10_writing_to_the_buffers_is_the_only_side_effect() -> None:
    pool = make_pool()
    k, v, slots = torch.randn(2, 2, 4), torch.randn(2, 2, 4), torch.tensor([9, 2])
    before = [tensor.clone() for tensor in (k, v, slots)]
    others = {name: x for name, x in vars(pool).items() if name not in ("_k", "_v")}

    pool.store(0, k, v, slots)

    for tensor, was in zip((k, v, slots), before, strict=True):
        assert torch.equal(was, tensor)
    assert others == {name: vars(pool)[name] for name in others}
    assert "only side effect" in (KVPool.__doc__ or "")


@given(old=st.integers(1, 6), num_pages=st.integers(1, 6), page_size=st.integers(1, 3))
def test_resize_keeps_the_pages_that_stay(
    old: int, num_pages: int, page_size: int
) -> None:
    pool = make_pool(num_pages=old, page_size=page_size, v_head_dim=3)
    fill(pool)
    contents = [buffer.clone() for buffer in buffers(pool)]
    page_bytes = pool.page_bytes
    kept = (min(old, num_pages) + 1) * page_size

    pool.resize(num_pages)

    assert pool.num_pages == num_pages
    assert pool.page_bytes == page_bytes
    assert pool.size_bytes == (num_pages + 1) * page_bytes
    for content, buffer in zip(contents, buffers(pool), strict=True):
        assert buffer.shape == ((num_pages + 1) * page_size, *content.shape[1:])
        assert torch.equal(content[:kept], buffer[:kept])
        assert not buffer[kept:].any()


def test_s4_10_the_hold_page_takes_padding_after_a_resize() -> None:
    pool = make_pool()
    pool.resize(9)
    k = torch.ones(3, 2, 4)

    pool.store(0, k, k, torch.tensor([0, 1, 0]))

    assert pool.k_buffer(0)[:2].all()
    assert not pool.k_buffer(0)[2:].any()


@pytest.mark.parametrize("num_pages", [0, -1, True])
def test_bad_resize_changes_nothing(num_pages: int) -> None:
    pool = make_pool()
    before = data_ptrs(pool)

    with pytest.raises(ConfigError, match="num_pages must be"):
        pool.resize(num_pages)

    assert pool.num_pages == 4
    assert before == data_ptrs(pool)


@pytest.mark.parametrize("num_pages", [2, 6])
def test_resize_that_runs_out_of_memory_leaves_a_pool_that_works(
    num_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool()
    fill(pool)
    zeros, budget = torch.zeros, [1, 1]

    def zeros_twice(
        shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        if not budget:
            raise MemoryError
        budget.pop()
        return zeros(shape, dtype=dtype, device=device)

    contents = [buffer.clone() for buffer in buffers(pool)]
    monkeypatch.setattr(torch, "zeros", zeros_twice)

    with pytest.raises(MemoryError):
        pool.resize(num_pages)

    assert pool.num_pages == min(4, num_pages)
    num_slots = (pool.num_pages + 1) * pool.page_size
    for content, buffer in zip(contents, buffers(pool), strict=True):
        assert torch.equal(content[:num_slots], buffer[:num_slots])

"""The KV pool: one buffer, its views, writes in place, resizes that lose nothing."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixkv.kernels import paged_attention_decode
from radixkv.mem_cache import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVPool,
    MambaSpec,
    MLASpec,
    SlidingWindowSpec,
    bind_kv_cache,
    make_kv_cache_config,
    plan_kv_cache,
)
from radixkv.mem_cache.errors import ConfigError
from radixkv.mem_cache.planning import AnyKVCacheSpec, BufferOrder, KVCacheTensor

ORDERS: list[BufferOrder] = ["pages_outermost", "layers_outermost"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
SIZES: dict[str, Any] = {
    "num_pages": 4,
    "page_size": 2,
    "num_layers": 3,
    "num_kv_heads": 2,
    "head_dim": 4,
}
HEADS: dict[str, Any] = {"page_size": 2, "num_kv_heads": 1, "dtype": "float32"}
LATENT = MLASpec(page_size=2, latent_dim=6, rope_dim=2, dtype="float32")
STATE = MambaSpec(page_size=2, shapes=((3, 2), (5,)), dtypes=("bfloat16", "float32"))

each_order = pytest.mark.parametrize("order", ORDERS)


def make_pool(**changes: object) -> KVPool:
    return KVPool.uniform(**{**SIZES, **changes})


def make_mixed(
    specs: dict[str, AnyKVCacheSpec], num_pages: int = 4, order: BufferOrder = ORDERS[0]
) -> KVPool:
    """Make a pool of one group of layers."""
    group = KVCacheGroup(
        layer_names=tuple(specs), spec=next(iter(specs.values())), other_specs=specs
    )
    return KVPool(make_kv_cache_config([group], num_pages=num_pages, order=order))


def buffers(pool: KVPool) -> list[torch.Tensor]:
    return [x for layer in pool.layers.values() for x in (layer.k, layer.v)]


def fill(pool: KVPool) -> None:
    """Give every number in the pool its own value."""
    first = 1.0
    for buffer in buffers(pool):
        buffer[:] = first + torch.arange(buffer.numel()).view(buffer.shape)
        first += buffer.numel()


def data_ptrs(pool: KVPool) -> list[int]:
    return [buffer.data_ptr() for buffer in buffers(pool)]


# Views -------------------------------------------------------------------------------


@each_order
@pytest.mark.parametrize("dtype", DTYPES)
def test_buffers_have_the_hold_page_on_top(
    dtype: torch.dtype, order: BufferOrder
) -> None:
    pool = make_pool(num_pages=7, page_size=3, dtype=dtype, v_head_dim=5, order=order)

    for layer in range(3):
        k, v = pool.k_buffer(layer), pool.v_buffer(layer)

        assert k.shape == (8, 3, 2, 4)
        assert v.shape == (8, 3, 2, 5)
        assert k.dtype == v.dtype == dtype
        assert k.device == v.device == pool.device
        assert k[0].is_contiguous()
        assert v[0].is_contiguous()


def test_fresh_pool_is_zero() -> None:
    assert not make_pool().buffer.any()


@each_order
def test_bytes_count_k_and_v_of_all_layers(order: BufferOrder) -> None:
    pool = make_pool(
        num_pages=7,
        page_size=4,
        num_layers=5,
        v_head_dim=6,
        dtype=torch.float16,
        order=order,
    )

    assert pool.page_bytes == 4 * 5 * 2 * (4 + 6) * 2
    assert pool.size_bytes == 8 * pool.page_bytes == pool.buffer.nbytes
    assert pool.size_bytes == sum(buffer.nbytes for buffer in buffers(pool))


def test_pages_are_side_by_side_or_layers_are() -> None:
    by_page, by_layer = (make_pool(order=order) for order in ORDERS)

    # K and V of a layer take 2 * 16 numbers a page.
    assert (96, 8, 4, 1) == by_page.k_buffer(2).stride()
    assert (32, 8, 4, 1) == by_layer.k_buffer(2).stride()
    offsets = [
        [pool.k_buffer(layer).storage_offset() for layer in range(3)]
        for pool in (by_page, by_layer)
    ]
    assert [[0, 32, 64], [0, 160, 320]] == offsets


@each_order
def test_one_view_has_k_and_v_by_slot_or_by_head(order: BufferOrder) -> None:
    pool = make_pool(order=order)
    fill(pool)
    layer = pool.layer(1)

    by_slot, by_head = layer.kv(), layer.kv("HND")

    assert by_slot.shape == (5, 2, 2, 2, 4)
    assert by_head.shape == (5, 2, 2, 2, 4)
    for i, own in enumerate((layer.k, layer.v)):
        assert torch.equal(own, by_slot[:, i])
        assert torch.equal(own.transpose(1, 2), by_head[:, i])
        assert own.data_ptr() == by_slot[:, i].data_ptr() == by_head[:, i].data_ptr()
    assert (pool.k_buffer(1).stride(0), 16, 8, 4, 1) == by_slot.stride()
    assert (pool.k_buffer(1).stride(0), 16, 4, 8, 1) == by_head.stride()


@pytest.mark.parametrize(
    "spec", [FullAttentionSpec(head_dim=4, v_head_dim=3, **HEADS), LATENT, STATE]
)
def test_k_and_v_of_other_shapes_are_no_one_view(spec: AnyKVCacheSpec) -> None:
    pool = make_mixed({"layers.0": spec})

    with pytest.raises(ConfigError, match=r"layer must keep .* got layers\.0"):
        pool.layer(0).kv()


@pytest.mark.parametrize(
    "name", ["num_pages", "page_size", "num_layers", "num_kv_heads", "head_dim"]
)
@pytest.mark.parametrize("value", [0, -1, True, 1.5, 2**31])
def test_bad_sizes_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{name} must be .* got {value}$"):
        make_pool(**{name: value})


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.bool])
def test_dtypes_that_hold_no_kv_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=r"dtype must be one of .* got"):
        make_pool(dtype=dtype)


def test_layers_go_by_name_or_by_the_number_in_it() -> None:
    spec = FullAttentionSpec(head_dim=4, **HEADS)
    names = [
        "model.layers.7.attn",
        "layers.3.attn",
        "draft.layers.3.attn",
        "a.1.2",
        "b",
    ]
    pool = make_mixed(dict.fromkeys(names, spec))

    assert names == list(pool.layers)
    assert names == [pool.layer(name).name for name in names]
    assert "model.layers.7.attn" == pool.layer(7).name


@pytest.mark.parametrize("layer", [-1, 3, "layers.3"])
def test_layers_that_do_not_exist_are_refused(layer: int | str) -> None:
    pool = make_pool()
    k = torch.ones(1, 2, 4)
    calls: list[Callable[[], object]] = [
        lambda: pool.layer(layer),
        lambda: pool.k_buffer(layer),
        lambda: pool.v_buffer(layer),
        lambda: pool.store(layer, k, k, torch.tensor([1])),
    ]

    for call in calls:
        with pytest.raises(ConfigError, match=r"layer must be one of \['layers.0', .*"):
            call()


def test_a_number_that_two_layers_have_is_refused_and_names_both() -> None:
    spec = FullAttentionSpec(head_dim=4, **HEADS)
    pool = make_mixed({"layers.3.attn": spec, "draft.layers.3.attn": spec})

    with pytest.raises(ConfigError, match="name of one") as refusal:
        pool.layer(3)

    assert "layers.3.attn', 'draft.layers.3.attn" in str(refusal.value)


def test_numbers_that_lie_across_the_places_of_two_are_refused() -> None:
    spec = FullAttentionSpec(head_dim=4, **HEADS)
    config = KVCacheConfig(
        num_pages=1,
        page_size=2,
        buffer_bytes=2 * 66,
        tensors=(
            KVCacheTensor(
                size_bytes=2 * 64,
                layer_names=("a",),
                offset=0,
                layer_stride=64,
                page_stride=66,
            ),
        ),
        groups=(KVCacheGroup(layer_names=("a",), spec=spec),),
    )

    with pytest.raises(ConfigError, match="float32 must lie at multiples of 4 bytes"):
        KVPool(config)


# Kinds of layers ---------------------------------------------------------------------


def test_latent_attention_keeps_one_vector_of_which_v_is_a_part() -> None:
    pool = make_mixed({"layers.0": LATENT})
    vectors = torch.randn(3, 1, 8)

    pool.store(0, vectors, None, torch.tensor([4, 3, 9]))

    k, v = pool.k_buffer(0), pool.v_buffer(0)
    assert k.shape == (5, 2, 1, 8)
    assert v.shape == (5, 2, 1, 6)
    assert k.data_ptr() == v.data_ptr()
    assert torch.equal(vectors, k.reshape(-1, 1, 8)[[4, 3, 9]])
    assert torch.equal(vectors[..., :6], v.reshape(-1, 1, 6)[[4, 3, 9]])
    assert 3 * 8 == k.count_nonzero()


def test_attention_reads_latent_vectors_as_k_and_as_v() -> None:
    pool = make_mixed({"layers.0": LATENT})
    vectors, q = torch.randn(3, 1, 8), torch.randn(1, 4, 8)
    pool.store(0, vectors, None, torch.tensor([4, 5, 2]))

    attended = paged_attention_decode(
        q,
        pool.k_buffer(0),
        pool.v_buffer(0),
        torch.tensor([[2, 1]], dtype=torch.int32),
        torch.tensor([0], dtype=torch.int32),
        torch.tensor([3], dtype=torch.int32),
        page_size=2,
        scale=0.5,
    )

    weights = (q[0] @ vectors[:, 0].T * 0.5).softmax(-1)
    torch.testing.assert_close(weights @ vectors[:, 0, :6], attended[0])


def test_keys_that_select_tokens_lie_beside_the_latent_vectors() -> None:
    spec = MLASpec(page_size=2, latent_dim=6, rope_dim=2, index_dim=4, dtype="float32")
    pool = make_mixed({"layers.0": spec})
    vectors, keys = torch.randn(2, 1, 8), torch.randn(2, 1, 4)

    pool.store(0, vectors, keys, torch.tensor([4, 3]))

    layer = pool.layer(0)
    assert torch.equal(vectors, layer.k.reshape(-1, 1, 8)[[4, 3]])
    assert torch.equal(keys, layer.parts["index"].reshape(-1, 1, 4)[[4, 3]])


@pytest.mark.parametrize("spec", [LATENT, FullAttentionSpec(head_dim=8, **HEADS)])
def test_v_is_given_where_a_layer_keeps_it_and_only_there(
    spec: AnyKVCacheSpec,
) -> None:
    pool = make_mixed({"layers.0": spec})
    k = torch.ones(1, 1, 8)
    v = k if spec is LATENT else None

    with pytest.raises(ConfigError, match=r"v must be (given|None), as layers\.0"):
        pool.store(0, k, v, torch.tensor([3]))

    assert not pool.buffer.any()


def test_states_are_arrays_of_a_page_each() -> None:
    spec = FullAttentionSpec(head_dim=4, **HEADS)
    pool = make_mixed({"layers.0": spec, "layers.1": STATE})
    conv, recurrent = pool.layer(1).parts.values()

    conv[2], recurrent[3] = 1, 2
    pool.copy_pages([2, 3], [4, 2])

    assert (torch.bfloat16, torch.float32) == (conv.dtype, recurrent.dtype)
    assert (5, 3, 2) == conv.shape
    assert (5, 5) == recurrent.shape
    assert [0, 0, 0, 0, 6] == conv.sum((1, 2)).tolist()
    assert [0, 0, 10, 10, 0] == recurrent.sum(1).tolist()
    assert not pool.k_buffer(0).any()


def test_a_layer_with_a_state_keeps_no_k_and_v() -> None:
    pool = make_mixed({"layers.0": STATE})
    k = torch.ones(1, 1, 4)

    for call in (
        lambda: pool.k_buffer(0),
        lambda: pool.v_buffer(0),
        lambda: pool.store(0, k, k, torch.tensor([1])),
        lambda: pool.layer(0).set_scales(0.5),
    ):
        with pytest.raises(ConfigError, match=r"keeps \['state_0', 'state_1'\]"):
            call()


@pytest.mark.parametrize("order", ORDERS)
def test_s3_19_a_draft_model_and_latent_attention_share_a_pool_within_the_budget(
    order: BufferOrder,
) -> None:
    specs: dict[str, AnyKVCacheSpec] = {
        "layers.0.attention": LATENT,
        "layers.1.attention": LATENT,
        "draft.layers.0.attention": FullAttentionSpec(head_dim=4, **HEADS),
    }
    budget = 10_000

    (config,) = plan_kv_cache([specs], [budget], max_len=20, order=order)
    pool = KVPool(config)

    assert pool.page_bytes == 2 * 2 * 8 * 4 + 2 * 2 * 4 * 4
    assert pool.buffer.nbytes == pool.size_bytes <= budget
    assert pool.size_bytes + pool.page_bytes > budget
    for name, layer in pool.layers.items():
        for part in layer.parts.values():
            part.fill_(len(name))
    for name, layer in pool.layers.items():
        assert all((part == len(name)).all() for part in layer.parts.values())


@each_order
def test_s3_20_a_page_holds_the_layers_of_the_group_that_has_it(
    order: BufferOrder,
) -> None:
    full = FullAttentionSpec(head_dim=4, **HEADS)
    window = SlidingWindowSpec(head_dim=4, window_size=4, **HEADS)
    groups = [
        KVCacheGroup(layer_names=("layers.1", "layers.3"), spec=full),
        KVCacheGroup(layer_names=("layers.0", "layers.2"), spec=window),
    ]
    pool = KVPool(make_kv_cache_config(groups, num_pages=4, order=order))

    for layer in (1, 3):
        pool.k_buffer(layer)[[1, 3]] = layer
        pool.v_buffer(layer)[[1, 3]] = layer
    for layer in (0, 2):
        pool.k_buffer(layer)[[2, 4]] = 10 + layer
        pool.v_buffer(layer)[[2, 4]] = 10 + layer

    assert pool.size_bytes == 5 * 2 * full.page_bytes  # one group's, not both
    for layer in (1, 3):
        assert (pool.k_buffer(layer)[[1, 3]] == layer).all()
        assert (pool.v_buffer(layer)[[1, 3]] == layer).all()
    for layer in (0, 2):
        assert (pool.k_buffer(layer)[[2, 4]] == 10 + layer).all()
        assert (pool.v_buffer(layer)[[2, 4]] == 10 + layer).all()


@each_order
def test_s3_3_a_config_that_went_through_msgspec_gives_the_same_views(
    order: BufferOrder,
) -> None:
    specs: dict[str, AnyKVCacheSpec] = {
        "layers.0": FullAttentionSpec(head_dim=4, **HEADS),
        "layers.1": SlidingWindowSpec(head_dim=8, window_size=4, **HEADS),
        "layers.2": LATENT,
        "layers.3": STATE,
    }
    (config,) = plan_kv_cache([specs], [20_000], max_len=20, order=order)
    wire = msgspec.msgpack.encode(config)

    pools = [KVPool(config), KVPool(msgspec.msgpack.decode(wire, type=KVCacheConfig))]

    views = [
        {
            (name, part): (x.dtype, x.shape, x.stride(), x.storage_offset())
            for name, layer in pool.layers.items()
            for part, x in layer.parts.items()
        }
        for pool in pools
    ]
    assert views[0] == views[1]
    assert 6 == len(views[0]) - 1
    assert pools[0].buffer.nbytes == pools[1].buffer.nbytes


def test_s4_16_pools_of_all_ranks_have_as_many_pages() -> None:
    specs = {f"layers.{i}": FullAttentionSpec(head_dim=4, **HEADS) for i in range(2)}
    page_bytes = 2 * 64
    offers = [(pages + 1) * page_bytes for pages in (100, 60, 80)]

    configs = plan_kv_cache([specs] * 3, offers, max_len=20)

    assert [60, 60, 60] == [KVPool(config).num_pages for config in configs]


def test_a_stage_without_layers_has_pages_of_nothing() -> None:
    spec = FullAttentionSpec(head_dim=4, **HEADS)
    configs = plan_kv_cache([{"layers.0": spec}, {}], [1_000, 1_000], max_len=8)
    pool = KVPool(configs[1])

    pool.copy_pages([1, 2], [2, 1])
    pool.resize(3)

    assert (3, 0, 0) == (pool.num_pages, pool.page_bytes, pool.size_bytes)


def test_s3_13_a_layer_of_a_model_stays_bound_when_its_pool_is_resized() -> None:
    pool = make_pool()
    modules = {name: SimpleNamespace() for name in pool.layers}

    bound = bind_kv_cache(modules, pool.layers)
    pool.resize(9)

    assert list(pool.layers.values()) == bound
    for i, module in enumerate(modules.values()):
        assert pool.k_buffer(i).data_ptr() == module.kv_cache.k.data_ptr()
        assert 10 == len(module.kv_cache.v)


# Writes ------------------------------------------------------------------------------


@each_order
def test_store_writes_one_layer_in_the_dtype_of_the_pool(order: BufferOrder) -> None:
    pool = make_pool(dtype=torch.bfloat16, order=order)
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(2, 2, 4, generator=generator)
    v = torch.randn(2, 2, 4, generator=generator)

    pool.store(1, k, v, torch.tensor([9, 2]))

    others = [0, 1, 3, 4, 5, 6, 7, 8]
    for x, buffer in ((k, pool.k_buffer(1)), (v, pool.v_buffer(1))):
        by_slot = buffer.reshape(-1, 2, 4)
        assert torch.equal(x.bfloat16(), by_slot[[9, 2]])
        assert not by_slot[others].any()
    assert not any(pool.k_buffer(layer).any() for layer in (0, 2))
    assert not any(pool.v_buffer(layer).any() for layer in (0, 2))


def test_float8_holds_multiples_of_a_scale() -> None:
    pool = make_pool(dtype=torch.float8_e4m3fn)
    layer = pool.layer(1)
    layer.set_scales(0.5, 4)
    k = torch.tensor([1.0, -3.0, 192.0, 1e9]).expand(1, 2, 4)

    pool.store(1, k, k, torch.tensor([5]))

    assert [2, -6, 384, 448] == layer.k[2, 1, 0].float().tolist()
    assert [0.25, -0.75, 48, 448] == layer.v[2, 1, 0].float().tolist()
    assert (0.5, 4) == (layer.k_scale, layer.v_scale)
    assert (1, 1) == (pool.layer(0).k_scale, pool.layer(0).v_scale)
    layer.set_scales(2)
    assert (2, 2) == (layer.k_scale, layer.v_scale)


@pytest.mark.parametrize(
    "scales",
    [(0,), (-1,), (float("inf"),), (float("nan"),), (1, 0), (True,), ("1",)],
)
def test_scales_out_of_range_are_refused(scales: tuple[float, ...]) -> None:
    layer = make_pool(dtype=torch.float8_e4m3fn).layer(0)
    layer.set_scales(0.5, 4)

    with pytest.raises(ConfigError, match="must be"):
        layer.set_scales(*scales)

    assert (0.5, 4) == (layer.k_scale, layer.v_scale)


def test_scales_are_for_float8_and_of_latent_vectors_there_is_one() -> None:
    spec = MLASpec(page_size=2, latent_dim=8, rope_dim=0, dtype="float8_e4m3fn")
    latent = make_mixed({"layers.0": spec}).layer(0)

    with pytest.raises(ConfigError, match=r"are for float8_e4m3fn, got layers\.0"):
        make_pool().layer(0).set_scales(0.5)
    with pytest.raises(ConfigError, match="V is a part of K and has its scale"):
        latent.set_scales(0.5, 0.25)
    latent.set_scales(0.5)
    assert 0.5 == latent.v_scale


@pytest.mark.parametrize("dtype", ["int8", "uint8", "float8_e5m2"])
def test_kv_that_others_convert_is_kept_but_not_stored(dtype: str) -> None:
    spec = FullAttentionSpec(page_size=2, num_kv_heads=1, head_dim=4, dtype=dtype)
    pool = make_mixed({"layers.0": spec})
    k = torch.ones(1, 1, 4)

    with pytest.raises(ConfigError, match="K and V are stored as one of"):
        pool.store(0, k, k, torch.tensor([3]))

    assert getattr(torch, dtype) == pool.k_buffer(0).dtype
    assert not pool.buffer.any()


@each_order
def test_s0_5_steps_update_the_buffers_in_place(order: BufferOrder) -> None:
    pool = make_pool(order=order)
    before, buffer = data_ptrs(pool), pool.buffer.data_ptr()

    for step in range(10):
        for layer in range(3):
            k = torch.full((2, 2, 4), float(step))
            pool.store(layer, k, k, torch.tensor([step, 9 - step]))
        pool.copy_pages([1, 2], [2, 1])

    assert before == data_ptrs(pool)
    assert buffer == pool.buffer.data_ptr()
    assert len(set(before)) == 6


def test_s0_10_writing_to_the_buffers_is_the_only_side_effect() -> None:
    pool = make_pool()
    k, v, slots = torch.randn(2, 2, 4), torch.randn(2, 2, 4), torch.tensor([9, 2])
    before = [tensor.clone() for tensor in (k, v, slots)]
    others = dict(vars(pool))
    config = msgspec.msgpack.encode(pool.config)

    pool.store(0, k, v, slots)

    for tensor, was in zip((k, v, slots), before, strict=True):
        assert torch.equal(was, tensor)
    assert others == vars(pool)
    assert config == msgspec.msgpack.encode(pool.config)
    assert "only side effect" in (KVPool.__doc__ or "")


@each_order
def test_s4_15_padded_tokens_write_to_the_hold_page_only(order: BufferOrder) -> None:
    pool = make_pool(order=order)
    fill(pool)
    before = [buffer.clone() for buffer in buffers(pool)]
    k = torch.full((3, 2, 4), -1.0)

    for layer in range(3):
        pool.store(layer, k, k, torch.tensor([0, 1, 0]))

    for was, buffer in zip(before, buffers(pool), strict=True):
        assert (buffer[0] == -1).all()
        assert torch.equal(was[1:], buffer[1:])


def test_pages_go_from_a_pool_of_one_order_to_one_of_the_other() -> None:
    source, target = (make_pool(order=order) for order in ORDERS)
    fill(source)
    staging = torch.zeros(2, source.page_bytes, dtype=torch.uint8)

    source.gather_pages(torch.tensor([4, 1]), staging)
    target.scatter_pages(torch.tensor([2, 3]), staging)

    for was, buffer in zip(buffers(source), buffers(target), strict=True):
        assert torch.equal(was[[4, 1]], buffer[[2, 3]])
        assert not buffer[[0, 1, 4]].any()


def test_b131_pages_are_addressed_past_2_31_elements(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Memory that nothing touches takes none.
    monkeypatch.setattr(torch, "zeros", torch.empty)
    pool = make_pool(
        num_pages=2**11 + 1,
        page_size=2**14,
        num_layers=1,
        num_kv_heads=1,
        head_dim=64,
        dtype=torch.float8_e4m3fn,
    )
    k = torch.ones(1, 1, 64)
    last = 2**11 + 1

    pool.store(0, k, 2 * k, torch.tensor([last * 2**14 + 5]))
    pool.copy_pages([last], [last - 1])

    assert last * pool.k_buffer(0).stride(0) > 2**31
    for page in (last, last - 1):
        assert (pool.k_buffer(0)[page, 5].float() == 1).all()
        assert (pool.v_buffer(0)[page, 5].float() == 2).all()


# Guards and resizes ------------------------------------------------------------------


class Guarded:
    """Stands for `torch.zeros`; what it makes lies between guard values."""

    def __init__(self) -> None:
        self.made: list[torch.Tensor] = []

    def __call__(
        self, size: int, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        made = torch.full((size + 128,), 77, dtype=dtype, device=device)
        self.made.append(made)
        return made[64 : size + 64].zero_()

    def check(self) -> None:
        for made in self.made:
            assert (made[:64] == 77).all()
            assert (made[-64:] == 77).all()


@each_order
@pytest.mark.parametrize("dtype", DTYPES)
def test_guard_values_around_the_buffer_stay_intact(
    dtype: torch.dtype, order: BufferOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded = Guarded()
    monkeypatch.setattr(torch, "zeros", guarded)
    pool = make_pool(v_head_dim=3, dtype=dtype, order=order)
    k, v = torch.randn(10, 2, 4), torch.randn(10, 2, 3)

    for num_pages in (4, 7, 2):
        pool.resize(num_pages)
        slots = torch.arange(10) % ((num_pages + 1) * 2)
        for layer in pool.layers.values():
            layer.store(k, v, slots)
        pool.copy_pages([1, 2], [2, 1])
        staging = torch.empty(2, pool.page_bytes, dtype=torch.uint8)
        pool.gather_pages(torch.tensor([0, num_pages]), staging)
        pool.scatter_pages(torch.tensor([num_pages, 0]), staging)

    assert 3 <= len(guarded.made)
    guarded.check()


@given(
    old=st.integers(1, 6),
    num_pages=st.integers(1, 6),
    page_size=st.integers(1, 3),
    order=st.sampled_from(ORDERS),
)
def test_resize_keeps_the_pages_that_stay(
    old: int, num_pages: int, page_size: int, order: BufferOrder
) -> None:
    pool = make_pool(num_pages=old, page_size=page_size, v_head_dim=3, order=order)
    fill(pool)
    contents = [buffer.clone() for buffer in buffers(pool)]
    page_bytes = pool.page_bytes
    kept = min(old, num_pages) + 1

    pool.resize(num_pages)

    assert pool.num_pages == num_pages
    assert pool.page_bytes == page_bytes
    assert pool.size_bytes == (num_pages + 1) * page_bytes == pool.buffer.nbytes
    for content, buffer in zip(contents, buffers(pool), strict=True):
        assert buffer.shape == (num_pages + 1, *content.shape[1:])
        assert torch.equal(content[:kept], buffer[:kept])
        assert not buffer[kept:].any()


def test_scales_survive_a_resize() -> None:
    pool = make_pool(dtype=torch.float8_e4m3fn)
    pool.layer(1).set_scales(0.5, 4)

    pool.resize(9)

    assert (0.5, 4) == (pool.layer(1).k_scale, pool.layer(1).v_scale)


def test_s4_10_the_hold_page_takes_padding_after_a_resize() -> None:
    pool = make_pool()
    pool.resize(9)
    k = torch.ones(3, 2, 4)

    pool.store(0, k, k, torch.tensor([0, 1, 0]))

    assert pool.k_buffer(0)[0].all()
    assert not pool.k_buffer(0)[1:].any()


@pytest.mark.parametrize("num_pages", [0, -1, True])
def test_bad_resize_changes_nothing(num_pages: int) -> None:
    pool = make_pool()
    before = data_ptrs(pool)

    with pytest.raises(ConfigError, match="num_pages must be"):
        pool.resize(num_pages)

    assert pool.num_pages == 4
    assert before == data_ptrs(pool)


@each_order
def test_a_buffer_that_somebody_laid_out_by_hand_is_not_resized(
    order: BufferOrder,
) -> None:
    planned = make_pool(order=order).config
    (tensor,) = planned.tensors
    gap = 16 if order == "layers_outermost" else 0
    config = msgspec.structs.replace(
        planned,
        buffer_bytes=planned.buffer_bytes + (16 if gap else 5 * 16),
        tensors=(
            msgspec.structs.replace(
                tensor,
                offset=16,
                page_stride=tensor.page_stride + (0 if gap else 16),
            ),
        ),
    )
    pool = KVPool(config)
    fill(pool)
    pool.copy_pages([1], [2])
    before, content = data_ptrs(pool), pool.buffer.clone()

    with pytest.raises(ConfigError, match="laid out otherwise"):
        pool.resize(6)

    assert torch.equal(pool.k_buffer(2)[1], pool.k_buffer(2)[2])
    assert before == data_ptrs(pool)
    assert torch.equal(content, pool.buffer)
    assert config == pool.config


class ShortOfMemory:
    """Stands for `torch.zeros` on a device that has no room for two buffers."""

    def __init__(self, num_failures: int) -> None:
        self.num_failures = num_failures
        self.zeros = torch.zeros

    def __call__(
        self, size: int, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        if self.num_failures > 0:
            self.num_failures -= 1
            raise torch.OutOfMemoryError("out of memory")
        return self.zeros(size, dtype=dtype, device=device)


@pytest.mark.parametrize("num_pages", [2, 6])
def test_a_device_without_room_for_two_buffers_keeps_the_content_on_the_host(
    num_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool()
    fill(pool)
    contents = [buffer.clone() for buffer in buffers(pool)]
    monkeypatch.setattr(torch, "zeros", ShortOfMemory(num_failures=1))

    pool.resize(num_pages)

    assert num_pages == pool.num_pages
    kept = min(4, num_pages) + 1
    for content, buffer in zip(contents, buffers(pool), strict=True):
        assert torch.equal(content[:kept], buffer[:kept])


@pytest.mark.parametrize("num_pages", [2, 6])
def test_resize_that_runs_out_of_memory_leaves_the_pool_as_it_was(
    num_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool()
    fill(pool)
    contents = [buffer.clone() for buffer in buffers(pool)]
    config = pool.config
    monkeypatch.setattr(torch, "zeros", ShortOfMemory(num_failures=2))
    moved_to: list[object] = []
    to = torch.Tensor.to

    def move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        moved_to.append(device)
        return to(tensor, device)

    monkeypatch.setattr(torch.Tensor, "to", move)

    with pytest.raises(torch.OutOfMemoryError):
        pool.resize(num_pages)

    assert [pool.device] == moved_to  # back from the host
    assert config == pool.config
    for content, buffer in zip(contents, buffers(pool), strict=True):
        assert torch.equal(content, buffer)

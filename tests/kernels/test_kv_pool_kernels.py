"""A pool whose ops are Triton kernels holds what one with their references holds."""

from __future__ import annotations

import pytest
import torch

from radixkv.kernels.backend import Backend
from radixkv.mem_cache import (
    FullAttentionSpec,
    KVCacheGroup,
    KVPool,
    MLASpec,
    make_kv_cache_config,
)
from radixkv.mem_cache.planning import AnyKVCacheSpec, BufferOrder

BACKENDS: tuple[Backend, Backend] = ("reference", "triton")
SPECS: dict[str, AnyKVCacheSpec] = {
    "layers.0": FullAttentionSpec(
        page_size=4, num_kv_heads=2, head_dim=8, v_head_dim=4, dtype="float32"
    ),
    "layers.1": FullAttentionSpec(
        page_size=4, num_kv_heads=1, head_dim=16, dtype="float8_e4m3fn"
    ),
    "layers.2": MLASpec(page_size=4, latent_dim=6, rope_dim=2, dtype="float16"),
    "layers.3": MLASpec(
        page_size=4, latent_dim=8, rope_dim=0, index_dim=3, dtype="float16"
    ),
}


@pytest.mark.parametrize("order", ["pages_outermost", "layers_outermost"])
def test_kernels_of_a_pool_do_what_their_references_do(order: BufferOrder) -> None:
    group = KVCacheGroup(
        layer_names=tuple(SPECS), spec=SPECS["layers.0"], other_specs=SPECS
    )
    config = make_kv_cache_config([group], num_pages=5, order=order)
    pools = [KVPool(config, backend=backend) for backend in BACKENDS]
    slots = torch.tensor([4, 23, 9, 0, 1])

    for pool in pools:
        generator = torch.Generator().manual_seed(0)
        pool.layer(1).set_scales(0.5, 0.25)
        for layer in pool.layers.values():
            k, v = (
                torch.randn(len(slots), *x.shape[2:], generator=generator)
                for x in (layer.k, list(layer.parts.values())[-1])
            )
            layer.store(k, v if len(layer.parts) > 1 else None, slots)
        pool.copy_pages([1, 5, 2], [2, 1, 4])
        staging = torch.zeros(2, pool.page_bytes, dtype=torch.uint8)
        pool.gather_pages(torch.tensor([4, 5]), staging)
        pool.scatter_pages(torch.tensor([3, 4]), staging)

    assert pools[0].buffer.any()
    assert torch.equal(pools[0].buffer, pools[1].buffer)

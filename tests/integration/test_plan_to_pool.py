"""From a model to its pool in four steps, with plain data between them."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest
import torch

from radixkv.mem_cache import KVCacheConfig, KVPool, bind_kv_cache, plan_kv_cache
from radixkv.scheduling import get_available_memory, get_kv_cache_spec, load_model


@pytest.mark.parametrize("order", ["pages_outermost", "layers_outermost"])
def test_s3_1_each_of_the_four_steps_needs_only_what_the_one_before_returns(
    order: str,
) -> None:
    specs = get_kv_cache_spec(load_model("tiny").model, page_size=4)
    available_bytes = get_available_memory("cpu", available_bytes=100_000)
    plans = plan_kv_cache(
        [specs],
        [available_bytes],
        max_len=64,
        order=order,  # type: ignore[arg-type]
    )
    # The worker gets its plan as a message.
    (plan,) = msgspec.msgpack.decode(
        msgspec.msgpack.encode(plans), type=list[KVCacheConfig]
    )
    pool = KVPool(plan)

    assert plan == plans[0]
    assert plan.buffer_bytes <= available_bytes
    assert sorted(specs) == sorted(plan.layer_names)
    modules = {name: SimpleNamespace() for name in specs}
    bind_kv_cache(modules, {name: pool.layer(name) for name in specs})
    assert all(modules[name].kv_cache is pool.layer(name) for name in specs)
    k = torch.ones(1, *pool.layer(0).k.shape[2:])
    pool.layer(0).store(k, k, torch.tensor([4]))
    assert pool.layer(0).k[1, 0].sum() == k.numel()

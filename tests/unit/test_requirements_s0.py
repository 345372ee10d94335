"""Requirements of seed 0: the cache is apart from the blocks that it describes."""

from __future__ import annotations

import gc
import subprocess
import sys
from types import FunctionType, ModuleType

import msgspec
import numpy as np
import pytest
import torch

from radixkv.mem_cache import KVCacheInfo, PageTable, RadixCache

from .driver import admit, compute, decode, insert, law, make_cache, run, span

LIFE_WITHOUT_TORCH = """
import sys
from radixkv.mem_cache import MemoryManager, RadixCache

cache = RadixCache(MemoryManager(8, 4, max_num_requests=2, max_context_len=32))
for _ in range(2):
    request = cache.admit(range(10))
    cache.alloc_for_extend([request], [10])
    cache.commit(request, 10)
    cache.cache_finished_req(request, range(10))
cache.check_integrity()
print("torch" in sys.modules, cache.match_prefix(range(10)))
"""


def reachable_from(root: object) -> list[object]:
    seen: dict[int, object] = {}
    stack = [root]
    while stack:
        value = stack.pop()
        if id(value) in seen or isinstance(value, type | ModuleType | FunctionType):
            continue
        seen[id(value)] = value
        stack += gc.get_referents(value)
    return list(seen.values())


def busy_cache() -> RadixCache:
    cache = make_cache()
    insert(cache, span(1, 16))
    run(cache, [*span(1, 8), *span(30, 35)])
    return cache


def test_s0_1_no_k_or_v_can_be_reached_from_a_cache() -> None:
    found = reachable_from(busy_cache())
    arrays = [value for value in found if isinstance(value, np.ndarray)]

    assert arrays
    assert not any(isinstance(value, torch.Tensor) for value in found)
    assert {"i"} == {array.dtype.kind for array in arrays}


def test_s0_1_an_engine_runs_without_torch() -> None:
    command = [sys.executable, "-P", "-c", LIFE_WITHOUT_TORCH]
    output = subprocess.run(command, check=True, capture_output=True, text=True)

    assert output.stdout.split() == ["False", "8"]


def test_s0_2_a_message_says_nothing_of_layers_and_heads() -> None:
    fields = {field.name: field.type for field in msgspec.structs.fields(KVCacheInfo)}

    assert fields == {
        "num_reqs": int,
        "num_new_pages": int,
        "payload": bytes,
        "num_copies": int,
    }


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_s0_3_a_prefill_costs_four_bytes_a_page(page_size: int) -> None:
    cache = make_cache(4096 // page_size, page_size, max_context_len=4096)
    request = admit(cache, span(1, 4096))
    wire = msgspec.msgpack.encode(compute(cache, request, 4096))

    assert len(wire) <= 4 * (4096 // page_size) + 40


def test_s0_3_a_decode_step_costs_twenty_bytes() -> None:
    cache = make_cache()
    request = run(cache, span(1, 5))
    wire = msgspec.msgpack.encode(decode(cache, request))

    assert len(wire) <= 20 + 12


def test_s0_4_a_worker_needs_the_message_only() -> None:
    """What crosses is bytes, without a handle: any process can apply it."""
    cache = make_cache()
    request = admit(cache, span(1, 10))
    wire = msgspec.msgpack.encode(compute(cache, request, 10))
    table = PageTable(max_num_requests=8, max_pages_per_request=16)
    table.apply(msgspec.msgpack.decode(wire, type=KVCacheInfo))
    pages = cache.slots(request)[::4] // 4

    assert table.table[request.req_pool_idx, :3].tolist() == pages.tolist()


def test_s0_9_two_caches_live_side_by_side() -> None:
    """A cache does the same, whoever else is there."""
    alone = make_cache(8, 4)
    left, right = make_cache(8, 4), make_cache(16, 1, policy="lfu")
    for tokens in (span(1, 9), [*span(1, 5), 70], span(1, 8)):
        insert(alone, tokens)
        insert(left, tokens)
        insert(right, tokens[:3])

    assert (left.page_size, right.page_size) == (4, 1)
    assert law(alone) == law(left)
    assert alone.stats() == left.stats()
    assert right.match_prefix(span(1, 9)) == 3


def test_s0_9_the_same_messages_give_the_same_table() -> None:
    cache = make_cache()
    infos = []
    for tokens in (span(1, 10), span(1, 12), span(50, 55)):
        request = admit(cache, tokens)
        infos.append(compute(cache, request, len(tokens)))
        cache.cache_finished_req(request, tokens)
    tables = [PageTable(max_num_requests=8, max_pages_per_request=16) for _ in "ab"]
    for info in infos:
        for table in tables:
            table.apply(info)

    assert torch.equal(tables[0].table, tables[1].table)
    assert tables[0].table.any()

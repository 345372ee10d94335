"""Any resizes under load: whoever reads a page finds what belongs there."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from radixkv.mem_cache import KVCacheGroup, KVPool, MLASpec, make_kv_cache_config
from radixkv.mem_cache.testing import LabelWorker

from .caches import MAX_NUM_PAGES, make_checked
from .test_random_lives import RandomLife

NUM_STEPS = 60

GONE = -1
"""What nobody may ever read: the label of a slot that was cut off."""


class PoolWorker(LabelWorker):
    """A worker that keeps its labels as K in the pool of the engine's own process."""

    pool: KVPool | None = None

    @property
    def labels(self) -> NDArray[np.float32]:  # type: ignore[override]
        assert self.pool is not None
        # Four numbers a slot leave no gap between pages: slots are in one row.
        labels: NDArray[np.float32] = self.pool.k_buffer(0).view(-1, 4)[:, 0].numpy()
        return labels

    @labels.setter
    def labels(self, labels: NDArray[np.int64]) -> None:
        if self.pool is not None:
            self.labels[:] = labels


class ResizedLife(RandomLife):
    """Resizes all the time, and lets the workers keep up or not."""

    def step(self) -> None:
        chance = self.random.random()
        if chance < 0.25:
            self.checked.resize(self.random.randint(1, MAX_NUM_PAGES))
        elif chance < 0.35:
            self.flush()
        else:
            super().step()
        self.checked.check()

    def flush(self) -> None:
        """Apply a message without a step, then cut the worker's pool as well."""
        checked = self.checked
        checked.worker.receive(checked.cache.alloc_for_extend([], []))
        assert not checked.cache.memory.page_copies.pending
        checked.worker.labels[(checked.oracle.num_pages + 1) * checked.page_size :] = (
            GONE
        )


sizes = {
    "num_pages": st.integers(4, 12),
    "page_size": st.sampled_from([1, 2, 3, 16]),
    "num_rows": st.integers(2, 5),
    "partial_pages": st.booleans(),
    "seed": st.integers(0, 2**32 - 1),
}


@pytest.mark.parametrize("policy", ["lru", "lfu", "none"])
@settings(max_examples=max(10, settings().max_examples // 2))
@given(**sizes)
def test_workers_elsewhere_find_every_page_where_it_went(
    policy: str,
    num_pages: int,
    page_size: int,
    num_rows: int,
    partial_pages: bool,
    seed: int,
) -> None:
    checked = make_checked(
        policy,
        num_pages,
        page_size,
        num_rows,
        20 * page_size,
        partial_pages=partial_pages,
    )
    life = ResizedLife(checked, Random(seed))
    for _ in range(NUM_STEPS):
        life.step()
    checked.drain()
    checked.check()


@given(**sizes)
def test_a_pool_in_the_process_finds_every_page_where_it_went(
    num_pages: int, page_size: int, num_rows: int, partial_pages: bool, seed: int
) -> None:
    checked = make_checked(
        "lru",
        num_pages,
        page_size,
        num_rows,
        20 * page_size,
        partial_pages=partial_pages,
    )
    worker = PoolWorker(
        max_num_pages=num_pages,
        page_size=page_size,
        num_rows=num_rows,
        num_columns=20,
    )
    spec = MLASpec(page_size=page_size, latent_dim=4, rope_dim=0, dtype="float32")
    group = KVCacheGroup(layer_names=("layers.0",), spec=spec)
    config = make_kv_cache_config([group], num_pages=num_pages)
    worker.pool = checked.cache.memory.kv_pool = KVPool(config)
    checked.worker = worker
    life = ResizedLife(checked, Random(seed))
    for _ in range(NUM_STEPS):
        life.step()
        assert worker.pool.num_pages == checked.oracle.num_pages

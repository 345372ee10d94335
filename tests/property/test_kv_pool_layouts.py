"""Pools of any layers, in either order, hold what was written and where they say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

import torch
from hypothesis import given
from hypothesis import strategies as st

from radixkv.mem_cache import KVCacheConfig, KVCacheGroup, KVPool, make_kv_cache_config

from .test_plan_properties import ORDERS, Question, questions

Content = dict[tuple[str, str], bytes]
"""The bytes of one page, by layer and part."""


def part_bytes(pool: KVPool, layer: str, part: str, page: int) -> torch.Tensor:
    """View one array of one page as bytes."""
    return pool.layers[layer].parts[part][page].contiguous().view(torch.uint8)


def parts(config: KVCacheConfig, group: KVCacheGroup) -> Iterator[tuple[str, str]]:
    for layer in group.layer_names:
        for part in config.spec_of(layer).parts:
            yield layer, part.name


@dataclass
class Twins:
    """Two pools that differ in the order of their buffer, and what they must hold.

    Attributes:
        pools: One of each order.
        random: Decides all.
        contents: What is in each page, for the layers of the group that has it.
    """

    groups: tuple[KVCacheGroup, ...]
    num_pages: int
    random: Random
    contents: dict[int, Content] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pools = [
            KVPool(
                make_kv_cache_config(self.groups, num_pages=self.num_pages, order=order)
            )
            for order in ORDERS
        ]

    def write(self) -> None:
        """Give a page to a group, which fills it."""
        page = self.random.randint(0, self.num_pages)
        group = self.random.choice(self.groups)
        content: Content = {}
        for layer, part in parts(self.pools[0].config, group):
            for pool in self.pools:
                array = pool.layers[layer].parts[part]
                num_bytes = array[page].nbytes
                content.setdefault((layer, part), self.random.randbytes(num_bytes))
                filled = torch.frombuffer(
                    bytearray(content[layer, part]), dtype=torch.uint8
                )
                array[page] = filled.view(array.dtype).view(array.shape[1:])
        self.contents[page] = content

    def copy(self) -> None:
        """Copy pages to others, all at a time."""
        pages = range(1, self.num_pages + 1)
        targets = self.random.sample(pages, self.random.randint(0, len(pages)))
        sources = [self.random.choice(pages) for _ in targets]
        for pool in self.pools:
            pool.copy_pages(sources, targets)
        before = dict(self.contents)
        for source, target in zip(sources, targets, strict=True):
            self.contents.pop(target, None)
            if source in before:
                self.contents[target] = before[source]

    def resize(self) -> None:
        self.num_pages = self.random.randint(1, 6)
        for pool in self.pools:
            pool.resize(self.num_pages)
        for page in [page for page in self.contents if page > self.num_pages]:
            del self.contents[page]

    def stage(self) -> None:
        """Move pages out and, somewhere else, in again."""
        pages = range(self.num_pages + 1)
        sources = self.random.sample(pages, self.random.randint(0, len(pages)))
        targets = self.random.sample(pages, len(sources))
        for pool in self.pools:
            shape = (len(sources), pool.page_bytes)
            staging = torch.zeros(shape, dtype=torch.uint8)
            pool.gather_pages(torch.tensor(sources, dtype=torch.int64), staging)
            pool.scatter_pages(torch.tensor(targets, dtype=torch.int64), staging)
        before = dict(self.contents)
        for source, target in zip(sources, targets, strict=True):
            self.contents.pop(target, None)
            if source in before:
                self.contents[target] = before[source]

    def check(self) -> None:
        for pool in self.pools:
            assert self.num_pages == pool.num_pages
            assert pool.config.buffer_bytes == pool.buffer.nbytes == pool.size_bytes
            for page, content in self.contents.items():
                for (layer, part), expected in content.items():
                    actual = part_bytes(pool, layer, part, page)
                    assert expected == bytes(actual.flatten().tolist())


@given(
    question=questions(),
    num_pages=st.integers(1, 5),
    seed=st.integers(0, 2**32 - 1),
)
def test_s3_20_both_orders_hold_what_was_written_whatever_happens_to_pages(
    question: Question, num_pages: int, seed: int
) -> None:
    random = Random(seed)
    config = random.choice(question.plan())
    twins = Twins(config.groups, num_pages, random)

    for _ in range(12):
        random.choice([twins.write, twins.write, twins.copy, twins.stage])()
        twins.check()
    twins.resize()
    twins.check()


@given(question=questions(max_spare=2_000))
def test_views_lie_where_the_config_says_and_apart_within_a_group(
    question: Question,
) -> None:
    for config in question.plan():
        pool = KVPool(config)
        base = pool.buffer.data_ptr()
        for group in config.groups:
            taken: set[int] = set()
            for name in group.layer_names:
                layer, tensor = pool.layers[name], config.tensor_of(name)
                assert layer.spec == config.spec_of(name)
                for part in layer.spec.parts:
                    array = layer.parts[part.name]
                    assert (config.num_pages + 1, *part.shape) == array.shape
                    assert part.dtype == str(array.dtype).removeprefix("torch.")
                    for page in range(config.num_pages + 1):
                        assert array[page].is_contiguous()
                        place = tensor.address(name, page) + part.offset
                        assert base + place == array[page].data_ptr()
                        bytes_of_page = range(place, place + array[page].nbytes)
                        assert taken.isdisjoint(bytes_of_page)
                        taken.update(bytes_of_page)
            assert not taken or max(taken) < pool.buffer.nbytes

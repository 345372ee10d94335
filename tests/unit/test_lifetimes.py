"""Nodes are freed by their reference counts alone, and the collector sees none."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from radixkv.mem_cache import MemoryManager, RadixCache, RadixNode
from radixkv.mem_cache.eviction import make_eviction_index
from radixkv.mem_cache.radix_tree import RadixTree
from radixkv.mem_cache.sharded_dict import MAX_DICT_SIZE

from .driver import Wrong, admit, insert, make_cache, make_memory, run, span
from .lifetimes import num_leaves_alive


@pytest.fixture(scope="module", autouse=True)
def _others_out_of_sight() -> Iterator[None]:
    """Hide from the collector what was there before, or each look takes a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Switch the collector off, after it freed what others left behind."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def busy(cache: RadixCache, num_requests: int, seed: int) -> None:
    """Run random requests: they share, split, grow, retain, and end their epoch."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 40, num_requests).tolist()
    events = rng.integers(0, 100, num_requests).tolist()
    for length, event in zip(lengths, events, strict=True):
        tokens = rng.integers(0, 3, length).tolist()
        request = run(cache, tokens, namespace=event % 3)
        if event == 0:
            cache.bump_epoch(event % 3)
        elif event == 1:
            cache.retain(tokens[: length // 2], event % 3)
        elif event == 2:
            cache.release(request)
            continue
        elif event == 3:
            cache.cache_unfinished_req(request, tokens)
        cache.cache_finished_req(request, tokens)


def with_a_quota(memory: MemoryManager) -> RadixCache:
    cache = RadixCache(memory)
    cache.set_quota(1, floor_size=8, ceiling_size=40)
    return cache


CACHES: dict[str, Callable[[MemoryManager], RadixCache]] = {
    "lru": RadixCache,
    "lfu": lambda memory: RadixCache(memory, "lfu"),
    "quota": with_a_quota,
    "partial": lambda memory: RadixCache(memory, partial_pages=True),
    "marks": lambda memory: RadixCache(memory, outputs_first=True, explain=False),
}


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)
def test_b193_nothing_is_left_of_random_requests(
    make: Callable[[MemoryManager], RadixCache],
) -> None:
    """With the collector off, after 5,000 requests and after 10,000."""
    leaves = num_leaves_alive()
    busy(make(make_memory(64, 1)), 500, 0)  # fills what Python keeps for reuse
    num_blocks = sys.getallocatedblocks()
    cache = make(make_memory(64, 1))
    busy(cache, 5_000, 1)
    assert num_leaves_alive() - leaves <= 2 * 64
    half = sys.getallocatedblocks()
    busy(cache, 5_000, 2)
    assert num_leaves_alive() - leaves <= 2 * 64
    # A node takes three: itself, its tokens, and its pages.
    assert sys.getallocatedblocks() - half < 1_500
    del cache

    assert leaves == num_leaves_alive()
    assert sys.getallocatedblocks() - num_blocks < 1_500


def fill(cache: RadixCache) -> None:
    for first in range(20):
        insert(cache, [first, *span(100, 103)])
        insert(cache, [first, *span(200, 203)])
        insert(cache, [first, 200], namespace="other")


def drop_some(cache: RadixCache) -> None:
    cache.evict(50)
    cache.resize(100)


def end_two_epochs(cache: RadixCache) -> None:
    running = run(cache, [0, 200, 7])
    cache.bump_epoch(None)
    cache.evict(30)  # a walk rests in the middle
    insert(cache, span(1, 9))
    cache.bump_epoch(None)
    cache.evict(3)
    cache.release(running)


WAYS: dict[str, Callable[[RadixCache], object]] = {
    "full": fill,
    "evicted": drop_some,
    "stale": end_two_epochs,
    "reset": lambda cache: cache.reset(),
    "retained": lambda cache: cache.retain([3, *span(100, 103)]),
    "quota": lambda cache: cache.set_quota("other", floor_size=8),
    "running": lambda cache: run(cache, [0, 200, 7]),
}


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_a_cache_that_goes_takes_all_with_it(
    policy: str, way: Callable[[RadixCache], object]
) -> None:
    """At once, and whatever it was in the middle of."""
    leaves = num_leaves_alive()
    cache, other = (make_cache(400, 1, policy=policy) for _ in range(2))
    fill(other)
    fill(cache)
    kept = way(cache)
    del cache, kept
    other.check_integrity()
    assert other.match_prefix([7, *span(200, 203)]) == 5
    del other

    assert leaves == num_leaves_alive()


class Tenant:
    """A policy and a namespace that know their cache, as users' objects do."""

    def __init__(self) -> None:
        self.cache = RadixCache(make_memory(), self)

    def key(self, node: RadixNode) -> int:
        return node.last_use


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_collector_frees_a_cache_in_a_cycle_with_what_uses_it(
    way: Callable[[RadixCache], object],
) -> None:
    gc.collect()
    leaves = num_leaves_alive()
    tenant = Tenant()
    tenant.cache = RadixCache(make_memory(400, 1), tenant)
    fill(tenant.cache)
    insert(tenant.cache, span(1, 8), namespace=tenant)  # type: ignore[arg-type]
    tenant.cache.set_quota(tenant, floor_size=4)
    insert(tenant.cache, span(1, 8), namespace=(tenant, 1))
    way(tenant.cache)
    tenant.kept = tenant.cache.admit([7], namespace=tenant)  # type: ignore[attr-defined]
    witness = weakref.ref(tenant)
    del tenant
    gc.collect()

    assert witness() is None
    assert leaves == num_leaves_alive()


@pytest.mark.parametrize("options", [{"debug": True}, {"partial_pages": True}], ids=str)
def test_the_collector_frees_a_cache_with_any_option(options: Wrong) -> None:
    gc.collect()
    leaves = num_leaves_alive()
    cache = RadixCache(make_memory(400, 1), **options)
    fill(cache)
    del cache
    gc.collect()

    assert leaves == num_leaves_alive()


def test_a_namespace_keeps_its_name_while_it_is_stale() -> None:
    cache = make_cache(400, 1)
    insert(cache, [1, 2], namespace=("a", 1))
    root = cache._tree.roots[0]
    cache.bump_epoch(("a", 1))
    assert ("a", 1) == root.namespace
    cache.evict(2)

    assert root.namespace is None
    assert root.quota is None
    assert root not in cache._tree.roots


def test_a_request_outlives_its_cache() -> None:
    """What it still holds is taken apart, and giving it back to nobody does no harm."""
    cache = make_cache(400, 1)
    request = run(cache, [1, 2, 3])
    cache.cache_unfinished_req(request, [1, 2, 3])
    tree = cache._tree
    del cache
    node = request.node
    assert node is not None

    assert (3, 1) == (node.num_pages, node.lock_ref)
    assert node.root.namespace is None
    for _ in range(3):
        tree.unlock(node)
        tree.lock(node)
    assert not tree.roots


def chain(policy: str, num_nodes: int) -> tuple[RadixTree, RadixNode]:
    """A tree of one path, a page a node; and its end, which is protected."""
    tree = RadixTree(4, make_eviction_index(policy))
    node, _ = tree.acquire(None, b"")
    for number in range(num_nodes):
        page = number.to_bytes(4, "little")
        node, _ = tree.publish(node, page, page)
    return tree, node


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("num_nodes", [100_000])
def test_b138_a_chain_of_nodes_is_freed_one_by_one(num_nodes: int) -> None:
    """As many calls inside of each other would be more than the stack holds."""
    leaves = num_leaves_alive()
    tree, end = chain("lfu", num_nodes)
    del tree
    assert end.parent is not end  # kept alone
    del end
    assert leaves == num_leaves_alive()

    gone: list[RadixNode] = []
    tree, end = chain("lfu", num_nodes)
    tree.on_evicted.append(lambda node, key, pages: gone.append(node))
    tree.unlock(end)
    tree.evict(num_nodes)
    del gone[1:]
    assert gone[0] is end
    assert end.parent is end.root  # it does not hold all that went after it
    gone.clear()
    del end, tree
    assert leaves == num_leaves_alive()


def num_tracked() -> int:
    """Objects that the collector looks at, after it dropped what it need not see."""
    for _ in range(3):
        gc.collect()
    return len(gc.get_objects())


def grown(num_leaves: int) -> RadixCache:
    """A cache of so many leaves of one page, below one root, and as many evicted."""
    cache = make_cache(num_leaves, 1, max_context_len=8)
    for number in range(3 * num_leaves // 2):
        insert(cache, [number])
    return cache


@pytest.mark.parametrize(
    ("few", "many"),
    [(100, 1_100), (2 * MAX_DICT_SIZE, 3 * MAX_DICT_SIZE)],
    ids=["plain", "sharded"],
)
def test_leaves_and_ghosts_add_nothing_that_the_collector_looks_at(
    few: int, many: int
) -> None:
    counts: list[int] = []
    for num_leaves in (few, few, many):  # the first fills what Python keeps for reuse
        before = num_tracked()
        cache = grown(num_leaves)
        counts.append(num_tracked() - before)
        del cache

    assert counts[2] - counts[1] < 20


def test_the_collector_looks_at_no_node_and_at_no_children() -> None:
    cache = grown(10)
    node = next(cache._tree.nodes())

    assert not gc.is_tracked(node)
    assert not gc.is_tracked(node.root)
    assert not gc.is_tracked(node.root.children)


def test_a_root_with_many_children_is_as_any_other() -> None:
    num_leaves = MAX_DICT_SIZE + 500
    cache = grown(num_leaves)
    cache.check_integrity()
    first = num_leaves // 2  # half as many were evicted
    assert 1 == cache.match_prefix([first])
    assert 0 == cache.match_prefix([first - 1])
    for number in (first, first - 1):
        request = admit(cache, [number, 7])
        assert request.hit_report is not None
        is_gone = number < first
        assert int(is_gone) == request.hit_report.num_evicted_tokens
        cache.release(request)
    cache.bump_epoch(None)
    assert num_leaves == cache.evict(num_leaves)
    cache.check_integrity()
    insert(cache, [5])
    cache.reset()

    assert cache.total_size == cache.available_size


def test_a_node_of_one_page_shares_its_key_with_its_parent() -> None:
    cache = make_cache(16, 4, policy="lfu")  # no leaf grows
    insert(cache, span(1, 4))
    insert(cache, span(11, 18))
    insert(cache, [*span(1, 4), *span(25, 28)])
    children = [
        (page, child)
        for node in (*cache._tree.roots, *cache._tree.nodes())
        for page, child in node.children.items()
    ]

    assert [4, 8, 4] == [len(child.key) // 4 for _, child in children]
    assert [True, False, True] == [page is child.key for page, child in children]

"""Partial-page reuse changes how much is computed, and nothing that is read."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.mem_cache import MemoryManager, RadixCache
from radixkv.mem_cache.eviction import RecencyIndex
from radixkv.mem_cache.partial_pages import PartialPageIndex
from radixkv.mem_cache.radix_node import RadixNode
from radixkv.mem_cache.radix_tree import RadixTree
from radixkv.mem_cache.testing import LabelWorker

from .caches import make_checked
from .test_random_lives import RandomLife

# Words of the tokens 0 and 1, and of two that differ from 0 in another byte.
LETTERS = [0, 1, 2**8, 2**24]
words = st.lists(st.sampled_from([0, 0, *LETTERS]), max_size=9)


def raw(tokens: list[int]) -> bytes:
    return np.array(tokens, np.int32).tobytes()


def shared(page: bytes, wanted: list[int]) -> int:
    """The definition: tokens that are equal, from the first one on."""
    tokens = np.frombuffer(page, np.int32).tolist()
    count = 0
    while count < len(wanted) and tokens[count] == wanted[count]:
        count += 1
    return count


def publish(tree: RadixTree, tokens: list[int], page_size: int) -> None:
    """Cache whole pages, behind those that are cached already."""
    whole = raw(tokens[: len(tokens) // page_size * page_size])
    known = tree.match(None, whole)
    node, _ = tree.acquire(None, whole)
    if known < len(whole):
        node, _ = tree.publish(node, whole[known:], whole[known::page_size])
    tree.unlock(node)


def check(tree: RadixTree, index: PartialPageIndex, wanted: list[int]) -> None:
    nodes: list[RadixNode] = [*tree.roots, *tree.nodes()]
    for node in nodes:
        best, most = index.longest(node, raw(wanted))
        expected = max((shared(page, wanted) for page in node.children), default=0)
        assert expected == most
        assert (best is None) == (most == 0)
        if best is not None:
            first_page = next(x for x, child in node.children.items() if child is best)
            assert most == shared(first_page, wanted)


@given(
    page_size=st.sampled_from([2, 3]),
    crowd=st.sets(st.integers(0, 15), min_size=9).map(sorted),
    operations=st.lists(
        st.tuples(st.sampled_from(["publish"] * 8 + ["evict", "bump"]), words),
        max_size=30,
    ),
)
def test_the_index_finds_what_a_walk_over_all_children_finds(
    page_size: int, crowd: list[int], operations: list[tuple[str, list[int]]]
) -> None:
    tree = RadixTree(4 * page_size, RecencyIndex())
    index = PartialPageIndex(tree, 4 * page_size)
    for number in crowd:
        page = [LETTERS[number // 4], LETTERS[number % 4], LETTERS[number % 4]]
        publish(tree, page[:page_size], page_size)
    for name, tokens in operations:
        if name == "publish":
            publish(tree, tokens, page_size)
        elif name == "evict":
            tree.evict(len(tokens))
        elif name == "bump":
            tree.retire(None)
        check(tree, index, tokens[:page_size])
    while tree.evict(1):
        for letter in LETTERS:
            check(tree, index, [letter, letter])
    assert index._first_pages == {}


class Server:
    """A cache with its worker; serves prompts and counts what it computed."""

    def __init__(self, num_pages: int, page_size: int, *, partial_pages: bool) -> None:
        memory = MemoryManager(
            num_pages, page_size, max_num_requests=2, max_context_len=4 * page_size
        )
        self.cache = RadixCache(memory, partial_pages=partial_pages)
        self.worker = LabelWorker(
            max_num_pages=num_pages, page_size=page_size, num_rows=2, num_columns=4
        )
        self.num_computed = 0

    def serve(self, tokens: list[int], chunk: int, *, publish: bool) -> list[int]:
        """The labels that are read at all positions when the prompt is computed."""
        cache, worker = self.cache, self.worker
        labels = worker.labels_of(None, tokens)
        request = cache.admit(tokens)
        assert request is not None
        row = request.req_pool_idx
        while (start := request.committed_len) < len(tokens):
            stop = min(len(tokens), start + chunk)
            worker.receive(cache.alloc_for_extend([request], [stop]))
            worker.compute(row, start, stop, labels)
            self.num_computed += stop - start
            cache.commit(request, stop)
        read = worker.labels[cache.slots(request)].tolist()
        if publish:
            cache.cache_finished_req(request, tokens)
        else:
            cache.release(request)
        cache.check_integrity()
        return read


@pytest.mark.parametrize("page_size", [2, 3, 16])
@given(data=st.data())
def test_what_is_read_does_not_depend_on_the_option(
    page_size: int, data: st.DataObject
) -> None:
    """In pools that are always full."""
    longest = 3 * page_size
    num_pages = data.draw(st.integers(3, 6))
    servers = [
        Server(num_pages, page_size, partial_pages=option) for option in (False, True)
    ]
    token = st.sampled_from([0, 0, 0, 0, 0, 0, 1])
    prompts = st.lists(token, min_size=1, max_size=longest)
    for _ in range(data.draw(st.integers(1, 12))):
        tokens = data.draw(prompts)
        chunk = data.draw(st.integers(1, longest))
        publish = data.draw(st.sampled_from([True, True, True, False]))
        expected = servers[0].worker.labels_of(None, tokens)
        for server in servers:
            read = server.serve(tokens, chunk, publish=publish)
            assert server.worker.labels_of(None, tokens) == read
            assert len(read) == len(expected)


@pytest.mark.parametrize("page_size", [2, 3, 16, 64])
def test_less_is_computed_where_prompts_part_inside_a_page(page_size: int) -> None:
    random = Random(page_size)
    plain, partial = (Server(64, page_size, partial_pages=x) for x in (False, True))
    system = [random.randrange(1, 99) for _ in range(2 * page_size - 1)]
    size = page_size + 1
    for server in (plain, partial):
        server.serve([*system, *range(100, 100 + size)], size, publish=True)
    for user in range(9):
        prompt = [*system, *range(1000 * user, 1000 * user + size)]
        assert plain.serve(prompt, size, publish=True)
        assert partial.serve(prompt, size, publish=True)

    assert plain.num_computed - partial.num_computed == 9 * (page_size - 1)


@given(
    policy=st.sampled_from(["lru", "lfu", "priority"]),
    num_pages=st.integers(2, 9),
    page_size=st.sampled_from([2, 3, 16]),
    num_rows=st.integers(2, 4),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_busy_cache_with_the_option_equals_the_oracle(
    policy: str, num_pages: int, page_size: int, num_rows: int, seed: int
) -> None:
    checked = make_checked(
        policy, num_pages, page_size, num_rows, 20 * page_size, partial_pages=True
    )
    life = RandomLife(checked, Random(seed))
    for _ in range(60):
        life.step()
    checked.drain()
    checked.check()


def test_busy_lives_meet_everything_that_can_happen() -> None:
    seen: Counter[str] = Counter()
    for seed in range(15):
        random = Random(seed)
        page_size = random.choice([2, 3, 16])
        checked = make_checked(
            "lru",
            random.randint(2, 9),
            page_size,
            4,
            20 * page_size,
            partial_pages=True,
        )
        life = RandomLife(checked, random)
        for _ in range(60):
            before = checked.oracle.num_free
            life.admit()
            kv = checked.live[-1].kv if checked.live else None
            if kv is not None and kv.committed_len == kv.allocated_len:
                page = checked.pages_of(kv)[-1:]
                if kv.committed_len % page_size:
                    copies = checked.cache.memory.page_copies.pending
                    seen["room" if before else "eviction"] += 1
                    seen["copy" if page[0] in copies else "taken over"] += 1
                else:
                    seen["whole pages"] += 1
            life.step()
    assert {"room", "eviction", "copy", "taken over", "whole pages"} == set(seen)

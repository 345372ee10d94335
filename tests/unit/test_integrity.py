"""The integrity check finds every kind of corruption, and says by how much.

The only tests that reach into private state: there is no public way to break a cache.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from radixkv.mem_cache import IntegrityError, RadixCache, RadixNode, RequestKV
from radixkv.mem_cache.radix_node import make_node, make_root

from .driver import insert, make_cache, run, span

Break = Callable[[RadixCache, RequestKV], object]


def make_busy_cache(policy: str = "lru") -> tuple[RadixCache, RequestKV]:
    """Pages 1..4 in one leaf, and a request with 2 pages of its own and 2 of it."""
    cache = make_cache(policy=policy)
    insert(cache, span(1, 16))
    request = run(cache, [*span(1, 8), *span(50, 57)])
    cache.check_integrity()
    return cache, request


def nodes(cache: RadixCache) -> list[RadixNode]:
    """The shared node, then the evictable one below it."""
    upper, lower = cache._tree.nodes()
    return [upper, lower]


def page(number: int) -> bytes:
    return np.int32(number).tobytes()


def report(break_it: Break, policy: str = "lru") -> str:
    cache, request = make_busy_cache(policy)
    break_it(cache, request)
    with pytest.raises(IntegrityError) as caught:
        cache.check_integrity()
    return str(caught.value)


def add(name: str, number: int) -> Break:
    """A mistake in one of the counters."""
    paths = {
        "evictable": lambda cache: (cache._tree, "num_evictable_pages"),
        "protected": lambda cache: (cache._tree, "num_protected_pages"),
        "held": lambda cache: (cache._running, "num_held_pages"),
        "free": lambda cache: (cache.memory.allocator, "num_free_pages"),
    }

    def break_it(cache: RadixCache, request: RequestKV) -> None:
        owner, attribute = paths[name](cache)
        setattr(owner, attribute, getattr(owner, attribute) + number)

    return break_it


@pytest.mark.parametrize("number", [1, -2])
@pytest.mark.parametrize(
    ("name", "recount"), [("evictable", 2), ("protected", 2), ("held", 2), ("free", 10)]
)
def test_a_wrong_counter_is_named_with_a_sign(
    name: str, recount: int, number: int
) -> None:
    wrong = recount + number

    assert f"{name}: counter {wrong}, recount {recount} ({number:+d} pages)" in report(
        add(name, number)
    )


def test_a_lost_page_is_named() -> None:
    text = report(lambda cache, request: cache.memory.allocator.alloc(1))

    assert "page 7 has no owner" in text
    assert "= 15, capacity 16 (-1 pages)" in text


def test_a_page_with_two_owners_is_named() -> None:
    text = report(lambda cache, request: cache.memory.allocator.free([3]))

    assert (
        "page 3 has 2 owners: RadixNode(num_pages=2, lock_ref=0, num_children=0) "
        "at 8..16 of namespace None, the free list\n"
    ) in f"{text}\n"
    assert "= 17, capacity 16 (+1 pages)" in text


def test_two_requests_with_one_page_are_named() -> None:
    def break_it(cache: RadixCache, request: RequestKV) -> None:
        other = run(cache, span(70, 73))
        other.pages[:4] = request.pages[8:12]

    text = report(break_it)

    assert "page 5 has 2 owners: RequestKV(req_pool_idx=1" in text
    assert ", RequestKV(req_pool_idx=2" in text
    assert "page 7 has no owner" in text


def test_a_foreign_page_is_named() -> None:
    def break_it(cache: RadixCache, request: RequestKV) -> None:
        nodes(cache)[1].pages = page(3) + page(99)

    text = report(break_it)

    assert "page 99 is foreign, owned by RadixNode(num_pages=2" in text
    assert "page 4 has no owner" in text


def test_a_page_of_a_row_that_changed_is_noticed() -> None:
    def break_it(cache: RadixCache, request: RequestKV) -> None:
        request.pages[:8] = page(2) + page(1)

    text = report(break_it)

    assert "its row does not list its tree path: column 0 lists 2, not page 1" in text


def test_a_path_that_is_longer_than_its_row_is_noticed() -> None:
    cache = make_cache(page_size=1, max_num_requests=1, max_context_len=2)
    request = run(cache, [1, 2])
    request.node = make_node(b"", b"".join(map(page, range(3))), make_root())
    with pytest.raises(IntegrityError, match="column 0 lists 1, not page 0"):
        cache.check_integrity()
    request.pages[:] = page(0) + page(1)
    with pytest.raises(IntegrityError, match="column 2 lists None, not page 2"):
        cache.check_integrity()


@pytest.mark.parametrize("number", [1, -1])
def test_a_wrong_lock_is_named_with_a_sign(number: int) -> None:
    def break_it(cache: RadixCache, request: RequestKV) -> None:
        nodes(cache)[0].lock_ref += number

    text = report(break_it)

    assert f"at 0..8 of namespace None: lock_ref is off by {number:+d}; " in text
    assert "leased by RequestKV(req_pool_idx=1, protected_len=8" in text
    assert "0 children are protected" in text


def test_a_lock_below_an_unlocked_parent_is_noticed() -> None:
    def break_it(cache: RadixCache, request: RequestKV) -> None:
        nodes(cache)[1].lock_ref = 1

    text = report(break_it)

    assert "lock_ref is off by +1; leased by nobody, 0 children" in text
    assert "lock_ref is off by -1; leased by RequestKV(req_pool_idx=1" in text


def test_a_child_under_a_wrong_key_is_noticed() -> None:
    def break_it(cache: RadixCache, request: RequestKV) -> None:
        upper, lower = nodes(cache)
        del upper.children[lower.key[:16]]
        upper.children[b"wrong"] = lower

    text = report(break_it)

    assert "at 8..16 of namespace None is not its parent's child: None is, of " in text


def test_a_key_that_does_not_fit_its_pages_is_noticed() -> None:
    def break_it(cache: RadixCache, request: RequestKV) -> None:
        nodes(cache)[1].key += b"more"

    assert "has a key of 36 bytes, its pages need 32" in report(break_it)


def test_an_empty_node_is_noticed() -> None:
    def break_it(cache: RadixCache, request: RequestKV) -> None:
        upper, _ = nodes(cache)
        upper.children[b""] = make_node(b"", b"", upper)

    assert "has a key of 0 bytes" in report(break_it)


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_a_node_that_is_missing_in_the_index_is_noticed(policy: str) -> None:
    def break_it(cache: RadixCache, request: RequestKV) -> None:
        cache._tree.index.protect(nodes(cache)[1])

    text = report(break_it, policy)

    assert "at 8..16 of namespace None is wrongly not in the eviction index" in text


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_a_protected_node_in_the_index_is_noticed(policy: str) -> None:
    def break_it(cache: RadixCache, request: RequestKV) -> None:
        node = nodes(cache)[0]
        node.children, children = {}, node.children
        cache._tree.index.release(node)
        node.children = children

    text = report(break_it, policy)

    assert "at 0..8 of namespace None is wrongly in the eviction index" in text


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_a_node_in_the_index_that_left_the_tree_is_noticed(policy: str) -> None:
    def break_it(cache: RadixCache, request: RequestKV) -> None:
        cache._tree.index.release(make_node(b"0" * 16, page(3), make_root()))

    assert "the eviction index holds nodes outside the tree" in report(break_it, policy)


def test_a_parent_that_goes_before_its_child_is_noticed() -> None:
    def break_it(cache: RadixCache, request: RequestKV) -> None:
        cache.release(request)
        _, lower = nodes(cache)
        cache._tree.index.protect(lower)
        cache._tree.index.release(lower)

    assert "at 0..8 of namespace None goes next, but has children" in report(break_it)


def test_a_lease_outside_the_tree_is_noticed() -> None:
    def break_it(cache: RadixCache, request: RequestKV) -> None:
        request.node = make_root()

    text = report(break_it)

    assert "RequestKV(req_pool_idx=1, protected_len=8" in text
    assert " leases RadixRoot(num_pages=0" in text
    assert "which is outside the tree" in text
    assert "lock_ref is off by +1; leased by nobody" in text


@pytest.mark.parametrize("number", [4, -4])
def test_a_protected_length_that_does_not_fit_the_path_is_noticed(number: int) -> None:
    def break_it(cache: RadixCache, request: RequestKV) -> None:
        request.protected_len += number

    text = report(break_it)

    assert "protected_len does not fit its tree path of 8" in text
    assert (
        f"held: counter 2, recount {2 - number // 4} ({number // 4:+d} pages)" in text
    )


def test_lengths_out_of_order_are_noticed() -> None:
    def break_it(cache: RadixCache, request: RequestKV) -> None:
        request.committed_len = request.allocated_len + 1

    assert "its lengths are out of order" in report(break_it)


def test_a_page_count_that_does_not_fit_the_lengths_is_noticed() -> None:
    def break_it(cache: RadixCache, request: RequestKV) -> None:
        request.pages += page(16)

    assert "num_pages does not fit its allocated_len: 5, not 4" in report(break_it)


def test_workers_that_know_more_pages_than_there_are_are_noticed() -> None:
    def break_it(cache: RadixCache, request: RequestKV) -> None:
        request.num_known_pages = 5

    assert "workers know 5 pages of its row" in report(break_it)


def test_a_request_with_the_row_of_nobody_is_noticed() -> None:
    def break_it(cache: RadixCache, request: RequestKV) -> None:
        request.pages = bytearray(request.pages)

    assert "its pages are not those of its row" in report(break_it)


def test_a_lost_row_is_named() -> None:
    assert "row 2 has no owner" in report(
        lambda cache, request: cache.memory.request_table.alloc()
    )


def test_a_row_with_two_owners_is_named() -> None:
    text = report(
        lambda cache, request: cache.memory.request_table.free(request.req_pool_idx)
    )

    assert "row 1 has 2 owners: the free rows, RequestKV(req_pool_idx=1" in text


def test_a_foreign_row_is_named() -> None:
    def break_it(cache: RadixCache, request: RequestKV) -> None:
        run(cache, span(70, 73)).req_pool_idx = 0

    text = report(break_it)

    assert "row 0 is foreign, owned by RequestKV(req_pool_idx=0" in text
    assert "row 2 has no owner" in text


def test_pages_in_the_padding_row_are_noticed() -> None:
    assert "the padding row lists pages [3]" in report(
        lambda cache, request: cache.memory.request_table.rows[0].extend(page(3))
    )


def test_a_page_twice_in_the_free_list_is_noticed() -> None:
    def break_it(cache: RadixCache, request: RequestKV) -> None:
        stack = cache.memory.allocator._stack
        stack[0] = stack[1]

    text = report(break_it)

    assert "no owner: pages [16]" in text
    assert "two owners: pages [15]" in text
    assert "page 15 has 2 owners: the free list, the free list" in text


def test_a_foreign_page_in_the_free_list_is_noticed() -> None:
    def break_it(cache: RadixCache, request: RequestKV) -> None:
        cache.memory.allocator._stack[0] = 0

    assert "the free list holds a foreign page" in report(break_it)


def test_all_faults_are_told_at_once() -> None:
    def break_it(cache: RadixCache, request: RequestKV) -> None:
        cache.memory.allocator._stack[0] = 15
        cache.memory.request_table.rows[0] += page(3)
        nodes(cache)[0].lock_ref += 1

    assert len(report(break_it).splitlines()) >= 4


def test_a_sound_cache_passes() -> None:
    for policy in ("lru", "lfu", "priority"):
        cache, request = make_busy_cache(policy)
        cache.cache_finished_req(request, [*span(1, 8), *span(50, 57)])
        cache.check_integrity()

"""No recursion anywhere: paths of 100,000 nodes and prompts of a million tokens work.

Every public call that walks is made with a stack that is nearly full.
"""

from __future__ import annotations

import gc
import io
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

import numpy as np
import pytest
from numpy.typing import NDArray
from rich.console import Console

from radixkv.mem_cache import LengthError, RadixCache, RequestKV, TreeView

from .driver import Wrong, insert, make_memory

CONTENT = b"the only image.."


@contextmanager
def small_stack(num_frames: int = 60) -> Generator[None, None, None]:
    """Leave room for a few calls inside each other, and no more."""
    depth = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        depth, frame = depth + 1, frame.f_back
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(depth + num_frames)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def test_a_recursion_would_be_noticed() -> None:
    def fall(depth: int) -> int:
        return depth and fall(depth - 1)

    with small_stack():
        assert fall(20) == 0
        with pytest.raises(RecursionError):
            fall(100)


class DeepCache:
    """A cache with a path of as many nodes as a prompt has pages.

    Attributes:
        now: What the clock of the cache says.
        cache: The cache.
        tokens: The prompt; its whole pages are cached, each in a node of its own.
        page_size: Tokens a page.
        num_nodes: How many nodes there are.
    """

    def __init__(
        self,
        num_nodes: int,
        policy: str,
        *,
        page_size: int = 1,
        has_all: bool = False,
        has_short_nodes: bool = True,
        debug: bool = False,
    ) -> None:
        self.now = 0.0
        self.num_nodes = num_nodes
        self.page_size = page_size
        size = num_nodes * page_size
        memory = make_memory(
            2 * num_nodes + 1,
            page_size,
            max_num_requests=3,
            max_context_len=size + 1,
        )
        self.cache = RadixCache(
            memory,
            policy,
            retention_share=1,
            clock=lambda: self.now,
            outputs_first=has_all,
            partial_pages=has_all,
            debug=debug,
        )
        if has_short_nodes:
            self.cache._tree._max_node_bytes = 4 * page_size
        self.tokens: NDArray[np.int32] = np.arange(size + 1, dtype=np.int32)
        if has_all:
            self.tokens[0] = self.cache.intern(CONTENT)
            self.cache.set_quota(None, floor_size=page_size)
        # The first half of the pages is taken meanwhile, so that a shrink must move.
        blocker = self.serve(np.full(size + 1, size, np.int32), "blocker")
        self.publish("a")
        self.cache.release(blocker)

    def serve(self, tokens: NDArray[np.int32], namespace: str) -> RequestKV:
        """Admit a request and compute all of its tokens but the last."""
        request = self.cache.admit(tokens, namespace=namespace)
        assert request is not None
        end = len(tokens) - 1
        if request.committed_len < end:
            self.cache.alloc_for_extend([request], [end])
            self.cache.commit(request, end)
        return request

    def publish(self, namespace: str) -> None:
        request = self.serve(self.tokens, namespace)
        half = len(self.tokens) // 2
        self.cache.cache_unfinished_req(request, self.tokens)
        self.cache.cache_finished_req(request, self.tokens, prompt_len=half)

    def check(self) -> None:
        """Ask for everything that can be asked for."""
        cache = self.cache
        size = self.num_nodes * self.page_size
        assert cache.match_prefix(self.tokens, "a") == size
        assert cache.namespace_stats("a").used_size == size
        assert cache.stats().evictable_size == cache.evictable_size
        num_evictable = cache.evictable_size // self.page_size
        assert len(cache.eviction_order(100)) == min(100, num_evictable)
        cache.check_integrity()


def walk_everywhere(deep: DeepCache) -> None:
    cache = deep.cache
    size = deep.num_nodes * deep.page_size
    assert sum(1 for _ in cache._tree.nodes()) == deep.num_nodes
    assert len(cache.eviction_order(2 * deep.num_nodes)) == deep.num_nodes
    deep.check()

    # Requests come and go, the path is locked and unlocked.
    request = deep.serve(deep.tokens, "a")
    assert request.protected_len == size
    cache.check_integrity()
    assert len(cache.slots(request)) == size
    cache.truncate(request, size)
    cache.release(request)

    # Everything is retained, moved, and normal again.
    assert cache.retain(deep.tokens, "a", ttl=5.0) == cache.retained_size == size
    request = deep.serve(deep.tokens, "a")
    pages = cache.slots(request)
    cache.resize(deep.num_nodes + 1)
    assert np.count_nonzero(pages != cache.slots(request)) >= size // 2
    deep.check()
    cache.cache_finished_req(request, deep.tokens)
    deep.now = 10.0
    assert cache.retained_size == 0

    # What goes, goes from the end.
    assert cache.evict(1) == deep.page_size
    assert cache.match_prefix(deep.tokens, "a") == size - deep.page_size
    request = deep.serve(deep.tokens, "a")
    report = request.hit_report
    assert report is not None
    assert report.num_evicted_tokens == deep.page_size
    cache.cache_finished_req(request, deep.tokens)
    deep.check()
    assert cache.evict(size // 2) == size // 2 // deep.page_size * deep.page_size
    deep.publish("a")

    # A new epoch, with a request of the old one.
    request = deep.serve(deep.tokens, "a")
    cache.bump_epoch("a")
    assert cache.match_prefix(deep.tokens, "a") == 0
    cache.release(request)
    cache.check_integrity()
    assert len(cache.eviction_order(deep.num_nodes)) == deep.num_nodes
    assert cache.evict(size // 2) > 0
    deep.publish("a")
    deep.check()
    cache.evict(size)
    cache.check_integrity()
    deep.publish("b")
    cache.reset()
    cache.check_integrity()
    assert cache.available_size == cache.total_size


@pytest.mark.parametrize(
    "num_nodes", [20_000, pytest.param(100_000, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("policy", "page_size", "has_all"), [("lru", 1, False), ("lfu", 2, True)]
)
def test_b138_a_path_far_deeper_than_the_stack_works(
    policy: str, page_size: int, has_all: bool, num_nodes: int
) -> None:
    deep = DeepCache(num_nodes, policy, page_size=page_size, has_all=has_all)
    with small_stack():
        walk_everywhere(deep)
        del deep
        gc.collect()  # frees them node by node


@pytest.mark.parametrize(
    "num_nodes", [5_000, pytest.param(100_000, marks=pytest.mark.slow)]
)
def test_b138_a_deep_path_is_shown(num_nodes: int) -> None:
    deep = DeepCache(num_nodes, "lru")
    with small_stack():
        whole = TreeView(deep.cache, max_num_nodes=num_nodes)
        assert whole.dot().count(" -> ") >= num_nodes
        assert whole.html().count("<tr") >= num_nodes
        del whole
    with small_stack(150):  # rich needs some for itself
        console = Console(file=io.StringIO(), width=80)
        console.print(TreeView(deep.cache).rich())


def test_b138_a_comb_is_shown_and_evicted() -> None:
    """At each node of the path another prompt branches off."""
    depth = 1_000
    memory = make_memory(2 * depth, 1, max_context_len=depth + 1)
    cache = RadixCache(memory, "fifo")
    for length in range(depth):
        insert(cache, [*range(length), length + depth])
    with small_stack(150):
        view = TreeView(cache, max_num_nodes=2 * depth)
        assert view.dot().count(" -> ") >= depth
        Console(file=io.StringIO(), width=80).print(TreeView(cache).rich())
        cache.bump_epoch(None)
        assert len(cache.eviction_order(2 * depth)) == cache.evictable_size > depth
        cache.evict(2 * depth)
        cache.check_integrity()
    assert cache.available_size == 2 * depth


def test_b138_debug_mode_takes_its_snapshots_of_a_deep_path() -> None:
    deep = DeepCache(5_000, "lru", debug=True)
    with small_stack():
        request = deep.serve(deep.tokens, "a")
        with pytest.raises(LengthError):
            deep.cache.commit(request, 0)
        deep.cache.cache_finished_req(request, deep.tokens)
        deep.cache.evict(3)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_a_prompt_of_a_million_tokens_works_with_a_small_stack(page_size: int) -> None:
    """Its nodes are as long as they may be."""
    num_pages = 1_000_000 // page_size
    deep = DeepCache(num_pages, "lru", page_size=page_size, has_short_nodes=False)
    with small_stack():
        deep.check()
        request = deep.serve(deep.tokens, "a")
        assert request.protected_len == 1_000_000
        assert len(deep.cache.slots(request)) == 1_000_000
        deep.cache.resize(num_pages + 1)
        deep.cache.check_integrity()
        deep.cache.cache_finished_req(request, deep.tokens)
        assert deep.cache.retain(deep.tokens, "a") == 1_000_000
        assert deep.cache.evict(480_000) == 480_000
        deep.publish("a")
        deep.check()
        deep.cache.bump_epoch("a")
        assert deep.cache.match_prefix(deep.tokens, "a") == 0
        assert deep.cache.evict(1_000_000) == 1_000_000
        deep.cache.check_integrity()


def count_lines(function: Callable[[], object]) -> int:
    """How many lines of Python run."""
    num_lines = 0

    def trace(frame: FrameType, event: str, arg: object) -> Wrong:
        nonlocal num_lines
        num_lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return num_lines


def test_b138_twice_the_depth_costs_about_twice_as_much() -> None:
    costs: list[list[int]] = []
    for depth in (2_500, 5_000):
        deep = DeepCache(depth, "lru")
        cache, tokens = deep.cache, deep.tokens
        requests: list[RequestKV] = []
        calls: list[Callable[[], object]] = [
            lambda cache=cache, tokens=tokens: cache.match_prefix(tokens, "a"),
            lambda deep=deep, requests=requests: requests.append(
                deep.serve(deep.tokens, "a")
            ),
            lambda cache=cache, requests=requests: cache.slots(requests[0]),
            lambda cache=cache, requests=requests: cache.release(requests[0]),
            lambda cache=cache: cache.evict(1),
            lambda cache=cache, depth=depth: cache.evict(depth),
        ]
        costs.append([count_lines(call) for call in calls])

    for half, whole in zip(*costs, strict=True):
        assert whole <= 3 * half

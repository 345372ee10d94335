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

from radixkv.mem_cache import RadixCache, RequestKV, TreeView

from .driver import make_memory

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
        self, num_nodes: int, policy: str, *, page_size: int = 1, has_all: bool = False
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
        )
        # As short as a node can be.
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

    def check(self, namespace: str = "a") -> None:
        """Ask for everything that can be asked for."""
        cache = self.cache
        size = self.num_nodes * self.page_size
        assert cache.match_prefix(self.tokens, namespace) == size
        assert cache.namespace_stats(namespace).used_size == size
        assert cache.stats().evictable_size + cache.protected_size == size
        order = cache.eviction_order(2 * self.num_nodes)
        assert len(order) * self.page_size == cache.evictable_size
        cache.check_integrity()


def walk_everywhere(deep: DeepCache) -> None:
    cache = deep.cache
    size = deep.num_nodes * deep.page_size
    assert sum(1 for _ in cache._tree.nodes()) == deep.num_nodes
    deep.check()

    # Requests come and go, the path is locked and unlocked.
    request = deep.serve(deep.tokens, "a")
    assert request.protected_len == size
    deep.check()
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


@pytest.mark.parametrize(("policy", "has_all"), [("lru", False), ("lfu", True)])
def test_b138_a_path_of_100_000_nodes_works_with_a_small_stack(
    policy: str, has_all: bool
) -> None:
    deep = DeepCache(100_000, policy, page_size=1, has_all=has_all)
    with small_stack():
        walk_everywhere(deep)
        del deep
        gc.collect()  # frees them node by node

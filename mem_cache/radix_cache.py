"""The radix cache: requests share the pages of their common prefixes."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
from numpy.typing import NDArray

from .eviction import make_eviction_index, teach
from .eviction_policies import EvictionPolicy
from .memory_manager import MemoryManager
from .prefix_cache import PrefixCache, check_hashable
from .radix_node import PAGE_ID_BYTES
from .radix_tree import RadixTree
from .request_kv import RequestKV
from .tokens import TOKEN_BYTES, Tokens, as_sequence, as_tokens, key_bytes
from .virtual_tokens import MAX_NUM_CONTENTS


class RadixCache(PrefixCache):
    """A prefix cache that keeps what finished in a radix tree.

    Example:
        >>> from radixkv.mem_cache import MemoryManager, RadixCache
        >>> memory = MemoryManager(8, 4, max_num_requests=2, max_context_len=32)
        >>> cache = RadixCache(memory)
        >>> prompt = [1, 2, 3, 4, 5, 6]
        >>> request = cache.admit(prompt)
        >>> info = cache.alloc_for_extend([request], [6])
        >>> cache.commit(request, 6)
        >>> cache.cache_finished_req(request, prompt)
        >>> cache.match_prefix(prompt)
        4
    """

    def __init__(
        self,
        memory: MemoryManager,
        policy: str | EvictionPolicy = "lru",
        *,
        max_num_contents: int = MAX_NUM_CONTENTS,
    ) -> None:
        """Make an empty cache.

        Args:
            memory: The allocator and the request table; no other cache may use them.
            policy: Who is evicted first: ``"lru"``, ``"lfu"``, ``"fifo"``, ``"mru"``,
                ``"filo"``, ``"slru"``, ``"priority"``, or an object of your own.
            max_num_contents: Most contents that have a virtual token at a time.

        Raises:
            ConfigError: The policy is unknown, `max_num_contents` is below 1, or
                `memory` belongs to another cache.
        """
        index = make_eviction_index(policy)
        tree = RadixTree(memory.page_size * TOKEN_BYTES, index)
        teach(policy, index, tree)
        super().__init__(memory, tree, max_num_contents)

    def match_prefix(self, tokens: Tokens, namespace: Hashable = None) -> int:
        """Tell how many leading tokens are cached; see `PrefixCache`.

        Complexity: O(nodes on the path) plus one comparison of the matched tokens.
        """
        check_hashable("namespace", namespace)
        array = as_tokens(tokens, self._virtual)
        whole = len(array) // self.page_size * self.page_size
        return self._tree.match(namespace, array[:whole].tobytes()) // TOKEN_BYTES

    def cache_unfinished_req(self, request: RequestKV, tokens: Tokens) -> None:
        """Publish the full pages that are computed; see `PrefixCache`.

        Complexity: O(new tokens); the walk begins at the request's locked node.
        """
        tokens = as_sequence(tokens, self._virtual)
        self._check_cover(request, tokens)
        page_size = self._allocator.page_size
        start = request.protected_len
        stop = request.committed_len // page_size * page_size
        if stop == start:
            return
        # [start, stop)              computed by this request, whole pages
        #   [start, known)           the tree has them: our copies are freed
        #   [known, stop)            ours become the tree's
        raw = key_bytes(tokens, start, stop, self._virtual)
        node = request.node
        assert node is not None  # `_acquire` set it
        if node.root.is_stale:
            return  # its epoch is over: it publishes nothing
        pages = self._running.own_pages(request, stop)
        request.node, known = self._tree.publish(node, raw, pages, request.priority)
        self._running.hand_over(request, stop, known)
        num_known = len(known) // PAGE_ID_BYTES
        self._num_duplicate_pages += num_known
        self._num_published_pages += len(pages) // PAGE_ID_BYTES - num_known

    def _acquire(self, request: RequestKV, tokens: NDArray[np.int32]) -> None:
        page_size = self._allocator.page_size
        whole = (len(tokens) - 1) // page_size * page_size
        raw = tokens[:whole].tobytes()
        request.node, pages = self._tree.acquire(request.namespace, raw)
        self._running.begin_with(request, pages)

    def _unlock(self, request: RequestKV) -> None:
        assert request.node is not None  # `_acquire` set it
        self._tree.unlock(request.node)

"""The radix cache: requests share the pages of their common prefixes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from threading import get_ident
from typing import TYPE_CHECKING, Final

from mypy_extensions import mypyc_attr

from .eviction import KeyedIndex, make_eviction_index
from .eviction_policies import EvictionPolicy
from .explainer import Explainer
from .lessons import teach
from .memory_manager import MemoryManager
from .output_marks import OutputMarks
from .partial_pages import PartialPageIndex, PartialPages
from .prefix_cache import PrefixCache
from .quota import Quota, requests_of
from .quotas import Quotas
from .radix_key import RadixKey
from .radix_node import PAGE_ID_BYTES, NamespaceCounters
from .radix_tree import RadixTree
from .request_kv import RequestKV
from .retention import Retention
from .sizes import Flag, Integer, Number, as_size, check_hashable
from .stats import NamespaceStats
from .steady_clock import SteadyClock
from .tokens import TOKEN_BYTES, Tokens, check_virtual, part_bytes
from .virtual_tokens import MAX_NUM_CONTENTS

if TYPE_CHECKING:
    from .shared_counters import SharedCounters


_get_ident: Final = get_ident  # compiled code finds what is final without a look-up


@mypyc_attr(allow_interpreted_subclasses=True)
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
        retention_share: Number = 0.25,
        clock: Callable[[], float] | None = None,
        outputs_first: Flag = False,
        partial_pages: Flag = False,
        max_num_contents: Integer = MAX_NUM_CONTENTS,
        explain: Flag = True,
        debug: Flag = False,
        counters: SharedCounters | None = None,
    ) -> None:
        """Make an empty cache.

        Args:
            memory: The allocator and the request table; no other cache may use them.
            policy: Who is evicted first: ``"lru"``, ``"lfu"``, ``"fifo"``, ``"mru"``,
                ``"filo"``, ``"slru"``, ``"priority"``, or an object of your own.
            retention_share: Share of all pages that `retain` may grant at a time, in
                ``[0, 1]``; whole pages, rounded down.
            clock: Returns seconds, for what is retained for a time. It is asked when
                something is admitted, evicted or retained; where it fails or goes
                backwards, time stands still.
            outputs_first: Evict what requests generated before what they were asked;
                see `cache_finished_req`. Leaves do not grow in place then.
            partial_pages: Reuse the start of a page that does not match as a whole: it
                is copied to a page of the request's own, with the next message. An
                admission takes that page, and evicts one if none is free.
            max_num_contents: Most contents that have a virtual token at a time.
            explain: Give each request a `HitReport`, and count misses by reason.
            debug: Check everything after each call, and add the last calls to the
                report of a fault.
            counters: Where other processes read the sizes.

        Raises:
            ConfigError: The policy is unknown, `retention_share` is out of range,
                `clock` cannot be called, `max_num_contents` is below 1, `counters`
                cannot be written by this cache, or `memory` belongs to another cache.
        """
        marks = OutputMarks() if outputs_first else None
        index = make_eviction_index(policy, level=marks.level if marks else None)
        tree = RadixTree(memory.page_size * TOKEN_BYTES, index)
        teach(index, tree)
        self._policy_index = index
        retention = Retention(
            tree, memory.allocator, retention_share, SteadyClock(clock)
        )
        super().__init__(memory, tree, max_num_contents, debug, counters)
        self._retention = retention
        self._rooms.append(retention)
        if marks is not None:
            marks.listen(tree)
            self._output_marks = marks
            self._rooms.append(marks)
        if explain:
            name = policy if isinstance(policy, str) else type(policy).__name__
            page_bytes = memory.page_size * TOKEN_BYTES
            self._explainer = Explainer(tree, page_bytes, memory.num_pages, name)
            self._rooms.append(self._explainer)
        if partial_pages:
            self._partial_pages = PartialPages(
                PartialPageIndex(tree, memory.page_size * TOKEN_BYTES),
                self._running,
                memory.page_copies,
            )

    def match_prefix(
        self, tokens: Tokens | RadixKey, namespace: Hashable = None
    ) -> int:
        """Tell how many leading tokens are cached; see `PrefixCache`.

        Complexity: O(nodes on the path) plus one comparison of the matched tokens.
        """
        if _get_ident() != self._owner:
            self._check_thread()
        key = self._as_key(tokens, namespace)
        return self._tree.match(key.namespace, key.raw) // TOKEN_BYTES

    def retain(
        self,
        tokens: Tokens | RadixKey,
        namespace: Hashable = None,
        *,
        priority: Integer = 1,
        ttl: Number | None = None,
    ) -> int:
        """Retain the cached prefix of `tokens`: what is not retained goes first.

        That is soft: it never stands in the way of an allocation. Among retained pages,
        those of a lower priority go first, then the policy decides. It is no use: the
        recency of the pages stays as it is. What is published behind them later is not
        retained.

        `retention_share` of the pool is all that can be granted at a time. What is
        retained already costs nothing; there, the higher priority, the longer `ttl` and
        the later end win. A shrink that leaves less than was granted ends the latest
        grants, down to the page.

        With a `ttl`, the pages become normal again so many seconds after the last
        admission that used them, with the recency that they have by then. Without one,
        they are retained until they are evicted, or until `bump_epoch` or `reset`.

        After the first grant, a release and an eviction cost O(log leaves), whatever
        the policy, and leaves grow in place no longer.

        Args:
            tokens: Token ids, or the key of them; of which the cached prefix counts, in
                whole pages.
            namespace: Where to look.
            priority: At least 1.
            ttl: Seconds of the cache's clock, above 0; ``None`` for no end.

        Returns:
            The leading tokens that are retained now, in whole pages; fewer than are
            cached if the share is used up.

        Raises:
            TokenError: `tokens` are no token ids.
            ConfigError: `namespace` is not hashable, `priority` or `ttl` is out of
                range, or the cache has no clock that works.

        Complexity: O(log leaves + log grants) for each node on the path; the first
        grant costs O(nodes log nodes).
        """
        if self.watch is not None:
            return self.watch.call(
                self.retain, tokens, namespace, priority=priority, ttl=ttl
            )
        self._check_thread()
        key = self._as_key(tokens, namespace)
        priority = as_size("priority", priority)
        assert self._retention is not None  # `__init__` set it
        num_pages = self._retention.retain(key.namespace, key.raw, priority, ttl)
        return num_pages * self.page_size

    @property
    def retained_size(self) -> int:
        """Retained, in tokens, whether evictable or protected."""
        assert self._retention is not None  # `__init__` set it
        if _get_ident() == self._owner:  # nobody else may end what is over
            self._retention.settle()
        return self._retention.num_pages * self.page_size

    def set_quota(
        self,
        namespace: Hashable,
        *,
        floor_size: Integer = 0,
        ceiling_size: Integer | None = None,
    ) -> None:
        """Say what a namespace is sure of, and what it may use at most, in tokens.

        It uses its cached pages and those that its running requests hold. What is stale
        is nobody's use.

        An allocation above the ceiling first evicts the namespace's own pages, exactly
        as many as it takes, and is refused with a `QuotaError` if that is not enough. A
        ceiling below the present use is heeded from the next allocation on.

        No eviction for others leaves the namespace with less than its floor: neither
        their allocations nor `evict`, `evict_if_needed` and `resize`. Free pages are
        not kept for it. Its own allocations evict its own pages as ever.

        A quota outlives `bump_epoch` and `reset`.

        Args:
            namespace: Any hashable.
            floor_size: Rounded up to whole pages.
            ceiling_size: Rounded down to whole pages; ``None`` for no ceiling. Without
                a floor, that takes the quota away.

        Raises:
            ConfigError: `namespace` is not hashable, a size is negative, the floor is
                above the ceiling, or all floors together are above the capacity.

        Complexity: O(nodes of the namespace + running requests) where a namespace gets
        its first quota, O(nodes) where it loses it, else O(namespaces with a quota).
        """
        if self.watch is not None:
            return self.watch.call(
                self.set_quota,
                namespace,
                floor_size=floor_size,
                ceiling_size=ceiling_size,
            )
        self._check_thread()
        check_hashable("namespace", namespace)
        quotas = self._quotas or Quotas(self._tree, self._running, self._allocator)
        quotas.set(namespace, floor_size, ceiling_size)
        self._quotas = quotas if len(quotas) else None

    def namespace_stats(self, namespace: Hashable) -> NamespaceStats:
        """Return what a namespace uses, and its counters.

        The counters go on for as long as the namespace has a quota, a cached page or a
        running request; after `bump_epoch` without a quota, they start again.

        Args:
            namespace: Any hashable; of one that is unknown, everything is 0.

        Raises:
            ConfigError: `namespace` is not hashable.

        Complexity: O(1) with a quota, else O(nodes of the namespace + running
        requests).
        """
        self._check_thread()
        check_hashable("namespace", namespace)
        page_size = self.page_size
        root = self._tree.root_of(namespace)
        quota = root.quota if root else None
        if quota is None:
            quota = Quota(namespace)
            nodes = self._tree.nodes_of(root) if root else ()
            quota.count(nodes, requests_of(namespace, self._running), page_size)
        counters = root.counters if root else None
        counters = counters or NamespaceCounters()
        ceiling = quota.num_ceiling_pages
        return NamespaceStats(
            evictable_size=quota.num_evictable_pages * page_size,
            protected_size=quota.num_protected_pages * page_size,
            held_size=quota.num_held_pages * page_size,
            floor_size=quota.num_floor_pages * page_size,
            ceiling_size=None if ceiling is None else ceiling * page_size,
            num_admitted_requests=counters.num_admitted_requests,
            num_prompt_tokens=counters.num_prompt_tokens,
            num_cached_tokens=counters.num_cached_tokens,
        )

    def _restart_policy(self) -> None:
        self._tree.index.forgive()
        index = self._policy_index
        if not isinstance(index, KeyedIndex):
            return
        reset = getattr(index.policy, "reset", None)
        if callable(reset):
            try:
                reset()
            except Exception as error:  # whatever the caller's code raises
                index.fail(error)

    def _publish(
        self, request: RequestKV, tokens: Tokens | RadixKey, prompt_len: Integer | None
    ) -> None:
        page_size = self._allocator.page_size
        start = request.protected_len
        stop = request.committed_len // page_size * page_size
        if stop == start:
            return
        if isinstance(tokens, RadixKey):
            if tokens.has_virtual:
                check_virtual(tokens.tokens, self._virtual)
            raw, at, end = tokens.part(start, stop)
        else:
            raw = part_bytes(tokens, start, stop, self._virtual)
            at = 0
            end = len(raw)
        assert request.node is not None  # it has its lease
        if request.node.root.is_stale:
            return  # its epoch is over: it publishes nothing
        marks = self._output_marks
        if marks is None:
            self._publish_part(request, raw, at, end, stop)
            return
        # [start, prompt_stop)       prompt, up to the end of its last page
        # [prompt_stop, stop)        output: in nodes of its own, since these are marked
        prompt_stop = stop
        if prompt_len is not None:
            prompt_stop = -(-int(prompt_len) // page_size) * page_size
            prompt_stop = min(max(prompt_stop, start), stop)
        cut = at + (prompt_stop - start) * TOKEN_BYTES
        if at < cut:
            num_new = self._publish_part(request, raw, at, cut, prompt_stop)
            marks.see_prompt(request.node, num_new)
        if cut < end:
            num_new = self._publish_part(request, raw, cut, end, stop)
            marks.see_output(request.node, num_new)

    def _publish_part(
        self, request: RequestKV, raw: bytes, start: int, end: int, stop: int
    ) -> int:
        """Publish the tokens of ``[protected_len, stop)``; how many pages were new.

        Args:
            request: A running request.
            raw: Those tokens are ``raw[start:end]``.
            start: In bytes.
            end: In bytes.
            stop: In tokens.
        """
        # [protected_len, stop)      computed by this request, whole pages
        #   [protected_len, known)   the tree has them: our copies are freed
        #   [known, stop)            ours become the tree's
        node = request.node
        assert node is not None  # it has its lease
        pages = self._running.own_pages(request, stop)
        request.node, known = self._tree.publish(
            node, raw, pages, request.priority, start, end
        )
        self._running.hand_over(request, stop, known)
        num_known = len(known) // PAGE_ID_BYTES
        num_new = len(pages) // PAGE_ID_BYTES - num_known
        self._num_duplicate_pages += num_known
        self._num_published_pages += num_new
        if request.awaited:
            num_left = len(request.awaited) // TOKEN_BYTES - stop
            if num_left < self._allocator.page_size:
                self._end_wait(request)
        return num_new

    def _open(self, key: RadixKey, priority: int) -> RequestKV:
        page_size = self._allocator.page_size
        raw = key.raw
        end = (len(raw) // TOKEN_BYTES - 1) // page_size * page_size * TOKEN_BYTES
        node, pages = self._tree.acquire(key.namespace, raw, end)
        request = self._running.open(key.namespace, priority, node, pages)
        request.quota = node.root.quota
        return request

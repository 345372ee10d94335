"""How much of what was admitted was cached, and why not more."""

from __future__ import annotations

from typing import Final

from .hit_report import Hit, HitReport
from .radix_node import RadixRoot
from .request_kv import RequestKV
from .tokens import TOKEN_BYTES

_MAX_NUM_RECENT: Final = 32
"""Few enough to be still in the caches of the CPU when they are counted."""


class HitCounters:
    """Counts each admission once, if it got pages.

    An admission that is given back before that is not counted: a scheduler may admit a
    request to find that it does not fit, and try again later.

    Admissions are counted some at a time, which costs less than one by one; call
    `settle` before you read.

    Attributes:
        num_admitted_requests: See `CacheStats`, as for all that follow.
    """

    __slots__ = (
        "_max_num_recent",
        "_recent",
        "num_admitted_requests",
        "num_cached_tokens",
        "num_missed_cold_tokens",
        "num_missed_evicted_tokens",
        "num_missed_other_epoch_tokens",
        "num_missed_other_namespace_tokens",
        "num_missed_quota_tokens",
        "num_missed_unaligned_tokens",
        "num_missed_unpublished_tokens",
        "num_prompt_tokens",
        "num_recomputed_tokens",
        "num_resumed_cached_tokens",
        "num_resumed_requests",
    )

    def __init__(self) -> None:
        """Start at 0."""
        self._recent: list[RequestKV] = []
        self._max_num_recent = _MAX_NUM_RECENT
        self.num_admitted_requests = 0
        self.num_resumed_requests = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_resumed_cached_tokens = 0
        self.num_recomputed_tokens = 0
        self.num_missed_evicted_tokens = 0
        self.num_missed_quota_tokens = 0
        self.num_missed_unpublished_tokens = 0
        self.num_missed_other_epoch_tokens = 0
        self.num_missed_other_namespace_tokens = 0
        self.num_missed_cold_tokens = 0
        self.num_missed_unaligned_tokens = 0

    def add(self, request: RequestKV, num_tokens: int) -> None:
        """Take note of a request that was just admitted with `num_tokens` tokens."""
        request.hit = (num_tokens, request.committed_len)
        recent = self._recent
        recent.append(request)
        if len(recent) > self._max_num_recent:
            self.settle()

    def settle(self) -> None:
        """Count the admissions that got pages since the last time."""
        hits: list[Hit] = []
        roots: list[RadixRoot] = []
        waiting: list[RequestKV] = []
        for request in self._recent:
            if not request.has_run:
                if request.owner is not None:
                    waiting.append(request)
                continue
            hit = request.hit
            if isinstance(hit, HitReport) or request.computed_len:
                self._count(request)
                continue
            hits.append(hit)
            if request.node is not None:
                roots.append(request.node.root)
        if hits:
            self._count_plain(hits, roots)
        self._recent = waiting
        self._max_num_recent = len(waiting) + _MAX_NUM_RECENT

    def _count_plain(self, hits: list[Hit], roots: list[RadixRoot]) -> None:
        """Count hits of requests that were not retracted, by the columns.

        Args:
            hits: Either all of them are explained, or none.
            roots: Theirs, or empty if there is no tree.
        """
        columns = [*zip(*hits, strict=True)]
        num_tokens, num_cached = sum(columns[0]), sum(columns[1])
        self.num_admitted_requests += len(hits)
        self.num_prompt_tokens += num_tokens
        self.num_cached_tokens += num_cached
        if len(columns) > 2:
            num_whole = sum(columns[3]) // TOKEN_BYTES
            self.num_missed_cold_tokens += num_whole - num_cached
            self.num_missed_unaligned_tokens += num_tokens - num_whole
        if not roots:
            return
        if roots.count(roots[0]) < len(roots):
            for root, hit in zip(roots, hits, strict=True):
                root.counters.count(hit[0], hit[1])
        else:
            counters = roots[0].counters
            counters.num_admitted_requests += len(hits)
            counters.num_prompt_tokens += num_tokens
            counters.num_cached_tokens += num_cached

    def _count(self, request: RequestKV) -> None:
        """Count any request."""
        hit = request.hit
        computed_len = request.computed_len
        if isinstance(hit, HitReport):
            self._count_misses(hit)
            num_tokens, num_cached = hit.num_tokens, hit.granted_len
        else:
            num_tokens, num_cached = hit[0], hit[1]
        self.num_admitted_requests += 1
        if computed_len:
            self.num_resumed_requests += 1
            num_resumed = min(num_cached, computed_len)
            self.num_resumed_cached_tokens += num_resumed
            self.num_recomputed_tokens += computed_len - num_resumed
            num_tokens -= computed_len
            num_cached -= num_resumed
        self.num_prompt_tokens += num_tokens
        self.num_cached_tokens += num_cached
        if request.node is not None:
            request.node.root.counters.count(num_tokens, num_cached)

    def _count_misses(self, report: HitReport) -> None:
        self.num_missed_cold_tokens += report.num_cold_tokens
        self.num_missed_unaligned_tokens += report.num_unaligned_tokens
        self.num_missed_evicted_tokens += report.num_evicted_tokens
        self.num_missed_quota_tokens += report.num_quota_tokens
        self.num_missed_unpublished_tokens += report.num_unpublished_tokens
        self.num_missed_other_epoch_tokens += report.num_other_epoch_tokens
        self.num_missed_other_namespace_tokens += report.num_other_namespace_tokens

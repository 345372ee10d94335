"""How much of what was admitted was cached, and why not more."""

from __future__ import annotations

from typing import Final

from .request_kv import RequestKV

_MAX_NUM_RECENT: Final = 256


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
        # Each with what it was admitted with, and what it need not compute of that.
        self._recent: list[tuple[RequestKV, int, int]] = []
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
        recent = self._recent
        recent.append((request, num_tokens, request.committed_len))
        if len(recent) > self._max_num_recent:
            self.settle()

    def settle(self) -> None:
        """Count the admissions that got pages since the last time."""
        waiting: list[tuple[RequestKV, int, int]] = []
        for admission in self._recent:
            request, num_tokens, granted_len = admission
            if request.has_run:
                self._count(request, num_tokens, granted_len)
            elif request.owner is not None:
                waiting.append(admission)
        self._recent = waiting
        self._max_num_recent = len(waiting) + _MAX_NUM_RECENT

    def _count(self, request: RequestKV, num_tokens: int, granted_len: int) -> None:
        computed_len = request.computed_len
        num_cached = granted_len
        self.num_admitted_requests += 1
        if computed_len:
            self.num_resumed_requests += 1
            num_resumed = min(granted_len, computed_len)
            self.num_resumed_cached_tokens += num_resumed
            self.num_recomputed_tokens += computed_len - num_resumed
            num_tokens -= computed_len
            num_cached -= num_resumed
        self.num_prompt_tokens += num_tokens
        self.num_cached_tokens += num_cached
        if request.node is not None:
            request.node.root.counters.count(num_tokens, num_cached)
        report = request.hit_report
        if report is None:
            return
        num_cold, num_unaligned = report.num_cold_tokens, report.num_unaligned_tokens
        self.num_missed_cold_tokens += num_cold
        self.num_missed_unaligned_tokens += num_unaligned
        if num_cached + num_cold + num_unaligned == num_tokens:
            return  # as for most: the other reasons are seldom
        self.num_missed_evicted_tokens += report.num_evicted_tokens
        self.num_missed_quota_tokens += report.num_quota_tokens
        self.num_missed_unpublished_tokens += report.num_unpublished_tokens
        self.num_missed_other_epoch_tokens += report.num_other_epoch_tokens
        self.num_missed_other_namespace_tokens += report.num_other_namespace_tokens

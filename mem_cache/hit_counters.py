"""How much of what was admitted was cached, and why not more."""

from __future__ import annotations

from .request_kv import RequestKV


class HitCounters:
    """Counts each admission once, when it gets its first pages.

    An admission that is given back before that is not counted: a scheduler may admit a
    request to find that it does not fit, and try again later.

    Attributes:
        pending: The requests that were not counted yet: what each was admitted with,
            and what it need not compute of that, in tokens.
        num_admitted_requests: See `CacheStats`, as for all that follow.
    """

    __slots__ = (
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
        "pending",
    )

    def __init__(self) -> None:
        """Start at 0."""
        self.pending: dict[RequestKV, tuple[int, int]] = {}
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

    def book(self) -> None:
        """Count the pending requests that have pages by now."""
        for request, (num_tokens, granted_len) in list(self.pending.items()):
            if request.allocated_len > granted_len:
                del self.pending[request]
                self._count(request, num_tokens, granted_len)

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

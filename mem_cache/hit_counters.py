"""How much of what was admitted was cached, and why not more."""

from __future__ import annotations

from .hit_report import HitReport
from .request_kv import RequestKV
from .tokens import TOKEN_BYTES


class HitCounters:
    """Counts each admission once, if it got pages.

    An admission that is given back before that is not counted: a scheduler may admit a
    request to find that it does not fit, and try again later.

    Attributes:
        num_admitted_requests: See `CacheStats`, as for all that follow.
    """

    __slots__ = (
        "num_admitted_requests",
        "num_cached_tokens",
        "num_missed_cold_tokens",
        "num_missed_evicted_tokens",
        "num_missed_forgotten_tokens",
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
        self.num_missed_forgotten_tokens = 0
        self.num_missed_cold_tokens = 0
        self.num_missed_unaligned_tokens = 0

    def count(self, request: RequestKV) -> None:
        """Count the admission of a request that just got its first pages."""
        hit = request.hit
        self.num_admitted_requests += 1
        if request.computed_len:
            self._count_resumed(request)
            return
        if isinstance(hit, HitReport):
            self._count_misses(hit)
            num_tokens, num_cached = hit.num_tokens, hit.granted_len
        else:
            num_tokens, num_cached = hit[0], hit[1]
            if len(hit) > 2:  # it is explained
                num_whole = hit[3] // TOKEN_BYTES
                self.num_missed_cold_tokens += num_whole - num_cached
                self.num_missed_unaligned_tokens += num_tokens - num_whole
        self.num_prompt_tokens += num_tokens
        self.num_cached_tokens += num_cached
        _count_in_namespace(request, num_tokens, num_cached)

    def _count_resumed(self, request: RequestKV) -> None:
        """Count what a request had computed: its prompt counted when it first came."""
        hit = request.hit
        num_cached = hit.granted_len if isinstance(hit, HitReport) else hit[1]
        num_resumed = min(num_cached, request.computed_len)
        self.num_resumed_requests += 1
        self.num_resumed_cached_tokens += num_resumed
        self.num_recomputed_tokens += request.computed_len - num_resumed
        _count_in_namespace(request, 0, 0)

    def _count_misses(self, report: HitReport) -> None:
        self.num_missed_forgotten_tokens += report.num_forgotten_tokens
        self.num_missed_cold_tokens += report.num_cold_tokens
        self.num_missed_unaligned_tokens += report.num_unaligned_tokens
        self.num_missed_evicted_tokens += report.num_evicted_tokens
        self.num_missed_quota_tokens += report.num_quota_tokens
        self.num_missed_unpublished_tokens += report.num_unpublished_tokens
        self.num_missed_other_epoch_tokens += report.num_other_epoch_tokens
        self.num_missed_other_namespace_tokens += report.num_other_namespace_tokens


def _count_in_namespace(request: RequestKV, num_tokens: int, num_cached: int) -> None:
    counters = None if request.node is None else request.node.root.counters
    if counters is not None:
        counters.count(num_tokens, num_cached)

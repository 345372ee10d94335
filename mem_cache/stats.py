"""What a cache tells about itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Sizes now, and counters since the cache was made; sizes count tokens.

    Attributes:
        total_size: Capacity.
        available_size: Free.
        evictable_size: In the tree, and needed by no running request.
        protected_size: In the tree, and needed by a running request.
        held_size: Owned by running requests outside the tree, in whole pages.
        num_requests: Running requests.
        num_contents: Contents that have a virtual token.
        num_admitted_requests: Requests admitted so far.
        num_prompt_tokens: Tokens of the admitted requests.
        num_cached_tokens: Those of them that were cached.
        num_published_tokens: Tokens that went into the tree.
        num_duplicate_tokens: Tokens that were computed although the tree had them when
            they were published; their slots were freed.
        num_evicted_tokens: Tokens that were evicted.
        runs_per_thousand_pages: Fragmentation of the free pages: 1000 if no two of them
            are neighbours.
    """

    total_size: int
    available_size: int
    evictable_size: int
    protected_size: int
    held_size: int
    num_requests: int
    num_contents: int
    num_admitted_requests: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_published_tokens: int
    num_duplicate_tokens: int
    num_evicted_tokens: int
    runs_per_thousand_pages: float

    @property
    def hit_rate(self) -> float:
        """Cached share of the admitted tokens, 0 if there were none."""
        return self.num_cached_tokens / max(1, self.num_prompt_tokens)

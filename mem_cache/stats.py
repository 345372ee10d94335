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
        num_admitted_requests: Requests that were admitted and got pages so far.
        num_resumed_requests: Those of them that had been retracted before.
        num_prompt_tokens: Tokens of the admitted requests when they first came: not
            again after a retraction, nor what they have sampled by then.
        num_cached_tokens: Those of them that were cached. The rest is told by reason,
            as in `HitReport`, unless the cache does not explain:
        num_missed_evicted_tokens: Evicted.
        num_missed_quota_tokens: Evicted because of a ceiling.
        num_missed_unpublished_tokens: Not published yet.
        num_missed_other_epoch_tokens: Resident in an epoch that has ended.
        num_missed_other_namespace_tokens: Cached in another namespace.
        num_missed_forgotten_tokens: Perhaps cached once, too long ago to be remembered.
        num_missed_cold_tokens: Never cached before.
        num_missed_unaligned_tokens: In the last page, which is always kept back.
        num_resumed_cached_tokens: Tokens that requests had computed before they were
            retracted, and that were still cached.
        num_recomputed_tokens: The same, but not cached any more.
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
    num_resumed_requests: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_missed_evicted_tokens: int
    num_missed_quota_tokens: int
    num_missed_unpublished_tokens: int
    num_missed_other_epoch_tokens: int
    num_missed_other_namespace_tokens: int
    num_missed_forgotten_tokens: int
    num_missed_cold_tokens: int
    num_missed_unaligned_tokens: int
    num_resumed_cached_tokens: int
    num_recomputed_tokens: int
    num_published_tokens: int
    num_duplicate_tokens: int
    num_evicted_tokens: int
    runs_per_thousand_pages: float

    @property
    def hit_rate(self) -> float:
        """Cached share of the prompt tokens, 0 if there were none."""
        return self.num_cached_tokens / max(1, self.num_prompt_tokens)


@dataclass(frozen=True, slots=True)
class NamespaceStats:
    """What one namespace uses now, and its counters; sizes count tokens.

    Attributes:
        evictable_size: In the tree, and needed by no running request.
        protected_size: In the tree, and needed by a running request.
        held_size: Owned by its running requests outside the tree, in whole pages.
        floor_size: What others leave it; 0 without a quota.
        ceiling_size: Most that it may use; ``None`` without a bound.
        num_admitted_requests: As in `CacheStats`, but only of this namespace; so are
            those that follow.
        num_prompt_tokens: Tokens of the admitted requests when they first came.
        num_cached_tokens: Those of them that were cached.
    """

    evictable_size: int
    protected_size: int
    held_size: int
    floor_size: int
    ceiling_size: int | None
    num_admitted_requests: int
    num_prompt_tokens: int
    num_cached_tokens: int

    @property
    def used_size(self) -> int:
        """All that counts for its floor and its ceiling."""
        return self.evictable_size + self.protected_size + self.held_size

    @property
    def hit_rate(self) -> float:
        """Cached share of the prompt tokens, 0 if there were none."""
        return self.num_cached_tokens / max(1, self.num_prompt_tokens)

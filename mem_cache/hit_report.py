"""Why a request found what it found in the cache."""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from .tokens import TOKEN_BYTES

Hit: TypeAlias = tuple[int, ...]
"""What most hits come down to: the tokens that a request was admitted with, and those
granted. If it is explained, also the bytes available, and the bytes of its whole pages,
all but the last token's: up to there the rest is cold, then unaligned."""

NO_HIT: Final[Hit] = (0, 0)


class HitReport(msgspec.Struct, frozen=True, gc=False):
    """What the cache had of a request at its admission, and why not more.

    Every token of the request is counted once::

        num_tokens = granted_len
                   + num_recomputed_tokens
                   + num_evicted_tokens + num_quota_tokens
                   + num_unpublished_tokens
                   + num_other_epoch_tokens
                   + num_other_namespace_tokens
                   + num_forgotten_tokens or num_cold_tokens
                   + num_unaligned_tokens

    Each reason holds for a run of tokens that begins where the hit ends. A token for
    which several reasons hold counts for the first of them, in the order above.

    Attributes:
        num_tokens: Tokens that the request was admitted with.
        available_len: Leading tokens that were cached, in whole pages.
        granted_len: Leading tokens that it need not compute: fewer if all of it is
            cached, as one token is always left; more if a part of a page is reused.
        num_recomputed_tokens: Computed once, before the request was retracted, and not
            cached any more; see `computed_len` of `PrefixCache.admit`.
        num_evicted_tokens: Were cached in this epoch, and were evicted. The cache
            remembers at least as many pages that were evicted last as half of those it
            has, and at most as many as it has.
        num_quota_tokens: The same, but they had to go since their namespace had reached
            its ceiling.
        num_unpublished_tokens: A running request was admitted with the same tokens, and
            has not published them yet.
        num_other_epoch_tokens: Resident, but in an epoch that has ended.
        num_other_namespace_tokens: Cached in another namespace. At most 8 namespaces
            and ended epochs are looked at whose first page is the same.
        num_cold_tokens: Never cached in this epoch of the namespace, nor since the last
            reset. That holds for all of them, or they are forgotten; but what goes back
            more than a million evictions may be called cold, too.
        num_unaligned_tokens: No cache could have them: the last page is kept back, full
            or not, so that one token is left to compute.
        evicted_by: Who evicted the first missing page: the policy's name, ``"quota"``,
            ``"manual"`` (`evict` and `evict_if_needed`) or ``"resize"``. ``None`` if it
            was not evicted, as far as is known.
        evicted_ago: Admissions between that eviction and this one.
        num_forgotten_tokens: May have been cached, too long ago to be remembered: the
            first page of them was evicted once in this place, or from a prefix that
            was. How much of the rest, nobody knows: all is counted, up to the last
            page. Fewer than 1 in 100 texts are counted that are cold.
    """

    num_tokens: int
    available_len: int
    granted_len: int
    num_recomputed_tokens: int = 0
    num_cold_tokens: int = 0
    num_unaligned_tokens: int = 0
    num_evicted_tokens: int = 0
    num_quota_tokens: int = 0
    num_unpublished_tokens: int = 0
    num_other_epoch_tokens: int = 0
    num_other_namespace_tokens: int = 0
    evicted_by: str | None = None
    evicted_ago: int | None = None
    num_forgotten_tokens: int = 0


def report_of(hit: Hit | HitReport) -> HitReport | None:
    """Return the report of a hit, or ``None`` if it is not explained."""
    if isinstance(hit, HitReport):
        return hit
    if len(hit) == 2:
        return None
    num_tokens, granted_len, available_bytes, whole_bytes = hit
    whole_len = whole_bytes // TOKEN_BYTES
    return HitReport(
        num_tokens=num_tokens,
        available_len=available_bytes // TOKEN_BYTES,
        granted_len=granted_len,
        num_cold_tokens=whole_len - granted_len,
        num_unaligned_tokens=num_tokens - whole_len,
    )

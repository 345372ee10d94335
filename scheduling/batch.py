"""What one step computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from radixkv.mem_cache.errors import LengthError, RequestStateError

from .request import Request

if TYPE_CHECKING:
    from radixkv.mem_cache.kv_cache_info import KVCacheInfo
    from radixkv.mem_cache.prefix_cache import PrefixCache


class BatchEntry(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Positions of one request to compute in a step.

    Attributes:
        request: The request.
        start: First position to compute.
        stop: End of the positions to compute.
        num_samples: How many of the last positions give a next token: none for a chunk
            of a prompt that is not its last, one more than there are drafts otherwise.
        drafts: The tokens at the last positions, if they are only guesses. The tokens
            that are sampled decide which of them stay.
    """

    request: Request
    start: int
    stop: int
    num_samples: int
    drafts: tuple[int, ...] = ()

    @property
    def tokens(self) -> NDArray[np.int32]:
        """The tokens at positions ``[0, stop)``, int32 `[stop]`, drafts included.

        Zeros stand where a token is unknown for ever, since its request ended while the
        step was being prepared; what is computed there is dropped.
        """
        return self._tokens_from(0)

    @property
    def input_ids(self) -> NDArray[np.int32]:
        """Those of them that are to compute, int32 `[stop - start]`, in O(these)."""
        return self._tokens_from(self.start)

    def _tokens_from(self, first: int) -> NDArray[np.int32]:
        drafts = self.drafts
        tokens = self.request.tokens[first : self.stop - len(drafts)]
        if drafts:
            tokens = np.concatenate([tokens, np.array(drafts, np.int32)])
        num_unknown = self.stop - first - len(tokens)
        if num_unknown:
            tokens = np.pad(tokens, (0, num_unknown))
        return tokens


@dataclass(frozen=True, slots=True)
class Batch:
    """One step: what to compute, and where its K and V go.

    Per-token arrays list the requests one after another, in the order of `entries`. A
    batch may be prepared before the tokens are known that the one before it samples;
    read its arrays when it is about to run.

    Attributes:
        entries: What to compute of each request.
        kv_cache_info: The message for the workers, its requests in the same order.
        cache: The cache that made the message.

    Raises:
        LengthError: The message is about other positions than the entries, or an entry
            samples at positions that it does not compute.
    """

    entries: tuple[BatchEntry, ...]
    kv_cache_info: KVCacheInfo
    cache: PrefixCache

    def __post_init__(self) -> None:
        """Refuse a message that would send K and V to other positions."""
        info = self.kv_cache_info
        starts = [entry.start for entry in self.entries]
        stops = [entry.stop for entry in self.entries]
        if starts != info.starts.tolist() or stops != info.stops.tolist():
            raise LengthError(
                f"kv_cache_info must cover the entries' positions {starts} to {stops}, "
                f"got {info.starts.tolist()} to {info.stops.tolist()}"
            )
        for entry in self.entries:
            if entry.num_samples > entry.stop - entry.start:
                raise LengthError(
                    f"an entry can sample at {entry.stop - entry.start} positions, "
                    f"got num_samples {entry.num_samples}"
                )

    @property
    def num_tokens(self) -> int:
        """Tokens that this step computes."""
        return sum([entry.stop - entry.start for entry in self.entries])

    @property
    def num_samples(self) -> int:
        """Next tokens that this step samples."""
        return sum([entry.num_samples for entry in self.entries])

    @property
    def input_ids(self) -> NDArray[np.int32]:
        """Tokens to compute, int32 `[num_tokens]`."""
        return np.concatenate([entry.input_ids for entry in self.entries])

    @property
    def positions(self) -> NDArray[np.int32]:
        """Position of each token in its request, int32 `[num_tokens]`."""
        starts, stops = self.kv_cache_info.starts, self.kv_cache_info.stops
        lengths = stops - starts
        ends = np.cumsum(lengths, dtype=np.int32)
        steps = np.arange(self.num_tokens, dtype=np.int32)
        return steps + np.repeat(stops - ends, lengths)

    @property
    def sample_indices(self) -> NDArray[np.int64]:
        """Where the step samples, as indices of its tokens, int64 `[num_samples]`."""
        nums = np.array([entry.num_samples for entry in self.entries], np.int64)
        info = self.kv_cache_info
        ends = np.cumsum(info.stops - info.starts, dtype=np.int64)
        steps = np.arange(nums.sum(), dtype=np.int64)
        return steps + np.repeat(ends - np.cumsum(nums), nums)

    def out_cache_loc(self) -> NDArray[np.int64]:
        """Return the slots of this step's tokens, int64 `[num_tokens]`.

        For runners on the host and for tests. A worker has its own page table.

        Raises:
            RequestStateError: A request holds no part of the cache.
        """
        return np.concatenate([self._slots(entry) for entry in self.entries])

    def _slots(self, entry: BatchEntry) -> NDArray[np.int64]:
        if entry.request.kv is None:
            raise RequestStateError(f"{entry.request!r} holds no part of the cache")
        return self.cache.slots(entry.request.kv, entry.start, entry.stop)

"""What one step computes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from radixkv.mem_cache.errors import LengthError, RequestStateError

from .request import Request

if TYPE_CHECKING:
    from radixkv.mem_cache.kv_cache_info import KVCacheInfo
    from radixkv.mem_cache.prefix_cache import PrefixCache


@dataclass(frozen=True, slots=True)
class BatchEntry:
    """Positions of one request to compute in a step.

    Attributes:
        request: The request.
        start: First position to compute.
        stop: End of the positions to compute.
        samples: Whether the last position gives the request's next token. False for a
            chunk of a prompt that is not its last.

    Raises:
        LengthError: Not `0 <= start < stop <= request.num_tokens`.
    """

    request: Request
    start: int
    stop: int
    samples: bool = field(init=False)

    def __post_init__(self) -> None:
        """Settle now whether the entry samples; the request grows after the step."""
        num_tokens = self.request.num_tokens
        if not 0 <= self.start < self.stop <= num_tokens:
            raise LengthError(
                f"an entry needs 0 <= start < stop <= {num_tokens} (the request's "
                f"tokens), got start {self.start} and stop {self.stop}"
            )
        object.__setattr__(self, "samples", self.stop == num_tokens)


@dataclass(frozen=True, slots=True)
class Batch:
    """One step: what to compute, and where its K and V go.

    Per-token arrays list the requests one after another, in the order of `entries`.

    Attributes:
        entries: What to compute of each request.
        kv_cache_info: The message for the workers, its requests in the same order.
        cache: The cache that made the message.

    Raises:
        LengthError: The message is about other positions than the entries.
    """

    entries: tuple[BatchEntry, ...]
    kv_cache_info: KVCacheInfo
    cache: PrefixCache

    def __post_init__(self) -> None:
        """Refuse a message that would send K and V to other positions."""
        info = self.kv_cache_info
        expected = [(entry.start, entry.stop) for entry in self.entries]
        actual = list(zip(info.starts.tolist(), info.stops.tolist(), strict=True))
        if actual != expected:
            raise LengthError(
                f"kv_cache_info must cover the entries' positions {expected}, "
                f"got {actual}"
            )

    @property
    def num_tokens(self) -> int:
        """Tokens that this step computes."""
        return sum(entry.stop - entry.start for entry in self.entries)

    @property
    def input_ids(self) -> NDArray[np.int32]:
        """Tokens to compute, int32 `[num_tokens]`."""
        return np.concatenate(
            [e.request.tokens[e.start : e.stop] for e in self.entries]
        )

    @property
    def positions(self) -> NDArray[np.int32]:
        """Position of each token in its request, int32 `[num_tokens]`."""
        starts, stops = self.kv_cache_info.starts, self.kv_cache_info.stops
        lengths = stops - starts
        ends = np.cumsum(lengths, dtype=np.int32)
        steps = np.arange(self.num_tokens, dtype=np.int32)
        return steps + np.repeat(stops - ends, lengths)

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

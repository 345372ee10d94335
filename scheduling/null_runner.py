"""A runner without a model."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from radixkv.mem_cache.sizes import as_size

from .batch import Batch, BatchEntry

_NUM_LAST_TOKENS = 4
_MULTIPLIER = 1_000_003


class NullRunner:
    """Samples from no model: the next token is a hash of the request's last tokens.

    A token depends on nothing but its own request, as a model's would, so a scheduler
    that mixes up requests or positions is found out. For tests and trace replay.
    """

    def __init__(self, vocab_size: int) -> None:
        """Set the range of the tokens, `[0, vocab_size)`.

        Raises:
            ConfigError: `vocab_size` is no integer in `[1, 2**31)`.
        """
        self._vocab_size = as_size("vocab_size", vocab_size)

    def run(self, batch: Batch) -> NDArray[np.int32]:
        """Return the next token behind each position that samples, in batch order."""
        tokens = [
            self._next_token(entry, stop)
            for entry in batch.entries
            for stop in range(entry.stop - entry.num_samples + 1, entry.stop + 1)
        ]
        return np.array(tokens, np.int32)

    def _next_token(self, entry: BatchEntry, stop: int) -> int:
        # The length tells repeated tokens apart; Python's hash() is not for keeps.
        state = stop
        first = max(0, stop - _NUM_LAST_TOKENS)
        for token in entry.tokens[first:stop].tolist():
            state = (state * _MULTIPLIER + token + 1) % 2**61
        return (state ^ state >> 31) % self._vocab_size

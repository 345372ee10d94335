"""What the scheduler needs from others."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .batch import Batch


class ModelRunner(Protocol):
    """Computes the steps of a batch scheduler."""

    def run(self, batch: Batch) -> NDArray[np.int32]:
        """Compute one step and sample.

        The batches of one cache arrive in the order in which they were made, each once.
        A runner applies the message of a batch before anything that may fail, or
        recalls it (`PrefixCache.recall`), since later messages build on it.

        Args:
            batch: What to compute.

        Returns:
            The next token of each entry that samples, in batch order,
            int32 `[num_sampling_entries]`.
        """
        ...

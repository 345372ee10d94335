"""Decode batches in a few sizes, captured as CUDA graphs where there is a GPU."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.mem_cache.sizes import as_size

from .batch import Batch

NUM_INPUTS = 4
"""Numbers of a request in a decode step: token, start, row, stop."""

_PADDING = (0, 0, 0, 1)
"""Those of a padded request: token 0 at position 0 of the padding row. Its K and V go
to the hold page, and it sees nothing else."""

Compute: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Computes the logits `[size, vocab_size]` of inputs, int32 `[NUM_INPUTS, size]`."""


class DecodeGraphs:
    """Runs decode batches padded to the next of a few sizes.

    On a GPU a step of one token a request is hundreds of short kernels, and the host
    takes longer to launch them than they take to run. A CUDA graph launches them all at
    once. It does the same every time, on the same memory: so batches are padded, and
    their numbers are written to where the graph reads them. A size is captured when it
    is first used. Elsewhere a padded batch is just computed.

    Attributes:
        sizes: Numbers of requests that batches are padded to, the smallest first.
    """

    def __init__(
        self, compute: Compute, sizes: Sequence[int], device: torch.device
    ) -> None:
        """Make the memory that graphs read; nothing is captured yet.

        Args:
            compute: What a step does, without a look at the host.
            sizes: Numbers of requests to pad batches to, each at least 1; may be empty.
            device: Where it is computed.

        Raises:
            ConfigError: A size is out of range.
        """
        self.sizes = sorted({as_size("graph_sizes", size) for size in sizes})
        self._compute = compute
        self._device = device
        self._inputs = torch.zeros(
            NUM_INPUTS, max(self.sizes, default=0), dtype=torch.int32, device=device
        )
        self._replays: dict[int, Callable[[], torch.Tensor]] = {}
        self._memory: Any = None

    def size_for(self, batch: Batch) -> int | None:
        """Return the size that a batch is padded to; None if it has to run as it is.

        Args:
            batch: Any batch.
        """
        num_reqs = len(batch.entries)
        place = bisect_left(self.sizes, num_reqs)
        if batch.num_tokens != num_reqs or place == len(self.sizes):
            return None
        return self.sizes[place]

    def run(self, inputs: torch.Tensor) -> torch.Tensor:
        """Compute a padded batch.

        Args:
            inputs: What `padded_inputs` made, flat, on the device.

        Returns:
            Logits of all requests, `[size, vocab_size]`; the next call overwrites them.
        """
        size = len(inputs) // NUM_INPUTS
        own = self._inputs[:, :size]
        if size not in self._replays:
            own.copy_(torch.tensor(_PADDING)[:, None])
            self._replays[size] = self._replay_of(own)
        own.copy_(inputs.view(NUM_INPUTS, size))
        return self._replays[size]()

    def clear(self) -> None:
        """Forget the graphs: what they read or write has moved."""
        self._replays.clear()

    def _replay_of(self, inputs: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return what computes the logits of whatever is in these inputs by then."""
        compute = partial(self._compute, inputs)
        if self._device.type != "cuda":
            return compute
        graph = CapturedGraph(compute, self._memory)
        # All graphs share the memory of what they compute: one runs at a time.
        self._memory = graph.memory
        return graph


class CapturedGraph:
    """A computation on a GPU that is launched at once.

    Attributes:
        memory: Where what it computes lies, for other graphs to share.
    """

    def __init__(self, compute: Callable[[], torch.Tensor], memory: object) -> None:
        """Capture a computation, for which it is computed twice.

        Args:
            compute: What to do, without a look at the host.
            memory: That of another graph, or None.
        """
        cuda: Any = torch.cuda  # the types of what follows are partial
        stream = cuda.Stream()
        stream.wait_stream(cuda.current_stream())
        with cuda.stream(stream):
            compute()  # kernels are compiled, and libraries set up
        cuda.current_stream().wait_stream(stream)
        self._graph = cuda.CUDAGraph()
        # Other threads may use the GPU meanwhile.
        with cuda.graph(self._graph, pool=memory, capture_error_mode="thread_local"):
            self._logits = compute()
        self.memory: Any = self._graph.pool()

    def __call__(self) -> torch.Tensor:
        """Compute it again, and return the same tensor with what comes out."""
        self._graph.replay()
        return self._logits


def padded_inputs(batch: Batch, size: int) -> NDArray[np.int32]:
    """Return the numbers of a decode batch, int32 `[NUM_INPUTS * size]`.

    Args:
        batch: A batch of one token a request.
        size: Requests with the padded ones.
    """
    info = batch.kv_cache_info
    inputs = np.repeat(np.array(_PADDING, np.int32)[:, None], size, axis=1)
    inputs[:, : info.num_reqs] = batch.input_ids, info.starts, info.rows, info.stops
    return inputs.ravel()


def default_sizes(max_num_requests: int) -> list[int]:
    """Return sizes of which the next is never much larger than a batch.

    Args:
        max_num_requests: Requests of the largest batch.

    Example:
        >>> default_sizes(20)
        [1, 2, 4, 8, 16, 20]
    """
    largest = min(max_num_requests, 256)
    return sorted({1, 2, 4, *range(8, largest, 8), largest} - {*range(largest + 1, 5)})

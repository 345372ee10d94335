"""A transformers model over a paged pool: computes steps from messages alone."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.mem_cache import KVCacheInfo, KVPool, PageTable
from radixkv.mem_cache.device_step import DeviceStep

from .attention_backends import AttentionBackend
from .model_call import ModelCall
from .model_trial import ModelTrial
from .models import TransformersObject
from .step_cache import PagedStepCache, as_transformers_cache


class PagedModel:
    """Computes packed steps, `[1, num_tokens]`: nothing is padded.

    Attributes:
        pool: K and V of all requests.
        page_table: The mirror of the engine's request table.
        attention: Who attends to the pool's pages.
    """

    def __init__(
        self,
        model: TransformersObject,
        trial: ModelTrial,
        *,
        pool: KVPool,
        page_table: PageTable,
        attention: AttentionBackend,
    ) -> None:
        """Join a model and a pool.

        Args:
            model: A transformers causal language model, in evaluation mode.
            trial: What it was seen to do.
            pool: Laid out for that.
            page_table: On the pool's device.
            attention: Made for the pool.
        """
        self.pool = pool
        self.page_table = page_table
        self.attention = attention
        self._trial = trial
        self._call = ModelCall(model, trial.attention)
        self._cache_class = as_transformers_cache(PagedStepCache)

    @property
    def can_capture(self) -> bool:
        """Whether no layer asks the message for sizes, which a graph cannot."""
        return not any(use.is_gathered for use in self._trial.layers.values())

    def forward(
        self,
        info: KVCacheInfo,
        tokens: NDArray[np.int32],
        positions: NDArray[np.int32],
        samples: NDArray[np.integer],
    ) -> torch.Tensor:
        """Compute one step, and store its K and V.

        All numbers go to the device in one copy, and nothing waits for it.

        Args:
            info: The message.
            tokens: To compute, in its order, int32 `[num_tokens]`.
            positions: Theirs, int32 `[num_tokens]`.
            samples: The places to return logits of, `[num_samples]`.

        Returns:
            `[num_samples, vocab_size]`.
        """
        self.pool.copy_pages(info.copy_sources, info.copy_targets)
        extra = np.concatenate([tokens, positions, samples.astype(np.int32)])
        step = self.page_table.apply(info, extra)
        num_tokens = len(tokens)
        inputs = step.extra.long()
        return self.compute(
            step,
            inputs[:num_tokens],
            inputs[num_tokens : 2 * num_tokens],
            inputs[2 * num_tokens :],
        )

    def compute(
        self,
        step: DeviceStep,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        samples: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute one step whose numbers are on the device.

        Args:
            step: The page table after its message, rows, starts and stops.
            tokens: int64 `[num_tokens]`.
            positions: int64 `[num_tokens]`.
            samples: The places to return logits of, int64 `[num_samples]`; all if not
                given.

        Returns:
            `[num_samples, vocab_size]`.
        """
        self.attention.begin_step(step)
        cache = self._cache_class(
            self.pool,
            step,
            self.attention,
            self._trial.layers,
            self._trial.reaches,
            positions,
        )
        return self._call.logits(cache, tokens, positions, samples)

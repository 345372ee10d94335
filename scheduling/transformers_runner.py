"""Runs any Hugging Face causal language model over the paged KV pool."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.mem_cache import KVCacheInfo, KVPool, PageTable
from radixkv.mem_cache.device_step import DeviceStep
from radixkv.mem_cache.errors import BatchRefusedError, ConfigError
from radixkv.mem_cache.sizes import as_size, num_pages_for

from .attention_backends import AttentionFactory, PagedAttention
from .batch import Batch
from .decode_graphs import DecodeGraphs, default_sizes, padded_inputs
from .models import TransformersObject
from .paged_model import PagedModel
from .runner_check import check_model
from .runner_plan import plan_runner
from .sampler import sample


class TransformersRunner:
    """Computes batches with a transformers model whose code stays untouched.

    Only the model's attention function is replaced: K and V go to the runner's pool.
    A batch runs packed, `[1, num_tokens]`, so nothing is padded but what runs as a CUDA
    graph. Runners may share one model. To use the model elsewhere, set its attention
    implementation back; the next `run` takes it over again.

    Attributes:
        pool: K and V of all requests.
        page_table: The mirror of the engine's request table.
    """

    def __init__(
        self,
        model: TransformersObject,
        *,
        num_pages: int,
        page_size: int,
        max_num_requests: int,
        max_context_len: int,
        dtype: torch.dtype | None = None,
        attention: AttentionFactory = PagedAttention,
        graph_sizes: Sequence[int] | None = None,
        self_check: bool = True,
    ) -> None:
        """Make the pool for a model, and put the paged attention into it.

        Args:
            model: A transformers causal language model, in evaluation mode.
            num_pages: Usable pages, as the engine's memory has.
            page_size: Slots a page, as the engine's memory has.
            max_num_requests: Rows of the request table, as the engine's memory has.
            max_context_len: Longest request, as the engine's memory has.
            dtype: Dtype of K and V; the model's if not given.
            attention: Makes what attends: `PagedAttention`, `FlashInferAttention`,
                `FlashAttention`, or a class of your own.
            graph_sizes: Sizes of the decode batches that run as CUDA graphs; a batch is
                padded to the next. If not given, up to `max_num_requests` on a GPU, and
                none elsewhere; none, if empty.
            self_check: Whether to compare logits with the model's own on a few short
                requests, which takes as long as some dozens of their tokens.

        Raises:
            BackendUnavailableError: The attention needs what is not installed.
            ConfigError: A size is out of range, transformers is not installed, the
                runner would compute other tokens than the model does alone, or the
                attention takes no such pool or runs in no graphs.
        """
        max_num_requests = as_size("max_num_requests", max_num_requests)
        max_context_len = as_size("max_context_len", max_context_len)
        if not callable(attention):
            raise ConfigError(
                "attention must make an AttentionBackend for a pool, such as the class "
                f"PagedAttention, got {attention!r}"
            )
        trial, config = plan_runner(
            model,
            num_pages=num_pages,
            page_size=page_size,
            max_num_tokens=max_num_requests * max_context_len,
            dtype=dtype,
        )
        self.pool = KVPool(config, device=model.device)
        self.page_table = PageTable(
            max_num_requests=max_num_requests,
            max_pages_per_request=num_pages_for(max_context_len, page_size),
            device=model.device,
        )
        backend = attention(self.pool)
        if self_check:
            check_model(
                model,
                trial,
                attention,
                page_size=page_size,
                dtype=dtype or model.dtype,
            )
        self._model = PagedModel(
            model,
            trial,
            pool=self.pool,
            page_table=self.page_table,
            attention=backend,
        )
        can_capture = backend.can_capture and self._model.can_capture
        if graph_sizes is None:
            is_on_gpu = self.pool.device.type == "cuda"
            graph_sizes = (
                default_sizes(max_num_requests) if is_on_gpu and can_capture else ()
            )
        if graph_sizes and not can_capture:
            raise ConfigError(
                f"{type(backend).__name__} cannot run {type(model).__name__} in CUDA "
                f"graphs, got graph_sizes {list(graph_sizes)}"
            )
        self._graphs = DecodeGraphs(self._decode, graph_sizes, self.pool.device)
        self._graphs_buffer = self.pool.buffer

    def run(self, batch: Batch) -> NDArray[np.int32]:
        """Compute one step and sample; see `ModelRunner`."""
        places = [
            (entry.request.sampling_params, stop)
            for entry in batch.entries
            for stop in range(entry.stop - entry.num_samples + 1, entry.stop + 1)
        ]
        return sample(
            self.forward(batch),
            [params for params, _ in places],
            [stop for _, stop in places],
        )

    def forward(self, batch: Batch) -> torch.Tensor:
        """Compute one step, each once and in order, and store its K and V.

        All numbers of a step go to the device in one copy, and nothing waits for it.

        Raises:
            BatchRefusedError: The cache of the batch has other pages than the pool.

        Returns:
            The logits where the batch samples, `[num_samples, vocab_size]`.
        """
        self._check_sizes(batch)
        info = batch.kv_cache_info
        size = self._graphs.size_for(batch)
        samples = batch.sample_indices.astype(np.int32)
        if size is None:
            return self._model.forward(info, batch.input_ids, batch.positions, samples)
        self.pool.copy_pages(info.copy_sources, info.copy_targets)
        extra = np.concatenate([padded_inputs(batch, size), samples])
        step = self.page_table.apply(info, extra)
        num_inputs = len(extra) - len(samples)
        if self._graphs_buffer is not self.pool.buffer:  # a resize has moved it
            self._graphs.clear()
            self._graphs_buffer = self.pool.buffer
        logits = self._graphs.run(step.extra[:num_inputs])
        return logits.index_select(0, step.extra[num_inputs:])

    def _check_sizes(self, batch: Batch) -> None:
        """Refuse a cache whose slots are not the pool's: its tokens would be wrong."""
        pool, cache = self.pool, batch.cache
        pool_size = pool.num_pages * pool.page_size
        if cache.page_size != pool.page_size or cache.total_size > pool_size:
            raise BatchRefusedError(
                f"the runner has {pool.num_pages} pages of {pool.page_size} slots, got "
                f"a cache of {cache.total_size} slots with page_size {cache.page_size}"
            )

    def _decode(self, inputs: torch.Tensor) -> torch.Tensor:
        """Compute a padded decode batch from what is on the device alone.

        Args:
            inputs: Tokens, starts, rows and stops, int32 `[NUM_INPUTS, size]`.
        """
        size = inputs.shape[1]
        _, starts, rows, stops = inputs
        step = DeviceStep(
            # Says how many they are; what else is in it, nobody reads.
            info=KVCacheInfo.pack(
                [0] * size, [0] * size, [1] * size, [0] * size, [0] * (size + 1), b""
            ),
            page_table=self.page_table.table,
            rows=rows,
            starts=starts,
            stops=stops,
            backend=self.page_table.backend,
            extra=inputs,
        )
        tokens, positions = inputs[:2].long()
        return self._model.compute(step, tokens, positions)

"""Runs any Hugging Face causal language model over the paged KV pool."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.kernels import slot_mapping_extend
from radixkv.mem_cache import KVPool, PageTable
from radixkv.mem_cache.errors import ConfigError
from radixkv.mem_cache.sizes import as_size, num_pages_for

from .batch import Batch
from .models import LoadedModel, TransformersObject, import_transformers
from .sampler import sample
from .transformers_attention import ATTENTION, StepMetadata, paged_attention


class TransformersRunner:
    """Computes batches with a transformers model whose code stays untouched.

    Only the model's attention function is replaced: K and V go to the runner's pool.
    A batch runs packed, `[1, num_tokens]`, so nothing is padded. Runners may share one
    model. To use the model elsewhere, set its attention implementation back; the next
    `run` takes it over again.

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
    ) -> None:
        """Make the pool for a model, and put the paged attention into it.

        Args:
            model: A transformers causal language model, in evaluation mode.
            num_pages: Usable pages, as the engine's memory has.
            page_size: Slots a page, as the engine's memory has.
            max_num_requests: Rows of the request table, as the engine's memory has.
            max_context_len: Longest request, as the engine's memory has.
            dtype: Dtype of K and V; the model's if not given.

        Raises:
            ConfigError: A size is out of range, transformers is not installed, or the
                model needs more than full causal attention.
        """
        _check_supported(model)
        config = model.config.get_text_config()
        num_heads = config.num_attention_heads
        self.pool = KVPool(
            num_pages=num_pages,
            page_size=page_size,
            num_layers=config.num_hidden_layers,
            # A model without grouped heads need not name the others.
            num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
            head_dim=getattr(config, "head_dim", None)
            or config.hidden_size // num_heads,
            dtype=dtype or model.dtype,
            device=model.device,
        )
        max_context_len = as_size("max_context_len", max_context_len)
        self.page_table = PageTable(
            max_num_requests=max_num_requests,
            max_pages_per_request=num_pages_for(max_context_len, page_size),
            device=model.device,
        )
        self._model = model
        # No mask function goes with it: without one, transformers builds no mask.
        import_transformers().AttentionInterface.register(ATTENTION, paged_attention)

    def run(self, batch: Batch) -> NDArray[np.int32]:
        """Compute one step and sample; see `ModelRunner`."""
        sampling = [entry for entry in batch.entries if entry.samples]
        return sample(
            self.forward(batch),
            [entry.request.sampling_params for entry in sampling],
            [entry.stop for entry in sampling],
        )

    def forward(self, batch: Batch) -> torch.Tensor:
        """Compute one step, each once and in order, and store its K and V.

        Raises:
            ConfigError: The cache of the batch has other pages than the pool.

        Returns:
            The logits of the entries that sample, `[num_sampling_entries, vocab_size]`.
        """
        self._check_sizes(batch)
        # With another attention in place, transformers would ignore the step without a
        # word.
        if self._model.config._attn_implementation != ATTENTION:
            self._model.set_attn_implementation(ATTENTION)
        step = self._prepare(batch)
        tokens = self._upload(np.stack([batch.input_ids, batch.positions]))
        lasts = np.cumsum(batch.kv_cache_info.stops - batch.kv_cache_info.starts) - 1
        samples = np.array([entry.samples for entry in batch.entries])
        with torch.inference_mode():
            output = self._model(
                input_ids=tokens[:1],
                position_ids=tokens[1:],
                use_cache=False,
                logits_to_keep=self._upload(lasts[samples]),
                step_metadata=step,
            )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _check_sizes(self, batch: Batch) -> None:
        """Refuse a cache whose slots are not the pool's: its tokens would be wrong."""
        pool, cache = self.pool, batch.cache
        pool_size = pool.num_pages * pool.page_size
        if cache.page_size != pool.page_size or cache.total_size > pool_size:
            cache.recall(batch.kv_cache_info)
            raise ConfigError(
                f"the runner has {pool.num_pages} pages of {pool.page_size} slots, got "
                f"a cache of {cache.total_size} slots with page_size {cache.page_size}"
            )

    def _prepare(self, batch: Batch) -> StepMetadata:
        info = batch.kv_cache_info
        self.pool.copy_pages(info.copy_sources, info.copy_targets)
        self.page_table.apply(info)
        table = self.page_table.table
        rows, starts, stops = (
            torch.tensor(part) for part in (info.rows, info.starts, info.stops)
        )
        return StepMetadata(
            pool=self.pool,
            page_table=table,
            slots=slot_mapping_extend(
                table, rows, starts, stops, page_size=self.pool.page_size
            ),
            rows=rows,
            starts=starts,
            stops=stops,
            is_decode=batch.num_tokens == info.num_reqs,
        )

    def _upload(self, numbers: NDArray[np.integer[Any]]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.pool.device)


def _check_supported(model: TransformersObject) -> None:
    if isinstance(model, LoadedModel):
        raise ConfigError("TransformersRunner takes the `model` of a LoadedModel")
    reason = _unsupported(model)
    if reason:
        raise ConfigError(
            "TransformersRunner supports decoders with full causal attention, "
            f"got {type(model).__name__} with {reason}"
        )


def _unsupported(model: TransformersObject) -> str | None:
    """Name what would make the model's tokens wrong in a paged, packed batch."""
    config = model.config.get_text_config()
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    rope = getattr(config, "rope_parameters", None)
    checks = {
        "an encoder": config.is_encoder_decoder,
        "attention that is not causal": not all(
            getattr(part, "is_causal", True) for part in (config, *model.modules())
        ),
        f"{sorted(layer_types)} layers": layer_types != {"full_attention"},
        # Models with layer types keep a window in their config that no layer uses.
        "a sliding window": not getattr(config, "layer_types", None)
        and getattr(config, "sliding_window", None),
        "latent attention (MLA)": getattr(config, "kv_lora_rank", None),
        "dropout (model.eval() ends it)": model.training,
        "recurrent layers": model._is_stateful,
        # The longest request of a batch would change the positions of the others.
        "rope that depends on the batch": rope
        and rope.get("rope_type") in ("dynamic", "longrope"),
        "an attention of its own": not (
            model._supports_attention_backend and model._can_set_attn_implementation()
        ),
    }
    return next((reason for reason, found in checks.items() if found), None)

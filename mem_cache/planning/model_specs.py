"""The specs of all layers of a model, from its `config.json` alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from ..sizes import as_size
from .attention_heads import attention_heads
from .attention_specs import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)
from .layer_cache import LayerCache
from .layer_caches import layer_caches, mtp_layer_caches
from .mamba_spec import MambaSpec
from .mla_spec import MLASpec
from .model_config import ConfigObject, ModelConfig
from .model_dtype import kv_dtype
from .sharding import per_rank
from .spec_types import AnyKVCacheSpec
from .state_shapes import state_shapes


def specs_from_model_config(
    config: Mapping[str, Any] | ConfigObject,
    *,
    page_size: int = 16,
    tensor_parallel_size: int = 1,
    dtype: str | None = None,
    checkpoint_size: int | None = None,
    assume_dense: bool = False,
    include_mtp: bool = False,
) -> dict[str, AnyKVCacheSpec]:
    """Return the spec of each layer of a Hugging Face model on one rank.

    Knows dense and grouped attention, latent attention (MLA), mixes with sliding
    windows or local chunks, and mixes with states: Mamba, Mamba-2, gated delta
    networks, KDA, lightning attention, short convolutions. A layer is named
    "layers.N.attention" or "layers.N.state"; a layer that keeps nothing is left out.
    A window counts only in a family whose code uses it, whatever its config carries.

    A `model_type` that is not known is refused, since its fields may mean something
    else there. A config without one is taken at its word.

    Args:
        config: The content of the model's `config.json`, or its config of transformers.
        page_size: Tokens a page, at least 1.
        tensor_parallel_size: Ranks that divide the heads among them, at least 1. With
            more ranks than heads, heads are copied; latent attention is on each rank.
        dtype: The torch name of the dtype of K and V; what the model computes in if
            not given.
        checkpoint_size: Tokens between the states that are kept for reuse; None keeps
            none.
        assume_dense: Read a family that is not known as its fields say.
        include_mtp: Count the layers of the model's own heads for multi-token
            prediction too, as "mtp.N.attention", numbered on from the others.

    Raises:
        ConfigError: The config is no decoder's, its family is not known, it lacks a
            field, says what no spec describes, or an argument is out of range.

    Example:
        >>> llama = {
        ...     "num_hidden_layers": 32,
        ...     "hidden_size": 4096,
        ...     "num_attention_heads": 32,
        ...     "num_key_value_heads": 8,
        ...     "dtype": "bfloat16",
        ... }
        >>> specs = specs_from_model_config(llama, tensor_parallel_size=2)
        >>> len(specs), specs["layers.31.attention"].num_kv_heads
        (32, 4)
    """
    read = ModelConfig.read(config, assume_dense=assume_dense)
    dtype = kv_dtype(dtype, read.compute_dtype, read.dtype, read.quantised_kv)
    layout = _Layout(
        config=read,
        page_size=as_size("page_size", page_size),
        tensor_parallel_size=as_size("tensor_parallel_size", tensor_parallel_size),
        dtype=dtype,
        checkpoint_size=checkpoint_size,
    )
    caches = [("layers", each) for each in layer_caches(read)]
    if include_mtp:
        caches += [("mtp", each) for each in mtp_layer_caches(read)]
    return {
        f"{part}.{layer}.{'state' if cache == 'state' else 'attention'}": (
            layout.spec(layer, cache)
        )
        for layer, (part, each) in enumerate(caches)
        for cache in each
    }


def num_mtp_layers(config: Mapping[str, Any] | ConfigObject) -> int:
    """Return how many layers for multi-token prediction (MTP) keep something.

    `specs_from_model_config` counts them only with `include_mtp`: an engine that does
    not draft with them keeps nothing of them.

    Args:
        config: The content of the model's `config.json`, or its config of transformers.

    Raises:
        ConfigError: The config is no decoder's, or lacks a field.

    Example:
        >>> from radixkv.mem_cache.planning import num_mtp_layers
        >>> num_mtp_layers({"num_hidden_layers": 61, "num_nextn_predict_layers": 1})
        1
    """
    read = ModelConfig.read(config, assume_dense=True)
    return sum(1 for caches in mtp_layer_caches(read) if caches)


@dataclass(frozen=True, slots=True)
class _Layout:
    """What the specs of all layers depend on."""

    config: ModelConfig
    page_size: int
    tensor_parallel_size: int
    dtype: str
    checkpoint_size: int | None

    def spec(self, layer: int, cache: LayerCache) -> AnyKVCacheSpec:
        """Return the spec of one cache of a layer."""
        if cache == "state":
            return self._state()
        config = self.config
        if config.kv_lora_rank is not None:
            if cache != "full":
                raise ConfigError(f"no spec describes {cache} latent attention")
            return MLASpec(
                page_size=self.page_size,
                latent_dim=config.kv_lora_rank,
                rope_dim=config.qk_rope_head_dim,
                index_dim=config.index_head_dim,
                dtype=self.dtype,
            )
        if config.index_head_dim:
            raise ConfigError("no spec describes an index beside K and V by head")
        num_kv_heads, head_dim = attention_heads(config, layer, cache)
        heads: dict[str, Any] = {
            "page_size": self.page_size,
            "num_kv_heads": per_rank(
                "num_key_value_heads", num_kv_heads, self.tensor_parallel_size
            ),
            "head_dim": head_dim,
            "v_head_dim": head_dim
            if config.v_head_dim is None
            else as_size("v_head_dim", config.v_head_dim),
            "dtype": self.dtype,
        }
        if cache == "sliding":
            window = _given("sliding_window", config.sliding_window)
            return SlidingWindowSpec(window_size=window, **heads)
        if cache == "chunked":
            chunk = _given("attention_chunk_size", config.attention_chunk_size)
            return ChunkedLocalAttentionSpec(chunk_size=chunk, **heads)
        return FullAttentionSpec(**heads)

    def _state(self) -> MambaSpec:
        # K and V may be kept in fewer bits than the model computes with, a state not.
        computed = self.config.compute_dtype or "bfloat16"
        shapes = state_shapes(self.config, self.tensor_parallel_size)
        arrays = [
            (shapes.conv, computed),
            (shapes.recurrent, self.config.mamba_ssm_dtype),
        ]
        return MambaSpec(
            page_size=self.page_size,
            shapes=tuple(shape for shape, _ in arrays if shape is not None),
            dtypes=tuple(dtype for shape, dtype in arrays if shape is not None),
            checkpoint_size=self.checkpoint_size,
        )


def _given(name: str, value: int | None) -> int:
    if value is None:
        raise ConfigError(f"{name} must be given where layers use it, got none")
    return value

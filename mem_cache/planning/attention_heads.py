"""How many heads of K and V a layer has, and how wide they are."""

from __future__ import annotations

from typing import NamedTuple

from ..errors import ConfigError
from .layer_caches import LayerCache
from .model_config import LayerSizes, ModelConfig


class AttentionHeads(NamedTuple):
    """The heads of K and of V of one layer, on all ranks together."""

    num_kv_heads: int
    head_dim: int


def attention_heads(
    config: ModelConfig, layer: int, cache: LayerCache
) -> AttentionHeads:
    """Return the heads of a layer with attention.

    Args:
        config: The model's config.
        layer: Layer, from 0.
        cache: What the layer keeps; some models have other heads where it is all.

    Raises:
        ConfigError: The config does not say, or the heads of K do not divide those of
            the queries.
    """
    own = next(
        (
            sizes
            for key, sizes in config.per_layer_config.items()
            if key.isdecimal() and int(key) == layer
        ),
        LayerSizes(),
    )
    if cache == "full" and config.global_head_dim is not None:
        # Where K is V as well, there may be other heads of it.
        num_heads = (
            config.num_global_key_value_heads if config.attention_k_eq_v else None
        )
        own = LayerSizes(own.num_key_value_heads or num_heads, config.global_head_dim)
    num_heads = _of_layer("num_attention_heads", config.num_attention_heads, layer)
    num_kv_heads = _of_layer("num_key_value_heads", config.num_key_value_heads, layer)
    if config.multi_query and not config.new_decoder_architecture:
        num_kv_heads = 1
    head_dim = own.head_dim or config.head_dim
    if head_dim is None:
        head_dim = _head_dim(config, num_heads)
    num_kv_heads = own.num_key_value_heads or num_kv_heads or num_heads
    if not num_kv_heads:
        raise ConfigError("config must have num_attention_heads, got none")
    if num_heads and num_heads % num_kv_heads:
        raise ConfigError(
            f"num_key_value_heads must divide num_attention_heads ({num_heads}), got "
            f"{num_kv_heads}"
        )
    return AttentionHeads(num_kv_heads, head_dim)


def _of_layer(name: str, value: int | tuple[int, ...] | None, layer: int) -> int | None:
    if not isinstance(value, tuple):
        return value
    if layer >= len(value):
        raise ConfigError(f"{name} must name each layer, got {len(value)} numbers")
    return value[layer]


def _head_dim(config: ModelConfig, num_heads: int | None) -> int:
    if not config.hidden_size or not num_heads or config.hidden_size % num_heads:
        raise ConfigError(
            "config must have head_dim, or a hidden_size that its heads divide, got "
            f"hidden_size {config.hidden_size} and num_attention_heads {num_heads}"
        )
    return config.hidden_size // num_heads

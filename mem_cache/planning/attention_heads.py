"""How many heads of K and V a layer has, and how wide they are."""

from __future__ import annotations

from typing import NamedTuple

from ..errors import ConfigError
from .layer_cache import LayerCache
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
    own = _sizes_of_layer(config, layer, cache)
    num_heads = _of_layer("num_attention_heads", config.num_attention_heads, layer)
    if num_heads == 0:
        raise ConfigError("num_attention_heads must be >= 1, got 0")
    head_dim = config.head_dim if own.head_dim is None else own.head_dim
    if head_dim is None:
        head_dim = _head_dim(config, num_heads)
    num_kv_heads = own.num_key_value_heads
    if num_kv_heads is None:
        num_kv_heads = _num_kv_heads(config, layer)
    if num_kv_heads is None:
        raise ConfigError("config must have num_attention_heads, got none")
    if num_kv_heads == 0:
        raise ConfigError("num_key_value_heads must be >= 1, got 0")
    if num_heads is not None and num_heads % num_kv_heads:
        raise ConfigError(
            f"num_key_value_heads must divide num_attention_heads ({num_heads}), got "
            f"{num_kv_heads}"
        )
    return AttentionHeads(num_kv_heads, head_dim)


def has_no_heads(config: ModelConfig, layer: int) -> bool:
    """Tell whether a config that names the heads of each layer gives one none.

    Args:
        config: The model's config.
        layer: Layer, from 0.

    Raises:
        ConfigError: The config does not name the heads of all layers.
    """
    return (
        isinstance(config.num_key_value_heads, tuple)
        and _of_layer("num_key_value_heads", config.num_key_value_heads, layer) == 0
    )


def _num_kv_heads(config: ModelConfig, layer: int) -> int | None:
    if config.multi_query and not config.new_decoder_architecture:
        return 1
    num_kv_heads = _of_layer("num_key_value_heads", config.num_key_value_heads, layer)
    if num_kv_heads is None:
        return _of_layer("num_attention_heads", config.num_attention_heads, layer)
    return num_kv_heads


def _sizes_of_layer(config: ModelConfig, layer: int, cache: LayerCache) -> LayerSizes:
    """Return the sizes that a layer has of its own."""
    own = next(
        (
            sizes
            for key, sizes in config.per_layer_config.items()
            if key.isdecimal() and int(key) == layer
        ),
        LayerSizes(),
    )
    if cache != "full" or config.global_head_dim is None:
        return own
    num_kv_heads = own.num_key_value_heads
    if num_kv_heads is None and config.attention_k_eq_v:
        # Where K is V as well, there may be other heads of it.
        num_kv_heads = config.num_global_key_value_heads
    return LayerSizes(num_kv_heads, config.global_head_dim)


def _of_layer(name: str, value: int | tuple[int, ...] | None, layer: int) -> int | None:
    if not isinstance(value, tuple):
        return value
    if layer >= len(value):
        raise ConfigError(f"{name} must name each layer, got {len(value)} numbers")
    return value[layer]


def _head_dim(config: ModelConfig, num_heads: int | None) -> int:
    if not config.hidden_size or num_heads is None or config.hidden_size % num_heads:
        raise ConfigError(
            "config must have head_dim, or a hidden_size that its heads divide, got "
            f"hidden_size {config.hidden_size} and num_attention_heads {num_heads}"
        )
    return config.hidden_size // num_heads

"""Which caches each layer of a model has, by what its config says of the layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

from ..errors import ConfigError
from .model_config import ModelConfig

LayerCache: TypeAlias = Literal["full", "sliding", "chunked", "state"]
"""What a layer keeps: all tokens, a window, a chunk, or a state."""

LayerCaches: TypeAlias = tuple[LayerCache, ...]

_BY_TYPE: Final[Mapping[str, LayerCaches]] = MappingProxyType(
    {
        "full_attention": ("full",),
        "attention": ("full",),
        "indexed_attention": ("full",),
        "deepseek_sparse_attention": ("full",),
        "sliding_attention": ("sliding",),
        "chunked_attention": ("chunked",),
        "linear_attention": ("state",),
        "mamba": ("state",),
        "mamba2": ("state",),
        "conv": ("state",),
        "hybrid": ("full", "state"),
        "moe": (),
        "mlp": (),
    }
)

_BY_LETTER: Final[Mapping[str, LayerCaches]] = MappingProxyType(
    {"M": ("state",), "*": ("full",), "-": (), "E": ()}
)
"""The letters of `hybrid_override_pattern`."""


def layer_caches(config: ModelConfig) -> list[LayerCaches]:
    """Return which caches each layer has; none, if it reads those of another layer.

    Args:
        config: The model's config.

    Raises:
        ConfigError: The config says of a layer what no spec describes, or says it of
            more or fewer layers than there are.
    """
    num_layers = config.num_hidden_layers
    caches = _listed(config) or _hybrid(config) or _windowed(config)
    if len(caches) != num_layers:
        raise ConfigError(
            f"num_hidden_layers is {num_layers}, got the types of {len(caches)} layers"
        )
    # The last layers of some models read K and V of earlier ones.
    num_own = max(0, num_layers - config.num_kv_shared_layers)
    return [*caches[:num_own], *[()] * (num_layers - num_own)]


def _listed(config: ModelConfig) -> list[LayerCaches] | None:
    """Return the caches of a model that names the type of each layer."""
    if config.layer_types is not None:
        indexed = {"indexed_attention", "deepseek_sparse_attention"}
        if indexed.intersection(config.layer_types) and not config.index_head_dim:
            raise ConfigError("indexed attention must have index_head_dim, got none")
        return [_look_up(_BY_TYPE, "layer_types", each) for each in config.layer_types]
    if config.hybrid_override_pattern is not None:
        return [
            _look_up(_BY_LETTER, "hybrid_override_pattern", letter)
            for letter in config.hybrid_override_pattern
        ]
    if config.attn_type_list is not None:
        return [("full",) if each else ("state",) for each in config.attn_type_list]
    return None


def _hybrid(config: ModelConfig) -> list[LayerCaches] | None:
    """Return the caches of a model that says which of its layers have attention."""
    layers = range(config.num_hidden_layers)
    if config.model_type == "falcon_h1":  # both side by side, in each layer
        return [_BY_TYPE["hybrid"]] * len(layers)
    with_attention: Collection[int] | None = None
    if config.attn_layer_period:
        period, offset = config.attn_layer_period, config.attn_layer_offset
        with_attention = [i for i in layers if i % period == offset]
    elif config.full_attention_interval:
        interval = config.full_attention_interval
        with_attention = [i for i in layers if (i + 1) % interval == 0]
    elif config.attn_layer_indices is not None:
        with_attention = config.attn_layer_indices
    elif config.full_attn_idxs is not None:
        with_attention = config.full_attn_idxs
    elif config.linear_attn_config is not None:
        # They count from 1 here.
        numbers = config.linear_attn_config.full_attn_layers
        with_attention = [number - 1 for number in numbers]
    elif config.mamba_d_state is not None:
        with_attention = ()
    if with_attention is None:
        return None
    return [("full",) if i in with_attention else ("state",) for i in layers]


def _windowed(config: ModelConfig) -> list[LayerCaches]:
    """Return the caches of a model whose layers all have attention."""
    layers = range(config.num_hidden_layers)
    if config.attention_chunk_size:
        # Layers without rope attend to everything.
        interval = config.no_rope_layer_interval
        rope = config.no_rope_layers or [(i + 1) % interval for i in layers]
        return [("chunked",) if each else ("full",) for each in rope]
    if not config.sliding_window or not config.use_sliding_window:
        return [("full",)] * len(layers)
    pattern = config.sliding_window_pattern
    if (
        isinstance(pattern, str) and pattern
    ):  # such as "LLLG": local, local, local, global
        return [
            ("full",) if pattern[i % len(pattern)] == "G" else ("sliding",)
            for i in layers
        ]
    if pattern:
        return [("sliding",) if (i + 1) % pattern else ("full",) for i in layers]
    first = config.max_window_layers
    return [("sliding",) if i >= first else ("full",) for i in layers]


def _look_up(table: Mapping[str, LayerCaches], field: str, name: str) -> LayerCaches:
    if name not in table:
        allowed = ", ".join(table)
        raise ConfigError(f"{field} must be of {allowed}, got {name!r}")
    return table[name]

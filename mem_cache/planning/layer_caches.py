"""Which caches each layer of a model has, by what its config says of the layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from ..errors import ConfigError
from .attention_heads import has_no_heads
from .layer_cache import LayerCaches
from .model_config import ModelConfig
from .window_rules import WindowRule, window_rule

_BY_HEAD: Final = frozenset({"full", "sliding", "chunked"})
"""The caches that keep K and V by head."""

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
        ConfigError: The config says of a layer what no spec describes, says it of more
            or fewer layers than there are, or lets layers read what none keeps.
    """
    num_layers = config.num_hidden_layers
    listed = _listed(config)
    caches = _hybrid(config) if listed is None else listed
    if caches is None:
        caches = [_BY_TYPE["full_attention"]] * num_layers
    if len(caches) != num_layers:
        raise ConfigError(
            f"num_hidden_layers is {num_layers}, got the types of {len(caches)} layers"
        )
    rule = window_rule(config.model_type)
    if not rule.by_layer_types or listed is None:
        caches = [_by_rule(config, rule, i, each) for i, each in enumerate(caches)]
    if rule.last_is_full and caches[-1] == ("sliding",):
        caches[-1] = ("full",)
    if not config.sliding_window and any("sliding" in each for each in caches):
        got = "none" if config.sliding_window is None else 0
        raise ConfigError(
            f"sliding_window must be >= 1 where layers have a window, got {got}"
        )
    owners: list[LayerCaches] = [
        () if set(each) & _BY_HEAD and has_no_heads(config, i) else each
        for i, each in enumerate(caches)
    ]
    owners = _without_borrowers(config, owners)
    if not any(owners):
        raise ConfigError("the model must keep something, got no layer with a cache")
    return owners


def mtp_layer_caches(config: ModelConfig) -> list[LayerCaches]:
    """Return which caches each of a model's own layers for MTP has.

    They attend to all tokens, unless the config says otherwise.

    Args:
        config: The model's config.

    Raises:
        ConfigError: The config says of one what no spec describes, or names the types
            of more or fewer than there are.
    """
    if config.mtp_layer_types is not None:
        caches = [
            _look_up(_BY_TYPE, "mtp_layer_types", each)
            for each in config.mtp_layer_types
        ]
    elif config.mtp_hybrid_override_pattern is not None:
        # One step of prediction has several layers here, such as "*E".
        step = [
            _look_up(_BY_LETTER, "mtp_hybrid_override_pattern", letter)
            for letter in config.mtp_hybrid_override_pattern
        ]
        return step * config.num_mtp_layers
    else:
        caches = [_BY_TYPE["full_attention"]] * config.num_mtp_layers
    if len(caches) != config.num_mtp_layers:
        raise ConfigError(
            f"mtp_layer_types must name each of the {config.num_mtp_layers} layers, "
            f"got {len(caches)}"
        )
    return caches


def _by_rule(
    config: ModelConfig, rule: WindowRule, layer: int, caches: LayerCaches
) -> LayerCaches:
    """Return the caches of a layer whose window the family's own rule decides."""
    if not set(caches) & _BY_HEAD:
        return caches
    others: LayerCaches = tuple(each for each in caches if each not in _BY_HEAD)
    size = config.attention_chunk_size
    if rule.reads_chunks and size is not None and config.has_rope(layer):
        return "chunked", *others
    if config.sliding_window is not None and rule.has_window(config, layer):
        return "sliding", *others
    return "full", *others


def _without_borrowers(
    config: ModelConfig, caches: Sequence[LayerCaches]
) -> list[LayerCaches]:
    """Return the caches without those of the last layers that read earlier ones'."""
    num_shared = config.num_kv_shared_layers
    num_own = max(0, len(caches) - num_shared)
    unread = sorted({*caches[num_own:]} - {*caches[:num_own]} - {()})
    if unread:
        kinds = ", ".join("/".join(each) for each in unread)
        raise ConfigError(
            f"num_kv_shared_layers is {num_shared} of {len(caches)} layers, which "
            f"leaves none with a cache to share for those with {kinds} attention"
        )
    return [*caches[:num_own], *[()] * (len(caches) - num_own)]


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


def _look_up(table: Mapping[str, LayerCaches], field: str, name: str) -> LayerCaches:
    if name not in table:
        allowed = ", ".join(table)
        raise ConfigError(f"{field} must be of {allowed}, got {name!r}")
    return table[name]

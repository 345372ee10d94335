"""Reads the `config.json` of a Hugging Face model, whatever its family calls things."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Protocol, Self, TypeAlias, cast

import msgspec

from ..errors import ConfigError
from .family_defaults import family_defaults
from .family_fields import without_unread
from .field_names import by_usual_names
from .kv_quantisation import QuantisedKV, quantised_kv
from .model_dtype import compute_dtype, plain_dtype
from .model_families import check_family

_MAX_NUM_LAYERS: Final = 1000

_Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
_Sizes: TypeAlias = tuple[_Size, ...]

_TEXT_PARTS: Final = ("text_config", "llm_config", "language_config")
"""Where models that also read images keep the part that has the cache."""


class ConfigObject(Protocol):
    """A config of transformers."""

    def to_dict(self) -> dict[str, Any]:
        """Return the content of its `config.json`."""
        ...


class LinearAttentionConfig(msgspec.Struct, frozen=True):
    """What Kimi-Linear says of its layers, which it counts from 1."""

    full_attn_layers: _Sizes
    num_heads: _Count
    head_dim: _Count
    short_conv_kernel_size: _Count


class LayerSizes(msgspec.Struct, frozen=True):
    """The sizes that some models give single layers."""

    num_key_value_heads: _Count | None = None
    head_dim: _Count | None = None


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that say what a cache holds, by the name that most families use.

    Not every model has every field: None, where it is not given.
    """

    num_hidden_layers: _Size
    model_type: str = ""
    dtype: str | None = None
    compute_dtype: str | None = None
    quantised_kv: QuantisedKV | None = None
    is_encoder_decoder: bool = False
    max_position_embeddings: _Count | None = None
    hidden_size: _Size | None = None
    intermediate_size: _Size | _Sizes | None = None
    # Attention. Some families name the heads of each layer, or give a few their own.
    num_attention_heads: _Size | _Sizes | None = None
    num_heads: _Size | None = None
    num_key_value_heads: _Size | _Sizes | None = None
    multi_query: bool = False
    new_decoder_architecture: bool = False
    head_dim: _Size | None = None
    v_head_dim: _Size | None = None
    num_kv_shared_layers: _Size = 0
    global_head_dim: _Count | None = None
    num_global_key_value_heads: _Count | None = None
    attention_k_eq_v: bool = False
    per_layer_config: dict[str, LayerSizes] = {}
    # Latent attention.
    kv_lora_rank: _Size | None = None
    qk_rope_head_dim: _Size = 0
    index_head_dim: _Size = 0
    # Windows and chunks.
    sliding_window: _Size | None = None
    use_sliding_window: bool = True
    max_window_layers: _Size = 0
    sliding_window_pattern: _Size | str | None = None
    attention_chunk_size: _Count | None = None
    no_rope_layers: _Sizes = ()
    no_rope_layer_interval: _Count = 4
    # A model's own layers for multi-token prediction (MTP).
    num_mtp_layers: Annotated[int, msgspec.Meta(ge=0, le=_MAX_NUM_LAYERS)] = 0
    mtp_layer_types: tuple[str, ...] | None = None
    mtp_hybrid_override_pattern: str | None = None
    # Which layers are what.
    layer_types: tuple[str, ...] | None = None
    hybrid_override_pattern: str | None = None
    attn_layer_period: _Count | None = None
    attn_layer_offset: _Size = 0
    attn_layer_indices: _Sizes | None = None
    attn_type_list: _Sizes | None = None
    full_attn_idxs: _Sizes | None = None
    full_attention_interval: _Count | None = None
    linear_attn_config: LinearAttentionConfig | None = None
    # States.
    mamba_n_heads: _Count | None = None
    mamba_d_head: _Count | None = None
    mamba_n_groups: _Count = 1
    mamba_d_state: _Count | None = None
    mamba_d_conv: _Count = 4
    mamba_expand: _Count = 2
    mamba_ssm_dtype: str = "float32"
    linear_num_key_heads: _Count | None = None
    linear_num_value_heads: _Count | None = None
    linear_key_head_dim: _Count | None = None
    linear_value_head_dim: _Count | None = None
    linear_conv_kernel_dim: _Count = 4
    conv_L_cache: _Count | None = None

    @classmethod
    def read(
        cls, config: Mapping[str, Any] | ConfigObject, *, assume_dense: bool = False
    ) -> Self:
        """Read the content of a `config.json`.

        Args:
            config: Its content, or a config of transformers.
            assume_dense: Read one of an unknown family as its fields say.

        Raises:
            ConfigError: It is no decoder's, its family is not known, a field is missing
                or of a wrong type, or no spec describes its caches.
        """
        content = _content(config)
        fields = _fields(content)
        check_family(fields, assume_dense=assume_dense)
        fields["dtype"] = plain_dtype(fields.get("dtype"))
        fields["compute_dtype"] = compute_dtype(fields)
        fields["quantised_kv"] = quantised_kv({**content, **fields})
        fields = without_unread(fields)
        defaults = family_defaults(str(fields.get("model_type")))
        fields = {
            name: value
            for name, value in {**defaults, **fields}.items()
            if value is not None and value != "auto"
        }
        layers = fields.get("layer_types", fields.get("hybrid_override_pattern"))
        if isinstance(layers, list | tuple | str):
            fields.setdefault("num_hidden_layers", len(cast("str", layers)))
        try:
            read = msgspec.convert(fields, cls)
        except (msgspec.ValidationError, OverflowError) as error:
            raise ConfigError(f"config: {error}") from error
        if not 1 <= read.num_hidden_layers <= _MAX_NUM_LAYERS:
            raise ConfigError(
                f"num_hidden_layers must be in 1..{_MAX_NUM_LAYERS}, got "
                f"{read.num_hidden_layers}"
            )
        return read

    def has_rope(self, layer: int) -> bool:
        """Tell whether a layer rotates its queries and keys.

        Args:
            layer: Layer, from 0.

        Raises:
            ConfigError: `no_rope_layers` names fewer layers than there are.
        """
        if not self.no_rope_layers:  # an empty list is written for the usual pattern
            return (layer + 1) % self.no_rope_layer_interval != 0
        if len(self.no_rope_layers) != self.num_hidden_layers:
            raise ConfigError(
                f"num_hidden_layers is {self.num_hidden_layers}, got the types of "
                f"{len(self.no_rope_layers)} layers in no_rope_layers"
            )
        return bool(self.no_rope_layers[layer])


def _content(config: Mapping[str, Any] | ConfigObject) -> Mapping[str, Any]:
    to_dict = getattr(config, "to_dict", None)
    content: object = to_dict() if callable(to_dict) else config
    if not isinstance(content, Mapping):
        raise ConfigError(
            "config must be the content of a config.json, or a config of transformers, "
            f"got {type(config).__name__}"
        )
    return cast("Mapping[str, Any]", content)


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the part that has the cache, by their usual names."""
    parts = (config.get(name) for name in _TEXT_PARTS)
    text = next(
        (
            cast("Mapping[str, Any]", part)
            for part in parts
            if isinstance(part, Mapping)
        ),
        config,
    )
    fields = by_usual_names(text)
    # Of the whole model, only what its text part leaves out.
    whole = {
        "dtype": config.get("dtype", config.get("torch_dtype")),
        "is_encoder_decoder": config.get("is_encoder_decoder"),
        "model_type": config.get("model_type"),
        "quantization_config": config.get("quantization_config"),
    }
    for name, value in whole.items():
        if fields.get(name) is None:
            fields[name] = value
    return fields

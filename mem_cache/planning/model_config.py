"""Reads the `config.json` of a Hugging Face model, whatever its family calls things."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Final, Self, TypeAlias, cast

import msgspec

from ..errors import ConfigError

_Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
_Sizes: TypeAlias = tuple[_Size, ...]

_MAX_NUM_LAYERS: Final = 1000

_TEXT_PARTS: Final = ("text_config", "llm_config", "language_config")
"""Where models that also read images keep the part that has the cache."""

_OTHER_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "attention_head_dim": "head_dim",
        "conv_kernel": "mamba_d_conv",
        "d_model": "hidden_size",
        "expand": "mamba_expand",
        "kv_n_heads": "num_key_value_heads",
        "layers_block_type": "layer_types",
        "linear_head_dim": "linear_key_head_dim",
        "linear_num_heads": "linear_num_key_heads",
        "max_seq_len": "max_position_embeddings",
        "mamba_head_dim": "mamba_d_head",
        "mamba_headdim": "mamba_d_head",
        "mamba_ngroups": "mamba_n_groups",
        "mamba_num_heads": "mamba_n_heads",
        "mamba_ssm_cache_dtype": "mamba_ssm_dtype",
        "model_max_length": "max_position_embeddings",
        "n_embd": "hidden_size",
        "n_groups": "mamba_n_groups",
        "n_head": "num_attention_heads",
        "n_heads": "num_attention_heads",
        "n_layer": "num_hidden_layers",
        "n_layers": "num_hidden_layers",
        "n_mamba_heads": "mamba_n_heads",
        "n_positions": "max_position_embeddings",
        "num_kv_heads": "num_key_value_heads",
        "num_layers": "num_hidden_layers",
        "num_query_heads": "num_attention_heads",
        "ssm_state_size": "mamba_d_state",
        "state_size": "mamba_d_state",
        "torch_dtype": "dtype",
    }
)
"""What a few families call a field that most call otherwise."""

_FAMILY_DEFAULTS: Final[Mapping[str, Mapping[str, object]]] = MappingProxyType(
    {
        "cohere2": {"sliding_window": 4096, "sliding_window_pattern": 4},
        "gemma": {"head_dim": 256},
        "gemma2": {
            "head_dim": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 2,
        },
        "gemma3_text": {
            "num_hidden_layers": 26,
            "hidden_size": 2304,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
        },
    }
)
"""What published files of a family leave out, since its code has a default for it."""

_REFUSED_FAMILIES: Final = (
    "deepseek_v4",
    "longcat_flash",
    "rwkv",
    "xlstm",
    "zaya",
)
"""Families whose caches no spec describes: a plan would be wrong without a word."""

_REFUSED_FIELDS: Final = (
    "attention_types",
    "block_configs",
    "block_types",
    "compress_ratios",
    "cross_attention_layers",
    "hybrid_layer_pattern",
    "swa_num_key_value_heads",
)
"""Fields that give layers such caches."""


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
    def read(cls, config: Mapping[str, Any]) -> Self:
        """Read the content of a `config.json`.

        Args:
            config: Its content.

        Raises:
            ConfigError: It is no decoder's, a field is missing or of a wrong type, or
                no spec describes the caches of its family.
        """
        parts = (config.get(name) for name in _TEXT_PARTS)
        text = next(
            (
                cast("Mapping[str, Any]", part)
                for part in parts
                if isinstance(part, Mapping)
            ),
            config,
        )
        # Of the whole model, only what its text part leaves out.
        fields = {
            "dtype": config.get("dtype") or config.get("torch_dtype"),
            "is_encoder_decoder": config.get("is_encoder_decoder"),
            **_by_usual_names(text),
        }
        if isinstance(fields["dtype"], str):
            fields["dtype"] = fields["dtype"].removeprefix("torch.")
        fields = {n: v for n, v in fields.items() if v is not None and v != "auto"}
        _refuse_unknown_caches(fields)
        layers = fields.get("layer_types") or fields.get("hybrid_override_pattern")
        if isinstance(layers, list | tuple | str):
            fields.setdefault("num_hidden_layers", len(cast("str", layers)))
        defaults = _FAMILY_DEFAULTS.get(str(fields.get("model_type")), {})
        try:
            read = msgspec.convert({**defaults, **fields}, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"config: {error}") from error
        read._check()
        return read

    def _check(self) -> None:
        if self.is_encoder_decoder:
            raise ConfigError("the model must be a decoder, got an encoder-decoder")
        if not 1 <= self.num_hidden_layers <= _MAX_NUM_LAYERS:
            raise ConfigError(
                f"num_hidden_layers must be in 1..{_MAX_NUM_LAYERS}, got "
                f"{self.num_hidden_layers}"
            )


def _by_usual_names(values: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in values.items() if value is not None}
    renamed = {
        usual: given[name] for name, usual in _OTHER_NAMES.items() if name in given
    }
    return {**renamed, **given}


def _refuse_unknown_caches(fields: Mapping[str, Any]) -> None:
    family = fields.get("model_type")
    if family in _REFUSED_FAMILIES:
        raise ConfigError(f"no spec describes the caches of a model of type {family}")
    for name in _REFUSED_FIELDS:
        if fields.get(name):
            raise ConfigError(f"no spec describes the caches of a model with {name}")

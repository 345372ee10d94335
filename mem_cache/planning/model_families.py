"""Which families of models a plan knows, and which it refuses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from ..errors import ConfigError

_KNOWN: Final = frozenset(
    [
        "RefinedWeb",
        "RefinedWebModel",
        "afmoe",
        "apertus",
        "apertus1p5_text",
        "arcee",
        "aria_text",
        "baichuan",
        "bailing_moe",
        "bamba",
        "bloom",
        "chatglm",
        "codegen",
        "cohere",
        "cohere2",
        "cohere2_moe",
        "cwm",
        "dbrx",
        "deepseek",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "diffllama",
        "doge",
        "dots1",
        "ernie4_5",
        "ernie4_5_moe",
        "exaone",
        "exaone4",
        "exaone_moe",
        "falcon",
        "falcon_h1",
        "falcon_mamba",
        "flex_olmo",
        "flint",
        "gemma",
        "gemma2",
        "gemma3_text",
        "gemma3n_text",
        "gemma4_text",
        "gemma4_unified_text",
        "glm",
        "glm4",
        "glm4_moe",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "gpt2",
        "gpt_bigcode",
        "gpt_neox",
        "gpt_oss",
        "gptj",
        "granite",
        "granite_swa",
        "granitemoe",
        "granitemoe_swa",
        "granitemoehybrid",
        "granitemoeshared",
        "helium",
        "hf_olmo",
        "hunyuan",
        "hunyuan_v1_dense",
        "hunyuan_v1_moe",
        "hy_v3",
        "hyperclovax",
        "internlm2",
        "internlm3",
        "jais2",
        "jamba",
        "jetmoe",
        "kimi_k2",
        "kimi_linear",
        "kolibri1",
        "laguna",
        "lfm2",
        "lfm2_moe",
        "llama",
        "llama4_text",
        "mamba",
        "mamba2",
        "mellum",
        "minicpm",
        "minicpm3",
        "minimax",
        "minimax_m2",
        "minimax_text_01",
        "ministral",
        "ministral3",
        "mistral",
        "mixtral",
        "mpt",
        "nanochat",
        "nemotron",
        "nemotron_h",
        "olmo",
        "olmo2",
        "olmo3",
        "olmo_hybrid",
        "olmoe",
        "opt",
        "persimmon",
        "phi",
        "phi3",
        "phimoe",
        "qwen",
        "qwen2",
        "qwen2_5_vl",
        "qwen2_5_vl_text",
        "qwen2_moe",
        "qwen2_vl",
        "qwen2_vl_text",
        "qwen3",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_vl_moe_text",
        "qwen3_vl_text",
        "sarvam_moe",
        "seed_oss",
        "smollm3",
        "solar_open",
        "stablelm",
        "starcoder2",
        "step3_text",
        "vaultgemma",
        "zamba",
        "zamba2",
    ]
)
"""The families (`model_type`) whose fields are read for what they mean there."""

_REFUSED: Final = frozenset(
    [
        "deepseek_v4",
        "hrm_text",
        "hymba",
        "inkling2_loop_text",
        "inkling2_text",
        "inkling_text",
        "longcat_flash",
        "mimo_v2_flash",
        "minimax_m3_vl_text",
        "plamo2",
        "recurrent_gemma",
        "rwkv",
        "xlstm",
        "zaya",
    ]
)
"""Families whose caches no spec describes: a plan would be wrong without a word."""

_NO_DECODERS: Final = frozenset(
    [
        "albert",
        "bart",
        "beit",
        "bert",
        "big_bird",
        "camembert",
        "canine",
        "clip",
        "clip_text_model",
        "clip_vision_model",
        "convnext",
        "data2vec-text",
        "deberta",
        "deberta-v2",
        "deit",
        "dinov2",
        "distilbert",
        "electra",
        "ernie",
        "esm",
        "funnel",
        "hubert",
        "layoutlm",
        "layoutlmv3",
        "longformer",
        "marian",
        "mbart",
        "mobilebert",
        "modernbert",
        "mpnet",
        "mt5",
        "nomic_bert",
        "nystromformer",
        "pegasus",
        "roberta",
        "roformer",
        "siglip",
        "siglip_text_model",
        "siglip_vision_model",
        "squeezebert",
        "swin",
        "t5",
        "vit",
        "vit_mae",
        "wav2vec2",
        "wavlm",
        "whisper",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xlm_roberta",
    ]
)
"""Families that compute each input once, or that also have an encoder."""

_REFUSED_FIELDS: Final = (
    "attention_types",
    "block_configs",
    "block_types",
    "compress_ratios",
    "cross_attention_layers",
    "global_attn_idx",
    "hybrid_layer_pattern",
    "kv_reuse_group",
    "mamba_step",
    "swa_num_key_value_heads",
    "use_cla",
)
"""Fields that give layers caches that no spec describes."""

_REFUSED_ABOVE_ONE: Final = ("cla_share_factor", "layer_group_size")
"""Such fields too; 1 means that nothing is shared."""

_SHARES: Final = re.compile(r"(^|_)kv_.*(shar|reuse)|(shar|reuse).*_kv($|_)")
"""How fields are called by which layers read K and V of others."""

_UNDERSTOOD: Final = frozenset({"num_kv_shared_layers", "kv_sharing_modes"})
"""Such fields that are read, or that follow from one that is."""

_NOTHING: Final[tuple[object, ...]] = (None, False, 0, 1, [], (), {}, "")
"""Values of such fields by which nothing is shared."""

_MIXED: Final = frozenset(
    [
        "bailing_hybrid",
        "granitemoehybrid",
        "kimi_linear",
        "lara_mini",
        "lfm3",
        "minimax",
        "minimax_text_01",
        "nemotron_h",
        "olmo_hybrid",
        "zamba",
        "zamba2",
    ]
)
"""Families whose layers differ, and which have no simple rule for which is what."""

_LAYER_FIELDS: Final = (
    "attn_layer_indices",
    "attn_type_list",
    "hybrid_override_pattern",
    "layer_types",
    "linear_attn_config",
)
"""The fields that name the type of each layer."""


def is_known(family: str) -> bool:
    """Tell whether it is known what the fields of a family mean.

    Args:
        family: The `model_type` of a config.
    """
    return family in _KNOWN


def check_family(fields: Mapping[str, Any], *, assume_dense: bool) -> None:
    """Refuse a config whose caches are not known to be what its fields seem to say.

    A config without a `model_type` is taken at its word.

    Args:
        fields: The fields of the config, by their usual names.
        assume_dense: Take one of an unknown family at its word as well.

    Raises:
        ConfigError: The model is no decoder, no spec describes its caches, or its
            family is not known.
    """
    family = str(fields.get("model_type") or "")
    if fields.get("is_encoder_decoder") is True:
        raise ConfigError("the model must be a decoder, got an encoder-decoder")
    if family in _NO_DECODERS and fields.get("is_decoder") is not True:
        raise ConfigError(f"the model must be a decoder, got model_type {family}")
    if fields.get("use_bidirectional_attention") is True:
        raise ConfigError("the model must be a decoder, got bidirectional attention")
    if family in _REFUSED:
        raise ConfigError(f"no spec describes the caches of a model of type {family}")
    _check_fields(fields)
    if family in _MIXED and not any(fields.get(n) is not None for n in _LAYER_FIELDS):
        raise ConfigError(
            f"a config of type {family} must name the type of each layer by one of "
            f"{', '.join(_LAYER_FIELDS)}, got none"
        )
    if family and family not in _KNOWN and not assume_dense:
        raise ConfigError(
            f"model_type must be of a family that is known, got {family}: if its "
            "layers keep K and V by head as its fields say, go on with assume_dense "
            "(--assume-dense)"
        )


def _check_fields(fields: Mapping[str, Any]) -> None:
    refused = [name for name in _REFUSED_FIELDS if fields.get(name)]
    for name in _REFUSED_ABOVE_ONE:
        value = fields.get(name)
        if name == "cla_share_factor" and fields.get("use_cla") is False:
            continue  # says how layers would share, if they did
        if value and value != 1:
            refused.append(name)
    refused += [
        name
        for name, value in fields.items()
        if _SHARES.search(name) and name not in _UNDERSTOOD and value not in _NOTHING
    ]
    if refused:
        raise ConfigError(f"no spec describes the caches of a model with {refused[0]}")

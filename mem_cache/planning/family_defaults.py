"""What the configs of a family may leave out, since its code has a default for it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

_QWEN2: Final = {"use_sliding_window": False, "max_window_layers": 28}
_QWEN3: Final = {**_QWEN2, "head_dim": 128}
_QWEN3_NEXT: Final = {"head_dim": 256, "full_attention_interval": 4}
_QWEN2_VL: Final = {**_QWEN2, "num_key_value_heads": 8}
_MLA: Final = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
_INDEXED_MLA: Final = {**_MLA, "index_head_dim": 128}
_GEMMA2: Final = {"head_dim": 256, "sliding_window": 4096, "sliding_window_pattern": 2}

_DEFAULTS: Final[Mapping[str, Mapping[str, object]]] = MappingProxyType(
    {
        "afmoe": {"sliding_window": 1024, "head_dim": 128},
        "bamba": {"num_key_value_heads": 8, "mamba_d_state": 256, "mamba_n_heads": 128},
        "cohere2": {"sliding_window": 4096, "sliding_window_pattern": 4},
        "cohere2_moe": {"sliding_window": 4096, "sliding_window_pattern": 4},
        "cwm": {"num_key_value_heads": 8, "head_dim": 128, "sliding_window": 8192},
        "dbrx": {"num_key_value_heads": 1},
        "deepseek_v2": _MLA,
        "deepseek_v3": _MLA,
        "deepseek_v32": _INDEXED_MLA,
        "dots1": {"sliding_window": 4096, "max_window_layers": 62},
        "ernie4_5": {"num_key_value_heads": 2, "head_dim": 128},
        "ernie4_5_moe": {"num_key_value_heads": 4},
        "exaone": {"num_key_value_heads": 8},
        "exaone4": {"sliding_window": 4096, "sliding_window_pattern": 4},
        "exaone_moe": {"sliding_window": 4096, "sliding_window_pattern": 4},
        "falcon": {"multi_query": True},
        "falcon_mamba": {"mamba_d_state": 16},
        "flint": {"num_key_value_heads": 4, "head_dim": 128, "sliding_window": 513},
        "gemma": {"head_dim": 256, "num_key_value_heads": 16},
        "gemma2": {**_GEMMA2, "num_key_value_heads": 4},
        "gemma3_text": {
            "num_hidden_layers": 26,
            "hidden_size": 2304,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
        },
        "gemma3n_text": {
            "num_key_value_heads": 2,
            "head_dim": 256,
            "sliding_window": 512,
            "sliding_window_pattern": 5,
            "num_kv_shared_layers": 15,
        },
        "gemma4_text": {
            "num_key_value_heads": 4,
            "head_dim": 256,
            "global_head_dim": 512,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
        },
        "gemma4_unified_text": {
            "num_key_value_heads": 4,
            "head_dim": 256,
            "global_head_dim": 512,
            "sliding_window": 1024,
        },
        "glm": {"head_dim": 128, "num_key_value_heads": 2},
        "glm4": {"head_dim": 128, "num_key_value_heads": 2},
        "glm4_moe": {"num_key_value_heads": 8},
        "glm4_moe_lite": _MLA,
        "glm_moe_dsa": _INDEXED_MLA,
        "gpt_bigcode": {"multi_query": True},
        "gpt_oss": {
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
        },
        "granite_swa": {"num_key_value_heads": 4, "sliding_window": 128},
        "granitemoe_swa": {"sliding_window": 128},
        "hy_v3": {"num_key_value_heads": 8, "head_dim": 128},
        "internlm3": {"num_key_value_heads": 2, "head_dim": 128},
        "jamba": {
            "num_key_value_heads": 8,
            "attn_layer_period": 8,
            "attn_layer_offset": 4,
            "mamba_d_state": 16,
        },
        "jetmoe": {"num_key_value_heads": 16, "head_dim": 128},
        "kimi_k2": _MLA,
        "kolibri1": {"num_key_value_heads": 4, "head_dim": 128, "sliding_window": 513},
        "laguna": {"num_key_value_heads": 8, "head_dim": 128, "sliding_window": 512},
        "lfm2": {"num_key_value_heads": 8},
        "lfm2_moe": {"num_key_value_heads": 8},
        "llama4_text": {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_chunk_size": 8192,
        },
        "mamba": {"mamba_d_state": 16},
        "mamba2": {
            "mamba_d_state": 128,
            "num_heads": 128,
            "head_dim": 64,
            "mamba_n_groups": 8,
        },
        "mellum": {"num_key_value_heads": 4, "head_dim": 128, "sliding_window": 1024},
        "minicpm3": {"kv_lora_rank": 256, "qk_rope_head_dim": 32},
        "minimax_m2": {"num_key_value_heads": 8, "head_dim": 128},
        "ministral": {"num_key_value_heads": 8, "sliding_window": 4096},
        "ministral3": {"num_key_value_heads": 8, "head_dim": 128},
        "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
        "mixtral": {"num_key_value_heads": 8},
        "olmo3": {"sliding_window": 4096, "sliding_window_pattern": 4},
        "phimoe": {"num_key_value_heads": 8},
        "qwen2": _QWEN2,
        "qwen2_5_vl": _QWEN2_VL,
        "qwen2_5_vl_text": _QWEN2_VL,
        "qwen2_moe": _QWEN2,
        "qwen2_vl": _QWEN2_VL,
        "qwen2_vl_text": _QWEN2_VL,
        "qwen3": _QWEN3,
        "qwen3_5_moe_text": {**_QWEN3_NEXT, "num_key_value_heads": 2},
        "qwen3_5_text": {**_QWEN3_NEXT, "num_key_value_heads": 4},
        "qwen3_moe": {"use_sliding_window": False, "num_key_value_heads": 4},
        "qwen3_next": {**_QWEN3_NEXT, "num_key_value_heads": 2},
        "qwen3_vl_text": {"head_dim": 128},
        "sarvam_moe": {"num_key_value_heads": 4},
        "seed_oss": {"head_dim": 128, "num_key_value_heads": 8},
        "smollm3": {"num_key_value_heads": 4, "use_sliding_window": False},
        "solar_open": {"num_key_value_heads": 8, "head_dim": 128},
        "starcoder2": {"num_key_value_heads": 2},
        "vaultgemma": {**_GEMMA2, "num_key_value_heads": 4},
    }
)
"""What published files of a family leave out, since its code has a default for it."""


def family_defaults(model_type: str) -> Mapping[str, object]:
    """Return the fields that a config of a family may leave out; null is not left out.

    Args:
        model_type: What the config calls the family.

    Example:
        >>> dict(family_defaults("mixtral"))
        {'num_key_value_heads': 8}
    """
    return _DEFAULTS.get(model_type, {})

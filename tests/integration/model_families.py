"""Tiny random models of the families that transformers has, with awkward configs.

Fields are set that a family ignores, `sliding_window` above all; where one has windows
or chunks, texts of 40 tokens cross them several times.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from radixkv.scheduling.models import TransformersObject

_BASE: Final[dict[str, Any]] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 8,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_MOE: Final[dict[str, Any]] = {
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1},
    **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
}
_ALTERNATING: Final = ["sliding_attention", "full_attention"]
_HEADS_OF_8: Final[dict[str, Any]] = {"head_dim": 8}

FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "afmoe": _MOE,
    "apertus": {},
    "arcee": {},
    "biogpt": _HEADS_OF_8,
    "bitnet": _HEADS_OF_8,
    "cohere": {},
    "cohere2": {},
    "diffllama": {},
    "doge": {"keep_window_size": 2048, "sliding_window": None},
    "ernie4_5": {},
    "exaone4": {},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0},
    "gemma3_text": {"layer_types": _ALTERNATING * 2, "query_pre_attn_scalar": 16},
    "gemma3n_text": {
        **{"num_kv_shared_layers": 2, "num_hidden_layers": 6},
        **{"layer_types": _ALTERNATING * 3, "intermediate_size": [48] * 6},
        **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97},
        **{"laurel_rank": 4, "altup_num_inputs": 2},
        "activation_sparsity_pattern": [0.0] * 6,
    },
    "gemma4_text": {
        **{"num_kv_shared_layers": 2, "num_hidden_layers": 6},
        "layer_types": _ALTERNATING * 3,
        **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97},
    },
    "glm": {},
    "glm4": {},
    "glm4_moe": _MOE,
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neox": {},
    "granite": {},
    "granitemoe": _MOE,
    "hunyuan_v1_dense": {},
    "internlm3": {},
    "jetmoe": _MOE,
    "llama": {},
    "llama4_text": {
        **_MOE,
        **{"attention_chunk_size": 16, "intermediate_size_mlp": 48},
        # So that the temperature begins to rise within these texts.
        **{"floor_scale": 8, "attn_scale": 0.5, "attn_temperature_tuning": True},
        **{"interleave_moe_layer_step": 2, "no_rope_layer_interval": 2},
    },
    "minimax_m2": _MOE,
    "ministral": {},
    "ministral3": {
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0},
            **{"original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.5},
        }
    },
    "mistral": {},
    "mixtral": _MOE,
    "moshi": {},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": {},
    "olmoe": {**_MOE, **_HEADS_OF_8},
    "opt": {},
    "persimmon": {**_HEADS_OF_8, "num_key_value_heads": 4},
    "phi": {},
    "phi3": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2},
    "qwen2_moe": _MOE,
    "qwen3": {},
    "qwen3_moe": _MOE,
    "seed_oss": {},
    "smollm3": {},
    "stablelm": _HEADS_OF_8,
    "starcoder2": {},
    "vaultgemma": {},
}
"""What each family needs besides; all of them keep K and V."""

QUICK: Final = [
    *("cohere2", "diffllama", "doge", "gemma2", "gemma3n_text", "gemma4_text"),
    *("glm4", "gpt2", "granite", "llama", "llama4_text", "ministral3", "nemotron"),
    *("qwen2", "qwen3_moe"),
]
"""Those with a way of their own, and some that ignore what their config says."""


def tiny_model(
    family: str, dtype: torch.dtype = torch.float32, **options: object
) -> TransformersObject:
    """Make a model with large random weights, so that tokens vary.

    Args:
        family: One of `FAMILIES`.
        dtype: Dtype of the weights.
        **options: Fields of the config that go before those of the family.
    """
    config: Any = AutoConfig.for_model(
        family, **{**_BASE, **FAMILIES[family], **options}
    )
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, None)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
        for name, weight in model.named_parameters():
            if weight.ndim >= 2:
                torch.nn.init.normal_(weight, std=1.2 / weight.shape[-1] ** 0.5)
            elif "bias" in name:
                torch.nn.init.normal_(weight, std=0.3)
    return model.eval()

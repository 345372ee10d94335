"""Specs of real model code, against the cache that it fills by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

from radixkv.mem_cache import (
    ChunkedLocalAttentionSpec,
    ConfigError,
    FullAttentionSpec,
    MambaSpec,
    MLASpec,
    SlidingWindowSpec,
)
from radixkv.mem_cache.planning import AnyKVCacheSpec
from radixkv.scheduling import LoadedModel, get_kv_cache_spec

NUM_TOKENS = 12

DENSE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = DENSE | {"sliding_window": 8}
EXPERTS = {
    "n_routed_experts": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {name: size for name, size in DENSE.items() if name != "head_dim"} | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
}
ATTENTION_FREE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "state_size": 4,
    "pad_token_id": 0,
}

MODELS: dict[str, dict[str, Any]] = {
    "llama": DENSE,
    "gpt2": {"vocab_size": 64, "n_embd": 64, "n_head": 4, "n_layer": 2},
    "gpt_bigcode": {"vocab_size": 64, "n_embd": 64, "n_head": 4, "n_layer": 2},
    "mistral": WINDOW,
    "qwen2": WINDOW | {"use_sliding_window": True, "max_window_layers": 2},
    "gemma2": WINDOW,
    "gemma3_text": WINDOW | {"num_hidden_layers": 7},
    "gpt_oss": WINDOW | EXPERTS,
    "cohere2": WINDOW,
    "exaone4": WINDOW,
    "llama4_text": DENSE
    | EXPERTS
    | {"attention_chunk_size": 8, "intermediate_size_mlp": 96},
    "deepseek_v3": LATENT | EXPERTS,
    "minicpm3": LATENT,
    "qwen3_next": DENSE | DELTA | EXPERTS,
    "olmo_hybrid": DENSE | DELTA,
    "kimi_linear": LATENT
    | EXPERTS
    | {
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "jamba": DENSE
    | EXPERTS
    | {
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
    },
    "bamba": DENSE | MAMBA2 | {"attn_layer_indices": [1]},
    "falcon_h1": DENSE | MAMBA2 | {"mamba_d_ssm": 128},
    "granitemoehybrid": DENSE
    | MAMBA2
    | EXPERTS
    | {"layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 32},
    "nemotron_h": {n: v for n, v in DENSE.items() if n != "num_hidden_layers"}
    | EXPERTS
    | {
        "hybrid_override_pattern": "M-*E",
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "ssm_state_size": 8,
        "n_groups": 2,
        "moe_shared_expert_intermediate_size": 32,
    },
    "zamba2": LATENT
    | {
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "mamba_d_state": 8,
        "n_mamba_heads": 4,
        "mamba_headdim": 32,
        "num_mem_blocks": 1,
        "adapter_rank": 4,
        "kv_lora_rank": None,
        "v_head_dim": None,
    },
    "lfm2": DENSE
    | {
        "layer_types": ["conv", "full_attention"] * 2,
        "block_auto_adjust_ff_dim": False,
    },
    "mamba": ATTENTION_FREE | {"time_step_rank": 4},
    "falcon_mamba": ATTENTION_FREE | {"time_step_rank": 4, "intermediate_size": 128},
    "mamba2": ATTENTION_FREE | {"num_heads": 8, "head_dim": 16, "n_groups": 2},
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Keep transformers from telling of kernels that are not installed."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(verbosity)


def build(family: str) -> Any:  # noqa: ANN401
    config = transformers.CONFIG_MAPPING[family](**MODELS[family])
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def kept(model: Any) -> list[dict[str, tuple[int, ...]]]:  # noqa: ANN401
    """Return the shapes of what each layer keeps of a text, after reading it."""
    with torch.no_grad():
        output = model(torch.arange(1, NUM_TOKENS + 1)[None], use_cache=True)
    cache = getattr(output, "past_key_values", None)
    layers = (cache if cache is not None else output.cache_params).layers
    found: list[dict[str, tuple[int, ...]]] = []
    for layer in layers:
        shapes: dict[str, tuple[int, ...]] = {}
        for name in ("keys", "values"):
            part = getattr(layer, name, None)
            if isinstance(part, torch.Tensor) and part.numel():
                heads, num_tokens, dim = part.shape[1:]
                shapes[name] = (heads, dim, num_tokens < NUM_TOKENS)
        for name in ("conv_states", "recurrent_states"):
            for state in (getattr(layer, name, None) or {}).values():
                if state is not None:
                    shapes[name] = tuple(state.shape[1:])
        found.append(shapes)
    return found


def expected_of(spec: AnyKVCacheSpec) -> dict[str, tuple[int, ...]]:
    """Return in which shapes transformers keeps what a spec describes."""
    if isinstance(spec, MambaSpec):
        # It keeps one input more than a convolution needs.
        channels, width = spec.shapes[0]
        shapes: dict[str, tuple[int, ...]] = {"conv_states": (channels, width + 1)}
        if len(spec.shapes) > 1:
            shapes["recurrent_states"] = spec.shapes[1]
        return shapes
    if isinstance(spec, MLASpec):
        return {
            "keys": (1, spec.latent_dim, False),
            "values": (1, spec.rope_dim, False),
        }
    local = isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec)
    return {
        "keys": (spec.num_kv_heads, spec.head_dim, local),
        "values": (spec.num_kv_heads, spec.v_head_dim, local),
    }


@pytest.mark.parametrize("family", MODELS)
def test_s3_2_the_specs_are_of_what_the_model_keeps_by_itself(family: str) -> None:
    model = build(family)

    specs = get_kv_cache_spec(model)

    found = kept(model)
    expected: list[dict[str, tuple[int, ...]]] = [{} for _ in found]
    for name, spec in specs.items():
        (layer,) = (int(part) for part in name.split(".") if part.isdecimal())
        expected[layer] |= expected_of(spec)
    assert expected == found


def test_layers_are_named_as_their_modules() -> None:
    model = build("falcon_h1")

    specs = get_kv_cache_spec(model)

    modules = dict(model.named_modules())
    assert set(specs) <= set(modules)
    assert "FalconH1Attention" == type(modules["model.layers.3.self_attn"]).__name__
    assert isinstance(specs["model.layers.3.self_attn"], FullAttentionSpec)
    assert isinstance(specs["model.layers.3.mamba"], MambaSpec)


def test_the_dtype_is_that_of_the_model_unless_one_is_given() -> None:
    model = build("llama").to(torch.bfloat16)

    own = get_kv_cache_spec(model)
    fp8 = get_kv_cache_spec(model, dtype="float8_e4m3fn", page_size=32)

    assert "bfloat16" == own["model.layers.0.self_attn"].dtype  # type: ignore[union-attr]
    assert 2 * 16 * 2 * 16 * 2 == own["model.layers.0.self_attn"].page_bytes
    assert 2 * 32 * 2 * 16 * 1 == fp8["model.layers.0.self_attn"].page_bytes


def test_a_config_that_says_other_heads_than_the_modules_have_is_refused() -> None:
    model = build("llama")
    model.config.num_key_value_heads = 4

    with pytest.raises(
        ConfigError, match=r"k_proj of .*self_attn must be 64, .* got 32"
    ):
        get_kv_cache_spec(model)


def test_a_config_that_says_another_window_is_refused() -> None:
    model = build("gemma2")
    model.config.sliding_window = 9

    with pytest.raises(ConfigError, match=r"sliding_window of .* must be 9, .* got 8"):
        get_kv_cache_spec(model)


def test_a_config_with_more_layers_than_the_model_is_refused() -> None:
    model = build("llama")
    model.config.num_hidden_layers = 5

    with pytest.raises(ConfigError, match=r"names layers\.4\.attention, the model has"):
        get_kv_cache_spec(model)


def test_a_module_that_the_config_does_not_name_is_refused() -> None:
    model = build("llama")
    model.config.num_hidden_layers = 3

    with pytest.raises(ConfigError, match=r"keep: \['model\.layers\.3\.self_attn'\]"):
        get_kv_cache_spec(model)


def test_a_layer_with_two_modules_of_one_kind_is_refused() -> None:
    model = build("llama")
    layers = model.model.layers
    layers[0].cross_attn = type(layers[0].self_attn)(model.config, 0)

    with pytest.raises(ConfigError, match=r"two modules .* model\.layers\.0\.cross"):
        get_kv_cache_spec(model)


def test_a_state_with_other_channels_is_refused() -> None:
    model = build("lfm2")
    model.config.hidden_size = 32

    with pytest.raises(ConfigError, match=r"channels of .* must be 32, .* got 64"):
        get_kv_cache_spec(model)


def test_latent_attention_of_another_width_is_refused() -> None:
    model = build("minicpm3")
    model.config.kv_lora_rank = 32

    with pytest.raises(ConfigError, match=r"kv_a_proj of .* must be 40, .* got 32"):
        get_kv_cache_spec(model)


def test_attention_that_looks_ahead_is_refused() -> None:
    model = build("llama")
    model.model.layers[2].self_attn.is_causal = False

    with pytest.raises(ConfigError, match=r"must be causal, got model\.layers\.2\."):
        get_kv_cache_spec(model)


def test_the_wrapper_of_a_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="takes the `model` of a LoadedModel"):
        get_kv_cache_spec(LoadedModel("llama", build("llama"), None))

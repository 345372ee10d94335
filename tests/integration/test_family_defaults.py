"""What a plan fills in for a family is what transformers fills in."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from radixkv.mem_cache import ConfigError, specs_from_model_config

SIZES = (
    *("model_type", "num_hidden_layers", "hidden_size", "num_attention_heads"),
    *("n_embd", "n_layer", "n_head", "d_model", "n_layers", "n_heads"),
)
"""What a config has to say of itself; transformers has defaults for the rest."""

DENSE = [
    *("arcee", "bloom", "cohere", "cohere2", "falcon", "gemma"),
    *("gemma2", "gemma3_text", "glm", "glm4", "gpt2", "gpt_bigcode"),
    *("gpt_neox", "gpt_oss", "granite", "internlm3", "lfm2", "llama"),
    *("llama4_text", "minimax_m2", "ministral", "mistral", "mixtral", "mpt"),
    *("olmo3", "opt", "phi3", "phimoe", "qwen2", "qwen2_5_vl_text"),
    *("qwen2_moe", "qwen3", "qwen3_moe", "qwen3_vl_text", "seed_oss", "smollm3"),
    *("stablelm", "starcoder2"),
]
LATENT = ["deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "minicpm3"]
WITH_STATES = ["falcon_h1", "kimi_linear", "minimax", "nemotron_h", "qwen3_next"]


def whole_config(family: str) -> dict[str, Any]:
    config: dict[str, Any] = CONFIG_MAPPING[family]().to_dict()
    return config


@pytest.mark.parametrize("family", DENSE + LATENT)
def test_a_config_that_leaves_defaults_out_has_the_specs_of_the_whole_one(
    family: str,
) -> None:
    whole = whole_config(family)
    sparse = {name: whole[name] for name in SIZES if name in whole}

    assert specs_from_model_config(whole, dtype="float16") == (
        specs_from_model_config(sparse, dtype="float16")
    )


@pytest.mark.parametrize("family", WITH_STATES)
def test_a_config_that_does_not_say_how_its_layers_differ_is_refused(
    family: str,
) -> None:
    whole = whole_config(family)
    sparse = {name: whole[name] for name in SIZES if name in whole}

    assert specs_from_model_config(whole, dtype="float16")
    with pytest.raises(ConfigError, match=r"must name the type|must say how large"):
        specs_from_model_config(sparse, dtype="float16")


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "qwen3_next"])
def test_a_config_object_is_read_as_its_file_would_be(family: str) -> None:
    config = CONFIG_MAPPING[family]()

    assert specs_from_model_config(config, dtype="float16") == (
        specs_from_model_config(config.to_dict(), dtype="float16")
    )


@pytest.mark.parametrize("family", ["bert", "vit", "t5", "whisper", "wav2vec2", "bart"])
def test_a_model_that_is_no_decoder_is_refused(family: str) -> None:
    with pytest.raises(ConfigError, match="the model must be a decoder, got"):
        specs_from_model_config(whole_config(family), dtype="float16")

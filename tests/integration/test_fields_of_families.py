"""A plan reads each field of a config as the code of the model's family does.

Tiny models are made of configs that carry fields about windows, chunks and heads,
whether their family reads them or not, and watched while they read a text.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

import pytest
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from radixkv.mem_cache import (
    ChunkedLocalAttentionSpec,
    MambaSpec,
    MLASpec,
    SlidingWindowSpec,
    specs_from_model_config,
)
from radixkv.mem_cache.planning.model_families import is_known

from .attention_probe import NUM_TOKENS, TINY, Seen, build, watch

LISTED = ["full_attention", "sliding_attention"] * 2 + ["full_attention"]
CARRIED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "wide heads": {"head_dim": 24},
    "a window": {"sliding_window": 4},
    "a window that is off": {"sliding_window": 4, "use_sliding_window": False},
    "a window above 2 layers": {
        "sliding_window": 4,
        "use_sliding_window": True,
        "max_window_layers": 2,
    },
    "a window in a pattern": {"sliding_window": 4, "sliding_window_pattern": 3},
    "a window in some layers": {
        "sliding_window": 4,
        "use_sliding_window": True,
        "layer_types": LISTED,
    },
    "chunks": {"attention_chunk_size": 4},
}
"""What a config carries besides its sizes."""

OWN_SIZES: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 8},
    "deepseek_v3": {"qk_rope_head_dim": 16},
    "falcon": {"head_dim": None},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "glm4_moe_lite": {"head_dim": None, "qk_rope_head_dim": 16},
    "gptj": {"rotary_dim": 8},
}
"""What a family needs else; None takes a size away."""

OFTEN = [
    *("arcee", "cohere", "cohere2", "gemma2", "gemma3_text", "glm4", "gpt2"),
    *("gpt_oss", "granite", "llama", "llama4_text", "mistral", "olmo3"),
    *("phi3", "qwen2", "qwen2_moe", "qwen3_moe", "smollm3"),
]
"""Families tried at each run of the tests, some for each rule."""

HYBRID = {
    *("falcon_h1", "kimi_linear", "minimax", "nemotron_h", "olmo_hybrid"),
    *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
}
"""Families whose published configs say more than these sizes, of their states."""

NOT_MADE = {
    *("bamba", "dbrx", "falcon_mamba", "granitemoehybrid", "lfm2_moe", "mamba"),
    *("mamba2", "zamba", "zamba2"),
}
"""Known families that take more than these sizes, and that have no windows."""

NOT_RUN = {
    *product(
        ("deepseek_v3", "helium", "olmoe", "persimmon", "stablelm"), ["wide heads"]
    ),
    *product(("gemma4_text", "gemma4_unified_text"), ["chunks"]),
    *product(
        [
            *("deepseek_v32", "falcon_h1", "glm_moe_dsa", "jamba", "kimi_linear"),
            *("lfm2", "llama4_text", "minimax", "nemotron_h", "olmo_hybrid"),
            *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
        ],
        ["a window in some layers"],
    ),
}
"""What the code of a family refuses, or fails on."""

OTHERS = sorted(
    {name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if is_known(name)}
    - NOT_MADE
    - set(OFTEN)
)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Keep transformers from telling of fields that it does not know."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.CRITICAL)
    yield
    transformers.logging.set_verbosity(verbosity)


def fields_of(family: str, carried: str) -> dict[str, Any]:
    """Return the fields of a config as it would be published."""
    fields = {"model_type": family, **TINY, **OWN_SIZES.get(family, {})}
    given = {name: value for name, value in fields.items() if value is not None}
    return given | {
        name: value
        for name, value in CARRIED[carried].items()
        if fields.get(name, value) is not None
    }


def planned(config: dict[str, Any]) -> dict[int, Seen]:
    """Return what a plan says that each layer with attention keeps and sees."""
    found: dict[int, Seen] = {}
    for name, spec in specs_from_model_config(config, dtype="float32").items():
        layer = int(name.split(".")[1])
        if isinstance(spec, MambaSpec):
            continue
        if isinstance(spec, MLASpec):
            found[layer] = Seen(1, spec.latent_dim, spec.rope_dim, NUM_TOKENS)
            continue
        reach = NUM_TOKENS
        if isinstance(spec, SlidingWindowSpec):
            reach = min(spec.window_size, NUM_TOKENS)
        if isinstance(spec, ChunkedLocalAttentionSpec):
            reach = (NUM_TOKENS - 1) % spec.chunk_size + 1
        found[layer] = Seen(spec.num_kv_heads, spec.head_dim, spec.v_head_dim, reach)
    return found


def check(family: str, carried: str) -> None:
    fields = fields_of(family, carried)
    config = CONFIG_MAPPING[family](**fields)
    seen = watch(build(config))

    # First what transformers makes of the config, then the config as it is published.
    for whole in [config.to_dict()] + [fields] * (family not in HYBRID):
        said = planned(whole)
        shown = {
            layer: each._replace(reach=said[layer].reach)
            if each.reach is None
            else each
            for layer, each in seen.items()
        }
        assert said == shown


def pairs_of(families: Iterable[str]) -> list[tuple[str, str]]:
    """Return the families, each with all that its config may carry."""
    return [pair for pair in product(families, CARRIED) if pair not in NOT_RUN]


@pytest.mark.parametrize(("family", "carried"), pairs_of(OFTEN))
def test_a_plan_reads_the_fields_that_the_family_reads(
    family: str, carried: str
) -> None:
    check(family, carried)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "carried"), pairs_of(OTHERS))
def test_a_plan_reads_the_fields_that_any_family_reads(
    family: str, carried: str
) -> None:
    check(family, carried)

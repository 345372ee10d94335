"""Specs from the configs of real models, against figures computed by hand."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.mem_cache import (
    ChunkedLocalAttentionSpec,
    ConfigError,
    FullAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    MLASpec,
    SlidingWindowSpec,
    plan_kv_cache,
    report_plan,
    specs_from_model_config,
)
from radixkv.mem_cache.planning import AnyKVCacheSpec

FOLDER = Path(__file__).parents[1] / "data" / "model_configs"
MODELS = sorted(path.stem for path in FOLDER.glob("*.json"))

GIB = 2**30
LEN = 32768
CHUNK = 2048


def config_of(model: str) -> dict[str, Any]:
    return msgspec.json.decode((FOLDER / f"{model}.json").read_bytes())


def specs_of(model: str, **options: Any) -> dict[str, AnyKVCacheSpec]:  # noqa: ANN401
    options = {"dtype": "bfloat16", **options}
    return specs_from_model_config(config_of(model), **options)


def plan_of(model: str, **options: object) -> KVCacheConfig:
    specs = specs_of(model, **options)
    (config,) = plan_kv_cache([specs], [40 * GIB], max_len=LEN)
    return config


# model: layers of each kind and the bytes of one token (of a state: all its bytes)
LAYERS: dict[str, list[tuple[type, int, int]]] = {
    # 32 heads of 128, K and V, 2 bytes
    "llama-2-7b": [(FullAttentionSpec, 32, 32 * 128 * 2 * 2)],
    "llama-3.1-8b": [(FullAttentionSpec, 32, 8 * 128 * 2 * 2)],
    "llama-3.1-70b": [(FullAttentionSpec, 80, 8 * 128 * 2 * 2)],
    "smollm2-135m": [(FullAttentionSpec, 30, 3 * 64 * 2 * 2)],
    "gpt2": [(FullAttentionSpec, 12, 12 * 64 * 2 * 2)],
    "falcon-7b": [(FullAttentionSpec, 32, 1 * 64 * 2 * 2)],
    "mixtral-8x7b": [(FullAttentionSpec, 32, 8 * 128 * 2 * 2)],
    "qwen3-235b-a22b": [(FullAttentionSpec, 94, 4 * 128 * 2 * 2)],
    "mistral-7b-v0.1": [(SlidingWindowSpec, 32, 8 * 128 * 2 * 2)],
    "gemma-2-9b": [
        (FullAttentionSpec, 21, 8 * 256 * 2 * 2),
        (SlidingWindowSpec, 21, 8 * 256 * 2 * 2),
    ],
    "gemma-3-27b": [
        (FullAttentionSpec, 10, 16 * 128 * 2 * 2),
        (SlidingWindowSpec, 52, 16 * 128 * 2 * 2),
    ],
    "gpt-oss-120b": [
        (FullAttentionSpec, 18, 8 * 64 * 2 * 2),
        (SlidingWindowSpec, 18, 8 * 64 * 2 * 2),
    ],
    "llama-4-scout": [
        (FullAttentionSpec, 12, 8 * 128 * 2 * 2),
        (ChunkedLocalAttentionSpec, 36, 8 * 128 * 2 * 2),
    ],
    # 512 of the latent, 64 of rope; with an index 128 more
    "deepseek-v3": [(MLASpec, 61, 576 * 2)],
    "deepseek-v3.2": [(MLASpec, 61, (576 + 128) * 2)],
    # 3 x 32 heads of 128 before the convolution, 3 steps; 32 x 128 x 128 in float32
    "kimi-linear-48b-a3b": [
        (MLASpec, 7, 576 * 2),
        (MambaSpec, 20, 3 * 4096 * 3 * 2 + 32 * 128 * 128 * 4),
    ],
    # 2 x 16 heads of 128 for Q and K, 32 for V
    "qwen3-next-80b-a3b": [
        (FullAttentionSpec, 12, 2 * 256 * 2 * 2),
        (MambaSpec, 36, 8192 * 3 * 2 + 32 * 128 * 128 * 4),
    ],
    # 2 x 4096 channels, 3 steps; 16 numbers of state a channel
    "jamba-v0.1": [
        (FullAttentionSpec, 4, 8 * 128 * 2 * 2),
        (MambaSpec, 28, 8192 * 3 * 2 + 8192 * 16 * 4),
    ],
    # 128 heads of 64, and 2 x 8 groups of 128; 128 x 64 x 128 in float32
    "nemotron-h-8b": [
        (FullAttentionSpec, 4, 8 * 128 * 2 * 2),
        (MambaSpec, 24, (8192 + 2048) * 3 * 2 + 128 * 64 * 128 * 4),
    ],
    # Both in each layer: 24 heads of 64, and 2 groups of 128
    "falcon-h1-0.5b": [
        (FullAttentionSpec, 36, 2 * 64 * 2 * 2),
        (MambaSpec, 36, (1536 + 256) * 3 * 2 + 24 * 64 * 128 * 4),
    ],
}


@pytest.mark.parametrize("model", MODELS)
def test_s3_2_every_layer_has_the_spec_that_its_config_says(model: str) -> None:
    specs = specs_of(model)

    got = Counter(
        (type(spec), spec.page_bytes // (1 if type(spec) is MambaSpec else 16))
        for spec in specs.values()
    )

    assert {(kind, size): num for kind, num, size in LAYERS[model]} == got


# model: groups, bytes of a page, of a token more, of padding (percent, rounded)
PLANS: dict[str, tuple[int, int, int, float]] = {
    "llama-2-7b": (1, 16 * 524288, 524288, 0.0),
    "llama-3.1-8b": (1, 16 * 131072, 131072, 0.0),
    "llama-3.1-70b": (1, 16 * 327680, 327680, 0.0),
    "smollm2-135m": (1, 16 * 23040, 23040, 0.0),
    "gpt2": (1, 16 * 36864, 36864, 0.0),
    "falcon-7b": (1, 16 * 8192, 8192, 0.0),
    "mixtral-8x7b": (1, 16 * 131072, 131072, 0.0),
    "qwen3-235b-a22b": (1, 16 * 192512, 192512, 0.0),
    "mistral-7b-v0.1": (1, 16 * 131072, 0, 0.0),
    "gemma-2-9b": (2, 16 * 21 * 8192, 21 * 8192, 0.0),
    # 52 layers in 11 groups of 4 or 5, beside 2 of 5. Of (2 * 2048 + 11 * 193) * 5
    # pages of a layer, 10 * 2048 + 52 * 193 are used. One group of 10 beside 6 of 8 or
    # 9 would take 3 % more, 5.06 % more than no padding at all.
    "gemma-3-27b": (13, 16 * 5 * 8192, 10 * 8192, 1.9),
    "gpt-oss-120b": (2, 16 * 18 * 2048, 18 * 2048, 0.0),
    "llama-4-scout": (4, 16 * 12 * 4096, 12 * 4096, 0.0),
    "deepseek-v3": (1, 16 * 70272, 70272, 0.0),
    "deepseek-v3.2": (1, 16 * 85888, 85888, 0.0),
}


@pytest.mark.parametrize("model", PLANS)
def test_the_plan_of_a_real_model_has_the_figures_computed_by_hand(model: str) -> None:
    num_groups, page_bytes, token_bytes, padding = PLANS[model]
    num_pages = 40 * GIB // page_bytes - 1  # page 0

    report = report_plan(plan_of(model), request_len=LEN)

    assert num_groups == report.num_groups
    assert (page_bytes, token_bytes) == (report.page_bytes, report.token_bytes)
    assert num_pages == report.num_pages
    assert padding == round(report.padding_percent, 1)


# model: pages of one request of 32,768 tokens, all groups together
REQUESTS = {
    "llama-3.1-8b": 2048,
    "deepseek-v3": 2048,
    # 4095 tokens before the step, 2048 of it: 6143 at any offset
    "mistral-7b-v0.1": 385,
    "gemma-2-9b": 2048 + 385,
    "gemma-3-27b": 2 * 2048 + 11 * 193,  # 3071 tokens
    "gpt-oss-120b": 2048 + 137,  # 2175 tokens
    "llama-4-scout": 2048 + 3 * 640,  # 8191 + 2048 tokens, aligned to pages
}


@pytest.mark.parametrize("model", REQUESTS)
def test_the_requests_that_fit_are_those_computed_by_hand(model: str) -> None:
    config = plan_of(model)

    report = report_plan(config, request_len=LEN)

    assert REQUESTS[model] * config.page_bytes == report.request_bytes
    assert config.num_pages // REQUESTS[model] == report.num_requests


def test_a_plan_in_figures_that_anyone_can_check() -> None:
    # Llama 3.1 8B, 40 GiB: a token takes 128 KiB, so 327,680 would fit, less page 0.
    report = report_plan(plan_of("llama-3.1-8b"), request_len=LEN)

    assert 20479 == report.num_pages
    assert 327664 == report.longest_len
    assert 9 == report.num_requests


def test_states_are_as_large_as_many_pages_of_attention() -> None:
    # One state of Qwen3-Next is 2,146,304 bytes, a page of its 12 layers 393,216.
    report = report_plan(plan_of("qwen3-next-80b-a3b"), request_len=LEN)

    assert 37 == report.num_groups
    assert 2146304 == report.page_bytes
    assert 12 * 2048 == report.token_bytes
    filled = 2048 * 393216 + 36 * 2146304
    assert round(100 * (1 - filled / ((2048 + 36) * 2146304)), 6) == round(
        report.padding_percent, 6
    )
    assert report.hit_granularity is None


def test_with_larger_pages_states_waste_little() -> None:
    config = plan_of("qwen3-next-80b-a3b", page_size=256)

    assert report_plan(config, request_len=LEN).padding_percent < 10


# Tensor parallelism


@pytest.mark.parametrize(
    ("model", "ranks", "token_bytes"),
    [
        ("llama-3.1-70b", 8, 80 * 1 * 128 * 2 * 2),
        ("llama-3.1-70b", 16, 80 * 1 * 128 * 2 * 2),  # more ranks than heads
        ("deepseek-v3", 8, 70272),  # on every rank
        ("falcon-7b", 4, 8192),
        ("gpt-oss-120b", 4, 18 * 2 * 64 * 2 * 2),
    ],
)
def test_ranks_share_the_heads(model: str, ranks: int, token_bytes: int) -> None:
    config = plan_of(model, tensor_parallel_size=ranks)

    assert token_bytes == report_plan(config, request_len=LEN).token_bytes


@pytest.mark.parametrize(
    ("model", "state_bytes"),
    [
        ("qwen3-next-80b-a3b", 4096 * 3 * 2 + 16 * 128 * 128 * 4),
        ("jamba-v0.1", 4096 * 3 * 2 + 4096 * 16 * 4),
        ("nemotron-h-8b", (4096 + 1024) * 3 * 2 + 64 * 64 * 128 * 4),
        # The one group of B and C is on both ranks.
        ("falcon-h1-0.5b", (768 + 256) * 3 * 2 + 12 * 64 * 128 * 4),
        ("kimi-linear-48b-a3b", 3 * 2048 * 3 * 2 + 16 * 128 * 128 * 4),
    ],
)
def test_ranks_share_the_channels_of_a_state(model: str, state_bytes: int) -> None:
    specs = specs_of(model, tensor_parallel_size=2)

    assert {state_bytes} == {
        spec.page_bytes for spec in specs.values() if type(spec) is MambaSpec
    }


@pytest.mark.parametrize(
    ("model", "ranks", "message"),
    [
        ("smollm2-135m", 2, "num_key_value_heads must divide .*, got 3"),
        ("qwen3-235b-a22b", 3, "num_key_value_heads must divide .*, got 4"),
        ("jamba-v0.1", 3, "the width of the state must be a multiple"),
    ],
)
def test_b142_heads_that_cannot_be_dealt_out_are_refused(
    model: str, ranks: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        specs_of(model, tensor_parallel_size=ranks)


# Dtypes


def test_k_and_v_may_be_in_fewer_bits_than_the_model() -> None:
    specs = specs_of("nemotron-h-8b", dtype="float8_e4m3fn")

    assert "float8_e4m3fn" == specs["layers.7.attention"].dtype  # type: ignore[union-attr]
    # What a convolution remembers is in the dtype of the weights.
    assert ("bfloat16", "float32") == specs["layers.0.state"].dtypes  # type: ignore[union-attr]


def test_without_a_dtype_that_of_the_weights_is_taken() -> None:
    assert "float16" == specs_of("llama-2-7b", dtype=None)["layers.0.attention"].dtype  # type: ignore[union-attr]
    whole = {"dtype": "torch.float16", "text_config": small()}
    assert "float16" == specs_from_model_config(whole)["layers.0.attention"].dtype  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"--dtype.* given .*: the config names none"):
        specs_of("gpt2", dtype=None)


class TorchDtype:
    """Prints itself as a dtype of torch does."""

    def __str__(self) -> str:
        return "torch.bfloat16"


@pytest.mark.parametrize("dtype", ["torch.bfloat16", "bfloat16", TorchDtype()])
def test_a_dtype_may_be_spelled_as_torch_does(dtype: Any) -> None:  # noqa: ANN401
    given = specs_from_model_config(small(), dtype=dtype)

    assert given == specs_from_model_config(small(dtype=dtype))
    assert "bfloat16" == given["layers.0.attention"].dtype  # type: ignore[union-attr]


@pytest.mark.parametrize("weights", ["int8", "float8_e4m3fn", "uint8", None])
def test_k_and_v_are_not_kept_as_quantised_weights_are(weights: str | None) -> None:
    compute = {"bnb_4bit_compute_dtype": "torch.float16"}
    config = small(dtype=weights, quantization_config=compute)

    assert "float16" == specs_from_model_config(config)["layers.0.attention"].dtype  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=rf"names {weights or 'none'}"):
        specs_from_model_config(small(dtype=weights, quantization_config={}))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "float8_e5m2", "float64", "", 3])
def test_a_dtype_that_nothing_stores_k_and_v_as_is_refused(dtype: Any) -> None:  # noqa: ANN401
    with pytest.raises(ConfigError, match="dtype must be one of float32, float16, bf"):
        specs_from_model_config(small(), dtype=dtype)


# What a config may say


def small(**fields: object) -> dict[str, object]:
    sizes = {"num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 4}
    return {name: value for name, value in (sizes | fields).items() if value != "-"}


def kinds(**fields: object) -> list[str]:
    """Return what the layers of a small model keep: a letter each, in order."""
    specs = specs_from_model_config(small(**fields), dtype="float16")
    letters = {
        FullAttentionSpec: "F",
        SlidingWindowSpec: "W",
        ChunkedLocalAttentionSpec: "C",
        MLASpec: "L",
        MambaSpec: "S",
    }
    return [
        "".join(
            letters[type(spec)]
            for name, spec in specs.items()
            if name.startswith(f"layers.{layer}.")
        )
        for layer in range(4)
    ]


STATE: dict[str, object] = {"mamba_d_state": 4}
DELTA: dict[str, object] = {"linear_num_key_heads": 2, "linear_key_head_dim": 8}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "F F F F"),
        ({"sliding_window": 8}, "W W W W"),
        ({"sliding_window": None}, "F F F F"),
        ({"sliding_window": 8, "use_sliding_window": False}, "F F F F"),
        ({"sliding_window": 8, "max_window_layers": 3}, "F F F W"),
        ({"sliding_window": 8, "sliding_window_pattern": 2}, "W F W F"),
        ({"sliding_window": 8, "sliding_window_pattern": "LLG"}, "W W F W"),
        ({"sliding_window": 8, "model_type": "gemma2"}, "W F W F"),
        ({"sliding_window": 8, "num_kv_shared_layers": 1}, "W W W "),
        ({"attention_chunk_size": 8}, "C C C F"),
        ({"attention_chunk_size": 8, "no_rope_layers": [1, 0, 1, 0]}, "C F C F"),
        (
            {
                "sliding_window": 8,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
            "F W F W",
        ),
        ({"kv_lora_rank": 8, "qk_rope_head_dim": 2}, "L L L L"),
        ({"full_attention_interval": 2, **DELTA}, "S F S F"),
        ({"attn_layer_period": 4, "attn_layer_offset": 1, **STATE}, "S F S S"),
        ({"attn_layer_indices": [2], **STATE}, "S S F S"),
        ({"attn_type_list": [1, 0, 0, 1], "model_type": "minimax_text_01"}, "F S S F"),
        ({"full_attn_idxs": [0, 3], "conv_L_cache": 3}, "F S S F"),
        ({"hybrid_override_pattern": "M*-E", **STATE}, "S F  "),
        ({"model_type": "falcon_h1", **STATE}, "FS FS FS FS"),
        ({"layers_block_type": ["mamba", "hybrid"] * 2, **STATE}, "S FS S FS"),
        ({"num_attention_heads": "-", **STATE}, "S S S S"),
        ({"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3}, "S F S F"),
    ],
)
def test_each_way_of_naming_the_layers_is_read(
    fields: dict[str, object], expected: str
) -> None:
    assert expected.split(" ") == kinds(**fields)


@pytest.mark.parametrize(
    ("fields", "heads"),
    [
        ({"num_key_value_heads": 2}, [(2, 8)] * 4),
        (
            {"num_key_value_heads": [1, 2, 4, 4], "head_dim": 16},
            [(1, 16), (2, 16), (4, 16), (4, 16)],
        ),
        ({"num_attention_heads": [2, 4, 8, 16]}, [(2, 16), (4, 8), (8, 4), (16, 2)]),
        ({"multi_query": True}, [(1, 8)] * 4),
        (
            {"multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 2},
            [(2, 8)] * 4,
        ),
        (
            {"per_layer_config": {"02": {"head_dim": 64}}},
            [(4, 8), (4, 8), (4, 64), (4, 8)],
        ),
        (
            {
                "sliding_window": 8,
                "sliding_window_pattern": 2,
                "global_head_dim": 64,
                "num_global_key_value_heads": 1,
                "attention_k_eq_v": True,
            },
            [(4, 8), (1, 64)] * 2,
        ),
    ],
)
def test_layers_may_have_heads_of_their_own(
    fields: dict[str, object], heads: list[tuple[int, int]]
) -> None:
    specs = specs_from_model_config(small(**fields), dtype="float16")

    assert heads == [(s.num_kv_heads, s.head_dim) for s in specs.values()]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("fields", "shapes"),
    [
        # 2 x 32 channels in 4 heads; B and C of one group of 4
        ({"mamba_n_heads": 4, **STATE}, ((64 + 8, 3), (4, 16, 4))),
        ({"mamba_n_heads": 4, "mamba_d_head": 8, **STATE}, ((32 + 8, 3), (4, 8, 4))),
        ({"mamba_n_heads": 4, "mamba_d_head": "auto", **STATE}, ((72, 3), (4, 16, 4))),
        ({**STATE, "mamba_d_conv": 2}, ((64, 1), (64, 4))),
        (DELTA, ((3 * 16, 3), (2, 8, 8))),
        ({**DELTA, "linear_num_value_heads": 4}, ((64, 3), (4, 8, 8))),
        ({"conv_L_cache": 3}, ((32, 2),)),
        ({"model_type": "minimax"}, ((4, 8, 8),)),
    ],
)
def test_a_state_has_the_shapes_that_its_kind_of_layer_needs(
    fields: dict[str, object], shapes: tuple[tuple[int, ...], ...]
) -> None:
    config = small(attn_layer_indices=[], **fields)

    specs = specs_from_model_config(config, dtype="float16")

    assert {shapes} == {spec.shapes for spec in specs.values()}  # type: ignore[union-attr]


def test_the_text_part_of_a_model_that_sees_is_read() -> None:
    whole = {"hidden_size": 7, "text_config": small(), "vision_config": {"depth": 3}}

    assert specs_from_model_config(small(), dtype="float16") == (
        specs_from_model_config(whole, dtype="float16")
    )


def test_what_a_family_leaves_out_is_filled_in() -> None:
    gemma = {"text_config": {"model_type": "gemma3_text", "num_hidden_layers": 12}}

    specs = specs_from_model_config(gemma, dtype="bfloat16")

    assert (4, 256) == (
        specs["layers.5.attention"].num_kv_heads,  # type: ignore[union-attr]
        specs["layers.5.attention"].head_dim,  # type: ignore[union-attr]
    )
    assert Counter({SlidingWindowSpec: 10, FullAttentionSpec: 2}) == Counter(
        map(type, specs.values())
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": "-"}, "missing required field `num_hidden_layers`"),
        ({"num_hidden_layers": 0}, r"num_hidden_layers must be in 1\.\.1000, got 0"),
        ({"num_hidden_layers": 10**9}, r"must be in 1\.\.1000, got 1000000000"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers"),
        ({"num_hidden_layers": "4"}, r"Expected `int`, got `str` - at `\$.num_hidden"),
        ({"num_hidden_layers": True}, "Expected `int`, got `bool`"),
        ({"num_attention_heads": "-"}, "config must have head_dim, or a hidden_size"),
        ({"num_attention_heads": 5}, "config must have head_dim, or a hidden_size"),
        ({"num_attention_heads": [4]}, "num_attention_heads must name each layer"),
        ({"num_attention_heads": "-", "head_dim": 8}, "have num_attention_heads"),
        ({"head_dim": -8}, "Expected `int` >= 0"),
        ({"head_dim": 0}, "head_dim must be >= 1"),
        ({"is_encoder_decoder": True}, "must be a decoder"),
        (
            {"model_type": "rwkv"},
            "no spec describes the caches of a model of type rwkv",
        ),
        ({"block_types": ["recurrent"]}, "of a model with block_types"),
        ({"layer_types": ["full_attention"]}, "is 4, got the types of 1 layers"),
        ({"layer_types": ["odd"] * 4}, "layer_types must be of .*, got 'odd'"),
        ({"hybrid_override_pattern": "MMM?"}, "must be of .*, got '.'"),
        ({"no_rope_layers": [1], "attention_chunk_size": 2}, "the types of 1 layers"),
        ({"no_rope_layer_interval": 0, "attention_chunk_size": 2}, ">= 1"),
        ({"full_attention_interval": 2}, "config must say how large a state is"),
        (
            {"full_attention_interval": 2, "linear_num_key_heads": 2},
            "config must have linear_key_head_dim",
        ),
        ({"attn_layer_indices": [], "conv_L_cache": 1}, "a dimension of shapes"),
        (
            {
                "attn_type_list": [0] * 4,
                "model_type": "minimax",
                "num_attention_heads": 0,
            },
            "num_attention_heads must be a number, got 0",
        ),
        (
            {"kv_lora_rank": 4, "sliding_window": 8},
            "no spec describes sliding latent attention",
        ),
        ({"index_head_dim": 4}, "no spec describes an index beside K and V"),
        ({"layer_types": ["indexed_attention"] * 4}, "must have index_head_dim"),
        ({"dtype": "int4"}, "dtype .* must be given .*: the config names int4"),
        ({"num_key_value_heads": 3}, r"must divide num_attention_heads \(4\), got 3"),
        ({"num_key_value_heads": 8}, r"must divide num_attention_heads \(4\), got 8"),
        ({"model_type": "hymba"}, "caches of a model of type hymba"),
        ({"use_cla": True, "cla_share_factor": 2}, "of a model with use_cla"),
        ({"cla_share_factor": 2}, "of a model with cla_share_factor"),
        ({"layer_group_size": 5}, "of a model with layer_group_size"),
        ({"global_attn_idx": [0, 2]}, "of a model with global_attn_idx"),
        ({"mamba_step": 2}, "of a model with mamba_step"),
        ({"use_bidirectional_attention": True}, "got bidirectional attention"),
        ({"model_type": "zamba"}, "type zamba must name the type of each layer"),
        ({"model_type": "minimax"}, "type minimax must name the type of each layer"),
        ({"sliding_window": 2**31}, "sliding_window"),
        ({"sliding_window": float("nan")}, "sliding_window"),
    ],
)
def test_a_config_that_cannot_be_planned_is_refused(
    fields: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        specs_from_model_config({"dtype": "float16", **small(**fields)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_size": 0}, "page_size must be >= 1"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be >= 1"),
        ({"tensor_parallel_size": True}, "tensor_parallel_size must be an integer"),
        ({"checkpoint_size": 24}, "checkpoint_size must be a multiple of page_size"),
    ],
)
def test_an_option_out_of_range_is_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        specs_of("jamba-v0.1", **options)


FIELDS = sorted(
    {name for model in MODELS for name in config_of(model) if name != "text_config"}
    | {"attn_type_list", "conv_L_cache", "global_head_dim", "per_layer_config"}
    | {"no_rope_layers", "sliding_window_pattern", "num_kv_shared_layers", "use_mla"}
    | {"num_nextn_predict_layers", "mtp_layer_types", "mtp_hybrid_override_pattern"}
    | {"quantization_config", "kv_cache_dtype", "kv_share_layers", "multi_query"}
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-1, 2**40)
    | st.floats()
    | st.sampled_from(["", "gemma2", "falcon_h1", "auto", "bfloat16", "M*"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["0", "head_dim"]), inner, max_size=2)
    ),
    max_leaves=4,
)


@given(
    model=st.sampled_from(MODELS),
    changes=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3),
    ranks=st.integers(1, 8),
    dtype=st.sampled_from(["float16", None]),
    include_mtp=st.booleans(),
)
def test_any_config_is_read_or_refused(
    model: str,
    changes: dict[str, object],
    ranks: int,
    dtype: str | None,
    include_mtp: bool,
) -> None:
    config = {**config_of(model), **changes}
    try:
        specs = specs_from_model_config(
            config, dtype=dtype, tensor_parallel_size=ranks, include_mtp=include_mtp
        )
    except ConfigError:
        return

    assert all(spec.page_bytes > 0 for spec in specs.values())


# Families


@pytest.mark.parametrize(
    "fields",
    [
        {"num_kv_heads": 2},
        {"n_kv_heads": 2},
        {"n_head_kv": 2},
        {"kv_n_heads": 2},
        {"num_attention_groups": 2},
        {"num_key_value_heads_per_layer": [2] * 4},
        {"multi_query_attention": True, "multi_query_group_num": 2},
        {"attn_config": {"kv_n_heads": 2}},
        {"num_kv_heads": 2, "num_key_value_heads": None},
    ],
)
def test_the_heads_of_k_and_v_are_read_by_each_of_their_names(
    fields: dict[str, object],
) -> None:
    expected = specs_from_model_config(small(num_key_value_heads=2), dtype="float16")

    assert expected == specs_from_model_config(small(**fields), dtype="float16")


@pytest.mark.parametrize(
    ("fields", "num_kv_heads"),
    [
        ({"multi_query_attention": False, "multi_query_group_num": 2}, 4),
        ({"multi_query_attention": True}, 1),
        ({"attn_config": {"attn_type": "multiquery_attention"}}, 1),
        ({"attn_config": {"attn_type": "multihead_attention"}}, 4),
        ({"model_type": "falcon"}, 1),
        ({"model_type": "falcon", "multi_query": False}, 4),
        ({"model_type": "gpt_bigcode"}, 1),
    ],
)
def test_one_head_for_all_queries_has_several_names(
    fields: dict[str, object], num_kv_heads: int
) -> None:
    specs = specs_from_model_config(small(**fields), dtype="float16")

    assert {num_kv_heads} == {spec.num_kv_heads for spec in specs.values()}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "names",
    [
        ("n_layer", "n_embd", "n_head"),
        ("n_layers", "dim", "n_heads"),
        ("num_layers", "d_model", "num_query_heads"),
        ("num_layers", "n_embed", "n_head"),
    ],
)
def test_the_sizes_are_read_by_each_of_their_names(names: tuple[str, ...]) -> None:
    other = dict(zip(names, (4, 32, 4), strict=True))

    assert specs_from_model_config(small(), dtype="float16") == (
        specs_from_model_config(other, dtype="float16")
    )


WIDE: dict[str, object] = {"hidden_size": 2048, "num_attention_heads": 16}


@pytest.mark.parametrize(
    ("fields", "kind", "heads"),
    [
        # What transformers' own configs fill in, of version 5.
        ({"model_type": "mistral", **WIDE}, SlidingWindowSpec, (8, 128)),
        ({"model_type": "mixtral", **WIDE}, FullAttentionSpec, (8, 128)),
        (
            {"model_type": "qwen3", **WIDE, "hidden_size": 64},
            FullAttentionSpec,
            (16, 128),
        ),
        ({"model_type": "qwen2", "sliding_window": 8}, FullAttentionSpec, (4, 8)),
        ({"model_type": "qwen3_moe", "sliding_window": 8}, FullAttentionSpec, (4, 8)),
        ({"model_type": "gemma", **WIDE}, FullAttentionSpec, (16, 256)),
        ({"model_type": "seed_oss", **WIDE}, FullAttentionSpec, (8, 128)),
    ],
)
def test_what_a_family_has_a_default_for_may_be_left_out(
    fields: dict[str, object], kind: type, heads: tuple[int, int]
) -> None:
    specs = specs_from_model_config(small(**fields), dtype="float16")

    assert {(kind, *heads)} == {
        (type(spec), spec.num_kv_heads, spec.head_dim)  # type: ignore[union-attr]
        for spec in specs.values()
    }


def test_null_is_not_left_out() -> None:
    config = small(model_type="mistral", sliding_window=None, num_key_value_heads=None)

    assert specs_from_model_config(small(), dtype="float16") == (
        specs_from_model_config(config, dtype="float16")
    )


def test_a_family_that_is_not_known_is_refused_unless_it_is_said_to_be_dense() -> None:
    new = small(model_type="brand_new", num_kv_heads=2)

    with pytest.raises(
        ConfigError, match=r"known, got brand_new: .* assume_dense \(--assume-dense\)"
    ):
        specs_from_model_config(new, dtype="float16")
    assert specs_from_model_config(small(num_kv_heads=2), dtype="float16") == (
        specs_from_model_config(new, dtype="float16", assume_dense=True)
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "bert"},
        {"model_type": "vit"},
        {"model_type": "brand_new", "layer_group_size": 5},
        {"model_type": "rwkv"},
        {"model_type": "zamba"},
        {"model_type": "brand_new", "is_encoder_decoder": True},
    ],
)
def test_what_is_known_to_be_something_else_is_never_read_as_dense(
    fields: dict[str, object],
) -> None:
    with pytest.raises(ConfigError):
        specs_from_model_config(small(**fields), dtype="float16", assume_dense=True)


def test_the_family_of_a_text_part_may_be_that_of_the_whole() -> None:
    text = {"text_config": small(sliding_window=8), "dtype": "float16"}

    with pytest.raises(ConfigError, match="known, got brand_new"):
        specs_from_model_config({**text, "model_type": "brand_new"})
    assert FullAttentionSpec is type(
        specs_from_model_config({**text, "model_type": "qwen2"})["layers.0.attention"]
    )


def test_a_field_that_shares_nothing_is_no_reason_to_refuse() -> None:
    fields: dict[str, object] = {"use_cla": False, "cla_share_factor": 2}

    assert specs_from_model_config(small(), dtype="float16") == (
        specs_from_model_config(small(**fields, layer_group_size=1), dtype="float16")
    )


class TransformersConfig:
    """A config as transformers has it."""

    def to_dict(self) -> dict[str, Any]:
        """Return its content."""
        return small(dtype="float16")


def test_a_config_of_transformers_is_read() -> None:
    assert specs_from_model_config(small(dtype="float16")) == (
        specs_from_model_config(TransformersConfig())
    )


@pytest.mark.parametrize("config", [None, [], [1], "config.json", 3])
def test_what_is_no_config_is_refused(config: Any) -> None:  # noqa: ANN401
    with pytest.raises(ConfigError, match=r"must be the content of a config\.json"):
        specs_from_model_config(config, dtype="float16")

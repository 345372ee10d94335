"""Faults that planners of other projects had, by their ids, and their kin."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.mem_cache import (
    ConfigError,
    FullAttentionSpec,
    MambaSpec,
    plan_kv_cache,
    report_plan,
    specs_from_model_config,
)
from radixkv.mem_cache.planning import num_mtp_layers
from radixkv.scheduling.cli import main
from radixkv.scheduling.model_plan import PlanQuestion, read_model_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "dtype": "bfloat16",
}
MAMBA2: dict[str, Any] = {
    "model_type": "mamba2",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_heads": 8,
    "head_dim": 16,
    "n_groups": 1,
    "state_size": 16,
    "dtype": "bfloat16",
}
GEMMA3N: dict[str, Any] = {
    "model_type": "gemma3n_text",
    "num_hidden_layers": 35,
    "hidden_size": 2048,
    "num_attention_heads": 8,
    "sliding_window": 512,
    "dtype": "bfloat16",
}


def token_bytes(config: dict[str, Any], **options: Any) -> int:  # noqa: ANN401
    """Return the bytes of one token in all layers with attention."""
    specs = specs_from_model_config(config, **options)
    return sum(
        spec.page_bytes // spec.page_size
        for spec in specs.values()
        if not isinstance(spec, MambaSpec)
    )


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str
) -> tuple[int, str, str]:
    """Run the command, and return its exit code and what it printed."""
    monkeypatch.setattr(sys, "argv", ["radixkv", "plan", *args])
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as end:
        main()
    printed = capsys.readouterr()
    assert isinstance(end.value.code, int)
    return end.value.code, printed.out, printed.err


# B165: files as Python writes them


@pytest.mark.parametrize("limit", ["Infinity", "-Infinity", "NaN"])
def test_b165_numbers_that_only_python_writes_are_read(
    tmp_path: Path, limit: str
) -> None:
    path = tmp_path / "config.json"
    text = json.dumps({**MAMBA2, "time_step_limit": [0.0, 1e9]})
    path.write_text(text.replace("1000000000.0", limit))
    expected = specs_from_model_config({**MAMBA2, "time_step_limit": [0.0, 1e9]})

    assert limit in path.read_text()
    assert expected == specs_from_model_config(read_model_config(path))


def test_b165_a_byte_order_mark_and_a_field_given_twice_are_read(
    tmp_path: Path,
) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b'\xef\xbb\xbf{"num_hidden_layers": 2, "num_hidden_layers": 3}')

    assert {"num_hidden_layers": 3} == read_model_config(path)


@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=5,
    ),
    ascii_only=st.booleans(),
)
def test_b165_whatever_python_writes_is_read(
    value: object, ascii_only: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "written.json"
    text = json.dumps({"field": value}, ensure_ascii=ascii_only)
    path.write_text(text, "utf-8")
    expected = repr({"field": value})

    assert expected == repr(read_model_config(path))


@pytest.mark.parametrize("number", ["Infinity", "-Infinity", "NaN", "1e999", "3.5"])
@pytest.mark.parametrize(
    "field", ["num_hidden_layers", "num_key_value_heads", "max_position_embeddings"]
)
def test_b165_a_size_that_is_no_number_is_refused_by_its_name(
    tmp_path: Path, field: str, number: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, field: 77}).replace("77", number))

    with pytest.raises(ConfigError, match=field):
        specs_from_model_config(read_model_config(path))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"num_hidden_layers": 2',
        b"[]",
        b"null",
        b"3",
        b'"text"',
        b"\xff\xfe{\x00}\x00",
        b"{'a': 1}",
        b'{"a": Inf}',
        b'{"a": 1,}',
        b'{"a":' * 100_000,
        b"[" * 100_000,
        b'{"a": ' + b"9" * 5000 + b"}",
    ],
    ids=range(14),
)
def test_b233_a_file_that_is_no_object_is_one_line_that_names_it(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    content: bytes,
) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)

    code, out, err = run(
        monkeypatch, capsys, "--model-config", str(path), "--gpu-memory", "1GiB"
    )

    assert (2, "", 1) == (code, out, err.count("\n"))
    assert f"radixkv: {path}: JSON" in err


@pytest.mark.parametrize(
    "size", ["0x10GiB", "NaNGiB", "80 PiB", "inf GiB", "1,5GiB", "8GiB8", "-0GiB"]
)
def test_b233_a_size_that_is_none_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    size: str,
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))

    code, out, err = run(
        monkeypatch, capsys, "--model-config", str(path), "--gpu-memory", size
    )

    assert (2, "", 1) == (code, out, err.count("\n"))
    assert "gpu-memory must be a size with its unit" in err


# B167: what quantisers say of K and V

FP8 = [
    {"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}},
    {"quantization_config": {"kv_cache_quant_algo": "FP8"}},
    {"compression_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}},
    {"quantization_config": {"quantization": {"kv_cache_quant_algo": "FP8"}}},
    {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}},
    {"hf_quant_config": {"quantization": {"kv_cache_quant_algo": "FP8"}}},
    {"kv_cache_dtype": "fp8_e4m3"},
]


@pytest.mark.parametrize("fields", FP8)
def test_b167_k_and_v_are_kept_as_the_checkpoint_was_quantised(
    fields: dict[str, Any],
) -> None:
    whole = {"text_config": LLAMA, **fields}

    assert 64 * 1024 == token_bytes({**LLAMA, **fields}) == token_bytes(whole)
    assert 128 * 1024 == token_bytes({**LLAMA, **fields}, dtype="bfloat16")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"kv_cache_scheme": {"num_bits": 8, "type": "int"}}, "kv_cache_scheme"),
        ({"kv_cache_scheme": {"num_bits": 4, "type": "float"}}, "kv_cache_scheme"),
        ({"kv_cache_scheme": "static"}, "kv_cache_scheme"),
        ({"kv_cache_quant_algo": "INT8"}, "kv_cache_quant_algo"),
        ({"kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo"),
        ({"export": {"kv_cache_group": ["*k_proj", "*v_proj"]}}, "kv_cache_group"),
        ({"kv_cache_bits": 4, "kv_cache_dtype": "fp8"}, "kv_cache_bits"),
    ],
)
def test_b167_what_cannot_be_stored_is_refused_with_the_remedy(
    fields: dict[str, Any], named: str
) -> None:
    config = {**LLAMA, "quantization_config": fields}

    with pytest.raises(ConfigError, match=rf"dtype \(--dtype\) .* given .* {named} of"):
        specs_from_model_config(config)
    assert 64 * 1024 == token_bytes(config, dtype="float8_e4m3fn")


@pytest.mark.parametrize(
    "fields",
    [
        {"quant_method": "awq", "bits": 4},
        {"quant_method": "fp8", "fmt": "e4m3"},
        {"kv_cache_scheme": None},
        {"kv_cache_quant_algo": None},
        {"kv_cache_dtype": "auto"},
        {"export": {"kv_cache_group": []}, "kv_cache_post_rope": False},
        {"kv_cache_quant_targets": ["k_proj", "v_proj"]},
        None,
    ],
)
def test_b167_weights_in_few_bits_say_nothing_of_k_and_v(
    fields: dict[str, Any] | None,
) -> None:
    assert 128 * 1024 == token_bytes({**LLAMA, "quantization_config": fields})


def test_b167_the_file_beside_the_config_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    quantised = {"producer": {}, "quantization": {"kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(quantised))

    read = read_model_config(tmp_path)

    assert 64 * 1024 == token_bytes(dict(read))
    assert read == read_model_config(tmp_path / "config.json")


def test_b167_a_state_is_not_kept_in_the_bits_of_k_and_v() -> None:
    fields = {"attn_layer_indices": [], "mamba_d_state": 4, "hidden_size": 32}
    config = {**FP8[1], **fields, "num_hidden_layers": 1, "dtype": "bfloat16"}

    (spec,) = specs_from_model_config(config).values()

    assert isinstance(spec, MambaSpec)
    assert ("bfloat16", "float32") == spec.dtypes


# B168: 0 is a number, not a field that is left out

HEADS = {
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "dtype": "bfloat16",
}


def test_b168_a_layer_with_no_heads_of_k_and_v_keeps_nothing() -> None:
    specs = specs_from_model_config({**HEADS, "num_key_value_heads": [2, 0, 2, 2]})

    assert ["layers.0", "layers.2", "layers.3"] == [
        name.removesuffix(".attention") for name in specs
    ]
    assert 1536 == token_bytes({**HEADS, "num_key_value_heads": [2, 0, 2, 2]})


MISTRAL = {**HEADS, "model_type": "mistral"}
GEMMA3 = {**HEADS, "model_type": "gemma3_text", "sliding_window": 8}
SWITCHED = {**HEADS, "sliding_window": 8, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("config", "field", "message"),
    [
        (HEADS, "num_key_value_heads", "num_key_value_heads must be >= 1, got 0"),
        (HEADS, "num_attention_heads", "num_attention_heads must be >= 1, got 0"),
        (HEADS, "head_dim", "head_dim must be >= 1"),
        (HEADS, "v_head_dim", "v_head_dim must be >= 1"),
        (HEADS, "kv_lora_rank", "latent_dim must be >= 1"),
        (HEADS, "attention_chunk_size", "attention_chunk_size"),
        (HEADS, "num_hidden_layers", "num_hidden_layers must be in"),
        (HEADS, "sliding_window", "sliding_window must be >= 1 where"),
        (MISTRAL, "sliding_window", "sliding_window must be >= 1 where"),
        (GEMMA3, "sliding_window_pattern", "sliding_window_pattern must be >= 1"),
        (SWITCHED, "sliding_window_pattern", "sliding_window_pattern must be >= 1"),
        (
            {**HEADS, "multi_query_attention": True},
            "multi_query_group_num",
            "num_key_value_heads must be >= 1, got 0",
        ),
    ],
)
def test_b168_zero_is_refused_by_the_name_of_its_field(
    config: dict[str, Any], field: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        specs_from_model_config({**config, field: 0})


@pytest.mark.parametrize("field", ["layer_types", "hybrid_override_pattern"])
def test_b168_an_empty_list_of_layers_is_not_left_out(field: str) -> None:
    empty = "" if field == "hybrid_override_pattern" else []

    with pytest.raises(ConfigError, match="is 4, got the types of 0 layers"):
        specs_from_model_config({**HEADS, field: empty})


def test_b168_a_window_of_zero_in_a_family_without_windows_counts_for_nothing() -> None:
    assert token_bytes(LLAMA) == token_bytes({**LLAMA, "sliding_window": 0})


@pytest.mark.parametrize(
    "fields",
    [
        {"layer_types": ["moe"] * 4},
        {"num_key_value_heads": [0, 0, 0, 0]},
        {"hybrid_override_pattern": "-E-E"},
    ],
)
def test_b168_a_model_that_keeps_nothing_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="got no layer with a cache"):
        specs_from_model_config({**HEADS, **fields})


# B169: layers that read K and V of others


@pytest.mark.parametrize("num_shared", [0, 15, 30])
def test_b169_the_last_layers_may_read_those_of_earlier_ones(num_shared: int) -> None:
    specs = specs_from_model_config({**GEMMA3N, "num_kv_shared_layers": num_shared})

    assert 35 - num_shared == len(specs)


@pytest.mark.parametrize("num_shared", [31, 32, 33, 34, 35, 36, 1000])
def test_b169_layers_that_would_read_what_none_keeps_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    num_shared: int,
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**GEMMA3N, "num_kv_shared_layers": num_shared}))
    args = ["--gpu-memory", "1GiB", "--max-len", "64"]

    code, _, err = run(monkeypatch, capsys, "--model-config", str(path), *args)

    assert 2 == code
    assert f"{path}: num_kv_shared_layers is {num_shared} of 35 layers" in err
    assert "full attention" in err or "full, sliding attention" in err


def test_b169_a_family_that_does_not_share_ignores_the_field() -> None:
    assert token_bytes(LLAMA) == token_bytes({**LLAMA, "num_kv_shared_layers": 8})


@pytest.mark.parametrize(
    "field", ["kv_share_layers", "num_kv_reuse_layers", "share_kv", "kv_sharing_map"]
)
def test_b169_sharing_that_is_not_understood_is_refused_by_its_field(
    field: str,
) -> None:
    assert specs_from_model_config({**HEADS, field: False})
    with pytest.raises(ConfigError, match=f"of a model with {field}"):
        specs_from_model_config({**HEADS, field: [0, 0, 2, 2]})


# B178: a model's own layers for multi-token prediction

GLM: dict[str, Any] = {
    "model_type": "glm4_moe",
    "num_hidden_layers": 46,
    "hidden_size": 4096,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "dtype": "bfloat16",
}
QWEN: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 8,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (GLM, "num_nextn_predict_layers"),
        (GLM, "num_mtp_modules"),
        (GLM, "num_mtp_layers"),
        (GLM, "mtp_num_layers"),
        (QWEN, "mtp_num_hidden_layers"),
    ],
)
def test_b178_the_layers_of_mtp_heads_are_counted_if_asked_for(
    config: dict[str, Any], field: str
) -> None:
    config = {**config, field: 1}

    without = specs_from_model_config(config)
    counted = specs_from_model_config(config, include_mtp=True)

    assert 1 == num_mtp_layers(config)
    assert without == specs_from_model_config({**config, field: 0}, include_mtp=True)
    name = f"mtp.{config['num_hidden_layers']}.attention"
    assert {name} == counted.keys() - without.keys()
    last = [spec for spec in without.values() if isinstance(spec, FullAttentionSpec)]
    assert last[-1] == counted[name]


def test_b178_the_plan_grows_by_a_layer_of_46() -> None:
    config = {**GLM, "num_nextn_predict_layers": 1}

    assert 46 * token_bytes(config, include_mtp=True) == 47 * token_bytes(config)


def test_b178_what_mtp_keeps_may_be_said_by_its_own_fields() -> None:
    windows = {
        "model_type": "mellum",
        **HEADS,
        "sliding_window": 8,
        "num_mtp_layers": 2,
        "mtp_layer_types": ["sliding_attention", "full_attention"],
    }
    steps = {**HEADS, "hybrid_override_pattern": "*-*-", "num_nextn_predict_layers": 2}
    steps["mtp_hybrid_override_pattern"] = "*E"

    kinds = [
        type(spec).__name__
        for name, spec in specs_from_model_config(windows, include_mtp=True).items()
        if name.startswith("mtp.")
    ]
    names = [
        name
        for name in specs_from_model_config(steps, include_mtp=True)
        if name.startswith("mtp.")
    ]

    assert ["SlidingWindowSpec", "FullAttentionSpec"] == kinds
    assert ["mtp.4.attention", "mtp.6.attention"] == names
    with pytest.raises(ConfigError, match="mtp_layer_types must name each of the 3"):
        specs_from_model_config({**windows, "num_mtp_layers": 3}, include_mtp=True)


def test_b178_heads_that_are_switched_off_are_none() -> None:
    assert 0 == num_mtp_layers({**GLM, "num_mtp_modules": 3, "use_mtp": False})


def test_b178_the_report_says_what_it_leaves_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**GLM, "num_nextn_predict_layers": 1}))
    args = ["--model-config", str(path), "--gpu-memory", "80GiB"]

    _, said, _ = run(monkeypatch, capsys, *args)
    _, counted, _ = run(monkeypatch, capsys, *args, "--include-mtp")
    _, as_json, _ = run(monkeypatch, capsys, *args, "--json")

    note = f"{path}: 1 layer for multi-token prediction (MTP) not counted; with "
    assert f"{note}--include-mtp it is" == said.splitlines()[-1]
    assert "MTP" not in counted
    assert [f"{note}--include-mtp it is"] == json.loads(as_json)["notes"]


def test_b178_mtp_goes_with_the_last_stage_and_moves_no_other_layer() -> None:
    question: dict[str, Any] = {
        "model_config": {**GLM, "num_nextn_predict_layers": 2},
        "available_bytes": 2**35,
        "pipeline_parallel_size": 4,
    }

    without = PlanQuestion(**question).plan()
    counted = PlanQuestion(**question, include_mtp=True).plan()

    added = [
        {*new.layer_names} - {*old.layer_names}
        for old, new in zip(without, counted, strict=True)
    ]
    assert [set(), set(), set(), {"mtp.46.attention", "mtp.47.attention"}] == added


# Windows that a family carries and ignores


@pytest.mark.parametrize(
    "family",
    [
        *("llama", "granite", "cohere", "glm", "glm4", "seed_oss", "apertus"),
        *("internlm2", "baichuan", "minicpm", "hunyuan_v1_dense", "qwen3_vl_text"),
    ],
)
def test_a_window_that_the_family_ignores_takes_no_memory_away(family: str) -> None:
    config = {**LLAMA, "model_type": family}
    carried = {
        "sliding_window": 128,
        "use_sliding_window": True,
        "layer_types": ["sliding_attention"] * 32,
        "attention_chunk_size": 64,
    }

    assert specs_from_model_config(config) == (
        specs_from_model_config({**config, **carried})
    )


def test_of_a_family_that_is_not_known_only_the_types_of_layers_are_believed() -> None:
    config = {**HEADS, "model_type": "brand_new", "sliding_window": 8}
    types = ["sliding_attention", "full_attention"] * 2

    def num_full(**fields: object) -> int:
        specs = specs_from_model_config({**config, **fields}, assume_dense=True)
        return sum(isinstance(spec, FullAttentionSpec) for spec in specs.values())

    assert (4, 2) == (num_full(), num_full(layer_types=types))


# Right before, and to stay so


@pytest.mark.parametrize(
    ("config", "mebibytes"),
    [
        ({"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12}, 288),
        ({"multi_query": True}, 96),
        ({"multi_query": False}, 1536),
        ({}, 96),
    ],
)
def test_b215_names_and_switches_of_old_families_are_read(
    config: dict[str, Any], mebibytes: int
) -> None:
    bigcode = {"model_type": "gpt_bigcode", "n_layer": 24, "n_embd": 2048, "n_head": 16}

    num_bytes = 8192 * token_bytes({**bigcode, **config}, dtype="float16")

    assert mebibytes * 2**20 == num_bytes


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [(1, {262144, 131072}), (2, {131072, 65536}), (8, {32768})],
)
def test_b217_layers_of_two_shapes_each_have_their_own(
    ranks: int, sizes: set[int]
) -> None:
    config = {
        "model_type": "gemma4_text",
        "num_hidden_layers": 60,
        "hidden_size": 5376,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "sliding_window": 1024,
        "num_global_key_value_heads": 4,
        "attention_k_eq_v": True,
        "dtype": "bfloat16",
    }

    specs = specs_from_model_config(config, tensor_parallel_size=ranks)

    assert sizes == {spec.page_bytes for spec in specs.values()}


def test_b218_layers_with_states_do_not_grow_with_the_text() -> None:
    config = {
        **QWEN,
        "num_hidden_layers": 64,
        "hidden_size": 5120,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
    }

    specs = specs_from_model_config(config)

    states = [spec.page_bytes for spec in specs.values() if isinstance(spec, MambaSpec)]
    assert (48, 147) == (len(states), round(sum(states) / 2**20))
    assert 16384 * 2**20 == 262144 * token_bytes(config)


@pytest.mark.parametrize("cut", [1, 3, 4, 5])
def test_b221_stages_of_any_sizes_have_the_same_pages_and_name_all_groups(
    cut: int,
) -> None:
    specs = specs_from_model_config(QWEN, page_size=64)
    stages = [
        {n: s for n, s in specs.items() if (int(n.split(".")[1]) < cut) is first}
        for first in (True, False)
    ]

    first, second = plan_kv_cache(stages, [2**24] * 2, max_len=1024)

    assert first.num_pages == second.num_pages
    assert [64, 64] == [config.page_size for config in (first, second)]
    for one, other in zip(first.groups, second.groups, strict=True):
        assert type(one.spec) is type(other.spec)
    assert report_plan(first, request_len=1024).num_requests == (
        report_plan(second, request_len=1024).num_requests
    )

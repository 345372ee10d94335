"""`radixkv plan`: the figures it prints, and what it refuses in one line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.mem_cache import ConfigError, KVCacheConfig, PlanReport
from radixkv.scheduling.byte_size import format_byte_size, parse_byte_size
from radixkv.scheduling.cli import main
from radixkv.scheduling.model_plan import PlanQuestion, read_model_config

FOLDER = Path(__file__).parents[1] / "data" / "model_configs"
LLAMA = str(FOLDER / "llama-3.1-8b.json")


class Answer(msgspec.Struct):
    """What --json prints."""

    reports: list[PlanReport]
    configs: list[KVCacheConfig]


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


def figures(table: str) -> dict[str, list[str]]:
    """Return the cells of a printed table by the label of their row."""
    rows = [
        line.strip("│").split("│") for line in table.splitlines() if line[:1] == "│"
    ]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}


def test_the_table_says_what_a_token_takes_and_what_fits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(
        monkeypatch,
        capsys,
        *["--model-config", LLAMA, "--gpu-memory", "80GiB"],
        *["--reserved-memory", "16GiB", "--request-len", "8192"],
    )

    assert (0, "") == (code, err)
    assert {
        "memory for the cache": ["64 GiB"],
        "used by it": ["64 GiB"],
        "a token": ["128 KiB"],
        "a page of 16 tokens": ["2 MiB"],
        "pages": ["32,767"],
        "tokens of the longest request": ["524,272"],
        "a request of 8,192 tokens": ["1 GiB"],
        "requests of 8,192 tokens": ["63"],
        "of that padding": ["0.0 %"],
        "groups of layers": ["1"],
        "hits in steps of": ["16 tokens"],
    } == figures(out)


def test_planning_needs_no_torch() -> None:
    code = (
        "import sys; from radixkv.scheduling.cli import main\n"
        f"sys.argv = ['radixkv', 'plan', '--model-config', {LLAMA!r}, "
        "'--gpu-memory', '80GiB']\n"
        "try:\n    main()\nfinally:\n    assert 'torch' not in sys.modules\n"
    )

    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_stages_are_columns_with_the_same_pages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = run(
        monkeypatch,
        capsys,
        *["--model-config", str(FOLDER / "deepseek-v3.json"), "--gpu-memory", "10GiB"],
        *["--pipeline-parallel-size", "2", "--tensor-parallel-size", "4"],
    )

    rows = figures(out)
    # 31 of 61 layers, 1,152 bytes a token each, on every rank of the first stage.
    assert ["34.875 KiB", "33.75 KiB"] == rows["a token"]
    assert [f"{10 * 2**30 // (16 * 31 * 1152) - 1:,}"] * 2 == rows["pages"]


def test_a_draft_model_shares_the_pages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = run(
        monkeypatch,
        capsys,
        *["--model-config", LLAMA, "--gpu-memory", "10GiB", "--max-len", "64"],
        *["--draft-model-config", str(FOLDER / "smollm2-135m.json"), "--json"],
    )

    answer = msgspec.json.decode(out, type=Answer)
    assert [131072 + 23040] == [report.token_bytes for report in answer.reports]
    (group,) = answer.configs[0].groups
    assert 32 + 30 == len(group.layer_names)
    assert [0.0] == [report.padding_percent for report in answer.reports]


def test_b162_the_length_that_is_said_to_fit_does_with_stages_and_a_draft_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sizes = {"num_attention_heads": 2, "head_dim": 64, "dtype": "bfloat16"}
    for name, num_layers in (("model", 4), ("draft", 2)):
        path = tmp_path / f"{name}.json"
        path.write_bytes(
            msgspec.json.encode({"num_hidden_layers": num_layers, **sizes})
        )
    asked = [
        *["--model-config", str(tmp_path / "model.json"), "--gpu-memory", "8MiB"],
        *["--draft-model-config", str(tmp_path / "draft.json")],
        *["--pipeline-parallel-size", "2", "--max-len"],
    ]

    _, _, err = run(monkeypatch, capsys, *asked, "90000")
    fits, _, _ = run(monkeypatch, capsys, *asked, "4080")
    too_long, _, _ = run(monkeypatch, capsys, *asked, "4081")

    assert "at most 4080 tokens fit" in err
    assert (0, 2) == (fits, too_long)


def test_the_json_is_a_plan_that_a_worker_can_allocate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = run(
        monkeypatch,
        capsys,
        *["--model-config", LLAMA, "--gpu-memory", "10GiB", "--max-len", "8192"],
        *["--order", "layers_outermost", "--json"],
    )

    answer = msgspec.json.decode(out, type=Answer)
    (config,) = answer.configs
    assert 5119 == config.num_pages == answer.reports[0].num_pages
    assert "layers_outermost" == config.order
    assert 10 * 2**30 == config.buffer_bytes


def test_much_padding_is_told_with_the_page_size_that_has_room_for_most(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--gpu-memory", "60GiB", "--request-len", "8192"]
    model = ["--model-config", str(FOLDER / "qwen3-next-80b-a3b.json")]

    _, before, _ = run(monkeypatch, capsys, *model, *options)
    _, after, _ = run(monkeypatch, capsys, *model, *options, "--page-size", "256")

    advice = before.splitlines()[-1]
    assert "76 % of the pages of such a request is padding; with --page-size " in advice
    page_size, num_requests = re.findall(r"page-size (\d+), ([0-9,]+) ", advice)[0]
    _, best, _ = run(monkeypatch, capsys, *model, *options, "--page-size", page_size)
    assert [num_requests] == figures(best)["requests of 8,192 tokens"]
    assert "is padding" not in after


def test_no_page_size_is_named_if_none_has_more_room(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    # A request of one token takes a page, almost empty, and a state.
    model = {"num_hidden_layers": 2, "num_attention_heads": 1, "head_dim": 8}
    state = {"attn_layer_indices": [0], "mamba_d_state": 64, "hidden_size": 64}
    path = tmp_path / "config.json"
    path.write_bytes(msgspec.json.encode({**model, **state, "dtype": "float16"}))

    _, out, _ = run(
        monkeypatch,
        capsys,
        *["--model-config", str(tmp_path), "--gpu-memory", "1MiB", "--max-len", "1"],
    )

    assert "49 % of the pages of such a request is padding." == out.splitlines()[-1]


def test_the_roomiest_page_size_may_be_none() -> None:
    assert question(available_bytes=1, max_len=1).roomiest_page_size() is None
    assert (8, 16383) == question(max_len=16).roomiest_page_size()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--gpu-memory", "lots"], "gpu-memory must be a size with its unit, such as"),
        (["--gpu-memory", "80"], "a size with its unit, such as 80GiB, got '80'"),
        (["--checkpoint-size", "16"], "checkpoint-size is for a model with states"),
        (["--dtype", "int8"], "dtype must be one of"),
        (["--dtype", "float8_e5m2"], "dtype must be one of"),
        (["--model-config", str(FOLDER / "gpt2.json")], "gpt2.json: dtype (--dtype)"),
        (["--gpu-memory", "-1GiB"], "gpu-memory must be a size"),
        (["--gpu-memory", "nan"], "gpu-memory must be a size"),
        (["--gpu-memory", "1e400GB"], "gpu-memory must be a size"),
        (["--gpu-memory", "0GiB"], "reserved-memory must be less than gpu-memory"),
        (["--reserved-memory", "80GiB"], "reserved-memory must be less than"),
        (["--gpu-memory", "1MiB"], "at most 0 tokens fit"),
        (["--page-size", "0"], "page-size must be >= 1"),
        (["--page-size", "x"], "Invalid value for '--page-size'"),
        (["--tensor-parallel-size", "0"], "tensor-parallel-size must be >= 1"),
        (["--tensor-parallel-size", "3"], "num_key_value_heads must divide"),
        (["--pipeline-parallel-size", "0"], "pipeline-parallel-size must be >= 1"),
        (["--pipeline-parallel-size", "33"], "pipeline-parallel-size must be <= 32"),
        (["--max-len", "0"], "max-len must be >= 1"),
        (["--request-len", "0"], "request-len must be >= 1"),
        (["--chunked-prefill-size", "0"], "chunked-prefill-size must be >= 1"),
        (["--order", "rows"], "order must be one of"),
        (["--dtype", "int4"], "dtype must be one of"),
        (["--model-config", "nowhere.json"], "No such file"),
        (["--model-config", str(FOLDER)], "No such file"),
        (["--model-config", str(FOLDER / "README.md")], "README.md: JSON is malformed"),
        (["--model-config", str(FOLDER / "falcon-7b.json")], "max-len must be given"),
        (["--draft-model-config", "nowhere.json"], "No such file"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    message: str,
) -> None:
    right = {"--model-config": LLAMA, "--gpu-memory": "80GiB"}
    given = dict(zip(args[::2], args[1::2], strict=True))
    words = [word for pair in (right | given).items() for word in pair]

    code, out, err = run(monkeypatch, capsys, *words)

    assert (2, "") == (code, out)
    assert message in err
    assert 1 == err.count("\n")


@given(
    content=st.binary(max_size=40)
    | st.text(alphabet='{}[]":0a', max_size=20).map(str.encode)
)
def test_any_file_is_read_or_refused(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "config.json"
    path.write_bytes(content)
    try:
        read = read_model_config(path)
    except ConfigError:
        return

    assert isinstance(read, dict)


def test_a_config_of_many_brackets_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b'{"a":' * 100_000)

    with pytest.raises(ConfigError, match=r"config\.json"):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("80GiB", 80 * 2**30),
        ("80 GiB", 80 * 2**30),
        (" 80gib ", 80 * 2**30),
        ("80GB", 80 * 10**9),
        ("1.5TB", 1_500_000_000_000),
        ("0.1KiB", 102),
        ("7B", 7),
        ("99999999999999999999B", 99999999999999999999),
    ],
)
def test_bytes_are_read_as_people_write_them(text: str, num_bytes: int) -> None:
    assert num_bytes == parse_byte_size("memory", text)


@pytest.mark.parametrize(
    "text", ["", "7", "GiB", "1.GiB", "1e3", "٣GiB", "1 G", "--1", "1XB"]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(
        ConfigError, match="memory must be a size with its unit, such as"
    ):
        parse_byte_size("memory", text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1024, "1 KiB"),
        (34.875 * 1024, "34.875 KiB"),
        (2**50, "1,024 TiB"),
    ],
)
def test_bytes_are_written_as_people_read_them(num_bytes: float, text: str) -> None:
    assert text == format_byte_size(num_bytes)


def question(**fields: Any) -> PlanQuestion:  # noqa: ANN401
    llama = {"model_config": read_model_config(Path(LLAMA)), "available_bytes": 2**35}
    return PlanQuestion(**{**llama, **fields})


def test_without_a_length_the_models_own_is_taken() -> None:
    assert 131072 == question().longest_request == question().reports()[0].request_len
    assert 5 == question(max_len=5).longest_request
    assert 7 == question(max_len=5, request_len=7).reports()[0].request_len


def test_layers_are_dealt_out_to_stages_in_order() -> None:
    first, second, third = question(max_len=64, pipeline_parallel_size=3).plan()

    assert "layers.0.attention" == first.layer_names[0]
    assert "layers.10.attention" == first.layer_names[-1]
    assert "layers.11.attention" == second.layer_names[0]
    assert [11, 11, 10] == [len(c.layer_names) for c in (first, second, third)]


NEW_FAMILY = {
    "model_type": "brand_new",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "dtype": "bfloat16",
}


def test_a_family_that_is_not_known_is_refused_unless_it_is_said_to_be_dense(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "new.json"
    path.write_bytes(msgspec.json.encode(NEW_FAMILY))
    args = ["--model-config", str(path), "--gpu-memory", "1MiB"]

    refused, out, err = run(monkeypatch, capsys, *args)
    assert (2, "") == (refused, out)
    assert f"{path}: model_type must be of a family that is known, got brand_new" in err
    assert "--assume-dense" in err

    planned, out, _ = run(monkeypatch, capsys, *args, "--assume-dense")
    assert 0 == planned
    assert [f"{2 * 2 * 16 * 2 * 2} B"] == figures(out)["a token"]


def test_a_config_error_names_the_file_of_the_model_that_it_is_about(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "draft.json"
    path.write_bytes(msgspec.json.encode({**NEW_FAMILY, "model_type": "bert"}))

    _, _, err = run(
        monkeypatch,
        capsys,
        *["--model-config", LLAMA, "--gpu-memory", "40GiB"],
        *["--draft-model-config", str(path)],
    )

    assert f"radixkv: {path}: the model must be a decoder, got model_type bert" in err


def test_checkpoints_are_for_a_model_or_a_draft_model_with_states() -> None:
    jamba = read_model_config(FOLDER / "jamba-v0.1.json")

    with pytest.raises(ConfigError, match="checkpoint-size is for a model with states"):
        question(checkpoint_size=16).plan()
    assert question(max_len=64, checkpoint_size=16, draft_model_config=jamba).plan()

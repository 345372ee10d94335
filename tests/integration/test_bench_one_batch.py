"""`radixkv bench-one-batch` as a user runs it, on the tiny model."""

from __future__ import annotations

import gzip
import json
import math
import sys
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from shlex import split
from typing import Any, Protocol

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from radixkv.scheduling import Engine, load_model
from radixkv.scheduling.benchmark import (
    BenchConfig,
    bench_one_batch,
    compare_with_model,
    comparison,
    one_batch,
    progress,
    synthetic_prompts,
)
from radixkv.scheduling.cli import main
from radixkv.scheduling.models import import_transformers

SMALL = split("--batch-size 2 --input-len 20 --output-len 4")
DRAFTS = "--speculative-num-draft-tokens"


class Cells(list[dict[str, Any]]):
    """What a run wrote as JSON lines, and what it printed."""

    text = ""


class Bench(Protocol):
    def __call__(self, *args: str, model: str = "tiny", code: int = 0) -> Cells: ...


class Refused(Protocol):
    def __call__(self, *args: str, model: str = "tiny") -> str: ...


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[object, str, str]]:
    """Run the command; its exit code and what it printed.

    No line of progress is among it: how many there are depends on the machine.
    """
    monkeypatch.setattr(progress, "_INTERVAL_S", math.inf)

    def run(model: str, *args: str) -> tuple[object, str, str]:
        argv = ["radixkv", "bench-one-batch", "--model", model, *args]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as end:
            main()
        output = capsys.readouterr()
        return end.value.code, output.out, output.err

    return run


@pytest.fixture
def bench(run: Callable[..., tuple[object, str, str]], tmp_path: Path) -> Bench:
    """Run the command and read its results."""
    path = tmp_path / "results.jsonl"

    def bench(*args: str, model: str = "tiny", code: int = 0) -> Cells:
        path.unlink(missing_ok=True)
        actual, out, err = run(model, *args, "--result-filename", str(path))
        assert (code, "") == (actual, err)
        cells = Cells(json.loads(line) for line in path.read_text().splitlines())
        cells.text = out
        return cells

    return bench


@pytest.fixture
def refused(run: Callable[..., tuple[object, str, str]]) -> Refused:
    """Run the command and return the one line with which it refuses."""

    def refused(*args: str, model: str = "tiny") -> str:
        code, out, err = run(model, *args)
        assert (2, "") == (code, out)
        assert err.startswith("radixkv: ")
        assert err.count("\n") == 1
        return err

    return refused


def outputs_of(cell: dict[str, Any], batch: str = "cold") -> list[list[int]]:
    return [r["output"] for r in cell["requests"] if r["batch"] == batch]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """The tiny model in a folder, with a tokenizer: a word a token."""
    path = tmp_path_factory.mktemp("model")
    words = {f"w{i}": i for i in range(512)}
    backend = Tokenizer(WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = WhitespaceSplit()
    transformers = import_transformers()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.save_pretrained(path)
    load_model("tiny").model.save_pretrained(path)
    bars = transformers.utils.logging
    bars.disable_progress_bar()  # of the loading of weights
    yield str(path)
    bars.enable_progress_bar()


# Grids and options ------------------------------------------------------------


def test_a_grid_runs_every_cell_and_writes_a_line_each(bench: Bench) -> None:
    cells = bench(*split("--batch-size 1 2 --input-len 16 32 --output-len 2 3"))

    assert [
        (batch, input_len, output_len)
        for batch in (1, 2)
        for input_len in (16, 32)
        for output_len in (2, 3)
    ] == [(c["batch_size"], c["input_len"], c["output_len"]) for c in cells]
    for cell in cells:
        for batch in ("cold", "warm"):
            figures = cell[batch]
            num_prompt = cell["batch_size"] * cell["input_len"]
            assert figures["num_prompt_tokens"] == num_prompt
            assert figures["num_output_tokens"] == (
                cell["batch_size"] * cell["output_len"]
            )
            assert 0 < figures["prefill_s"] <= figures["total_s"]
            assert 0 < figures["management_share"] < 1
        # The last token of a prompt is computed in any case.
        assert cell["warm"]["num_cached_tokens"] == cell["batch_size"] * (
            (cell["input_len"] - 1) // 16 * 16
        )
        num_tokens = 2 * cell["batch_size"] * cell["output_len"]
        assert (cell["num_checked_tokens"], cell["num_wrong_tokens"]) == (num_tokens, 0)
        assert f"every one of the {num_tokens} output tokens equals" in cells.text


def test_s2_15_the_tokens_are_the_same_at_every_page_size(bench: Bench) -> None:
    cells = [bench(*SMALL, "--page-size", size)[0] for size in ("1", "16", "64")]

    assert outputs_of(cells[0]) == outputs_of(cells[1]) == outputs_of(cells[2])
    assert [38, 32, 0] == [cell["warm"]["num_cached_tokens"] for cell in cells]
    # Nothing is left of the warm-up.
    assert [0, 0, 0] == [cell["cold"]["num_cached_tokens"] for cell in cells]
    assert [0, 0, 0] == [cell["num_wrong_tokens"] for cell in cells]


def test_without_a_prefix_cache_nothing_is_cached_and_nothing_changes(
    bench: Bench,
) -> None:
    (cached,) = bench(*SMALL)
    (uncached,) = bench(*SMALL, "--no-prefix-cache")

    assert outputs_of(cached) == outputs_of(uncached) == outputs_of(uncached, "warm")
    assert cached["warm"]["hit_rate"] == 0.8
    assert uncached["warm"]["hit_rate"] == uncached["cold"]["hit_rate"] == 0


def test_requests_that_start_together_share_what_chunks_computed_before(
    bench: Bench,
) -> None:
    shared = ["--shared-prefix-len", "16", "--chunked-prefill-size", "20"]

    (cell,) = bench(*SMALL, *shared)

    assert [0, 16] == [
        r["num_cached_tokens"] for r in cell["requests"] if r["batch"] == "cold"
    ]
    assert cell["num_wrong_tokens"] == 0


def test_drafts_change_no_token_and_are_counted(bench: Bench) -> None:
    # Over 2 x 40 tokens, a random model says some of them again.
    longer = split("--batch-size 2 --input-len 20 --output-len 40")

    cells = [bench(*longer, *args) for args in ((), (DRAFTS, "3"))]
    plain, cell = cells[0][0], cells[1][0]

    assert outputs_of(plain) == outputs_of(cell)
    assert (cell["speculative_num_draft_tokens"], cell["num_wrong_tokens"]) == (3, 0)
    assert cell["cold"]["num_draft_tokens"] > 0
    assert plain["cold"]["num_draft_tokens"] == 0
    assert plain["cold"]["num_decode_steps"] == 39
    assert cell["cold"]["num_decode_steps"] <= 39
    shown = ["drafts accepted" in printed.text for printed in cells]
    assert [False, True] == shown


def test_in_a_pool_that_is_too_small_for_all_some_wait(bench: Bench) -> None:
    small = split("--batch-size 3 --input-len 14 --output-len 12 --num-pages 20")

    (cell,) = bench(*small, "--page-size", "3")

    assert cell["num_pages"] == 20
    assert cell["cold"]["num_retractions"] == 0
    assert cell["num_wrong_tokens"] == 0
    # Nobody can run with the other two: one begins when another one ends.
    assert cell["cold"]["num_decode_steps"] > 12


def test_a_share_of_the_memory_becomes_pages(bench: Bench) -> None:
    (cell,) = bench(*SMALL, "--mem-fraction", "0.0005")

    page_bytes = 2 * 2 * 2 * 16 * 4 * cell["page_size"]
    assert cell["pool_bytes"] == (cell["num_pages"] + 1) * page_bytes
    assert cell["num_pages"] > 100


def test_overlap_changes_no_token_and_says_what_it_hides(bench: Bench) -> None:
    options = split("--batch-size 3 --input-len 40 --output-len 5 --page-size 4")
    plain, overlapped = bench(*options), bench(*options, "--overlap")

    for batch in ("cold", "warm"):
        assert outputs_of(plain[0], batch) == outputs_of(overlapped[0], batch)
    assert overlapped[0]["num_wrong_tokens"] == 0
    assert plain[0]["cold"]["hidden_share"] == 0
    assert "scheduling beside the model" not in plain.text
    assert "scheduling beside the model" in overlapped.text


def test_the_seed_makes_the_prompts(bench: Bench) -> None:
    first, again, other = (bench(*SMALL, "--seed", seed)[0] for seed in "001")

    assert outputs_of(first) == outputs_of(again)
    assert outputs_of(first) != outputs_of(other)


def test_a_lower_precision_runs_and_need_not_be_checked(bench: Bench) -> None:
    (cell,) = bench(*SMALL, "--dtype", "bfloat16", "--no-correctness-test")

    (full,) = bench(*SMALL)
    assert 2 * cell["pool_bytes"] == full["pool_bytes"]
    assert cell["num_checked_tokens"] == 0


def test_a_profile_is_a_trace_for_each_cell(bench: Bench, tmp_path: Path) -> None:
    prefix = tmp_path / "trace"
    grid = split("--batch-size 1 2 --input-len 4 --output-len 2")

    bench(*grid, "--profile", "--profile-filename-prefix", str(prefix))

    for batch in (1, 2):
        path = f"{prefix}_batch{batch}_input4_output2.trace.json.gz"
        with gzip.open(path) as file:
            trace = json.load(file)
        names = {event.get("name") for event in trace["traceEvents"]}
        assert "aten::linear" in names


def test_results_are_appended_and_no_other_file_is_written(
    run: Callable[..., tuple[object, str, str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    path = tmp_path / "results.jsonl"
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        run("tiny", *SMALL, "--result-filename", "results.jsonl")

    assert len(path.read_text().splitlines()) == 2
    assert [path] == list(tmp_path.iterdir())


# Real prompts -----------------------------------------------------------------


def test_prompts_come_from_a_text_file(
    bench: Bench, folder: str, tmp_path: Path
) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("w1 w2 w3\nw4 w5 w6 w7 w8\n")
    options = ["--prompt-filename", str(path), "--output-len", "3"]

    cells = bench("--batch-size", "3", *options, model=folder)

    # The first prompt goes over again for the third request.
    lengths = [r["num_prompt_tokens"] for r in cells[0]["requests"]]
    assert [3, 5, 3] * 2 == lengths
    output = outputs_of(cells[0])[0]
    assert " ".join(f"w{token}" for token in output) in cells.text


def test_a_json_file_may_hold_a_chat(bench: Bench, folder: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.json"
    content = {"questions": ["w1", "w2"], "system": "w7 " * 20, "chat": ["w3", "w4"]}
    path.write_text(json.dumps(content))
    options = ["--prompt-filename", str(path), "--output-len", "5", "--page-size", "4"]

    (cell,) = bench("--batch-size", "2", *options, model=folder)

    chat = [r for r in cell["requests"] if r["batch"] == "chat"]
    # The second turn holds the first, its answer, and the second question.
    assert [21, 21 + 5 + 1] == [r["num_prompt_tokens"] for r in chat]
    assert [20, 24] == [r["num_cached_tokens"] for r in chat]
    assert cell["num_checked_tokens"] == 2 * 2 * 5 + 2 * 5
    assert cell["num_wrong_tokens"] == 0


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "prompt file cannot be read"),
        ("empty.txt", b"", "prompt file must hold prompts"),
        ("cut.json", b'{"questions": [', "is malformed"),
        ("binary.txt", b"\xff\xfe", "is malformed"),
    ],
)
def test_a_bad_prompt_file_is_refused_in_one_line(
    refused: Refused,
    folder: str,
    tmp_path: Path,
    name: str,
    content: bytes | None,
    message: str,
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)

    line = refused("--prompt-filename", str(path), model=folder)

    assert message in line
    assert name in line


# What is refused once the model is there --------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([*SMALL, "--dtype", "float8"], "dtype must be one of float32"),
        ([*SMALL, "--device", "tpu"], "device must be one of cpu"),
        ([*SMALL, "--device", "cuda:99"], "device must be one of cpu"),
        (
            [*SMALL, "--num-pages", "1"],
            "the longest request, 23 slots, got 1 pages of 16",
        ),
        (["--input-len", "40000"], "must fit the model's 32768 positions, got 40032"),
        ([*SMALL, "--mem-fraction", "1e-12"], "must give at least one page"),
        (["--prompt-filename", "x.txt"], "prompt file cannot be read"),
        ([*SMALL, "--result-filename", "no/such/folder/x"], "result-filename cannot"),
        ([*SMALL, "--result-filename", "."], "result-filename cannot"),
        (
            [*SMALL, "--profile", "--profile-filename-prefix", "no/such/x"],
            "profile-filename-prefix must be in a folder, got no/such",
        ),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(
    refused: Refused,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    args: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)

    assert message in refused(*args)


def test_a_model_without_a_tokenizer_reads_no_prompts(
    refused: Refused, tmp_path: Path
) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("one\n")

    assert "'tiny' has no tokenizer" in refused("--prompt-filename", str(path))


def test_cuda_is_refused_where_there_is_none(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)

    line = refused(*SMALL, "--device", "cuda")
    assert "device must be one of cpu, got 'cuda'" in line


def test_an_unknown_model_is_refused_in_one_line(refused: Refused) -> None:
    line = refused(model="tinny")

    assert "model must be 'tiny', 'smollm2'" in line
    assert "got 'tinny'" in line


def test_a_pool_that_does_not_fit_in_memory_is_refused_in_one_line(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("can't allocate memory:\n  you tried to allocate it all")

    monkeypatch.setattr("radixkv.mem_cache.kv_pool.torch.zeros", fail)

    line = refused(*SMALL, "--num-pages", "5000")
    assert "the pool must fit in memory, got 5000 pages of 16 slots" in line


# The check of the tokens ------------------------------------------------------


def test_a_token_that_the_model_does_not_generate_is_shouted_and_exit_code_1(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    right: Any = comparison.generate_reference

    def wrong(*args: object, **kwargs: object) -> list[int]:
        tokens: list[int] = right(*args, **kwargs)
        return [*tokens[:-1], tokens[-1] + 1]

    monkeypatch.setattr(comparison, "generate_reference", wrong)

    cells = bench("--batch-size", "1", "--input-len", "9", "--output-len", "3", code=1)

    assert cells[0]["num_wrong_tokens"] == 2
    assert "2 of 6 output tokens DIFFER" in cells.text
    assert "first in request 1 of 2: got [" in cells.text


def test_a_token_that_no_forward_pass_chooses_is_shouted_and_exit_code_1(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    right: Any = comparison.predict_reference

    def wrong(*args: object) -> list[frozenset[int]]:
        return [*right(*args)[:-1], frozenset([-1])]

    monkeypatch.setattr(comparison, "predict_reference", wrong)

    cells = bench("--batch-size", "1", "--input-len", "9", "--output-len", "3", code=1)

    assert cells[0]["num_wrong_tokens"] == 2


def test_a_cell_that_is_wrong_does_not_hide_behind_one_that_is_right(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = comparison.predict_reference

    def wrong(
        model: object, prompt: list[int], output: list[int]
    ) -> list[frozenset[int]]:
        choices = right(model, prompt, output)
        return [frozenset([-1])] * len(output) if len(prompt) == 8 else choices

    monkeypatch.setattr(comparison, "predict_reference", wrong)

    cells = bench("--input-len", "8", "9", "--output-len", "2", code=1)

    assert [32, 0] == [cell["num_wrong_tokens"] for cell in cells]


def test_a_grid_with_a_cell_that_cannot_run_runs_none(
    bench: Bench, run: Callable[..., tuple[object, str, str]], tmp_path: Path
) -> None:
    path = tmp_path / "none.jsonl"
    grid = split("--batch-size 1 --input-len 8 --output-len 2 100000")

    code, out, err = run("tiny", *grid, "--result-filename", str(path))

    assert (2, "") == (code, out)
    assert "32768 positions" in err
    assert not path.read_text()


def test_near_ties_of_logits_are_no_wrong_tokens(bench: Bench) -> None:
    """Here the model's own generate goes another way than its own forward pass."""
    options = "--input-len 512 --output-len 160 --batch-size 6"

    cells = bench(*options.split())

    assert (cells[0]["num_checked_tokens"], cells[0]["num_wrong_tokens"]) == (1920, 0)


def test_what_was_measured_is_written_though_the_comparison_is_interrupted(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(comparison, "generate_reference", interrupt)

    cells = bench(*SMALL, code=130)

    assert "cold prefill takes" in cells.text
    assert cells[0]["num_checked_tokens"] == 0


def test_real_prompts_may_end_early_and_synthetic_lengths_are_exact() -> None:
    loaded = load_model("tiny")
    prompts = synthetic_prompts(1, 8, 0, vocab_size=512, seed=0)
    config = BenchConfig(batch_size=1, input_len=8, output_len=6)
    output = bench_one_batch(config, loaded, prompts).cold.requests[0].output
    loaded.model.generation_config.eos_token_id = output[2]

    synthetic = bench_one_batch(config, loaded, prompts)
    real = bench_one_batch(replace(config, input_len=None), loaded, prompts)

    assert output == synthetic.cold.requests[0].output
    assert output[: output.index(output[2]) + 1] == real.cold.requests[0].output
    for result in (synthetic, real):
        assert compare_with_model(result, loaded).num_wrong_tokens == 0


def test_the_times_are_those_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that ticks whenever it is read, six times until a step is over."""
    ticking = partial(Engine, clock=count().__next__)
    monkeypatch.setattr(one_batch, "Engine", ticking)
    prompts = synthetic_prompts(2, 8, 0, vocab_size=512, seed=0)
    config = BenchConfig(
        batch_size=2, input_len=8, output_len=4, chunked_prefill_size=8
    )

    cold = bench_one_batch(config, load_model("tiny"), prompts).cold

    # a is computed, then b beside the first decode of a, and then both decode.
    assert [6, 12] == [request.ttft_s for request in cold.requests]
    assert cold.prefill_s == 12
    assert [6, 6, 6] == cold.decode_steps_s
    assert (30, 10, 0) == (cold.total_s, cold.management_s, cold.hidden_s)


def test_progress_is_told_of_every_part_and_reaches_its_end() -> None:
    loaded = load_model("tiny")
    prompts = synthetic_prompts(2, 8, 0, vocab_size=512, seed=0)
    told: dict[str, list[tuple[int, int]]] = {}

    def tell(what: str, done: int, total: int) -> None:
        told.setdefault(what, []).append((done, total))

    result = bench_one_batch(
        BenchConfig(batch_size=2, input_len=8, output_len=3), loaded, prompts, tell
    )
    compare_with_model(result, loaded, tell)

    assert {"cold", "warm", "compare with the model alone"} == set(told)
    assert told["compare with the model alone"][-1] == (12, 12)
    for steps in told.values():
        assert steps == sorted(steps)
    assert told["cold"][-1] == told["warm"][-1] == (6, 6)

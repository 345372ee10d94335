"""The report of a benchmark: the figures, the JSON lines and the tables."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from radixkv.scheduling.benchmark import (
    BatchMeasurement,
    BenchConfig,
    BenchResult,
    Comparison,
    RequestMeasurement,
)
from radixkv.scheduling.benchmark.report import (
    append_json_line,
    figures,
    print_result,
    summary,
    verdict,
)


def request(
    num_prompt: int = 10,
    num_cached: int = 0,
    num_output: int = 2,
    ttft_s: float = 0.5,
    num_drafts: int = 0,
) -> RequestMeasurement:
    prompt = np.arange(num_prompt, dtype=np.int32)
    output = list(range(num_output))
    accepted = num_drafts // 3
    return RequestMeasurement(prompt, output, num_cached, ttft_s, num_drafts, accepted)


COLD = BatchMeasurement(
    requests=[request(10, 0, 2, 0.5), request(30, 0, 4, 2.0)],
    decode_steps_s=[0.1, 0.3, 0.2],
    total_s=4.0,
    management_s=0.04,
    num_retractions=1,
)
WARM = BatchMeasurement(
    requests=[request(10, 8, 2, 0.25), request(30, 24, 4, 0.5)],
    decode_steps_s=[],
    total_s=2.0,
    management_s=0.1,
    num_retractions=0,
)
RESULT = BenchResult(
    config=BenchConfig(batch_size=2, output_len=4),
    model_name="some/model",
    num_pages=7,
    pool_bytes=3 * 2**20,
    cold=COLD,
    warm=WARM,
    chat=[],
)
RIGHT = Comparison(num_tokens=12, num_wrong_tokens=0, first_difference="")


class UpperTokenizer:
    def decode(self, tokens: list[int]) -> str:
        return f"[bold]TEXT[/bold]\n  OF {tokens}"


def printed(result: BenchResult, tokenizer: UpperTokenizer | None = None) -> str:
    console = Console(file=io.StringIO(), width=120)
    print_result(console, result, tokenizer)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_figures_of_a_batch() -> None:
    total = figures([COLD])

    assert (total.num_prompt_tokens, total.num_output_tokens) == (40, 6)
    assert (total.num_cached_tokens, total.hit_rate) == (0, 0)
    assert (total.prefill_s, total.total_s) == (2.0, 4.0)
    assert total.decode_median_s == pytest.approx(0.2)
    assert total.decode_p99_s == pytest.approx(0.298)
    assert (total.tokens_per_s, total.output_tokens_per_s) == (46 / 4, 6 / 4)
    assert (total.management_share, total.num_retractions) == (0.01, 1)


def test_without_a_decode_step_there_is_no_latency() -> None:
    total = figures([WARM])

    assert (total.decode_median_s, total.decode_p99_s) == (None, None)
    assert total.hit_rate == 0.8


measurements = st.builds(
    BatchMeasurement,
    requests=st.lists(
        st.builds(
            request,
            st.integers(1, 20),
            st.integers(0, 9),
            st.integers(1, 5),
            st.floats(0.01, 1),
            st.integers(3, 9),
        ),
        min_size=1,
        max_size=3,
    ),
    decode_steps_s=st.lists(st.floats(0.01, 1), max_size=4),
    total_s=st.floats(1, 9),
    management_s=st.floats(0, 1),
    num_retractions=st.integers(0, 3),
)


@given(st.lists(measurements, min_size=1, max_size=4))
def test_figures_of_batches_are_sums(batches: list[BatchMeasurement]) -> None:
    total = figures(batches)
    parts = [figures([batch]) for batch in batches]

    for name in (
        "num_prompt_tokens",
        "num_cached_tokens",
        "num_output_tokens",
        "num_decode_steps",
        "num_draft_tokens",
        "num_accepted_tokens",
    ):
        assert getattr(total, name) == sum(getattr(part, name) for part in parts)
    for name in ("prefill_s", "total_s"):
        expected = sum(getattr(part, name) for part in parts)
        assert getattr(total, name) == pytest.approx(expected)
    steps = sorted(step for batch in batches for step in batch.decode_steps_s)
    if steps:
        assert total.decode_median_s is not None
        assert total.decode_p99_s is not None
        assert steps[0] <= total.decode_median_s <= total.decode_p99_s <= steps[-1]


def test_a_json_line_holds_the_options_the_figures_and_every_request(
    tmp_path: Path,
) -> None:
    path = tmp_path / "results.jsonl"

    append_json_line(path, summary(RESULT, RIGHT))
    append_json_line(path, summary(replace(RESULT, model_name="second"), None))

    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert (first["model"], second["model"]) == ("some/model", "second")
    # The size of the pool is what came of the option.
    options = {**asdict(RESULT.config), "num_pages": 7}
    assert options == {name: first[name] for name in options}
    assert asdict(figures([WARM])) == first["warm"]
    assert first["pool_bytes"] == 3 * 2**20
    assert (first["warm_speedup"], first["chat"]) == (4.0, None)
    assert (first["num_checked_tokens"], first["num_wrong_tokens"]) == (12, 0)
    assert (second["num_checked_tokens"], second["num_wrong_tokens"]) == (0, 0)
    assert ["cold", "cold", "warm", "warm"] == [r["batch"] for r in first["requests"]]
    assert first["requests"][3] == {
        "batch": "warm",
        "num_prompt_tokens": 30,
        "num_cached_tokens": 24,
        "ttft_s": 0.5,
        "output": [0, 1, 2, 3],
    }


def test_the_turns_of_a_chat_are_summed_up() -> None:
    line = summary(replace(RESULT, chat=[COLD, WARM]), RIGHT)

    assert asdict(figures([COLD, WARM])) == line["chat"]
    assert isinstance(line["requests"], list)
    assert len(line["requests"]) == 8


def test_the_tables_show_every_request_and_every_batch() -> None:
    text = printed(replace(RESULT, chat=[WARM]))

    for words in (
        "some/model: batch size 2, page size 16, 7 pages (3.0 MiB), prefix cache on, "
        f"threads {torch.get_num_threads()}",
        "cold prefill takes 4.0x as long as warm prefill",
        "2000.0 ms",
        "200.0 ms",
        "298.0 ms",
        "80.0%",
        "1.00%",
        "5.00%",
    ):
        assert words in text
    rows = [line for line in text.splitlines() if line.startswith("│ ")]
    for name in ("cold", "warm", "chat"):
        assert sum(row.startswith(f"│ {name} ") for row in rows) == 2


def test_drafts_are_shown_where_there_may_be_any() -> None:
    batch = replace(COLD, requests=[request(num_drafts=9), request(num_drafts=4)])
    config = replace(RESULT.config, speculative_num_draft_tokens=3)

    text = printed(replace(RESULT, config=config, cold=batch))

    rows = [[cell.strip() for cell in line.split("│")] for line in text.splitlines()]
    assert ["", "drafts accepted", "4 of 13", "0 of 0", ""] in rows
    assert ["", "decode steps", "3", "0", ""] in rows
    assert "drafts" not in printed(RESULT)


def test_text_is_shown_as_it_is_on_one_line() -> None:
    assert "> [bold]TEXT[/bold] OF [0, 1]" in printed(RESULT, UpperTokenizer())
    assert "> [0, 1]" in printed(RESULT)


def test_wrong_tokens_are_shouted() -> None:
    wrong = Comparison(12, 3, "request 2 of 4: got [1], the model alone [2]")

    assert "3 of 12 output tokens DIFFER" in verdict(wrong)
    assert "request 2 of 4: got [1]" in verdict(wrong)
    assert "every one of the 12 output tokens equals" in verdict(RIGHT)


def test_nothing_is_claimed_about_tokens_that_were_not_checked() -> None:
    assert "generate" not in printed(RESULT)


def test_a_text_that_is_cut_says_so() -> None:
    long = BatchMeasurement([request(num_output=200)], [], 1.0, 0.0, 0)

    assert printed(replace(RESULT, cold=long)).count("…") == 1

"""Shows what a benchmark measured: tables for people, JSON lines for programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from ..models import TransformersObject
from .comparison import Comparison
from .one_batch import BatchMeasurement, BenchResult

_NUM_SHOWN_TEXTS = 3
_SHOWN_CHARACTERS = 160


@dataclass(frozen=True, slots=True)
class Figures:
    """Sums over batches that ran one after another; times in seconds.

    Attributes:
        num_prompt_tokens: Prompt tokens.
        num_cached_tokens: Those of them that were not computed.
        num_output_tokens: Generated tokens.
        hit_rate: Cached share of the prompt tokens.
        prefill_s: Until every request of a batch had its first token.
        decode_median_s: Median of the steps that only decoded; ``None`` without one.
        decode_p99_s: Their 99th percentile.
        total_s: In all.
        tokens_per_s: Prompt and output tokens a second.
        output_tokens_per_s: Output tokens a second.
        management_share: Share of the time in scheduler and cache while the model
            waited.
        num_retractions: How often a request gave its pages back.
        num_decode_steps: Steps that only decoded.
        num_draft_tokens: Draft tokens that were verified.
        num_accepted_tokens: Those of them that became output.
        hidden_share: Share of the time in the scheduler while the model was at work.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    hit_rate: float
    prefill_s: float
    decode_median_s: float | None
    decode_p99_s: float | None
    total_s: float
    tokens_per_s: float
    output_tokens_per_s: float
    management_share: float
    num_retractions: int
    num_decode_steps: int
    num_draft_tokens: int
    num_accepted_tokens: int
    hidden_share: float


def figures(batches: list[BatchMeasurement]) -> Figures:
    """Sum up batches that ran one after another, at least one."""
    prompt = sum(batch.num_prompt_tokens for batch in batches)
    cached = sum(batch.num_cached_tokens for batch in batches)
    output = sum(batch.num_output_tokens for batch in batches)
    total_s = sum(batch.total_s for batch in batches)
    steps = [step for batch in batches for step in batch.decode_steps_s]
    return Figures(
        num_prompt_tokens=prompt,
        num_cached_tokens=cached,
        num_output_tokens=output,
        hit_rate=cached / prompt,
        prefill_s=sum(batch.prefill_s for batch in batches),
        decode_median_s=float(np.median(steps)) if steps else None,
        decode_p99_s=float(np.percentile(steps, 99)) if steps else None,
        total_s=total_s,
        tokens_per_s=(prompt + output) / total_s,
        output_tokens_per_s=output / total_s,
        management_share=sum(batch.management_s for batch in batches) / total_s,
        num_retractions=sum(batch.num_retractions for batch in batches),
        num_decode_steps=len(steps),
        num_draft_tokens=sum(batch.num_draft_tokens for batch in batches),
        num_accepted_tokens=sum(batch.num_accepted_tokens for batch in batches),
        hidden_share=sum(batch.hidden_s for batch in batches) / total_s,
    )


def print_result(
    console: Console, result: BenchResult, tokenizer: TransformersObject | None
) -> None:
    """Print one cell of the grid.

    Args:
        console: Where to.
        result: What was measured.
        tokenizer: To show text; without one, token ids are shown.
    """
    config = result.config
    console.print(
        f"\n{result.model_name}: batch size {config.batch_size}, page size "
        f"{config.page_size}, {result.num_pages} pages "
        f"({result.pool_bytes / 2**20:.1f} MiB), prefix cache "
        f"{'on' if config.prefix_cache else 'off'}, "
        f"threads {torch.get_num_threads()}",
        highlight=False,
    )
    console.print(_request_table(result))
    console.print(_batch_table(result))
    ratio = result.cold.prefill_s / result.warm.prefill_s
    console.print(
        f"cold prefill takes {ratio:.1f}x as long as warm prefill", highlight=False
    )
    for batch in [result.cold, *result.chat][:_NUM_SHOWN_TEXTS]:
        console.print(f"  > {_text(batch, tokenizer)}", markup=False, highlight=False)


def verdict(comparison: Comparison) -> str:
    """Say whether the outputs equal the model's own."""
    if comparison.num_wrong_tokens:
        return (
            f"{comparison.num_wrong_tokens} of {comparison.num_tokens} output tokens "
            "DIFFER from the model's own uncached generate; first in "
            f"{comparison.first_difference}"
        )
    return (
        f"every one of the {comparison.num_tokens} output tokens equals the "
        "model's own uncached generate"
    )


def append_json_line(path: Path, line: dict[str, object]) -> None:
    """Append one line of JSON to a file.

    Args:
        path: The file; made if it does not exist.
        line: What to write.
    """
    with path.open("ab") as file:
        file.write(msgspec.json.encode(line) + b"\n")


def summary(result: BenchResult, comparison: Comparison | None) -> dict[str, object]:
    """Return the figures of one cell, ready for JSON. Times are in seconds.

    Args:
        result: What was measured.
        comparison: What the comparison with the model showed, if there was one.
    """
    return {
        "model": result.model_name,
        **asdict(result.config),
        "num_pages": result.num_pages,
        "pool_bytes": result.pool_bytes,
        "num_threads": torch.get_num_threads(),
        "cold": asdict(figures([result.cold])),
        "warm": asdict(figures([result.warm])),
        "chat": asdict(figures(result.chat)) if result.chat else None,
        "warm_speedup": result.cold.prefill_s / result.warm.prefill_s,
        "num_checked_tokens": comparison.num_tokens if comparison else 0,
        "num_wrong_tokens": comparison.num_wrong_tokens if comparison else 0,
        "requests": [
            {
                "batch": name,
                "num_prompt_tokens": len(request.prompt),
                "num_cached_tokens": request.num_cached_tokens,
                "ttft_s": request.ttft_s,
                "output": request.output,
            }
            for name, batches in _batches(result).items()
            for batch in batches
            for request in batch.requests
        ],
    }


def _batches(result: BenchResult) -> dict[str, list[BatchMeasurement]]:
    batches = {"cold": [result.cold], "warm": [result.warm]}
    return {**batches, "chat": result.chat} if result.chat else batches


def _request_table(result: BenchResult) -> Table:
    table = Table("batch", "request", title="requests")
    for name in ("prompt tokens", "cached tokens", "first token"):
        table.add_column(name, justify="right")
    for name, batches in _batches(result).items():
        requests = [request for batch in batches for request in batch.requests]
        for i, request in enumerate(requests):
            table.add_row(
                name,
                str(i + 1),
                str(len(request.prompt)),
                str(request.num_cached_tokens),
                _ms(request.ttft_s),
                end_section=i == len(requests) - 1,
            )
    return table


def _batch_table(result: BenchResult) -> Table:
    table = Table("", title="batches")
    columns: list[list[str]] = []
    for name, batches in _batches(result).items():
        table.add_column(name, justify="right")
        total = figures(batches)
        columns.append(
            [
                _ms(total.prefill_s),
                _ms(total.decode_median_s),
                _ms(total.decode_p99_s),
                f"{total.tokens_per_s:.0f}",
                f"{total.output_tokens_per_s:.1f}",
                f"{total.hit_rate:.1%}",
                f"{total.management_share:.2%}",
                str(total.num_retractions),
                str(total.num_decode_steps),
                f"{total.num_accepted_tokens} of {total.num_draft_tokens}",
            ]
        )
    names = (
        "prefill",
        "decode step, median",
        "decode step, p99",
        "tokens per second",
        "output tokens per second",
        "hit rate",
        "time in scheduler and cache",
        "retractions",
        "decode steps",
        "drafts accepted",
    )
    rows = list(zip(names, *columns, strict=True))
    if not result.config.speculative_num_draft_tokens:
        rows = rows[:-2]  # without drafts, they say nothing new
    for row in rows:
        table.add_row(*row)
    if result.config.overlap:
        totals = [figures(batches) for batches in _batches(result).values()]
        shares = [f"{total.hidden_share:.2%}" for total in totals]
        table.add_row("scheduling beside the model", *shares)
    return table


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f} ms"


def _text(batch: BatchMeasurement, tokenizer: TransformersObject | None) -> str:
    output = batch.requests[0].output
    text = str(output) if tokenizer is None else str(tokenizer.decode(output))
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"

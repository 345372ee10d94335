"""The command `radixkv plan`: what a model's cache takes, before any GPU is there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, cast

import msgspec
import typer

from radixkv.mem_cache import ConfigError, PlanReport
from radixkv.mem_cache.planning import BufferOrder
from radixkv.mem_cache.sizes import as_size

from .byte_size import format_byte_size, parse_byte_size
from .model_plan import PlanQuestion, read_model_config

_MUCH_PADDING_PERCENT: Final = 10


def plan_command(
    model_config: Annotated[
        Path, typer.Option(help="A model's config.json, or the folder that has it.")
    ],
    gpu_memory: Annotated[
        str, typer.Option(help="Memory of one GPU, such as 80GiB or 24GB.")
    ],
    reserved_memory: Annotated[
        str, typer.Option(help="What weights and activations take of it, on one GPU.")
    ] = "0B",
    draft_model_config: Annotated[
        Path | None, typer.Option(help="Of a draft model that shares the cache.")
    ] = None,
    page_size: Annotated[int, typer.Option(help="Slots a page.")] = 16,
    dtype: Annotated[
        str | None,
        typer.Option(help="Of K and V, such as float8_e4m3fn. [as computed]"),
    ] = None,
    tensor_parallel_size: Annotated[
        int, typer.Option(help="GPUs that share the heads of each layer.")
    ] = 1,
    pipeline_parallel_size: Annotated[
        int, typer.Option(help="Stages that share the layers.")
    ] = 1,
    max_len: Annotated[
        int | None, typer.Option(help="Longest request, in tokens. [the model's]")
    ] = None,
    request_len: Annotated[
        int | None, typer.Option(help="Count requests of so many tokens. [max-len]")
    ] = None,
    chunked_prefill_size: Annotated[
        int, typer.Option(help="Prompt tokens a step at most.")
    ] = 2048,
    checkpoint_size: Annotated[
        int | None, typer.Option(help="Tokens between kept states. [none is kept]")
    ] = None,
    order: Annotated[
        str, typer.Option(help="pages_outermost or layers_outermost.")
    ] = "pages_outermost",
    assume_dense: Annotated[
        bool,
        typer.Option(
            "--assume-dense",
            help="Read a model_type that is not known as its fields say.",
        ),
    ] = False,
    include_mtp: Annotated[
        bool,
        typer.Option(
            "--include-mtp",
            help="Count the model's own layers for multi-token prediction.",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print figures and layouts as JSON.")
    ] = False,
) -> None:
    """Plan the cache of a model from its config: what a token takes, and what fits.

    Bytes are those of one GPU; with several stages, each is a column.
    """
    total = parse_byte_size("gpu-memory", gpu_memory)
    available_bytes = total - parse_byte_size("reserved-memory", reserved_memory)
    if available_bytes <= 0:
        raise ConfigError(
            f"reserved-memory must be less than gpu-memory ({gpu_memory}), got "
            f"{reserved_memory}"
        )
    question = PlanQuestion(
        model_config=read_model_config(model_config),
        draft_model_config=None
        if draft_model_config is None
        else read_model_config(draft_model_config),
        model_name=str(model_config),
        draft_model_name=str(draft_model_config),
        assume_dense=assume_dense,
        include_mtp=include_mtp,
        available_bytes=available_bytes,
        page_size=as_size("page-size", page_size),
        dtype=dtype,
        tensor_parallel_size=as_size("tensor-parallel-size", tensor_parallel_size),
        pipeline_parallel_size=pipeline_parallel_size,
        max_len=max_len,
        request_len=request_len,
        chunked_prefill_size=as_size("chunked-prefill-size", chunked_prefill_size),
        checkpoint_size=checkpoint_size,
        # The planner refuses any other text.
        order=cast("BufferOrder", order),
    )
    if as_json:
        answer = {
            "reports": question.reports(),
            "configs": question.plan(),
            "notes": question.notes(),
        }
        print(msgspec.json.encode(answer).decode())
    else:
        _print_table(str(model_config), question)


def _print_table(title: str, question: PlanQuestion) -> None:
    from rich.console import Console
    from rich.table import Table

    reports = question.reports()
    # As a title it would be folded to the width of the table.
    console = Console(highlight=False, soft_wrap=True)
    console.print(title, markup=False)
    table = Table("")
    for stage in range(len(reports)):
        name = "one GPU" if len(reports) == 1 else f"stage {stage}"
        table.add_column(name, justify="right")
    for label, cells in _rows(reports, question.available_bytes):
        table.add_row(label, *cells)
    console.print(table)
    advice = _advice(question, reports)
    for line in (*question.notes(), *([advice] if advice else [])):
        console.print(line, markup=False)


def _rows(
    reports: Sequence[PlanReport], available_bytes: int
) -> list[tuple[str, list[str]]]:
    length = f"{reports[0].request_len:,} tokens"
    columns = [
        {
            "memory for the cache": format_byte_size(available_bytes),
            "used by it": format_byte_size(report.buffer_bytes),
            "a token": format_byte_size(report.token_bytes),
            f"a page of {report.page_size} tokens": format_byte_size(report.page_bytes),
            "pages": f"{report.num_pages:,}",
            "tokens of the longest request": f"{report.longest_len:,}",
            f"a request of {length}": format_byte_size(report.request_bytes),
            f"requests of {length}": f"{report.num_requests:,}",
            "of that padding": f"{report.padding_percent:.1f} %",
            "groups of layers": f"{report.num_groups}",
            "hits in steps of": "no reuse"
            if report.hit_granularity is None
            else f"{report.hit_granularity:,} tokens",
        }
        for report in reports
    ]
    return [(label, [column[label] for column in columns]) for label in columns[0]]


def _advice(question: PlanQuestion, reports: Sequence[PlanReport]) -> str | None:
    """Tell of much padding, and name the page size with which most requests fit."""
    worst = max(report.padding_percent for report in reports)
    if worst < _MUCH_PADDING_PERCENT:
        return None
    told = f"{worst:.0f} % of the pages of such a request is padding"
    page_size, num_requests = question.roomiest_page_size() or (0, 0)
    if num_requests <= reports[0].num_requests:
        return f"{told}."
    return f"{told}; with --page-size {page_size}, {num_requests:,} requests would fit."

"""The command line: `radixkv`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, NoReturn

import typer

import radixkv
from radixkv.mem_cache.errors import ConfigError, RadixKVError

from .plan_command import plan_command

app = typer.Typer(add_completion=False, rich_markup_mode=None)

_GRID_OPTIONS = ("--batch-size", "--input-len", "--output-len")


@app.callback(invoke_without_command=True)
def radixkv_command(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.")
    ] = False,
) -> None:
    """Plan a cache's memory, and measure what a prefix cache is worth."""
    if version:
        print(radixkv.__version__)
    elif context.invoked_subcommand is None:
        print(context.get_help())


@app.command("bench-one-batch")
def bench_one_batch_command(
    model: Annotated[
        str,
        typer.Option(
            help="smollm2, tiny (random weights), a GGUF file, a folder, or a hub id."
        ),
    ] = "smollm2",
    batch_size: Annotated[
        list[int] | None,
        typer.Option(help="Requests that start together; several make a grid. [8]"),
    ] = None,
    input_len: Annotated[
        list[int] | None,
        typer.Option(help="Tokens of synthetic prompts; several make a grid."),
    ] = None,
    output_len: Annotated[
        list[int] | None,
        typer.Option(help="Output tokens a request; several make a grid. [32]"),
    ] = None,
    shared_prefix_len: Annotated[
        int, typer.Option(help="Leading tokens that all synthetic prompts share.")
    ] = 0,
    prompt_filename: Annotated[
        Path | None,
        typer.Option(help="A prompt a line, or .json with questions, system, chat."),
    ] = None,
    page_size: Annotated[int, typer.Option(help="Slots a page.")] = 16,
    num_pages: Annotated[
        int | None, typer.Option(help="Pages of the pool. [enough for the run]")
    ] = None,
    mem_fraction: Annotated[
        float | None, typer.Option(help="Share of the free memory for the pool.")
    ] = None,
    prefix_cache: Annotated[
        bool, typer.Option(help="Share the pages of common prefixes.")
    ] = True,
    chunked_prefill_size: Annotated[
        int, typer.Option(help="Prompt tokens a step at most.")
    ] = 2048,
    speculative_num_draft_tokens: Annotated[
        int, typer.Option(help="Tokens guessed a request and step, by prompt lookup.")
    ] = 0,
    overlap: Annotated[
        bool, typer.Option(help="Schedule the next step while the model computes one.")
    ] = False,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads. [the cores that may be used]")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[
        str, typer.Option(help="float32, float16 or bfloat16.")
    ] = "float32",
    correctness_test: Annotated[
        bool, typer.Option(help="Compare every output token with the model's own.")
    ] = True,
    result_filename: Annotated[
        Path | None, typer.Option(help="Append the figures there, as JSON lines.")
    ] = None,
    profile: Annotated[
        bool, typer.Option(help="Write a torch profiler trace of each cell.")
    ] = False,
    profile_filename_prefix: Annotated[
        str, typer.Option(help="Begins the names of the traces.")
    ] = "profile",
    seed: Annotated[int, typer.Option(help="Of the synthetic prompts.")] = 0,
) -> None:
    """Run one batch on a real model, cold and warm.

    Several values after --batch-size, --input-len and --output-len make a grid.
    Without --input-len the prompts are real: those of --prompt-filename, or those that
    ship with the project; these end with a chat.
    """
    from .benchmark.config import BenchConfig

    if prompt_filename is not None and input_len:
        raise ConfigError("give prompt-filename or input-len, got both")
    real_prompts: list[int | None] = [None]
    configs = [
        BenchConfig(
            batch_size=batch,
            input_len=prompt_tokens,
            output_len=output_tokens,
            shared_prefix_len=shared_prefix_len,
            page_size=page_size,
            num_pages=num_pages,
            mem_fraction=mem_fraction,
            prefix_cache=prefix_cache,
            chunked_prefill_size=chunked_prefill_size,
            speculative_num_draft_tokens=speculative_num_draft_tokens,
            overlap=overlap,
            correctness_test=correctness_test,
            seed=seed,
        )
        for batch, prompt_tokens, output_tokens in product(
            batch_size or [8], input_len or real_prompts, output_len or [32]
        )
    ]
    # Only now: torch takes seconds to import, and a wrong option must not wait for it.
    from .benchmark.grid import Grid

    grid = Grid(
        model=model,
        device=device,
        dtype=dtype,
        prompt_filename=prompt_filename,
        result_filename=result_filename,
        profile_prefix=profile_filename_prefix if profile else None,
        num_threads=threads,
    )
    if not grid.run(configs):
        raise typer.Exit(1)


app.command("plan")(plan_command)


def spread(arguments: Sequence[str]) -> list[str]:
    """Repeat the option before each further value: ``--batch-size 1 8`` is a grid.

    Args:
        arguments: Command-line arguments.

    Example:
        >>> spread(["--batch-size", "1", "8", "--seed", "3"])
        ['--batch-size', '1', '--batch-size', '8', '--seed', '3']
    """
    spread_out: list[str] = []
    option: str | None = None
    for argument in arguments:
        if argument.startswith("--"):
            name = argument.partition("=")[0]
            option = name if name in _GRID_OPTIONS else None
        elif option is not None and spread_out[-1] != option:
            spread_out.append(option)
        spread_out.append(argument)
    return spread_out


def _refuse(message: str) -> NoReturn:
    print(f"radixkv: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def main() -> None:
    """Run the command line; what it refuses is one line, and exit code 2."""
    try:
        code = app(spread(sys.argv[1:]), standalone_mode=False)
    except typer.TyperException as error:
        _refuse(error.format_message())
    except (RadixKVError, OSError, MemoryError) as error:
        _refuse(str(error) or "out of memory")
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)

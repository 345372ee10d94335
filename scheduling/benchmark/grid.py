"""Runs the cells of a grid one after another, with progress bars, and reports them."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
)

from radixkv.mem_cache.errors import ConfigError

from ..models import LoadedModel, device_of, dtype_of, load_model
from .config import BenchConfig
from .one_batch import BenchResult, bench_one_batch
from .one_batch import Progress as OnProgress
from .prompts import PromptSet, load_prompts, read_prompt_file, synthetic_prompts
from .report import append_json_line, print_result

_DEFAULT_INPUT_LEN = 256


@dataclass(frozen=True, slots=True)
class Grid:
    """What all cells share.

    Attributes:
        model: Name of the model; see `load_model`.
        device: Name of the torch device.
        dtype: Name of the torch dtype, of weights, K and V.
        prompt_filename: Real prompts; see `load_prompts`.
        result_filename: JSON lines are appended there, if given.
        profile_prefix: If given, each cell writes a torch profiler trace to
            ``{profile_prefix}_batch8_input256_output32.trace.json.gz``.
    """

    model: str
    device: str = "cpu"
    dtype: str = "float32"
    prompt_filename: Path | None = None
    result_filename: Path | None = None
    profile_prefix: str | None = None

    def run(self, configs: Sequence[BenchConfig]) -> bool:
        """Run, print and write every cell; whether every checked token is right.

        Args:
            configs: The cells.

        Raises:
            ConfigError: The model, the device or the prompts are not to be had, a
                model without tokenizer is asked to read text, or a file cannot be
                written.
            LengthError: A request can never fit.
        """
        self._check_files()
        loaded = load_model(
            self.model, dtype=dtype_of(self.dtype), device=device_of(self.device)
        )
        console = Console()
        is_right = True
        for config in configs:
            if config.input_len is None and loaded.tokenizer is None:
                if self.prompt_filename is not None:
                    raise ConfigError(
                        f"model {loaded.name!r} has no tokenizer and cannot read "
                        "prompt-filename: give input-len"
                    )
                config = replace(config, input_len=_DEFAULT_INPUT_LEN)
            prompts = self._prompts(config, loaded)
            with _progress_bars() as progress, self._profiler(config):
                result = bench_one_batch(config, loaded, prompts, progress)
            self._report(console, result, loaded)
            is_right = is_right and not result.num_wrong_tokens
        return is_right

    def _check_files(self) -> None:
        """Refuse at once what else would fail after the model was loaded or run."""
        if self.prompt_filename is not None:
            read_prompt_file(self.prompt_filename)
        if self.result_filename is not None:
            try:
                self.result_filename.open("ab").close()
            except OSError as error:
                raise ConfigError(
                    f"result-filename cannot be written: {error}"
                ) from error
        if self.profile_prefix is not None:
            folder = Path(self.profile_prefix).parent
            if not folder.is_dir():
                raise ConfigError(
                    f"profile-filename-prefix must be in a folder, got {folder}"
                )

    def _prompts(self, config: BenchConfig, loaded: LoadedModel) -> PromptSet:
        if config.input_len is None:
            return load_prompts(loaded.tokenizer, self.prompt_filename)
        return synthetic_prompts(
            config.batch_size,
            config.input_len,
            config.shared_prefix_len,
            vocab_size=loaded.model.config.get_text_config().vocab_size,
            seed=config.seed,
        )

    def _report(
        self, console: Console, result: BenchResult, loaded: LoadedModel
    ) -> None:
        real = result.config.input_len is None
        print_result(console, result, loaded.tokenizer if real else None)
        if self.result_filename is not None:
            append_json_line(self.result_filename, result)

    @contextmanager
    def _profiler(self, config: BenchConfig) -> Generator[None]:
        if self.profile_prefix is None:
            yield
            return
        with torch.profiler.profile() as profiler:
            yield
        profiler.export_chrome_trace(
            f"{self.profile_prefix}_batch{config.batch_size}"
            f"_input{config.input_len or 'real'}_output{config.output_len}"
            ".trace.json.gz"
        )


@contextmanager
def _progress_bars() -> Generator[OnProgress]:
    console = Console(stderr=True)
    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        console=console,
        transient=True,
        # Elsewhere there is nothing to see, but an empty line before an error.
        disable=not console.is_terminal,
    )
    tasks: dict[str, TaskID] = {}

    def show(what: str, done: int, total: int) -> None:
        if what not in tasks:
            tasks[what] = bars.add_task(what)
        bars.update(tasks[what], completed=done, total=total)

    with bars:
        yield show

"""Runs the cells of a grid one after another, with progress bars, and reports them."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console

from radixkv.mem_cache.errors import ConfigError

from ..cpu_threads import use_num_threads
from ..models import LoadedModel, device_of, dtype_of, load_model
from .comparison import Comparison, compare_with_model
from .config import BenchConfig
from .one_batch import (
    BenchResult,
    bench_one_batch,
    check_longest,
    longest_request,
)
from .progress import shown_progress
from .prompts import PromptSet, load_prompts, read_prompt_file, synthetic_prompts
from .report import append_json_line, print_result, summary, verdict

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
        num_threads: Threads that torch computes with; see `use_num_threads`.
    """

    model: str
    device: str = "cpu"
    dtype: str = "float32"
    prompt_filename: Path | None = None
    result_filename: Path | None = None
    profile_prefix: str | None = None
    num_threads: int | None = None

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
        use_num_threads(self.num_threads)
        self._check_files()
        loaded = load_model(
            self.model, dtype=dtype_of(self.dtype), device=device_of(self.device)
        )
        real = None
        if any(config.input_len is None for config in configs):
            real = self._real_prompts(loaded)
        if real is None:
            configs = [
                replace(config, input_len=config.input_len or _DEFAULT_INPUT_LEN)
                for config in configs
            ]
        # Before the first cell runs, since that may take minutes.
        for config in configs:
            check_longest(config, loaded, self._longest(config, loaded, real))
        comparisons = [self._run_cell(config, loaded, real) for config in configs]
        return not any(c is not None and c.num_wrong_tokens for c in comparisons)

    def _run_cell(
        self, config: BenchConfig, loaded: LoadedModel, real: PromptSet | None
    ) -> Comparison | None:
        prompts = real
        if prompts is None or config.input_len is not None:
            prompts = self._synthetic_prompts(config, loaded)
        console = Console()
        with shown_progress() as progress, self._profiler(config):
            result = bench_one_batch(config, loaded, prompts, progress)
        print_result(console, result, loaded.tokenizer if prompts is real else None)
        comparison = None
        try:
            if config.correctness_test:
                with shown_progress() as progress:
                    comparison = compare_with_model(result, loaded, progress)
                console.print(
                    verdict(comparison), markup=False, highlight=False, soft_wrap=True
                )
        finally:  # what was measured is not lost if the comparison is interrupted
            self._write(result, comparison)
        return comparison

    def _write(self, result: BenchResult, comparison: Comparison | None) -> None:
        if self.result_filename is not None:
            append_json_line(
                self.result_filename,
                {
                    "device": self.device,
                    "dtype": self.dtype,
                    "prompt_filename": str(self.prompt_filename or ""),
                    **summary(result, comparison),
                },
            )

    def _longest(
        self, config: BenchConfig, loaded: LoadedModel, real: PromptSet | None
    ) -> int:
        if real is None or config.input_len is not None:
            return (config.input_len or 0) + config.output_len
        return longest_request(config, loaded, real)

    def _real_prompts(self, loaded: LoadedModel) -> PromptSet | None:
        if loaded.tokenizer is not None:
            return load_prompts(loaded.tokenizer, self.prompt_filename)
        if self.prompt_filename is not None:
            raise ConfigError(
                f"model {loaded.name!r} has no tokenizer and cannot read "
                "prompt-filename: give input-len"
            )
        return None

    def _synthetic_prompts(self, config: BenchConfig, loaded: LoadedModel) -> PromptSet:
        return synthetic_prompts(
            config.batch_size,
            config.input_len or _DEFAULT_INPUT_LEN,
            config.shared_prefix_len,
            vocab_size=loaded.vocab_size,
            seed=config.seed,
        )

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

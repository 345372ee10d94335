"""What to measure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from radixkv.mem_cache.errors import ConfigError
from radixkv.mem_cache.sizes import as_size

MAX_BATCH_SIZE: Final = 65_536
"""More requests than that are a typing error, and would fill the memory."""


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """One cell of the grid.

    Attributes:
        batch_size: Requests that start together, at least 1.
        input_len: Prompt tokens of each, synthetic; ``None`` for real prompts.
        output_len: Output tokens of each, at least 1.
        shared_prefix_len: Leading tokens that all synthetic prompts share; less than
            `input_len`.
        page_size: Slots a page.
        num_pages: Usable pages; ``None`` for as many as the run needs to keep
            everything, or what `mem_fraction` says.
        mem_fraction: Share of the free memory that the pool takes, in ``(0, 1]``.
        prefix_cache: Whether requests share the pages of their common prefixes.
        chunked_prefill_size: Prompt tokens that a step computes at most.
        speculative_num_draft_tokens: Tokens that `PromptLookup` may guess a request and
            step at most; 0 for plain decoding.
        overlap: Whether the next step is scheduled while the model computes one.
        correctness_test: Whether every output token is compared with the model's own.
        seed: Of the synthetic prompts.

    Raises:
        ConfigError: A value is out of range.
    """

    batch_size: int = 8
    input_len: int | None = None
    output_len: int = 32
    shared_prefix_len: int = 0
    page_size: int = 16
    num_pages: int | None = None
    mem_fraction: float | None = None
    prefix_cache: bool = True
    chunked_prefill_size: int = 2048
    speculative_num_draft_tokens: int = 0
    overlap: bool = False
    correctness_test: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        as_size("batch-size", self.batch_size)
        if self.batch_size > MAX_BATCH_SIZE:
            raise ConfigError(
                f"batch-size must be <= {MAX_BATCH_SIZE}, got {self.batch_size}"
            )
        as_size("output-len", self.output_len)
        as_size("page-size", self.page_size)
        as_size("chunked-prefill-size", self.chunked_prefill_size)
        as_size("speculative-num-draft-tokens", self.speculative_num_draft_tokens, 0)
        as_size("seed", self.seed, 0)
        as_size("shared-prefix-len", self.shared_prefix_len, 0)
        if self.input_len is not None:
            as_size("input-len", self.input_len)
            if self.shared_prefix_len >= self.input_len:
                raise ConfigError(
                    f"shared-prefix-len must be < input-len ({self.input_len}), "
                    f"got {self.shared_prefix_len}"
                )
        elif self.shared_prefix_len:
            raise ConfigError("shared-prefix-len goes with input-len, got none")
        if self.num_pages is not None:
            as_size("num-pages", self.num_pages)
            if self.mem_fraction is not None:
                raise ConfigError("give num-pages or mem-fraction, got both")
        if self.mem_fraction is not None and not 0 < self.mem_fraction <= 1:
            raise ConfigError(
                f"mem-fraction must be in (0, 1], got {self.mem_fraction}"
            )

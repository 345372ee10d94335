"""Measures what the prefix cache is worth: one batch cold, then warm, then a chat."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.mem_cache import (
    ChunkCache,
    ConfigError,
    MemoryManager,
    PrefixCache,
    RadixCache,
)

from ..engine import Engine
from ..limits import SchedulerLimits
from ..models import LoadedModel, TransformersObject
from ..prompt_lookup import PromptLookup
from ..request import Request
from ..sampling_params import SamplingParams
from ..scheduler import Scheduler
from ..transformers_runner import TransformersRunner
from .config import BenchConfig
from .prompts import PromptSet, chat_messages, encode_chat

Progress = Callable[[str, int, int], None]
"""Called with what is being done, the tokens done, and the tokens in all."""

_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class RequestMeasurement:
    """One request.

    Attributes:
        prompt: Token ids, int32 `[num_prompt_tokens]`.
        output: Generated token ids.
        num_cached_tokens: Prompt tokens that were not computed.
        ttft_s: Seconds from the start of its batch to its first token.
        num_draft_tokens: Draft tokens that were verified for it.
        num_accepted_tokens: Those of them that became output.
    """

    prompt: NDArray[np.int32]
    output: list[int]
    num_cached_tokens: int
    ttft_s: float
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class BatchMeasurement:
    """Requests that started together.

    Attributes:
        requests: Each of them.
        decode_steps_s: Seconds of each step that only decoded.
        total_s: Seconds in all.
        management_s: Seconds of that in scheduler and cache while the model waited.
        num_retractions: How often a request gave its pages back.
        hidden_s: Seconds in the scheduler while the model was at work.
    """

    requests: list[RequestMeasurement]
    decode_steps_s: list[float]
    total_s: float
    management_s: float
    num_retractions: int
    hidden_s: float = 0.0

    @property
    def prefill_s(self) -> float:
        """Seconds until every request had its first token."""
        return max(request.ttft_s for request in self.requests)

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(len(request.prompt) for request in self.requests)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return sum(request.num_cached_tokens for request in self.requests)

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens of all requests."""
        return sum(len(request.output) for request in self.requests)

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens that were verified."""
        return sum(request.num_draft_tokens for request in self.requests)

    @property
    def num_accepted_tokens(self) -> int:
        """Draft tokens that became output."""
        return sum(request.num_accepted_tokens for request in self.requests)


@dataclass(frozen=True, slots=True)
class BenchResult:
    """What one cell of the grid measured.

    Attributes:
        config: What was asked for.
        model_name: The model.
        num_pages: Usable pages of the pool.
        pool_bytes: Bytes of its K and V.
        cold: The batch on an empty cache.
        warm: The same batch again.
        chat: The turns of the chat, each a batch of one.
    """

    config: BenchConfig
    model_name: str
    num_pages: int
    pool_bytes: int
    cold: BatchMeasurement
    warm: BatchMeasurement
    chat: list[BatchMeasurement]

    @property
    def requests(self) -> list[RequestMeasurement]:
        """All requests of all batches."""
        batches = [self.cold, self.warm, *self.chat]
        return [request for batch in batches for request in batch.requests]


def bench_one_batch(
    config: BenchConfig,
    loaded: LoadedModel,
    prompts: PromptSet,
    progress: Progress = lambda what, done, total: None,
) -> BenchResult:
    """Run one cell of the grid.

    Args:
        config: What to measure.
        loaded: The model.
        prompts: What to run; its first `batch_size` prompts, over again if there are
            fewer.
        progress: Told of every step.

    Raises:
        ConfigError: The model cannot run paged, or the pool cannot hold a request.
        LengthError: A request can never fit.
    """
    chosen = [
        prompts.prompts[i % len(prompts.prompts)] for i in range(config.batch_size)
    ]
    bench = _Bench(config, loaded, chosen, prompts, progress)
    bench.warm_up(chosen[0])
    cold = bench.run_batch("cold", chosen)
    warm = bench.run_batch("warm", chosen)
    chat = bench.run_chat(prompts)
    return BenchResult(
        config=config,
        model_name=loaded.name,
        num_pages=bench.cache.memory.num_pages,
        pool_bytes=bench.runner.pool.size_bytes,
        cold=cold,
        warm=warm,
        chat=chat,
    )


def check_longest(config: BenchConfig, loaded: LoadedModel, longest: int) -> None:
    """Refuse a cell whose longest request cannot run.

    Args:
        config: What to measure.
        loaded: The model.
        longest: Tokens of prompt and output together.

    Raises:
        ConfigError: It does not fit the model's positions, or `num_pages`.
    """
    if longest > loaded.max_positions:
        raise ConfigError(
            f"prompt and output must fit the model's {loaded.max_positions} positions, "
            f"got {longest}"
        )
    # The newest token needs no slot.
    if config.num_pages is not None:
        num_slots = config.num_pages * config.page_size
        if longest - 1 > num_slots:
            raise ConfigError(
                f"num-pages must be enough for the longest request, {longest - 1} "
                f"slots, got {config.num_pages} pages of {config.page_size}"
            )


def longest_request(
    config: BenchConfig, loaded: LoadedModel, prompts: PromptSet
) -> int:
    """Bound the tokens of the longest request, prompt and output together."""
    longest = max(map(len, prompts.prompts[: config.batch_size])) + config.output_len
    if not prompts.chat:
        return longest
    # The last turn's prompt holds answers that are not known yet. Encoding an answer
    # again may give a few tokens more than were generated.
    unanswered = [text for user in prompts.chat for text in (user, "")][:-1]
    messages = chat_messages(prompts.system, unanswered)
    answers = 2 * len(prompts.chat) * config.output_len
    return max(longest, len(encode_chat(loaded.tokenizer, messages)) + answers)


class _Bench:
    """Engine and model of one cell."""

    def __init__(
        self,
        config: BenchConfig,
        loaded: LoadedModel,
        chosen: list[NDArray[np.int32]],
        prompts: PromptSet,
        progress: Progress,
    ) -> None:
        self._config = config
        self._loaded = loaded
        self._progress = progress
        self._params = SamplingParams(
            max_new_tokens=config.output_len,
            # Synthetic lengths are meant to be exact.
            ignore_eos=config.input_len is not None,
        )
        longest = longest_request(config, loaded, prompts)
        check_longest(config, loaded, longest)
        lengths = [len(prompt) + config.output_len for prompt in chosen]
        if prompts.chat:
            lengths.append(longest)
        num_pages = self._num_pages(lengths)
        # First what takes the most memory, so that too much is refused at once.
        self.runner = self._make_runner(num_pages, longest)
        memory = MemoryManager(
            num_pages,
            config.page_size,
            max_num_requests=config.batch_size,
            max_context_len=longest,
        )
        self.cache: PrefixCache = (
            RadixCache(memory) if config.prefix_cache else ChunkCache(memory)
        )
        limits = SchedulerLimits(
            max_running_requests=config.batch_size,
            max_batched_tokens=config.chunked_prefill_size + config.batch_size,
            chunked_prefill_size=config.chunked_prefill_size,
        )
        num_drafts = config.speculative_num_draft_tokens
        scheduler = Scheduler(
            self.cache,
            limits,
            drafter=PromptLookup() if num_drafts else None,
            max_draft_tokens=max(1, num_drafts),
            overlap=config.overlap,
            eos_token_ids=loaded.eos_token_ids,
            vocab_size=loaded.vocab_size,
        )
        self._engine = Engine(scheduler, self.runner, on_error="raise")

    def warm_up(self, prompt: NDArray[np.int32]) -> None:
        """Run the model once before anything is timed."""
        params = SamplingParams(min(2, self._config.output_len))
        request = Request("warm-up", prompt[:_WARM_UP_TOKENS], params)
        self._engine.generate([request])
        self.cache.reset()

    def run_batch(
        self, name: str, prompts: list[NDArray[np.int32]]
    ) -> BatchMeasurement:
        """Run prompts together and measure."""
        scheduler = self._engine.scheduler
        num_retractions = scheduler.num_retractions
        requests = [
            Request(f"{name} {i}", prompt, self._params)
            for i, prompt in enumerate(prompts)
        ]
        ttft_s: dict[Hashable, float] = {}
        decode_steps_s: list[float] = []
        total = len(requests) * self._config.output_len
        elapsed = management = hidden = beside = 0.0
        done = 0
        self._progress(name, done, total)
        for request in requests:
            scheduler.add_request(request)
        for step in self._engine.run():
            returned = time.perf_counter()
            step_s = step.total_s + beside
            elapsed += step_s
            management += step.schedule_s - step.hidden_s + step.update_s
            hidden += step.hidden_s
            for output in step.outputs:
                if output.error is not None:
                    raise output.error
                ttft_s.setdefault(output.request.request_id, elapsed)
            if not step.num_prefill_tokens:
                decode_steps_s.append(step_s)
            done += sum(len(output.tokens) for output in step.outputs)
            self._progress(name, done, total)
            if scheduler.overlap:
                # The model is at work meanwhile: it would be flattered without this.
                beside = time.perf_counter() - returned
        return BatchMeasurement(
            requests=[
                RequestMeasurement(
                    prompt=request.prompt_tokens,
                    output=request.output_tokens,
                    num_cached_tokens=request.num_cached_tokens,
                    ttft_s=ttft_s[request.request_id],
                    num_draft_tokens=request.num_draft_tokens,
                    num_accepted_tokens=request.num_accepted_tokens,
                )
                for request in requests
            ],
            decode_steps_s=decode_steps_s,
            total_s=elapsed,
            management_s=management,
            num_retractions=scheduler.num_retractions - num_retractions,
            hidden_s=hidden,
        )

    def run_chat(self, prompts: PromptSet) -> list[BatchMeasurement]:
        """Run a chat turn by turn; each turn's prompt holds all turns before it."""
        turns: list[str] = []
        measured: list[BatchMeasurement] = []
        tokenizer: TransformersObject = self._loaded.tokenizer
        for i, user in enumerate(prompts.chat):
            turns.append(user)
            prompt = encode_chat(tokenizer, chat_messages(prompts.system, turns))
            turn = self.run_batch(f"chat turn {i + 1}", [prompt])
            measured.append(turn)
            answer = tokenizer.decode(turn.requests[0].output, skip_special_tokens=True)
            turns.append(answer)
        return measured

    def _num_pages(self, lengths: list[int]) -> int:
        config = self._config
        if config.num_pages is not None:
            return config.num_pages
        if config.mem_fraction is not None:
            # It runs nothing, so it need not prove that it could.
            small = self._make_runner(1, 1, self_check=False)
            page_bytes = small.pool.page_bytes
            free = _free_memory_bytes(self._loaded.model.device)
            num_pages = int(free * config.mem_fraction) // page_bytes
            if num_pages < 1:
                raise ConfigError(
                    f"mem-fraction must give at least one page of {page_bytes} bytes, "
                    f"got {config.mem_fraction} of {free} bytes"
                )
            return num_pages
        # Enough to keep everything, and a page for each request to begin.
        return sum(-(-length // config.page_size) + 1 for length in lengths)

    def _make_runner(
        self, num_pages: int, max_context_len: int, *, self_check: bool = True
    ) -> TransformersRunner:
        try:
            return TransformersRunner(
                self._loaded.model,
                num_pages=num_pages,
                page_size=self._config.page_size,
                max_num_requests=self._config.batch_size,
                max_context_len=max_context_len,
                self_check=self_check,
            )
        except (MemoryError, RuntimeError) as error:  # torch raises the latter
            raise ConfigError(
                f"the pool must fit in memory, got {num_pages} pages of "
                f"{self._config.page_size} slots: {error}"
            ) from error


def _free_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

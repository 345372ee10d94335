"""Measures what the prefix cache is worth: one batch cold, then warm, then a chat."""

from __future__ import annotations

import os
from collections.abc import Callable
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
from ..reference import (
    count_wrong_tokens,
    generate_reference,
    predict_reference,
)
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
    """

    prompt: NDArray[np.int32]
    output: list[int]
    num_cached_tokens: int
    ttft_s: float


@dataclass(frozen=True, slots=True)
class BatchMeasurement:
    """Requests that started together.

    Attributes:
        requests: Each of them.
        decode_steps_s: Seconds of each step that only decoded.
        total_s: Seconds in all.
        management_s: Seconds of that outside the model runner: scheduler and cache.
        num_retractions: How often a request gave its pages back.
    """

    requests: list[RequestMeasurement]
    decode_steps_s: list[float]
    total_s: float
    management_s: float
    num_retractions: int

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
        num_checked_tokens: Output tokens that were compared; 0 without the test.
        num_wrong_tokens: Those of them that differ from the model's own.
    """

    config: BenchConfig
    model_name: str
    num_pages: int
    pool_bytes: int
    cold: BatchMeasurement
    warm: BatchMeasurement
    chat: list[BatchMeasurement]
    num_checked_tokens: int
    num_wrong_tokens: int


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
    checked = wrong = 0
    if config.correctness_test:
        checked, wrong = bench.check([cold, warm, *chat])
    return BenchResult(
        config=config,
        model_name=loaded.name,
        num_pages=bench.cache.memory.num_pages,
        pool_bytes=bench.runner.pool.size_bytes,
        cold=cold,
        warm=warm,
        chat=chat,
        num_checked_tokens=checked,
        num_wrong_tokens=wrong,
    )


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
        lengths = [len(prompt) + config.output_len for prompt in chosen]
        if prompts.chat:
            lengths.append(self._longest_chat(prompts))
        self._check_context(max(lengths))
        num_pages = self._num_pages(lengths)
        # First what takes the most memory, so that too much is refused at once.
        self.runner = self._make_runner(num_pages, max(lengths))
        memory = MemoryManager(
            num_pages,
            config.page_size,
            max_num_requests=config.batch_size,
            max_context_len=max(lengths),
        )
        self.cache: PrefixCache = (
            RadixCache(memory) if config.prefix_cache else ChunkCache(memory)
        )
        limits = SchedulerLimits(
            max_running_requests=config.batch_size,
            max_batched_tokens=config.chunked_prefill_size + config.batch_size,
            chunked_prefill_size=config.chunked_prefill_size,
        )
        scheduler = Scheduler(self.cache, limits, eos_token_ids=self._eos_token_ids())
        self._engine = Engine(scheduler, self.runner)

    def warm_up(self, prompt: NDArray[np.int32]) -> None:
        """Run the model once before anything is timed."""
        request = Request("warm-up", prompt[:_WARM_UP_TOKENS], SamplingParams(2))
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
        ttft_s: dict[str | int, float] = {}
        decode_steps_s: list[float] = []
        total = len(requests) * self._config.output_len
        elapsed = management = 0.0
        done = 0
        self._progress(name, done, total)
        for request in requests:
            scheduler.add_request(request)
        for step in self._engine.run():
            elapsed += step.total_s
            management += step.schedule_s + step.update_s
            for output in step.outputs:
                ttft_s.setdefault(output.request.request_id, elapsed)
            if not step.num_prefill_tokens:
                decode_steps_s.append(step.total_s)
            done += len(step.outputs)
            self._progress(name, done, total)
        return BatchMeasurement(
            requests=[
                RequestMeasurement(
                    prompt=request.prompt_tokens,
                    output=request.output_tokens,
                    num_cached_tokens=request.num_cached_tokens,
                    ttft_s=ttft_s[request.request_id],
                )
                for request in requests
            ],
            decode_steps_s=decode_steps_s,
            total_s=elapsed,
            management_s=management,
            num_retractions=scheduler.num_retractions - num_retractions,
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

    def check(self, batches: list[BatchMeasurement]) -> tuple[int, int]:
        """Compare every output token with the model's own; how many, how many wrong.

        Twice: with its `generate`, which keeps K and V within one text, and with its
        choices when nothing is cached at all.
        """
        requests = [request for batch in batches for request in batch.requests]
        total = sum(len(request.output) for request in requests)
        eos_token_ids = () if self._params.ignore_eos else self._eos_token_ids()
        references: dict[bytes, list[int]] = {}
        checked = wrong = 0
        for request in requests:
            key = request.prompt.tobytes()
            if key not in references:
                references[key] = generate_reference(
                    self._loaded.model,
                    request.prompt,
                    self._config.output_len,
                    eos_token_ids=eos_token_ids,
                    use_cache=True,
                )
            uncached = predict_reference(
                self._loaded.model, request.prompt, request.output
            )
            wrong += max(
                count_wrong_tokens(references[key], request.output),
                count_wrong_tokens(uncached, request.output),
            )
            checked += len(request.output)
            self._progress("compare with the model alone", checked, total)
        return checked, wrong

    def _eos_token_ids(self) -> list[int]:
        ids = self._loaded.model.generation_config.eos_token_id
        if ids is None:
            return []
        return [ids] if isinstance(ids, int) else list(ids)

    def _longest_chat(self, prompts: PromptSet) -> int:
        """Bound the last turn, whose prompt holds answers that are not known yet."""
        tokenizer = self._loaded.tokenizer
        unanswered = [text for user in prompts.chat for text in (user, "")][:-1]
        messages = chat_messages(prompts.system, unanswered)
        # Encoding an answer again may give a few tokens more than were generated.
        answers = 2 * len(prompts.chat) * self._config.output_len
        return len(encode_chat(tokenizer, messages)) + answers

    def _check_context(self, length: int) -> None:
        config = self._loaded.model.config.get_text_config()
        longest = getattr(config, "max_position_embeddings", None)
        if longest is not None and length > longest:
            raise ConfigError(
                f"prompt and output must fit the model's {longest} positions, "
                f"got {length}"
            )

    def _num_pages(self, lengths: list[int]) -> int:
        config = self._config
        if config.num_pages is not None:
            return config.num_pages
        if config.mem_fraction is not None:
            page_bytes = self._make_runner(1, 1).pool.page_bytes
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

    def _make_runner(self, num_pages: int, max_context_len: int) -> TransformersRunner:
        try:
            return TransformersRunner(
                self._loaded.model,
                num_pages=num_pages,
                page_size=self._config.page_size,
                max_num_requests=self._config.batch_size,
                max_context_len=max_context_len,
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

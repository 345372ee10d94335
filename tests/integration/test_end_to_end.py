"""Scheduler, cache, pool and a model together: the tokens are the model's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from radixkv.mem_cache import ChunkCache, MemoryManager, PrefixCache, RadixCache
from radixkv.scheduling import (
    RETRACTION_POLICIES,
    SCHEDULING_POLICIES,
    Batch,
    Engine,
    Estimate,
    LoadedModel,
    PromptLookup,
    Request,
    SamplingParams,
    Scheduler,
    SchedulerLimits,
    TransformersRunner,
    generate_reference,
    load_model,
)
from radixkv.scheduling.benchmark import load_prompts

PAGE_SIZES = [1, 3, 16, 64]
SYSTEM = [7 * i % 512 for i in range(20)]
PROMPTS = [
    [*SYSTEM, 5],
    [*SYSTEM, *range(100, 123)],
    [3, 1, 4],
    [*SYSTEM[:17], 9, 9],
    [*range(200, 270)],
]
NUM_NEW_TOKENS = 8
GREEDY = SamplingParams(NUM_NEW_TOKENS)
RANDOM = SamplingParams(NUM_NEW_TOKENS, temperature=3.0, top_k=50, top_p=0.95)


@dataclass(frozen=True, slots=True)
class Server:
    """A model behind an engine, in a pool of `num_slots` slots at least."""

    model: LoadedModel
    page_size: int = 16
    num_slots: int = 512
    is_cached: bool = True
    chunk: int = 64
    partial_pages: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def start(self) -> Engine:
        num_pages = -(-self.num_slots // self.page_size)
        memory = MemoryManager(
            num_pages, self.page_size, max_num_requests=5, max_context_len=96
        )
        cache: PrefixCache = (
            RadixCache(memory, partial_pages=self.partial_pages)
            if self.is_cached
            else ChunkCache(memory)
        )
        runner = TransformersRunner(
            self.model.model,
            num_pages=num_pages,
            page_size=self.page_size,
            max_num_requests=5,
            max_context_len=96,
        )
        limits = SchedulerLimits(chunked_prefill_size=self.chunk)
        return Engine(
            Scheduler(cache, limits, **self.options), runner, on_error="raise"
        )


def requests_of(params: SamplingParams = GREEDY) -> list[Request]:
    """A request a prompt; with temperature, each has a seed of its own."""
    return [
        Request(i, prompt, params if params.is_greedy else replace(params, seed=i))
        for i, prompt in enumerate(PROMPTS)
    ]


def outputs_of(requests: list[Request]) -> list[list[int]]:
    return [request.output_tokens for request in requests]


def check_idle(engine: Engine) -> None:
    cache = engine.scheduler.cache
    cache.check_integrity()

    assert cache.held_size == cache.protected_size == 0


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model("tiny")


@pytest.fixture(scope="module")
def greedy(tiny: LoadedModel) -> list[list[int]]:
    return [
        generate_reference(tiny.model, prompt, NUM_NEW_TOKENS, use_cache=False)
        for prompt in PROMPTS
    ]


@pytest.fixture(scope="module")
def random(tiny: LoadedModel) -> list[list[int]]:
    """The outputs with temperature when every request runs alone."""
    alone = [Server(tiny).start().generate([r])[0] for r in requests_of(RANDOM)]
    return outputs_of(alone)


def test_the_examples_tell_outputs_apart(
    greedy: list[list[int]], random: list[list[int]]
) -> None:
    outputs = [tuple(output) for output in greedy + random]

    assert len(outputs) == len(set(outputs))
    assert min(len(set(output)) for output in outputs) > 3


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("is_cached", [True, False])
@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_tokens_equal_uncached_generate(
    tiny: LoadedModel,
    greedy: list[list[int]],
    page_size: int,
    is_cached: bool,
    chunk: int,
) -> None:
    engine = Server(tiny, page_size, is_cached=is_cached, chunk=chunk).start()

    cold = engine.generate(requests_of())
    warm = engine.generate(requests_of())

    assert greedy == outputs_of(cold) == outputs_of(warm)
    # The last token is computed in any case, and the hit is whole pages.
    hits = [(len(prompt) - 1) // page_size * page_size for prompt in PROMPTS]
    expected = hits if is_cached else [0] * len(PROMPTS)
    assert expected == [request.num_cached_tokens for request in warm]
    check_idle(engine)


@pytest.mark.parametrize("page_size", [3, 16])
def test_tokens_are_the_same_when_requests_begin_inside_a_page_and_pages_move(
    tiny: LoadedModel, greedy: list[list[int]], page_size: int
) -> None:
    engine = Server(tiny, page_size, partial_pages=True).start()
    cache = engine.scheduler.cache
    num_pages, num_moves = cache.memory.num_pages, 0
    cold = engine.generate(requests_of())
    warm = requests_of()
    for request in warm:
        engine.scheduler.add_request(request)
    while engine.scheduler.has_requests:
        engine.step()
        cache.resize(1 + (cache.protected_size + cache.held_size) // page_size)
        num_moves += len(cache.memory.page_copies.pending)
        cache.resize(num_pages)

    assert greedy == outputs_of(cold) == outputs_of(warm)
    assert any(request.num_cached_tokens % page_size for request in warm)
    assert num_moves > 0
    check_idle(engine)


@pytest.mark.parametrize(
    ("page_size", "num_slots"), [(1, 200), (3, 201), (16, 160), (64, 192)]
)
@pytest.mark.parametrize("is_cached", [True, False])
def test_tokens_are_the_same_after_a_retraction(
    tiny: LoadedModel, page_size: int, num_slots: int, is_cached: bool
) -> None:
    longer = SamplingParams(24)
    prompts = [list(range(first, first + 60)) for first in range(0, 500, 100)]
    gambler = Estimate(initial_ratio=0.01, min_ratio=0)
    options = {"admission": gambler}
    engine = Server(tiny, page_size, num_slots, is_cached, options=options).start()

    requests = engine.generate(Request(i, p, longer) for i, p in enumerate(prompts))

    assert engine.scheduler.num_retractions > 0
    for request, prompt in zip(requests, prompts, strict=True):
        expected = generate_reference(tiny.model, prompt, 24, use_cache=False)
        assert expected == request.output_tokens
    check_idle(engine)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("seed", range(6))
def test_tokens_do_not_depend_on_the_schedule(
    tiny: LoadedModel,
    greedy: list[list[int]],
    random: list[list[int]],
    page_size: int,
    seed: int,
) -> None:
    """Chunks, policies, retractions, overlap and drafts change no token."""
    chance = Random(seed)
    chunk, num_slots = chance.choice([2, 7, 64]), chance.choice([128, 192, 512])
    gambler = Estimate(initial_ratio=0.01, min_ratio=0)
    options = {
        "policy": chance.choice(sorted(SCHEDULING_POLICIES)),
        "admission": chance.choice(["worst-case", gambler]),
        "retraction": chance.choice(sorted(RETRACTION_POLICIES)),
        "preempts": chance.random() < 0.5,
        "overlap": seed % 2 == 0,
        "drafter": PromptLookup() if seed % 3 == 0 else None,
    }
    engine = Server(tiny, page_size, num_slots, chunk=chunk, options=options).start()
    calm, wild = requests_of(), requests_of(RANDOM)
    for i, request in enumerate(wild):
        request.request_id = f"random {i}"
    arriving = [*calm, *wild]
    chance.shuffle(arriving)

    while arriving or engine.scheduler.has_requests:
        if arriving and chance.random() < 0.5:
            engine.scheduler.add_request(arriving.pop())
        engine.step()
    engine.close()

    assert greedy == outputs_of(calm)
    assert random == outputs_of(wild)
    check_idle(engine)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_an_abort_changes_nobody_elses_tokens(
    tiny: LoadedModel, greedy: list[list[int]], page_size: int
) -> None:
    engine = Server(tiny, page_size, chunk=16).start()
    requests = requests_of()
    for request in requests:
        engine.scheduler.add_request(request)

    for victim in (1, 4):
        engine.step()
        engine.scheduler.abort(victim)
    for _ in engine.run():
        pass

    for i, request in enumerate(requests):
        output = request.output_tokens
        assert greedy[i][: len(output)] == output
        assert len(output) < NUM_NEW_TOKENS if i in (1, 4) else greedy[i] == output
    check_idle(engine)


def test_an_end_of_sequence_token_ends_as_in_generate(
    tiny: LoadedModel, greedy: list[list[int]]
) -> None:
    eos = greedy[1][3]
    engine = Server(tiny).start()
    engine.scheduler.eos_token_ids = frozenset([eos])

    requests = engine.generate(requests_of())

    assert requests[1].finish_reason == "stop"
    for request in requests:
        expected = generate_reference(
            tiny.model, request.prompt_tokens, NUM_NEW_TOKENS, eos_token_ids=[eos]
        )
        assert expected == request.output_tokens


class Recorder:
    """Keeps the steps of a runner, and what it answered."""

    def __init__(self, runner: TransformersRunner) -> None:
        self.steps: list[tuple[Batch, list[int]]] = []
        self._runner = runner

    def run(self, batch: Batch) -> NDArray[np.int32]:
        tokens = self._runner.run(batch)
        self.steps.append((batch, tokens.tolist()))
        return tokens


def test_s0_9_replayed_messages_give_the_same_tokens(tiny: LoadedModel) -> None:
    server = Server(tiny, page_size=3, num_slots=96, chunk=7)
    engine = server.start()
    assert isinstance(engine.runner, TransformersRunner)
    recorder = engine.runner = Recorder(engine.runner)
    engine.generate(requests_of(RANDOM))
    fresh = server.start().runner

    for batch, tokens in recorder.steps:
        assert tokens == fresh.run(batch).tolist()


def test_s0_5_a_workload_updates_the_pool_in_place(tiny: LoadedModel) -> None:
    engine = Server(tiny).start()
    runner = engine.runner
    assert isinstance(runner, TransformersRunner)
    buffers = [runner.pool.k_buffer(0), runner.pool.v_buffer(1)]
    before = [buffer.data_ptr() for buffer in buffers]

    engine.generate(requests_of())

    after = [runner.pool.k_buffer(0).data_ptr(), runner.pool.v_buffer(1).data_ptr()]
    assert before == after
    assert all(buffer.any() for buffer in buffers)


def test_smollm2_answers_a_real_prompt_as_it_does_alone() -> None:
    loaded = load_model("smollm2")
    prompts = load_prompts(loaded.tokenizer).prompts
    memory = MemoryManager(128, 16, max_num_requests=2, max_context_len=1024)
    runner = TransformersRunner(
        loaded.model,
        num_pages=128,
        page_size=16,
        max_num_requests=2,
        max_context_len=1024,
    )
    engine = Engine(Scheduler(RadixCache(memory)), runner)
    params = SamplingParams(4)

    first = engine.generate([Request("first", prompts[0], params)])[0]
    engine.generate([Request("another", prompts[1], params)])
    again = engine.generate([Request("again", prompts[0], params)])[0]

    expected = generate_reference(loaded.model, prompts[0], 4, use_cache=False)
    assert expected == first.output_tokens == again.output_tokens
    assert again.num_cached_tokens > len(prompts[0]) - 17

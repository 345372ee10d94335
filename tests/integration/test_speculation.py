"""Speculative decoding on a model: the tokens are those of plain decoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import pytest

from radixkv.mem_cache import ChunkCache, MemoryManager, PrefixCache, RadixCache
from radixkv.scheduling import (
    Drafter,
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

NUM_NEW_TOKENS = 12
GREEDY = SamplingParams(NUM_NEW_TOKENS)
RANDOM = SamplingParams(NUM_NEW_TOKENS, temperature=3.0, top_k=50, top_p=0.95)
SYSTEM = [7 * i % 512 for i in range(20)]
PROMPTS = [
    [*SYSTEM, 5],
    [*SYSTEM, *range(100, 123)],
    [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5],
    [*range(200, 230)] * 2,
    [8],
]


class Seer:
    """Knows the outputs; every `period`-th guess is wrong."""

    def __init__(self, outputs: list[list[int]], period: int) -> None:
        self._outputs = outputs
        self._period = period

    def propose(self, request: Request, max_tokens: int) -> tuple[int, ...]:
        number = request.request_id
        assert isinstance(number, int)
        start = request.num_output_tokens
        return tuple(
            (token + (i % self._period == 0)) % 512
            for i, token in enumerate(self._outputs[number], 1)
        )[start : start + max_tokens]


@dataclass(frozen=True, slots=True)
class Server:
    """A model behind an engine, in a pool of `num_slots` slots at least."""

    model: LoadedModel
    page_size: int = 16
    num_slots: int = 512
    is_cached: bool = True

    def start(self, drafter: Drafter | None = None) -> Engine:
        num_pages = -(-self.num_slots // self.page_size)
        memory = MemoryManager(
            num_pages, self.page_size, max_num_requests=5, max_context_len=96
        )
        cache: PrefixCache = (
            RadixCache(memory) if self.is_cached else ChunkCache(memory)
        )
        runner = TransformersRunner(
            self.model.model,
            num_pages=num_pages,
            page_size=self.page_size,
            max_num_requests=5,
            max_context_len=96,
        )
        scheduler = Scheduler(
            cache,
            SchedulerLimits(chunked_prefill_size=16),
            admission=Estimate(initial_ratio=0.01, min_ratio=0),
            drafter=drafter,
            vocab_size=self.model.vocab_size,
        )
        return Engine(scheduler, runner, on_error="raise")


def requests_of(params: SamplingParams = GREEDY) -> list[Request]:
    """A request a prompt; with temperature, each has a seed of its own."""
    return [
        Request(i, prompt, params if params.is_greedy else replace(params, seed=i))
        for i, prompt in enumerate(PROMPTS)
    ]


def run(engine: Engine, requests: list[Request]) -> int:
    """Run requests to their end; how many steps that takes."""
    for request in requests:
        engine.scheduler.add_request(request)
    num_steps = sum(1 for _ in engine.run())
    cache = engine.scheduler.cache
    cache.check_integrity()
    assert cache.held_size == cache.protected_size == 0
    return num_steps


def outputs_of(requests: list[Request]) -> list[list[int]]:
    return [request.output_tokens for request in requests]


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
    """The outputs with temperature, without drafts."""
    requests = requests_of(RANDOM)
    run(Server(tiny).start(), requests)
    return outputs_of(requests)


DRAFTERS: dict[str, Callable[[list[list[int]]], Drafter]] = {
    "lookup": lambda outputs: PromptLookup(),
    "right": lambda outputs: Seer(outputs, 1000),
    "half": lambda outputs: Seer(outputs, 3),
    "wrong": lambda outputs: Seer(outputs, 1),
}


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("is_cached", [True, False])
@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_tokens_are_those_of_plain_decoding(
    tiny: LoadedModel,
    greedy: list[list[int]],
    page_size: int,
    is_cached: bool,
    name: str,
) -> None:
    engine = Server(tiny, page_size, is_cached=is_cached).start(DRAFTERS[name](greedy))

    cold, warm = requests_of(), requests_of()
    run(engine, cold)
    run(engine, warm)

    assert greedy == outputs_of(cold) == outputs_of(warm)
    assert all(request.num_draft_tokens > 0 for request in cold if name != "lookup")
    num_accepted = sum(request.num_accepted_tokens for request in cold)
    assert num_accepted > 0 or name in ("lookup", "wrong")


@pytest.mark.parametrize("name", ["right", "half", "wrong"])
def test_drawn_tokens_are_those_of_plain_decoding(
    tiny: LoadedModel, random: list[list[int]], greedy: list[list[int]], name: str
) -> None:
    requests = requests_of(RANDOM)
    run(Server(tiny).start(DRAFTERS[name](random)), requests)

    assert random == outputs_of(requests)
    assert random != greedy
    assert (name == "wrong") == all(r.num_accepted_tokens == 0 for r in requests)


@pytest.mark.parametrize("name", DRAFTERS)
def test_tokens_are_the_same_after_a_retraction(
    tiny: LoadedModel, greedy: list[list[int]], name: str
) -> None:
    num_retractions = 0
    for page_size, num_slots in product([1, 3, 16], [72, 96, 112, 120]):
        server = Server(tiny, page_size, num_slots)
        engine = server.start(DRAFTERS[name](greedy))
        requests = requests_of()
        run(engine, requests)

        assert greedy == outputs_of(requests)
        num_retractions += engine.scheduler.num_retractions
    assert num_retractions > 1


def test_right_drafts_save_steps(tiny: LoadedModel, greedy: list[list[int]]) -> None:
    plain = run(Server(tiny).start(), requests_of())
    quick = run(Server(tiny).start(DRAFTERS["right"](greedy)), requests_of())
    slow = run(Server(tiny).start(DRAFTERS["wrong"](greedy)), requests_of())

    # Five tokens a step instead of one; the prompts take as many steps as ever.
    assert plain - quick == (NUM_NEW_TOKENS - 1) - -(-(NUM_NEW_TOKENS - 1) // 5)
    assert plain == slow


def test_smollm2_goes_on_with_a_repetitive_text_in_fewer_steps() -> None:
    loaded = load_model("smollm2")
    assert loaded.tokenizer is not None
    text = "one two three four five " * 8
    prompt = loaded.tokenizer(text.strip())["input_ids"]
    params = SamplingParams(24)
    results: list[tuple[Request, int]] = []
    for drafter in (None, PromptLookup()):
        memory = MemoryManager(4, 16, max_num_requests=1, max_context_len=64)
        runner = TransformersRunner(
            loaded.model,
            num_pages=4,
            page_size=16,
            max_num_requests=1,
            max_context_len=64,
        )
        engine = Engine(Scheduler(RadixCache(memory), drafter=drafter), runner)
        request = Request("a", prompt, params)
        results.append((request, run(engine, [request])))

    (plain, num_plain_steps), (quick, num_quick_steps) = results
    assert plain.output_tokens == quick.output_tokens
    assert num_plain_steps == 24
    assert num_quick_steps == 24 - quick.num_accepted_tokens
    assert num_quick_steps <= 8

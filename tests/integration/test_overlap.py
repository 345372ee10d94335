"""A model in a thread, the next step scheduled meanwhile: the tokens stay the same."""

from __future__ import annotations

import threading
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray

from radixkv.mem_cache import BatchRefusedError, MemoryManager, RadixCache
from radixkv.scheduling import (
    Batch,
    Engine,
    Estimate,
    FinishReason,
    LoadedModel,
    Request,
    SamplingParams,
    Scheduler,
    SchedulerLimits,
    TransformersRunner,
    generate_reference,
    load_model,
)
from radixkv.scheduling.engine import OnError

PAGE_SIZES = [1, 2, 3, 16]
SYSTEM = [7 * i % 512 for i in range(20)]
PROMPTS = [
    [*SYSTEM, 5],
    [*SYSTEM, *range(100, 123)],
    [3, 1, 4],
    [*SYSTEM[:17], 9, 9],
    [*range(200, 240)],
    [*SYSTEM, 5],
]
NUM_NEW_TOKENS = 9
GREEDY = SamplingParams(NUM_NEW_TOKENS)
MAX_LEN = 64


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model("tiny")


@pytest.fixture(scope="module")
def greedy(tiny: LoadedModel) -> list[list[int]]:
    """What each prompt gives alone, without any cache."""
    return [
        generate_reference(tiny.model, prompt, NUM_NEW_TOKENS, use_cache=False)
        for prompt in PROMPTS
    ]


def make_engine(
    tiny: LoadedModel,
    page_size: int,
    *,
    num_slots: int = 512,
    runner_page_size: int | None = None,
    chunk: int = 64,
    eos: tuple[int, ...] = (),
    admission: str | Estimate = "worst-case",
    on_error: OnError = "raise",
) -> Engine:
    num_pages = -(-num_slots // page_size)
    memory = MemoryManager(
        num_pages, page_size, max_num_requests=6, max_context_len=MAX_LEN
    )
    runner = TransformersRunner(
        tiny.model,
        num_pages=num_pages,
        page_size=runner_page_size or page_size,
        max_num_requests=6,
        max_context_len=MAX_LEN,
    )
    scheduler = Scheduler(
        RadixCache(memory, debug=True),
        SchedulerLimits(6, 6 + chunk, chunk),
        admission=admission,
        overlap=True,
        eos_token_ids=eos,
    )
    return Engine(scheduler, runner, on_error=on_error)


def requests_of(params: SamplingParams = GREEDY) -> list[Request]:
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
    threads = [thread.name for thread in threading.enumerate()]
    assert not any(name.startswith("radixkv-runner") for name in threads)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("chunk", [3, 64])
def test_tokens_equal_uncached_generate(
    tiny: LoadedModel, greedy: list[list[int]], page_size: int, chunk: int
) -> None:
    engine = make_engine(tiny, page_size, chunk=chunk)

    for _ in range(2):  # cold and warm
        assert greedy == outputs_of(engine.generate(requests_of()))
    check_idle(engine)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("seed", range(3))
def test_tokens_do_not_depend_on_the_schedule(
    tiny: LoadedModel, greedy: list[list[int]], page_size: int, seed: int
) -> None:
    """Any arrivals, in a pool so small that few run at a time."""
    chance = Random(seed)
    engine = make_engine(
        tiny,
        page_size,
        num_slots=96,
        chunk=chance.choice([2, 7, 64]),
        admission=Estimate(initial_ratio=0.01, min_ratio=0),
    )
    requests = requests_of()
    arriving = list(requests)
    chance.shuffle(arriving)

    with engine:
        while arriving or engine.scheduler.has_requests:
            if arriving and chance.random() < 0.8:
                engine.scheduler.add_request(arriving.pop())
            if engine.scheduler.has_requests:
                engine.step()

    assert greedy == outputs_of(requests)
    check_idle(engine)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_tokens_are_the_same_after_a_retraction(
    tiny: LoadedModel, greedy: list[list[int]], page_size: int
) -> None:
    engine = make_engine(
        tiny,
        page_size,
        num_slots=64,
        admission=Estimate(initial_ratio=0.01, min_ratio=0),
    )

    requests = engine.generate(requests_of())

    assert engine.scheduler.num_retractions > 0
    assert greedy == outputs_of(requests)
    check_idle(engine)


def test_with_temperature_tokens_are_those_of_no_overlap(tiny: LoadedModel) -> None:
    wild = SamplingParams(NUM_NEW_TOKENS, temperature=3.0, top_k=50, top_p=0.95)
    engine = make_engine(tiny, 3)
    plain = make_engine(tiny, 3)
    plain.scheduler.overlap = False

    expected = outputs_of(plain.generate(requests_of(wild)))

    assert expected == outputs_of(engine.generate(requests_of(wild)))


def test_samples_of_one_prompt_have_the_tokens_that_they_have_alone(
    tiny: LoadedModel,
) -> None:
    params = SamplingParams(NUM_NEW_TOKENS, temperature=2.0, seed=5)
    samples = make_engine(tiny, 3).generate(Request("s", PROMPTS[1], params).fan_out(5))
    alone = [
        Request(i, PROMPTS[1], sample.sampling_params)
        for i, sample in enumerate(samples)
    ]
    for request in alone:
        make_engine(tiny, 3).generate([request])

    assert outputs_of(alone) == outputs_of(samples)
    assert len({tuple(output) for output in outputs_of(samples)}) == 5


def test_a_request_that_stops_while_its_next_token_is_computed_has_no_more(
    tiny: LoadedModel, greedy: list[list[int]]
) -> None:
    eos = greedy[1][3]
    expected = [
        output[: output.index(eos) + 1] if eos in output else output
        for output in greedy
    ]
    engine = make_engine(tiny, 16, eos=(eos,))

    requests = engine.generate(requests_of())

    assert expected == outputs_of(requests)
    assert requests[1].finish_reason is FinishReason.STOP
    check_idle(engine)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_an_abort_changes_nobody_elses_tokens(
    tiny: LoadedModel, greedy: list[list[int]], page_size: int
) -> None:
    engine = make_engine(tiny, page_size, chunk=16)
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


class FailsOnce:
    """A runner that fails in one step, once the model has written K and V."""

    def __init__(self, runner: TransformersRunner, step: int) -> None:
        self._runner = runner
        self._steps_left = step

    def run(self, batch: Batch) -> NDArray[np.int32]:
        tokens = self._runner.run(batch)
        self._steps_left -= 1
        if self._steps_left == 0:
            raise RuntimeError("out of luck")
        return tokens


@pytest.mark.parametrize("on_error", ["end", "requeue"])
@pytest.mark.parametrize("step", range(1, 8))
def test_after_a_failed_step_the_others_have_their_own_tokens(
    tiny: LoadedModel, greedy: list[list[int]], step: int, on_error: OnError
) -> None:
    engine = make_engine(tiny, 3, chunk=16, on_error=on_error)
    assert isinstance(engine.runner, TransformersRunner)
    engine.runner = FailsOnce(engine.runner, step)
    requests = requests_of()
    for request in requests:
        engine.scheduler.add_request(request)

    errors = [str(report.error) for report in engine.run() if report.error]
    assert ["out of luck"] == errors
    again = requests_of()
    for request in again:
        request.request_id = f"again {request.request_id}"
    engine.generate(again)

    assert greedy == outputs_of(again)
    for output, request in zip(greedy, requests, strict=True):
        is_done = request.finish_reason is FinishReason.LENGTH
        assert output[: request.num_output_tokens] == request.output_tokens
        assert is_done or (request.finish_reason, str(request.error)) == (
            FinishReason.ERROR,
            "out of luck",
        )
    if on_error == "requeue":
        assert greedy == outputs_of(requests)
    check_idle(engine)


def test_a_cache_with_other_pages_is_refused_and_left_as_it_was(
    tiny: LoadedModel,
) -> None:
    engine = make_engine(tiny, 3, runner_page_size=4)

    with pytest.raises(BatchRefusedError, match="slots, got a cache of"):
        engine.generate(requests_of())

    check_idle(engine)
    assert not engine.scheduler.num_in_flight
    assert engine.scheduler.cache.evictable_size == 0

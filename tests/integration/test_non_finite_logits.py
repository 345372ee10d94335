"""B170 with a real model: one request's numbers are its own affair, pages included."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from radixkv.mem_cache import MemoryManager, NonFiniteLogitsError, RadixCache
from radixkv.scheduling import (
    Engine,
    FinishReason,
    LoadedModel,
    PromptLookup,
    Request,
    SamplingParams,
    Scheduler,
    SchedulerLimits,
    TransformersRunner,
    load_model,
)

BAD_TOKEN = 7
NUM_PAGES = 18


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model("tiny")


@pytest.fixture(params=[torch.nan, torch.inf])
def sick(tiny: LoadedModel, request: pytest.FixtureRequest) -> Iterator[LoadedModel]:
    """The model, with an embedding of one token that is no number."""
    weight = tiny.model.get_input_embeddings().weight.data
    before = weight[BAD_TOKEN].clone()
    weight[BAD_TOKEN] = request.param
    yield tiny
    weight[BAD_TOKEN] = before


def make_engine(tiny: LoadedModel, **options: object) -> Engine:
    memory = MemoryManager(NUM_PAGES, 4, max_num_requests=4, max_context_len=64)
    runner = TransformersRunner(
        tiny.model,
        num_pages=NUM_PAGES,
        page_size=4,
        max_num_requests=4,
        max_context_len=64,
    )
    scheduler = Scheduler(
        RadixCache(memory, debug=True),
        SchedulerLimits(4, 36, 8),
        **options,  # type: ignore[arg-type]
    )
    return Engine(scheduler, runner)


def requests_of(round_: int, params: SamplingParams) -> list[Request]:
    return [
        Request((round_, i), [100 * round_ + 20 * i + j for j in range(13)], params)
        for i in range(2)
    ]


@pytest.mark.parametrize(
    "options",
    [{}, {"overlap": True}, {"drafter": PromptLookup()}],
    ids=["in turns", "overlap", "drafts"],
)
@pytest.mark.parametrize(("temperature", "place"), [(0.0, 12), (1.0, 2)])
def test_b170_others_have_their_own_tokens_in_pages_that_were_not_finite(
    sick: LoadedModel, options: dict[str, object], temperature: float, place: int
) -> None:
    """The bad token is in the first of two chunks, or in the last."""
    params = SamplingParams(8, temperature=temperature, seed=5)
    rounds = [requests_of(i, params) for i in range(1, 4)]
    expected = []
    for requests in rounds:
        healthy = make_engine(sick)
        same = [Request(r.request_id, r.prompt_tokens, params) for r in requests]
        expected.append([r.output_tokens for r in healthy.generate(same)])
    engine = make_engine(sick, **options)
    cache = engine.scheduler.cache

    for i, requests in enumerate(rounds):
        prompt = [300 + i, *range(400, 412)]
        prompt[place] = BAD_TOKEN
        bad = Request(f"bad {i}", prompt, params)
        engine.generate([requests[0], bad, requests[1]])

        assert FinishReason.ERROR is bad.finish_reason
        assert isinstance(bad.error, NonFiniteLogitsError)
        assert [] == bad.output_tokens
        # The first chunk may have been published when the second told.
        assert cache.match_prefix(prompt) <= 8
        assert expected[i] == [r.output_tokens for r in requests]
    assert cache.stats().num_evicted_tokens > 0  # so pages were used again
    assert (0, 0) == (cache.held_size, cache.protected_size)

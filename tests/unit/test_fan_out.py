"""Fan-out: many samples of a prompt compute it once, and depend on nobody's fate."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from radixkv.mem_cache import ConfigError, MemoryManager, RadixCache, RequestStateError
from radixkv.scheduling import (
    Batch,
    Engine,
    FinishReason,
    NullRunner,
    Request,
    RequestStatus,
    SamplingParams,
    Scheduler,
    SchedulerLimits,
)

PROMPT = list(range(100, 140))
PAGE_SIZES = pytest.mark.parametrize("page_size", [1, 3, 4, 16])


class CountingRunner:
    """Computes without a model, and counts the tokens; or fails in one step."""

    def __init__(self, fails_at: int = -1) -> None:
        self._null = NullRunner(500)
        self._fails_at = fails_at
        self.num_tokens: list[int] = []

    def run(self, batch: Batch) -> NDArray[np.int32]:
        self.num_tokens.append(batch.num_tokens)
        if len(self.num_tokens) == self._fails_at:
            raise RuntimeError("no luck")
        return self._null.run(batch)


def make(
    page_size: int = 4,
    num_slots: int = 1024,
    *,
    max_len: int = 64,
    num_rows: int = 16,
    limits: SchedulerLimits | None = None,
    fails_at: int = -1,
    preempts: bool = False,
) -> tuple[Engine, CountingRunner]:
    memory = MemoryManager(
        num_slots // page_size,
        page_size,
        max_num_requests=num_rows,
        max_context_len=max_len,
    )
    limits = limits or SchedulerLimits(16, 64, 8)
    runner = CountingRunner(fails_at)
    scheduler = Scheduler(RadixCache(memory), limits, preempts=preempts)
    return Engine(scheduler, runner), runner


def samples_of(engine: Engine, num_samples: int, max_new_tokens: int) -> list[Request]:
    """Queue samples of the one prompt."""
    params = SamplingParams(max_new_tokens, temperature=1.0, seed=2**64 - 1)
    samples = Request("s", PROMPT, params).fan_out(num_samples)
    for sample in samples:
        engine.scheduler.add_request(sample)
    return samples


def finish(engine: Engine) -> None:
    for _ in engine.run():
        pass
    cache = engine.scheduler.cache
    cache.check_integrity()
    assert (cache.held_size, cache.protected_size) == (0, 0)


def rest_len(num_tokens: int, page_size: int) -> int:
    """What is computed behind a cached prompt: at least its last token."""
    return num_tokens - (num_tokens - 1) // page_size * page_size


# What they are ----------------------------------------------------------------


def test_samples_differ_in_their_ids_and_seeds_only() -> None:
    params = SamplingParams(5, temperature=0.5, seed=2**64 - 2, top_k=3)
    request = Request("r", [1, 2, 3], params, namespace="n", priority=4)

    samples = request.fan_out(3)

    assert [("r", 0), ("r", 1), ("r", 2)] == [s.request_id for s in samples]
    seeds = [s.sampling_params.seed for s in samples]
    assert [2**64 - 2, 2**64 - 1, 0] == seeds
    for sample in samples:
        assert [1, 2, 3] == sample.tokens.tolist()
        assert ("n", 4) == (sample.namespace, sample.priority)
        assert (5, 0.5, 3) == (
            sample.sampling_params.max_new_tokens,
            sample.sampling_params.temperature,
            sample.sampling_params.top_k,
        )


@pytest.mark.parametrize("num_samples", [0, -1, 1.5, True])
def test_a_number_of_samples_below_one_is_refused(num_samples: int) -> None:
    with pytest.raises(ConfigError, match="num_samples must be"):
        Request("r", [1]).fan_out(num_samples)


def test_only_a_new_request_fans_out() -> None:
    engine, _ = make()
    submitted = Request("r", [1, 2], SamplingParams(3))
    engine.scheduler.add_request(submitted)
    longer = Request("x", [1, 2])
    longer.append(3)
    for request in (submitted, longer):
        with pytest.raises(RequestStateError, match="only a new request"):
            request.fan_out(2)


# What they cost ---------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 16])
def test_64_identical_prompts_of_2000_tokens_compute_2000_and_their_last_pages(
    page_size: int,
) -> None:
    engine, runner = make(
        page_size,
        4096 + 64 * page_size,
        max_len=2048,
        num_rows=64,
        limits=SchedulerLimits(64, 600, 512),
    )
    prompt = list(range(2000))
    samples = Request("s", prompt, SamplingParams(1)).fan_out(64)

    engine.generate(samples)

    rest = 63 * rest_len(2000, page_size)
    assert 2000 + rest == sum(runner.num_tokens)
    assert rest <= 63 * page_size
    cached = {sample.usage.num_cached_tokens for sample in samples[1:]}
    assert {2000 - rest_len(2000, page_size)} == cached


@PAGE_SIZES
def test_samples_that_wait_hold_no_pages_and_share_those_of_the_prompt(
    page_size: int,
) -> None:
    engine, _ = make(page_size)
    cache = engine.scheduler.cache
    samples = samples_of(engine, 8, max_new_tokens=8)
    leader = samples[0]
    while not leader.num_output_tokens:
        engine.step()
        if leader.num_output_tokens:
            break
        assert [None] * 7 == [sample.kv for sample in samples[1:]]
        assert cache.stats().num_requests == 1
    while engine.scheduler.num_waiting:
        engine.step()

    # All run now: the whole pages of the prompt are there once.
    shared = (len(PROMPT) - 1) // page_size * page_size
    assert all(sample.status is RequestStatus.RUNNING for sample in samples)
    assert all(sample.kv and sample.kv.protected_len >= shared for sample in samples)
    own = 8 * (-(-(rest_len(len(PROMPT), page_size) + 8) // page_size)) * page_size
    assert cache.total_size - cache.available_size <= shared + own
    finish(engine)


@PAGE_SIZES
def test_samples_have_the_tokens_that_they_have_alone(page_size: int) -> None:
    engine, _ = make(page_size)
    samples = samples_of(engine, 5, max_new_tokens=9)
    finish(engine)

    for sample in samples:
        alone = Request("alone", sample.prompt_tokens, sample.sampling_params)
        make(page_size)[0].generate([alone])
        assert alone.output_tokens == sample.output_tokens


def test_samples_that_may_not_wait_compute_the_prompt_themselves() -> None:
    engine, runner = make(limits=SchedulerLimits(16, 512, 64, max_deferrals=0))
    samples = samples_of(engine, 4, max_new_tokens=1)
    finish(engine)

    assert 4 * len(PROMPT) == sum(runner.num_tokens)
    assert {0} == {sample.usage.num_cached_tokens for sample in samples}


def test_samples_wait_no_longer_than_they_may() -> None:
    engine, _ = make(limits=SchedulerLimits(16, 64, 4, max_deferrals=3))
    samples = samples_of(engine, 2, max_new_tokens=1)
    for _ in range(4):
        engine.step()

    # The fourth step finds three of the ten chunks, and the second sample goes on.
    assert RequestStatus.RUNNING is samples[1].status
    assert 3 == samples[1].num_deferrals
    finish(engine)


# What befalls the one that computes the prompt -----------------------------------


@pytest.mark.parametrize("fate", ["abort", "failure", "epoch", "retraction"])
@PAGE_SIZES
def test_the_others_go_on_whatever_befalls_the_one_that_they_wait_for(
    fate: str, page_size: int
) -> None:
    # A pool for one of them at a time, so that an urgent one takes its place.
    engine, _ = make(
        page_size, 64, preempts=True, fails_at=2 if fate == "failure" else -1
    )
    scheduler = engine.scheduler
    leader, *others = samples_of(engine, 4, max_new_tokens=6)
    engine.step()
    assert [None] * 3 == [sample.kv for sample in others]
    if fate == "abort":
        scheduler.abort(leader.request_id)
    elif fate == "epoch":
        scheduler.cache.bump_epoch(None)
    elif fate == "retraction":
        urgent = Request("u", range(40), SamplingParams(6), priority=1)
        scheduler.add_request(urgent)
        engine.step()
        assert (RequestStatus.WAITING, 1) == (leader.status, leader.num_retractions)
    if fate == "failure":
        assert isinstance(engine.step().error, RuntimeError)
    finish(engine)

    ends = {"abort": FinishReason.ABORT, "failure": FinishReason.ERROR}
    assert ends.get(fate, FinishReason.LENGTH) is leader.finish_reason
    assert [FinishReason.LENGTH] * 3 == [sample.finish_reason for sample in others]


def test_the_next_sample_takes_over_where_the_leader_was_aborted() -> None:
    engine, runner = make(4)
    leader, second, third = samples_of(engine, 3, max_new_tokens=1)
    engine.step()
    engine.step()
    engine.scheduler.abort(leader.request_id)
    finish(engine)

    # Two chunks of 8 were published; the second sample computes the other 24 tokens,
    # and the third its last page.
    assert (16, 24) == (second.num_cached_tokens, second.num_computed_tokens)
    assert (36, 4) == (third.num_cached_tokens, third.num_computed_tokens)
    assert 2 * 8 + 24 + 4 == sum(runner.num_tokens)


def test_a_reload_of_weights_makes_one_of_the_others_compute_the_prompt_again() -> None:
    engine, runner = make(4)
    leader, *others = samples_of(engine, 4, max_new_tokens=1)
    engine.step()
    engine.scheduler.cache.bump_epoch(None)
    finish(engine)

    assert FinishReason.LENGTH is leader.finish_reason
    # Nothing of the old epoch is shared: one prompt before, one after, three last pages
    # at most.
    cached = [sample.num_cached_tokens for sample in others]
    assert 36 == max(cached)
    assert sum(runner.num_tokens) <= 2 * 40 + 2 * 40

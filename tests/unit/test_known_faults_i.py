"""Faults of other systems' schedulers and engines that this one must not have."""

from __future__ import annotations

import numpy as np
import pytest

from radixkv.mem_cache import (
    MemoryManager,
    RadixCache,
    RadixKVError,
    RequestStateError,
    TokenError,
)
from radixkv.scheduling import (
    Batch,
    Drafter,
    Engine,
    Estimate,
    FinishReason,
    NullRunner,
    Request,
    RequestOutput,
    SamplingParams,
    Scheduler,
    SchedulerLimits,
)
from radixkv.scheduling.testing import LabelRunner


class Perfect:
    """A drafter that says what the runner will say."""

    def propose(self, request: Request, max_tokens: int) -> tuple[int, ...]:
        same = Request("x", request.tokens, SamplingParams(max_tokens))
        return tuple(make(64).generate([same])[0].output_tokens)


class AtLeastOne:
    """A drafter of tokens that are mostly wrong."""

    def propose(self, request: Request, max_tokens: int) -> tuple[int, ...]:
        return (1,) * max_tokens


class ReserveOne(Estimate):
    """Sets nothing aside but the next token."""

    def __init__(self) -> None:
        super().__init__(initial_ratio=0.001, min_ratio=0)


def make(
    num_pages: int = 16,
    page_size: int = 4,
    *,
    limits: SchedulerLimits | None = None,
    **options: object,
) -> Engine:
    memory = MemoryManager(
        num_pages, page_size, max_num_requests=8, max_context_len=2048
    )
    cache = RadixCache(memory)
    scheduler = Scheduler(cache, limits, **options)  # type: ignore[arg-type]
    is_late = bool(options.get("overlap"))
    runner = LabelRunner(cache, 99, overlap=is_late)
    return Engine(scheduler, runner, on_error="raise")


def alone(prompt: list[int], max_new_tokens: int) -> list[int]:
    memory = MemoryManager(64, 4, max_num_requests=1, max_context_len=256)
    request = Request("alone", prompt, SamplingParams(max_new_tokens))
    engine = Engine(Scheduler(RadixCache(memory)), NullRunner(99))
    return engine.generate([request])[0].output_tokens


def prompt_of(name: str, num_tokens: int = 8) -> list[int]:
    first = 100 * ord(name)
    return list(range(first, first + num_tokens))


# Sharing ------------------------------------------------------------------------


def test_b176_a_namespace_of_its_own_neither_reads_nor_publishes_for_others() -> None:
    engine = make()
    cache = engine.scheduler.cache
    prompt = list(range(1, 10))
    private = Request("a", prompt, SamplingParams(1), namespace=object())
    engine.generate([private])

    assert 0 == cache.match_prefix(prompt)
    engine.generate([Request("b", prompt, SamplingParams(1))])
    again = Request("c", prompt, SamplingParams(1), namespace=object())
    engine.generate([again])
    assert 0 == again.num_cached_tokens


def test_b176_release_publishes_nothing_and_a_cut_prompt_reads_no_further() -> None:
    cache = make().scheduler.cache
    prompt = list(range(1, 10))
    for published in (False, True):
        request = cache.admit(prompt[:1])  # nothing can be found of one token
        assert request is not None
        assert 0 == request.committed_len
        cache.alloc_for_extend([request], [9])
        cache.commit(request, 9)
        if published:
            cache.cache_finished_req(request, prompt)
        else:
            cache.release(request)
        assert 8 * published == cache.match_prefix(prompt)


@pytest.mark.parametrize("drafter", [None, Perfect()])
def test_b196_every_sample_is_billed_its_hit_and_its_computation(
    drafter: Drafter | None,
) -> None:
    engine = make(64, drafter=drafter)
    prompt = prompt_of("p", 22)
    engine.generate([Request("first", prompt, SamplingParams(1))])
    samples = Request("s", prompt, SamplingParams(9)).fan_out(3)

    engine.generate(samples)

    for sample in samples:
        usage = sample.usage
        assert (20, 10) == (usage.num_cached_tokens, usage.num_computed_tokens)
        assert usage.num_accepted_tokens == usage.num_draft_tokens
        assert bool(drafter) == bool(usage.num_draft_tokens)


def test_b198_prompts_that_share_are_computed_once() -> None:
    engine = make(512, limits=SchedulerLimits(chunked_prefill_size=64))
    shared = list(range(1000))
    requests = [Request(i, [*shared, 5000 + i], SamplingParams(2)) for i in range(6)]

    engine.generate(requests)

    # The first has 1,001 of its prompt to compute, the others one; and all a token.
    computed = [request.num_computed_tokens for request in requests]
    assert [1002, *[2] * 5] == computed


@pytest.mark.parametrize("drafter", [None, AtLeastOne()])
def test_b200_guesses_evict_nothing_that_no_token_needs(
    drafter: Drafter | None,
) -> None:
    engine = make(16, drafter=drafter, max_draft_tokens=12)
    cache = engine.scheduler.cache
    old = prompt_of("o", 21)
    engine.generate([Request("old", old, SamplingParams(1))])

    engine.generate([Request("a", prompt_of("a", 24), SamplingParams(20))])

    assert 0 == cache.stats().num_evicted_tokens
    assert 20 == cache.match_prefix(old)


# Ends ---------------------------------------------------------------------------


@pytest.mark.parametrize("phase", range(12))
def test_b202_an_abort_with_two_steps_in_flight_ends_once_when_both_are_done(
    phase: int,
) -> None:
    """Phase: how many calls of schedule and update, in turns, come before."""
    engine = make(32, overlap=True, limits=SchedulerLimits(8, 16, 4))
    scheduler, runner = engine.scheduler, engine.runner
    a, b = (Request(name, prompt_of(name, 9), SamplingParams(4)) for name in "ab")
    for request in (a, b):
        scheduler.add_request(request)
    batches: list[Batch] = []
    outputs: list[RequestOutput] = []
    for turn in range(200):
        if turn == phase:
            scheduler.abort("a")
            assert (a.kv is not None) == (a.num_in_flight > 0)
            scheduler.abort("a")
        if len(batches) < 2 and turn % 3 != 2:
            batch = scheduler.schedule()
            if batch is not None:
                batches.append(batch)
                continue
        if batches:
            tokens = runner.run(batches[0])
            outputs += scheduler.update(batches.pop(0), tokens)
        outputs += scheduler.take_outputs()
        scheduler.cache.check_integrity()

    ends = [(o.request, o.finish_reason) for o in outputs if o.finish_reason]
    assert {(a, FinishReason.ABORT), (b, FinishReason.LENGTH)} == set(ends)
    assert 2 == len(ends)
    assert (None, 0) == (a.kv, scheduler.cache.stats().num_requests)
    assert alone(prompt_of("b", 9), 4) == b.output_tokens


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_steps", range(4))
def test_b204_an_id_that_is_free_again_names_a_new_request(
    overlap: bool, num_steps: int
) -> None:
    engine = make(32, overlap=overlap)
    scheduler = engine.scheduler
    old = Request("a", prompt_of("o"), SamplingParams(8))
    new = Request("a", prompt_of("n"), SamplingParams(3))
    scheduler.add_request(old)
    with pytest.raises(RequestStateError):
        scheduler.add_request(new)
    for _ in range(num_steps):
        engine.step()
    scheduler.abort("a")

    scheduler.add_request(new)
    outputs = [output for report in engine.run() for output in report.outputs]

    assert alone(prompt_of("n"), 3) == new.output_tokens
    told = [t for o in outputs if o.request is new for t in o.tokens]
    assert new.output_tokens == told
    assert num_steps == old.num_output_tokens
    assert 0 == scheduler.cache.stats().num_requests


@pytest.mark.parametrize(
    "prompt", [[-1], [2**31], [int(5e18)], [1.5], [True], [[1]], [], b"abc", "abc"]
)
def test_b205_what_is_no_prompt_is_refused(prompt: object) -> None:
    with pytest.raises(RadixKVError):
        Request("a", prompt)  # type: ignore[arg-type]


def test_b205_tokens_outside_of_the_vocabulary_are_refused_at_both_ends() -> None:
    scheduler = make(vocab_size=100).scheduler
    with pytest.raises(TokenError):
        scheduler.add_request(Request("a", [99, 100], SamplingParams(2)))
    request = Request("a", [0, 99], SamplingParams(2, stop_token_ids=(10**6,)))
    scheduler.add_request(request)
    batch = scheduler.schedule()
    assert batch is not None
    for token in (100, -2):
        with pytest.raises(TokenError):
            scheduler.update(batch, np.array([token]))

    scheduler.update(batch, np.array([99]))

    assert [99] == request.output_tokens


# Room ---------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_b207_who_does_not_fit_holds_up_nobody_who_does(policy: str) -> None:
    engine = make(16, policy=policy)
    scheduler = engine.scheduler
    running = Request("r", prompt_of("r", 32), SamplingParams(9))
    head = Request("h", prompt_of("h", 40), SamplingParams(5))
    scheduler.add_request(running)
    engine.step()
    scheduler.add_request(head)
    small = Request("s", prompt_of("s", 3), SamplingParams(3))
    scheduler.add_request(small)

    engine.step()

    assert ("waiting", "running") == (head.status, small.status)
    assert 1 == head.num_overtakes
    for _ in engine.run():
        pass
    assert {FinishReason.LENGTH} == {running.finish_reason, head.finish_reason}


@pytest.mark.parametrize("page_size", [1, 2, 4, 8])
@pytest.mark.parametrize("num_spare", [0, 1, 2])
def test_b209_who_comes_back_has_the_tokens_that_it_has_alone_each_once(
    page_size: int, num_spare: int
) -> None:
    num_pages = -(-24 // page_size) + num_spare
    engine = make(num_pages, page_size, admission=ReserveOne())
    requests = [Request(name, prompt_of(name), SamplingParams(17)) for name in "abc"]

    outputs = list(engine.stream(requests))

    for name, request in zip("abc", requests, strict=True):
        told = [t for o in outputs if o.request is request for t in o.tokens]
        assert request.output_tokens == told == alone(prompt_of(name), 17)
    cache = engine.scheduler.cache
    assert (0, 0) == (cache.held_size, cache.protected_size)


def test_b175_resumed_tokens_are_no_prompt_tokens() -> None:
    engine = make(32, 1, admission=ReserveOne())
    requests = [Request(name, prompt_of(name), SamplingParams(17)) for name in "abc"]

    engine.generate(requests)
    stats = engine.scheduler.cache.stats()

    assert stats.num_resumed_requests == engine.scheduler.num_retractions > 0
    assert (24, 0.0) == (stats.num_prompt_tokens, stats.hit_rate)
    assert 3 == stats.num_admitted_requests - stats.num_resumed_requests

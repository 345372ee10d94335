"""Drafts: how many there are, what becomes of them, and what they cost nobody."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.mem_cache import ConfigError, PolicyError, RadixCache, TokenError
from radixkv.scheduling import (
    Batch,
    Engine,
    Estimate,
    FinishReason,
    NullRunner,
    Request,
    RequestOutput,
    RequestStatus,
    SamplingParams,
    Scheduler,
    SchedulerLimits,
)
from radixkv.scheduling.drafts import cut_to_pages

from .driver import Wrong, law, make_cache, span

VOCAB_SIZE = 999


def future_of(prompt: Sequence[int], num_tokens: int = 40) -> list[int]:
    """What comes behind a prompt, without drafts."""
    cache = make_cache(32, 4, max_context_len=128)
    engine = Engine(Scheduler(cache), NullRunner(VOCAB_SIZE))
    request = Request("alone", prompt, SamplingParams(num_tokens))
    return engine.generate([request])[0].output_tokens


@dataclass
class Prophet:
    """Knows the outputs, and tells them with a fault behind `num_right` tokens."""

    num_right: int = 99
    asked: list[tuple[Hashable, int]] = field(default_factory=list)

    def propose(self, request: Request, max_tokens: int) -> tuple[int, ...]:
        self.asked.append((request.request_id, max_tokens))
        future = future_of(request.prompt_tokens.tolist())
        guesses = future[request.num_output_tokens :][:max_tokens]
        return tuple(
            token if i < self.num_right else (token + 1) % VOCAB_SIZE
            for i, token in enumerate(guesses)
        )


@dataclass
class Answers:
    """Answers whatever it is told to."""

    answer: Wrong

    def propose(self, request: Request, max_tokens: int) -> tuple[int, ...]:
        if isinstance(self.answer, Exception):
            raise self.answer
        result: tuple[int, ...] = self.answer
        return result


class Server:
    """A scheduler with drafts and a runner, one step at a time."""

    def __init__(
        self,
        drafter: Prophet | Answers,
        cache: RadixCache | None = None,
        limits: SchedulerLimits | None = None,
        **options: Wrong,
    ) -> None:
        self.cache = cache or make_cache()
        self.scheduler = Scheduler(self.cache, limits, drafter=drafter, **options)
        self.runner = NullRunner(VOCAB_SIZE)

    def add(
        self, name: Hashable, prompt: Sequence[int], num_tokens: int, **options: Wrong
    ) -> Request:
        namespace = options.pop("namespace", None)
        params = SamplingParams(num_tokens, **options)
        request = Request(name, prompt, params, namespace=namespace)
        self.scheduler.add_request(request)
        return request

    def schedule(self) -> Batch:
        batch = self.scheduler.schedule()
        assert batch is not None
        return batch

    def update(self, batch: Batch) -> list[RequestOutput]:
        return self.scheduler.update(batch, self.runner.run(batch))

    def step(self) -> list[RequestOutput]:
        return self.update(self.schedule())

    def drain(self) -> None:
        for _ in range(100):
            if not self.scheduler.has_requests:
                return
            self.step()
        pytest.fail("it never ends")


def spans(batch: Batch) -> list[tuple[int, int]]:
    return [(entry.start, entry.stop) for entry in batch.entries]


# What becomes of them ---------------------------------------------------------


def test_right_drafts_are_output_at_once() -> None:
    server = Server(Prophet())
    request = server.add("a", span(1, 6), 11)

    outputs = [output for _ in range(3) for output in server.step()]

    future = tuple(future_of(span(1, 6), 11))
    assert [future[:1], future[1:6], future[6:]] == [o.tokens for o in outputs]
    assert [None, None, FinishReason.LENGTH] == [o.finish_reason for o in outputs]
    usage = request.usage
    assert (usage.num_draft_tokens, usage.num_accepted_tokens) == (8, 8)
    assert usage.num_computed_tokens == 6 + 11 - 1


@pytest.mark.parametrize("num_right", range(5))
def test_drafts_are_kept_up_to_the_first_that_is_wrong(num_right: int) -> None:
    server = Server(Prophet(num_right))
    request = server.add("a", span(1, 6), 20)
    server.step()

    (output,) = server.step()

    assert tuple(future_of(span(1, 6))[1 : 2 + num_right]) == output.tokens
    usage = request.usage
    assert (usage.num_draft_tokens, usage.num_accepted_tokens) == (4, num_right)
    assert usage.num_computed_tokens == 6 + 1 + num_right
    assert request.kv is not None
    lengths = (request.kv.committed_len, request.kv.allocated_len)
    assert lengths == (7 + num_right,) * 2
    server.drain()
    assert future_of(span(1, 6), 20) == request.output_tokens


@pytest.mark.parametrize("where", ["eos", "stop"])
@pytest.mark.parametrize("index", range(1, 6))
def test_a_stop_token_among_right_drafts_is_the_last(where: str, index: int) -> None:
    prompt = span(1, 6)
    future = future_of(prompt)
    stop = future[index]
    assert stop not in future[:index]
    if where == "eos":
        server = Server(Prophet(), make_cache(32, 1), eos_token_ids=[stop])
        request = server.add("a", prompt, 20)
    else:
        server = Server(Prophet(), make_cache(32, 1))
        request = server.add("a", prompt, 20, stop_token_ids=(stop,))
    server.step()

    (output,) = server.step()

    assert tuple(future[1 : index + 1]) == output.tokens
    assert output.finish_reason is FinishReason.STOP
    # The newest token has no K and V: n + k - 1 positions are cached.
    num_cached = len(prompt) + len(request.output_tokens) - 1
    assert law(server.cache) == (32 - num_cached, num_cached, 0, 0)
    assert server.cache.match_prefix([*prompt, *future]) == num_cached
    accepted = min(index, 4)
    assert (request.num_draft_tokens, request.num_accepted_tokens) == (4, accepted)


def test_b45_rejected_drafts_give_their_pages_back_and_are_never_cached() -> None:
    prompt, prophet = span(1, 6), Prophet()
    future = future_of(prompt)
    server = Server(prophet)
    server.add("a", prompt, 20, stop_token_ids=(future[5],))
    server.step()
    held: list[tuple[int, int]] = []
    rejected: list[list[int]] = []
    for num_right in (1, 1, 0):
        prophet.num_right = num_right
        batch = server.schedule()
        rejected.append(batch.entries[0].tokens.tolist())
        during = law(server.cache)[3] + law(server.cache)[2]
        server.update(batch)
        held.append((during // 4, (law(server.cache)[2] + law(server.cache)[3]) // 4))

    assert held == [(3, 2), (4, 3), (4, 0)]
    assert law(server.cache) == (56, 8, 0, 0)
    for tokens, num_right in zip(rejected, (8, 10, 11), strict=True):
        assert server.cache.match_prefix(tokens) == num_right // 4 * 4


def test_b46_only_verified_tokens_are_cached() -> None:
    prompt = span(1, 7)
    future = future_of(prompt)
    server = Server(Prophet(1), max_draft_tokens=3)
    request = server.add("a", prompt, 20)
    server.step()
    batch = server.schedule()
    assert spans(batch) == [(7, 11)]

    assert server.cache.match_prefix([*prompt, *future]) == 4
    server.update(batch)
    server.scheduler.abort("a")
    assert server.cache.match_prefix([*prompt, *future]) == 4

    assert request.output_tokens == future[:3]
    again = server.add("b", prompt, 3)
    server.drain()
    assert again.output_tokens == future[:3]
    assert server.cache.match_prefix([*prompt, *future]) == 8


def test_an_abort_in_flight_keeps_the_pages_until_the_step_is_done() -> None:
    server = Server(Prophet())
    request = server.add("a", span(1, 6), 20)
    server.step()
    batch = server.schedule()
    server.scheduler.abort("a")
    assert law(server.cache) == (52, 0, 4, 8)

    (output,) = server.update(batch)

    assert ((), FinishReason.ABORT) == (output.tokens, output.finish_reason)
    assert request.num_output_tokens == 1
    assert law(server.cache) == (60, 4, 0, 0)


def test_a_step_with_drafts_may_fail() -> None:
    server = Server(Prophet())
    request = server.add("a", span(1, 6), 20)
    server.step()
    batch = server.schedule()
    server.cache.recall(batch.kv_cache_info)

    server.scheduler.cancel(batch)

    assert request.finish_reason is FinishReason.ABORT
    assert law(server.cache) == (60, 4, 0, 0)


# How many there are -----------------------------------------------------------


def test_b132_drafts_end_where_the_request_must() -> None:
    prophet = Prophet()
    server = Server(prophet, make_cache(8, 4, max_context_len=32))
    server.add("a", span(1, 27), 6)
    server.step()

    batch = server.schedule()

    assert spans(batch) == [(27, 32)]
    assert prophet.asked == [("a", 4)]
    assert batch.kv_cache_info.page_indptr.tolist() == [0, 1]
    server.update(batch)
    assert law(server.cache) == (0, 32, 0, 0)


def test_nobody_is_asked_for_the_last_token_or_for_a_prompt() -> None:
    prophet = Prophet()
    limits = SchedulerLimits(chunked_prefill_size=4)
    server = Server(prophet, limits=limits)
    server.add("a", span(1, 6), 2)
    server.drain()
    server.add("b", span(1, 6), 3)
    server.drain()

    assert prophet.asked == [("b", 1)]


@pytest.mark.parametrize(("num_waiting", "budget"), [(0, 5), (1, 2)])
def test_drafts_keep_to_the_budget_and_leave_half_to_prompts(
    num_waiting: int, budget: int
) -> None:
    limits = SchedulerLimits(max_running_requests=3, max_batched_tokens=8)
    prophet = Prophet()
    server = Server(prophet, make_cache(64, 4), limits)
    for name in range(3):
        server.add(name, [100 * name + 1, 2], 20)
    server.step()
    for name in range(num_waiting):
        server.add(f"waiting {name}", [7], 20)

    batch = server.schedule()

    lengths = [stop - start - 1 for start, stop in spans(batch)]
    assert sum(lengths) == budget
    assert lengths == [min(4, budget), budget - min(4, budget), 0]
    assert [min(4, budget), budget - 4][: len(prophet.asked)] == [
        max_tokens for _, max_tokens in prophet.asked
    ]


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_any_sequence_of_tokens_will_do_and_what_is_too_much_is_cut(
    kind: Callable[[list[int]], object],
) -> None:
    server = Server(Answers(kind([5] * 9)), max_draft_tokens=2)
    request = server.add("a", span(1, 6), 9)
    server.step()

    batch = server.schedule()

    assert batch.entries[0].drafts == (5, 5)
    assert batch.input_ids.tolist() == [request.output_tokens[0], 5, 5]
    assert batch.positions.tolist() == [6, 7, 8]
    assert batch.sample_indices.tolist() == [0, 1, 2]
    server.update(batch)
    assert batch.input_ids.tolist() == [request.output_tokens[0], 5, 5]
    server.drain()
    assert future_of(span(1, 6), 9) == request.output_tokens


@pytest.mark.parametrize("value", [0, -1, 1.5, None])
def test_the_number_of_drafts_must_be_a_positive_integer(value: Wrong) -> None:
    with pytest.raises(ConfigError, match=f"^max_draft_tokens must be .*{value!r}"):
        Scheduler(make_cache(), drafter=Prophet(), max_draft_tokens=value)


# What they cost nobody --------------------------------------------------------


def test_drafts_give_way_before_anybody_is_retracted() -> None:
    gambler = Estimate(initial_ratio=0.01, min_ratio=0)
    server = Server(Prophet(0), make_cache(4, 4), admission=gambler)
    for name in (1, 2):
        server.add(name, span(10 * name, 10 * name + 3), 9)
    server.step()

    batch = server.schedule()

    # Five positions would take two pages each, and there is one for each.
    assert spans(batch) == [(4, 8), (4, 8)]
    assert server.scheduler.num_retractions == 0
    server.update(batch)
    assert law(server.cache)[0] == 0
    server.drain()
    assert server.scheduler.num_retractions > 0


def test_nobody_loses_a_page_to_the_drafts_of_another() -> None:
    gambler = Estimate(initial_ratio=0.01, min_ratio=0)
    server = Server(Prophet(), make_cache(5, 4), admission=gambler)
    server.add("a", span(1, 7), 9)
    other = server.add("b", span(20, 27), 3)
    server.step()

    batch = server.schedule()

    # The drafts of the first would need the page that the second cannot do without.
    assert spans(batch) == [(7, 8), (8, 10)]
    server.update(batch)
    assert other.finish_reason is FinishReason.LENGTH


def test_drafts_stay_below_the_ceiling_of_a_namespace() -> None:
    server = Server(Prophet(0))
    server.cache.set_quota("tenant", ceiling_size=16)
    for name in (1, 2):
        prompt = span(10 * name, 10 * name + 3)
        server.add(name, prompt, 5, namespace="tenant")
    server.step()

    batch = server.schedule()

    assert spans(batch) == [(4, 8), (4, 8)]
    server.update(batch)
    server.drain()
    assert server.scheduler.num_retractions == 0


@given(
    scheduled_len=st.integers(0, 40),
    num_drafts=st.integers(1, 9),
    page_size=st.integers(1, 8),
)
def test_what_is_cut_to_pages_needs_no_more_pages(
    scheduled_len: int, num_drafts: int, page_size: int
) -> None:
    request = Request("a", [1])
    request.scheduled_len = scheduled_len
    drafts = {request: tuple(range(num_drafts))}

    cut = cut_to_pages(drafts, page_size)

    page = scheduled_len // page_size
    positions = range(scheduled_len + 1, scheduled_len + 1 + num_drafts)
    expected = sum(position // page_size == page for position in positions)
    assert cut == ({request: tuple(range(expected))} if expected else {})


# Drafters that fail -----------------------------------------------------------


def snapshot(server: Server, requests: list[Request]) -> Wrong:
    scheduler = server.scheduler
    return (
        law(server.cache),
        [
            (
                r.tokens.tolist(),
                r.status,
                r.scheduled_len,
                r.num_in_flight,
                r.num_pending,
            )
            for r in requests
        ],
        (scheduler.num_running, scheduler.num_waiting, scheduler.num_in_flight),
        scheduler.take_outputs(),
    )


RUBBISH = [
    None,
    5,
    "ab",
    [1.5],
    [True],
    [-1],
    [2**31],
    [2**70],
    [[1]],
    [1, None],
    [VOCAB_SIZE],
    np.empty((0, 2), np.int32),
    (token for token in (1, 2)),
    object(),
]


@pytest.mark.parametrize("answer", [*RUBBISH, ValueError("no"), KeyError(3)])
def test_a_drafter_that_fails_is_told_and_harms_nobody(answer: Wrong) -> None:
    drafter = Answers(())
    server = Server(drafter, vocab_size=VOCAB_SIZE)
    requests = [server.add(name, span(10 * name, 10 * name + 5), 9) for name in (1, 2)]
    server.step()
    before = snapshot(server, requests)
    drafter.answer = answer
    error = PolicyError if isinstance(answer, Exception) else TokenError

    for _ in range(2):
        with pytest.raises(error, match=r"draft.* request 1\b") as raised:
            server.schedule()
        if error is PolicyError:
            assert raised.value.__cause__ is answer
    assert before == snapshot(server, requests)

    drafter.answer = ()
    server.drain()
    for request in requests:
        assert request.status is RequestStatus.FINISHED
        assert future_of(request.prompt_tokens.tolist(), 9) == request.output_tokens


def test_a_drafter_that_fails_on_the_second_request_has_harmed_nobody() -> None:
    class SecondFails(Prophet):
        def propose(self, request: Request, max_tokens: int) -> tuple[int, ...]:
            if request.request_id == 2:
                raise ValueError("no")
            return super().propose(request, max_tokens)

    server = Server(SecondFails())
    requests = [server.add(name, span(10 * name, 10 * name + 5), 9) for name in (1, 2)]
    server.step()
    before = snapshot(server, requests)

    with pytest.raises(PolicyError, match="the drafter failed on request 2"):
        server.schedule()

    assert before == snapshot(server, requests)

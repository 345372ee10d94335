"""Calls of a scheduler that come at the wrong moment, or from the wrong place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import numpy as np
import pytest

from radixkv.mem_cache import (
    ConfigError,
    MemoryManager,
    PolicyError,
    RadixCache,
    RequestStateError,
    TokenError,
    WrongThreadError,
)
from radixkv.scheduling import (
    Batch,
    Engine,
    NullRunner,
    QueueView,
    Request,
    SamplingParams,
    Scheduler,
)


def make(**options: object) -> Scheduler:
    memory = MemoryManager(16, 4, max_num_requests=4, max_context_len=64)
    return Scheduler(RadixCache(memory), **options)  # type: ignore[arg-type]


def add(scheduler: Scheduler, name: object, max_new_tokens: int = 4) -> Request:
    request = Request(str(name), [1, 2, 3], SamplingParams(max_new_tokens))
    scheduler.add_request(request)
    return request


class CallsBack:
    """A scheduling policy that calls the scheduler which asks it."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call: Callable[[], object] | None = call

    def order(self, queue: QueueView) -> Iterable[Request]:
        call, self.call = self.call, None
        if call is not None:
            call()
        return list(queue)


@pytest.mark.parametrize("name", ["schedule", "abort", "add_request"])
def test_a_policy_cannot_call_the_scheduler_that_asks_it(name: str) -> None:
    scheduler: Scheduler
    calls: dict[str, Callable[[], object]] = {
        "schedule": lambda: scheduler.schedule(),
        "abort": lambda: scheduler.abort("a"),
        "add_request": lambda: add(scheduler, "b"),
    }
    scheduler = make(policy=CallsBack(calls[name]))
    request = add(scheduler, "a")

    with pytest.raises(PolicyError) as refusal:
        scheduler.schedule()

    assert isinstance(refusal.value.__cause__, RequestStateError)
    assert "from within one of its calls" in str(refusal.value.__cause__)
    assert scheduler.num_waiting == 1
    engine = Engine(scheduler, NullRunner(9))
    assert list(engine.run())
    assert request.num_output_tokens == 4
    scheduler.cache.check_integrity()


def test_another_thread_is_refused_once_there_is_an_owner() -> None:
    scheduler = make()
    add(scheduler, "a")
    errors: list[BaseException] = []

    def call(function: Callable[[], object]) -> None:
        def note() -> None:
            try:
                function()
            except WrongThreadError as error:
                errors.append(error)

        thread = threading.Thread(target=note)
        thread.start()
        thread.join()

    call(lambda: add(scheduler, "b"))
    assert (errors, scheduler.num_waiting) == ([], 2)  # nobody owns it yet
    batch = scheduler.schedule()
    assert batch is not None
    call(lambda: add(scheduler, "c"))
    call(lambda: scheduler.abort("a"))
    call(lambda: scheduler.update(batch, np.full(batch.num_samples, 1)))
    call(scheduler.schedule)

    assert len(errors) == 4
    assert "SimpleQueue" in str(errors[0])
    scheduler.update(batch, np.full(batch.num_samples, 1))


def test_a_thread_that_has_ended_owns_nothing() -> None:
    scheduler = make()
    thread = threading.Thread(target=scheduler.schedule)
    thread.start()
    thread.join()

    add(scheduler, "a")

    assert scheduler.num_waiting == 1


class InterruptedClock:
    """A clock that stands for Ctrl-C: it interrupts one call of many."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self) -> float:
        self.number -= 1
        if self.number == 0:
            raise KeyboardInterrupt
        return 0.0


@pytest.mark.parametrize("number", range(1, 12))
@pytest.mark.parametrize("overlap", [False, True])
def test_an_interrupt_before_a_change_loses_nothing(number: int, overlap: bool) -> None:
    """The clock is asked before anything is changed, wherever it is asked."""
    scheduler = make(clock=InterruptedClock(number), overlap=overlap)
    engine = Engine(scheduler, NullRunner(9))
    requests = [Request(str(i), [i, 2, 3], SamplingParams(4)) for i in range(3)]
    num_interrupts = 0
    for request in requests:
        try:
            scheduler.add_request(request)
        except KeyboardInterrupt:
            num_interrupts += 1
            scheduler.add_request(request)
    while scheduler.has_requests:
        try:
            engine.step()
        except KeyboardInterrupt:
            num_interrupts += 1
            engine.close()
            break

    assert num_interrupts == 1
    scheduler.cache.check_integrity()
    for request in requests:
        scheduler.abort(request.request_id)
    scheduler.cache.check_integrity()


def test_an_interrupt_in_the_middle_of_a_call_ends_the_use_of_a_scheduler() -> None:
    class Interrupted(RadixCache):
        def commit(self, request: object, new_len: object) -> None:
            raise KeyboardInterrupt

    memory = MemoryManager(16, 4, max_num_requests=4, max_context_len=64)
    scheduler = Scheduler(Interrupted(memory))
    add(scheduler, "a")
    engine = Engine(scheduler, NullRunner(9))

    with pytest.raises(KeyboardInterrupt):
        engine.step()

    with pytest.raises(RequestStateError, match="cut a call of this scheduler short"):
        scheduler.abort("a")
    with pytest.raises(RequestStateError, match="cut a call of this scheduler short"):
        engine.step()


def test_sampled_tokens_outside_of_the_vocabulary_are_refused() -> None:
    scheduler = make(vocab_size=50)
    request = add(scheduler, "a")
    batch = scheduler.schedule()
    assert isinstance(batch, Batch)

    with pytest.raises(TokenError, match="tokens must be < 50, got 50"):
        scheduler.update(batch, np.array([50]))

    assert request.num_output_tokens == 0
    scheduler.update(batch, np.array([49]))
    assert request.output_tokens == [49]


@pytest.mark.parametrize(
    "options",
    [
        {"limits": 5},
        {"limits": {}},
        {"drafter": 5},
        {"drafter": "prompt-lookup"},
        {"drafter": NullRunner},
    ],
)
def test_options_of_another_kind_are_refused_at_once(
    options: dict[str, object],
) -> None:
    with pytest.raises(ConfigError):
        make(**options)


@pytest.mark.parametrize("request_", [None, 5, "a"])
def test_only_requests_are_queued(request_: object) -> None:
    scheduler = make()

    with pytest.raises(ConfigError, match="request must be of kind Request, got"):
        scheduler.add_request(request_)  # type: ignore[arg-type]


def test_an_id_that_cannot_be_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="request_id"):
        make().abort([])  # type: ignore[arg-type]


@pytest.mark.parametrize("params", [{}, 3, "greedy"])
def test_sampling_params_of_another_kind_are_refused(params: object) -> None:
    with pytest.raises(ConfigError, match="sampling_params must be"):
        Request("a", [1], params)  # type: ignore[arg-type]

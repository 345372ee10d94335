"""The exported tools for schedulers: they notice what they are for."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pytest
from hypothesis import Phase, settings
from numpy.typing import NDArray

from radixkv.mem_cache import (
    ConfigError,
    MemoryManager,
    PrefixCache,
    RadixCache,
    RadixKVError,
    RequestStateError,
)
from radixkv.scheduling import (
    SCHEDULING_POLICIES,
    Batch,
    Engine,
    QueueView,
    Request,
    RequestOutput,
    SamplingParams,
    Scheduler,
    SchedulerLimits,
    SchedulingPolicy,
)
from radixkv.scheduling.testing import (
    CheckedScheduler,
    LabelRunner,
    SchedulerMachine,
    check_scheduling_policy,
)

from .driver import Wrong


@pytest.fixture(autouse=True)
def find_without_shrinking() -> Iterator[None]:
    """Looking for a smaller example takes longer than finding one."""
    before = settings.get_current_profile_name()
    settings.register_profile("find", deadline=None, phases=[Phase.generate])
    settings.load_profile("find")
    yield
    settings.load_profile(before)


def make_cache(num_pages: int = 16) -> RadixCache:
    memory = MemoryManager(num_pages, 4, max_num_requests=4, max_context_len=32)
    return RadixCache(memory)


# Policies ---------------------------------------------------------------------


@pytest.mark.parametrize("policy", SCHEDULING_POLICIES.values())
def test_the_built_in_policies_keep_their_promises(
    policy: Callable[[], SchedulingPolicy],
) -> None:
    check_scheduling_policy(policy, max_examples=5)


class NewestFirst:
    def order(self, queue: QueueView) -> Iterable[Request]:
        return list(queue)[::-1]


class NeverTheOldest:
    """Leaves the oldest out as long as there is another, which it may."""

    def order(self, queue: QueueView) -> Iterable[Request]:
        return list(queue)[:0:-1] or queue


@pytest.mark.parametrize("policy", [NewestFirst, NeverTheOldest])
def test_an_unfair_policy_may_pass(policy: Callable[[], SchedulingPolicy]) -> None:
    check_scheduling_policy(policy, max_examples=10)


class Drops:
    def order(self, queue: QueueView) -> Iterable[Request]:
        return [request for request in queue if request.num_prompt_tokens < 6]


class Twice:
    def order(self, queue: QueueView) -> Iterable[Request]:
        return [*queue, *queue]


class Endless:
    def order(self, queue: QueueView) -> Iterable[Request]:
        while True:
            yield from queue


class Shuffles:
    def order(self, queue: QueueView) -> Iterable[Request]:
        return random.sample(list(queue), len(queue))


class Fails:
    def order(self, queue: QueueView) -> Iterable[Request]:
        return sorted(queue, key=lambda request: 1 // (request.num_prompt_tokens - 3))


class Meddles:
    def order(self, queue: QueueView) -> Iterable[Request]:
        for request in queue:
            request.priority += 1
        return list(queue)


class Writes:
    def order(self, queue: QueueView) -> Iterable[Request]:
        for request in queue:
            request.key.append(0)
        return list(queue)


class Takes:
    def order(self, queue: Wrong) -> Iterable[Request]:
        queue.remove(next(iter(queue)))
        return list(queue)


@pytest.mark.parametrize(
    ("policy", "promise"),
    [
        (Drops, "do not come to an end .*left out"),
        (Twice, "must return waiting requests, each once"),
        (Endless, "must return waiting requests, each once"),
        (Shuffles, "must give the same orders|must do the same in every run"),
        (Fails, "order must not fail: .*ZeroDivisionError"),
        (Meddles, r"order must not change \['priority'\]"),
        (Writes, r"order must not change \['key'\]"),
        (Takes, "order must not change the queue"),
    ],
)
def test_a_policy_that_breaks_a_promise_is_told_which(
    policy: Callable[[], SchedulingPolicy], promise: str
) -> None:
    with pytest.raises(AssertionError, match=promise):
        check_scheduling_policy(policy)


def test_what_has_no_order_is_no_policy() -> None:
    with pytest.raises(ConfigError, match="policy must be an object"):
        check_scheduling_policy(lambda: 5)  # type: ignore[arg-type,return-value]


# Schedulers -------------------------------------------------------------------


def run(machine: type[SchedulerMachine]) -> None:
    case = machine.TestCase
    case.settings = settings(
        max_examples=200, stateful_step_count=20, derandomize=True, database=None
    )
    case().runTest()


class PublishesTooMuch(Scheduler):
    """Publishes the page that is being computed, too."""

    def schedule(self) -> Batch | None:
        batch = super().schedule()
        for entry in batch.entries if batch else ():
            kv = entry.request.kv
            if kv is not None and entry.stop <= entry.request.num_tokens:
                self.cache.commit(kv, entry.stop)
                self.cache.cache_unfinished_req(kv, entry.request.tokens)
        return batch


class TellsTwice(Scheduler):
    def take_outputs(self) -> list[RequestOutput]:
        outputs = super().take_outputs()
        return outputs + outputs[-1:]


class TellsNothing(Scheduler):
    def take_outputs(self) -> list[RequestOutput]:
        return super().take_outputs()[1:]


class LosesRequests(Scheduler):
    """Every third is never queued."""

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        if request.arrival % 3 == 2:
            self._waiting.remove(request)


class KeepsRows(Scheduler):
    """Takes a row for itself, and keeps it."""

    def update(
        self, batch: Batch, next_tokens: NDArray[np.int32]
    ) -> list[RequestOutput]:
        self.cache.admit([0])
        return super().update(batch, next_tokens)


class SwapsTokens(Scheduler):
    """Gives each request the tokens of another."""

    def update(
        self, batch: Batch, next_tokens: NDArray[np.int32]
    ) -> list[RequestOutput]:
        return super().update(batch, next_tokens[::-1])


class IgnoresAborts(Scheduler):
    def abort(self, request_id: object) -> None:
        pass


@pytest.mark.parametrize(
    "scheduler",
    [
        PublishesTooMuch,
        TellsTwice,
        TellsNothing,
        LosesRequests,
        KeepsRows,
        SwapsTokens,
        IgnoresAborts,
    ],
)
def test_a_scheduler_with_a_fault_fails(scheduler: type[Scheduler]) -> None:
    class Faulty(SchedulerMachine):
        def make_scheduler(
            self, cache: PrefixCache, limits: SchedulerLimits, overlap: bool
        ) -> CheckedScheduler:
            return CheckedScheduler(
                cache, limits, overlap=overlap, make_scheduler=scheduler
            )

    with pytest.raises((AssertionError, ExceptionGroup, RadixKVError)):
        run(Faulty)


def test_a_policy_that_drops_a_request_fails() -> None:
    class Dropping(SchedulerMachine):
        def make_scheduler(
            self, cache: PrefixCache, limits: SchedulerLimits, overlap: bool
        ) -> CheckedScheduler:
            return CheckedScheduler(cache, limits, overlap=overlap, policy=Drops())

    with pytest.raises(AssertionError, match="do not come to an end"):
        run(Dropping)


def test_a_sound_scheduler_passes() -> None:
    class Sound(SchedulerMachine):
        def make_scheduler(
            self, cache: PrefixCache, limits: SchedulerLimits, overlap: bool
        ) -> CheckedScheduler:
            policy = self.choose([NewestFirst(), NeverTheOldest()])
            return CheckedScheduler(cache, limits, overlap=overlap, policy=policy)

    Sound.TestCase.settings = settings(
        max_examples=20, stateful_step_count=20, derandomize=True, database=None
    )
    Sound.TestCase().runTest()


def test_what_is_misused_is_a_typed_error() -> None:
    checked = CheckedScheduler(make_cache())

    with pytest.raises(RequestStateError, match="no batch is in flight"):
        checked.run()
    with pytest.raises(RequestStateError, match="no batch is in flight"):
        checked.fail(is_received=True)
    with pytest.raises(ConfigError, match="cache must be of kind PrefixCache"):
        LabelRunner("cache", 9)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="policy must be one of"):
        CheckedScheduler(make_cache(), policy="best")


def test_stop_tokens_and_a_vocabulary_of_ones_own_count() -> None:
    checked = CheckedScheduler(make_cache(), eos_token_ids=(), vocab_size=2)
    params = SamplingParams(8, stop_token_ids=(1,))
    request = checked.add([0, 1, 1], params)
    assert request is not None
    checked.drain()

    assert checked.expected[request] == checked.streamed[request]
    assert "stop" == checked.ended[request]


# Runners ----------------------------------------------------------------------


class Forgetful(LabelRunner):
    """Forgets the message of the second step."""

    num_steps = 0

    def run(self, batch: Batch) -> NDArray[np.int32]:
        self.num_steps += 1
        if self.num_steps == 2:
            return np.zeros(batch.num_samples, np.int32)
        return super().run(batch)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_runner_that_forgets_a_message_is_noticed(overlap: bool) -> None:
    cache = make_cache()
    runner = Forgetful(cache, 9, overlap=overlap)
    engine = Engine(Scheduler(cache, overlap=overlap), runner, on_error="raise")

    with pytest.raises(AssertionError, match=r"must hold K and V of its position 5"):
        engine.generate([Request(0, [0] * 5, SamplingParams(6))])


def test_kv_of_somebody_else_is_noticed_between_steps() -> None:
    checked = CheckedScheduler(make_cache())
    request = checked.add([0] * 8, SamplingParams(4, ignore_eos=True))
    assert request is not None
    checked.step()
    checked.check()
    assert request.kv is not None
    checked.runner.worker.compute(request.kv.req_pool_idx, 2, 3, [0, 0, 7])

    with pytest.raises(AssertionError, match="those of another prefix"):
        checked.check()

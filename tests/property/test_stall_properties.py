"""Whoever waits has a reason, and the reason is true; without it, all go on.

Somebody else uses the same cache, quotas come and go, the pool is resized, and the
policy leaves requests out. The oracle asks the cache itself: it tries what the
scheduler says is impossible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.mem_cache import (
    CacheBusyError,
    ConfigError,
    LengthError,
    MemoryManager,
    OutOfPagesError,
    PagesInUseError,
    QuotaError,
    RadixCache,
    RequestKV,
    StalledError,
)
from radixkv.scheduling import (
    Batch,
    Engine,
    Estimate,
    FinishReason,
    NullRunner,
    QueueView,
    Request,
    RequestStatus,
    SamplingParams,
    Scheduler,
    SchedulerLimits,
    Shortage,
    StalledRequest,
    StallReason,
)
from radixkv.scheduling.testing import serial_output

VOCAB_SIZE = 3
EOS_TOKEN_IDS = (2,)
PAGE_SIZES = [1, 2, 3, 16]
NAMESPACES = [None, "tenant"]
PERSISTENT = {
    *(StallReason.NO_ROOM, StallReason.NO_ROW, StallReason.QUOTA),
    *(StallReason.LEFT_OUT, StallReason.TURN),
}
"""Why a request may wait although nothing runs."""


class Capricious:
    """The newest first; and some it does not name."""

    def __init__(self) -> None:
        self.left_out: set[Request] = set()

    def order(self, queue: QueueView) -> Iterable[Request]:
        return [r for r in reversed(list(queue)) if r not in self.left_out]


class Life:
    """A scheduler, and the others that keep it from its work."""

    def __init__(self, page_size: int, seed: int) -> None:
        random = self.random = Random(seed)
        self.page_size = page_size
        self.num_pages = random.randint(3, 10)
        self.longest = self.num_pages * page_size
        self.limits = SchedulerLimits(
            max_running_requests=random.choice([1, 2, 5]),
            max_batched_tokens=random.choice([5, 7, 50]),
            chunked_prefill_size=random.choice([1, page_size, 50]),
            max_overtakes=random.choice([0, 1, 256]),
            max_deferrals=random.choice([0, 256]),
        )
        memory = MemoryManager(
            self.num_pages,
            page_size,
            max_num_requests=random.choice([1, 2, 6]),
            max_context_len=self.longest,
        )
        self.cache = RadixCache(memory)
        self.policy = Capricious()
        self.scheduler = Scheduler(
            self.cache,
            self.limits,
            policy=self.policy,
            admission=random.choice(
                ["worst-case", Estimate(initial_ratio=0.01, min_ratio=0)]
            ),
            preempts=random.random() < 0.3,
            overlap=random.random() < 0.3,
            eos_token_ids=EOS_TOKEN_IDS,
        )
        self.runner = NullRunner(VOCAB_SIZE)
        self.engine = Engine(self.scheduler, self.runner, on_error="raise")
        self.requests: list[Request] = []
        self.strangers: list[RequestKV] = []
        self.batches: list[Batch] = []
        self.seen: Counter[str] = Counter()

    def add(self) -> None:
        random = self.random
        longest = random.choice([self.longest, 1 + self.longest // 3])
        prompt = [random.randint(0, 1)] * random.randint(1, longest)
        room = self.longest - len(prompt) + 1
        request = Request(
            len(self.requests),
            prompt,
            SamplingParams(
                random.randint(1, min(room, 40)), ignore_eos=random.random() < 0.6
            ),
            namespace=random.choice(NAMESPACES),
            priority=random.choice([0, 0, 1]),
        )
        with suppress(LengthError):
            self.scheduler.add_request(request)
            self.requests.append(request)
            if random.random() < 0.1:
                self.policy.left_out.add(request)

    def interfere(self) -> None:
        """Take rows and pages, set quotas, resize: or give some of it back."""
        random, cache = self.random, self.cache
        choice = random.randrange(6)
        if choice < 2:
            namespace = random.choice(NAMESPACES)
            kv = cache.admit([5], namespace=namespace)
            if kv is not None:
                self.strangers.append(kv)
                with suppress(OutOfPagesError):
                    num_tokens = random.randint(1, self.longest)
                    cache.alloc_for_extend([kv], [num_tokens])
        elif choice < 4 and self.strangers:
            cache.release(self.strangers.pop(random.randrange(len(self.strangers))))
        elif choice == 4:
            with suppress(ConfigError):
                ceiling = random.choice([None, self.longest, self.longest // 2])
                floor = random.choice([0, 0, self.page_size])
                cache.set_quota(
                    random.choice(NAMESPACES), floor_size=floor, ceiling_size=ceiling
                )
        else:
            with suppress(PagesInUseError, ConfigError):
                cache.resize(random.randint(1, self.num_pages))

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            for _ in range(self.random.choice([0, 0, 1, 3])):
                self.add()
            if self.random.random() < 0.4:
                self.interfere()
            self.step()
            self.cache.check_integrity()
        self.finish()

    def step(self) -> None:
        """Schedule, check every reason, and perhaps update."""
        num_retractions = self.scheduler.num_retractions
        waiting = self._waiting()
        self.num_running = self.scheduler.num_running
        batch = self.scheduler.schedule()
        if batch is not None:
            self.batches.append(batch)
        retracted = self.scheduler.num_retractions > num_retractions
        is_ahead = len(self.batches) - (batch is not None) > 0
        stalled = self.scheduler.explain_stall()
        assert self._waiting() == [each.request for each in stalled]
        assert {r for r in waiting if r.status is RequestStatus.WAITING} <= {
            each.request for each in stalled
        }
        if batch is None and not is_ahead:
            self._check_stall(stalled)
        for each in stalled:
            self.seen[each.reason] += 1
            self._check_reason(each, stalled, batch, retracted or is_ahead)
        if self.batches and (self.random.random() < 0.7 or not self._may_prepare()):
            first = self.batches.pop(0)
            self.scheduler.update(first, self.runner.run(first))

    def _may_prepare(self) -> bool:
        return len(self.batches) < 1 + self.scheduler.overlap

    # The oracle -------------------------------------------------------------

    def _check_stall(self, stalled: tuple[StalledRequest, ...]) -> None:
        """Nothing runs, so nobody waits for anything that ends by itself."""
        assert self.scheduler.num_running == 0
        if not stalled:
            return
        assert {each.reason for each in stalled} <= PERSISTENT
        self.scheduler.take_outputs()
        with pytest.raises(StalledError, match="waiting requests can go on") as error:
            self._step_while_there_are_outputs()
        assert isinstance(error.value, CacheBusyError)
        stalled = self.scheduler.explain_stall()
        assert repr(stalled[0].request.request_id) in str(error.value)
        for each in stalled:
            self.seen[f"stalled: {each.reason}"] += 1
            if each.reason in (StallReason.NO_ROOM, StallReason.QUOTA):
                self._check_shortage(each)
            elif each.reason is StallReason.NO_ROW:
                assert self.cache.admit(each.request.tokens) is None

    def _step_while_there_are_outputs(self) -> None:
        """Another order may find first who can never run any more, and tell that."""
        while self.engine.step().outputs:
            pass

    def _check_shortage(self, stalled: StalledRequest) -> None:
        """The cache cannot give the request what would be set aside for it."""
        cache, request = self.cache, stalled.request
        shortage = stalled.shortage
        if shortage is not None:
            assert shortage.cached_size == cache.match_prefix(
                request.tokens, request.namespace
            )
            assert shortage.reserved_size == 0  # nothing runs
            actual = (
                *(shortage.available_size, shortage.evictable_size),
                *(shortage.protected_size, shortage.held_size),
            )
            assert actual == (
                *(cache.available_size, cache.evictable_size),
                *(cache.protected_size, cache.held_size),
            )
        kv = cache.admit(request.tokens, namespace=request.namespace)
        if kv is None:  # it lacks a row besides
            assert self._is_obvious(shortage)
            return
        needed = request.max_kv_len if shortage is None else shortage.needed_size
        with pytest.raises(OutOfPagesError) as error:
            cache.alloc_for_extend([kv], [min(needed, self.longest)])
        if isinstance(error.value, QuotaError):
            is_quota = stalled.reason is StallReason.QUOTA
            assert is_quota or self._is_obvious(shortage)  # or both
        else:
            assert stalled.reason is StallReason.NO_ROOM
        cache.release(kv)

    def _is_obvious(self, shortage: Shortage | None) -> bool:
        """Tell whether the numbers alone say that there is no room."""
        assert shortage is not None
        missing = shortage.needed_size - shortage.cached_size
        return missing > shortage.available_size + shortage.evictable_size

    def _check_reason(
        self,
        stalled: StalledRequest,
        all_stalled: tuple[StalledRequest, ...],
        batch: Batch | None,
        is_special: bool,
    ) -> None:
        """What can be seen from outside bears the reason out."""
        request, blocker = stalled.request, stalled.blocker
        limits = self.limits
        match stalled.reason:
            case StallReason.PREFIX:
                assert blocker is not None
                assert blocker.status is RequestStatus.RUNNING
                assert blocker.namespace == request.namespace
                assert limits.max_deferrals
                cached = self.cache.match_prefix(request.tokens, request.namespace)
                stop = cached + self.page_size
                mine, its = request.tokens[:stop], blocker.tokens[:stop]
                assert mine.tolist() == its.tolist()
            case StallReason.TURN:
                assert blocker is not None
                reasons = {each.request: each.reason for each in all_stalled}
                assert reasons[blocker] in (StallReason.NO_ROOM, StallReason.QUOTA)
            case StallReason.RUNNING_CAP:
                nums = (self.num_running, self.scheduler.num_running)
                assert limits.max_running_requests in nums
            case StallReason.TOKEN_BUDGET:
                assert batch is not None
                assert batch.num_tokens == limits.max_batched_tokens
            case StallReason.LEFT_OUT:
                assert request in self.policy.left_out
            case StallReason.RETRACTION:
                assert is_special
            case StallReason.NO_ROOM:
                assert stalled.shortage is not None

    # The end ----------------------------------------------------------------

    def finish(self) -> None:
        """Take every cause away: then all end, and only those that never fit do not."""
        cache = self.cache
        for kv in self.strangers:
            cache.release(kv)
        for namespace in NAMESPACES:
            cache.set_quota(namespace)
        cache.resize(self.num_pages)
        self.policy.left_out.clear()
        for batch in self.batches:
            self.scheduler.update(batch, self.runner.run(batch))
        for _ in self.engine.run():
            pass
        for request in self.requests:
            expected = serial_output(
                request.prompt_tokens.tolist(), request.sampling_params
            )
            if request.finish_reason is not FinishReason.REFUSED:
                assert expected == request.output_tokens

    def _waiting(self) -> list[Request]:
        return [r for r in self.requests if r.status is RequestStatus.WAITING]


@given(page_size=st.sampled_from(PAGE_SIZES), seed=st.integers(0, 2**32 - 1))
def test_whoever_waits_has_a_reason_that_is_true(page_size: int, seed: int) -> None:
    Life(page_size, seed).run(num_steps=20)


def test_who_is_refused_only_in_the_next_order_hides_no_stall() -> None:
    Life(page_size=1, seed=12359).run(num_steps=20)


def test_every_reason_is_met() -> None:
    seen: Counter[str] = Counter()
    for seed in range(80):
        life = Life(PAGE_SIZES[seed % 4], seed)
        life.run(num_steps=24)
        seen += life.seen

    expected = {*StallReason, *(f"stalled: {reason}" for reason in PERSISTENT)}
    assert set() == expected - set(seen)

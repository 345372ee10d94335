"""Stalls: who waits for what, said instead of spinning; and no false alarm."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from radixkv.mem_cache import (
    CacheBusyError,
    MemoryManager,
    PolicyError,
    RadixCache,
    RequestKV,
    StalledError,
)
from radixkv.scheduling import (
    Engine,
    FinishReason,
    NullRunner,
    QueueView,
    Request,
    RequestStatus,
    SamplingParams,
    Scheduler,
    SchedulerLimits,
    SchedulingPolicy,
    Shortage,
    StalledRequest,
    StallReason,
)


class NamesNobody:
    """A policy that leaves everybody out, or fails."""

    fails = False

    def order(self, queue: QueueView) -> Iterable[Request]:
        if self.fails:
            raise ArithmeticError
        return []


def make(
    num_pages: int = 8,
    *,
    num_rows: int = 12,
    limits: SchedulerLimits | None = None,
    policy: str | SchedulingPolicy = "fcfs",
) -> Engine:
    memory = MemoryManager(num_pages, 4, max_num_requests=num_rows, max_context_len=64)
    scheduler = Scheduler(RadixCache(memory), limits, policy=policy)
    return Engine(scheduler, NullRunner(99))


def add(
    engine: Engine,
    name: str,
    num_tokens: int,
    max_new_tokens: int = 1,
    namespace: str | None = None,
) -> Request:
    first = 1000 * ord(name)
    request = Request(
        name,
        range(first, first + num_tokens),
        SamplingParams(max_new_tokens),
        namespace=namespace,
    )
    engine.scheduler.add_request(request)
    return request


def stranger(
    engine: Engine, num_tokens: int, namespace: str | None = None
) -> RequestKV:
    """Somebody else, who uses the same cache."""
    cache = engine.scheduler.cache
    kv = cache.admit(range(num_tokens), namespace=namespace)
    assert kv is not None
    cache.alloc_for_extend([kv], [num_tokens])
    return kv


def finish(engine: Engine) -> None:
    for _ in engine.run():
        pass


# Each reason ------------------------------------------------------------------


def test_without_room_the_numbers_say_so() -> None:
    engine = make(8)
    kv = stranger(engine, 17)
    request = add(engine, "a", 13, 3)

    with pytest.raises(StalledError) as stall:
        engine.step()

    shortage = Shortage(
        needed_size=16,
        cached_size=0,
        reserved_size=0,
        available_size=12,
        evictable_size=0,
        protected_size=0,
        held_size=20,
    )
    expected = StalledRequest(request, StallReason.NO_ROOM, None, shortage)
    assert (expected,) == engine.scheduler.explain_stall()
    assert (
        "none of 1 waiting requests can go on: 'a': no room, needs 16 slots (0 cached) "
        "beside 0 set aside, got 12 free and 0 evictable; others hold 20 and protect 0"
    ) == str(stall.value)
    engine.scheduler.cache.release(kv)
    finish(engine)
    assert FinishReason.LENGTH is request.finish_reason


def test_its_own_cached_prefix_is_no_room_and_the_numbers_tell() -> None:
    engine = make(8)
    add(engine, "a", 9)
    finish(engine)
    kv = stranger(engine, 17)
    again = add(engine, "a", 13)

    with pytest.raises(StalledError):
        engine.step()

    (stalled,) = engine.scheduler.explain_stall()
    assert stalled.shortage is not None
    # One page is free, and it needs two; the two that are evictable are its own.
    assert (16, 8) == (stalled.shortage.needed_size, stalled.shortage.cached_size)
    assert (4, 8) == (stalled.shortage.available_size, stalled.shortage.evictable_size)
    engine.scheduler.cache.release(kv)
    finish(engine)
    assert 8 == again.num_cached_tokens


def test_what_is_set_aside_for_others_is_told_apart() -> None:
    engine = make(8)
    add(engine, "a", 5, 8)
    add(engine, "b", 16, 8)
    engine.step()

    (stalled,) = engine.scheduler.explain_stall()
    shortage = stalled.shortage
    assert shortage is not None
    # The first may become 12 tokens long, and has two pages.
    assert (24, 4, 24) == (
        shortage.needed_size,
        shortage.reserved_size,
        shortage.available_size,
    )


def test_without_a_row_all_wait_for_one() -> None:
    engine = make(num_rows=2)
    kvs = [stranger(engine, 1), stranger(engine, 1)]
    requests = [add(engine, name, 2) for name in "ab"]

    with pytest.raises(StalledError, match="'a': no row; 'b': no row"):
        engine.step()
    engine.scheduler.cache.release(kvs[0])
    finish(engine)

    assert {FinishReason.LENGTH} == {request.finish_reason for request in requests}


def test_a_quota_is_named_with_its_namespace() -> None:
    engine = make()
    cache = engine.scheduler.cache
    assert isinstance(cache, RadixCache)
    cache.set_quota("tenant", ceiling_size=12)
    stranger(engine, 9, "tenant")
    request = add(engine, "a", 5, namespace="tenant")

    with pytest.raises(StalledError, match=r"'a': quota of namespace 'tenant'$"):
        engine.step()
    cache.set_quota("tenant", ceiling_size=20)
    finish(engine)

    assert FinishReason.LENGTH is request.finish_reason


def test_whom_the_policy_leaves_out_waits_for_the_policy() -> None:
    engine = make(policy=NamesNobody())
    request = add(engine, "a", 5)

    with pytest.raises(StalledError, match=r"'a': left out$"):
        engine.step()

    (stalled,) = engine.scheduler.explain_stall()
    assert (request, StallReason.LEFT_OUT) == (stalled.request, stalled.reason)
    assert RequestStatus.WAITING is stalled.request.status


def test_who_may_not_overtake_waits_for_its_turn() -> None:
    engine = make(limits=SchedulerLimits(max_overtakes=0))
    kv = stranger(engine, 17)
    long, short = add(engine, "a", 16), add(engine, "b", 1)

    with pytest.raises(StalledError, match=r"'b': turn of 'a'$"):
        engine.step()

    stalled = engine.scheduler.explain_stall()
    assert [StallReason.NO_ROOM, StallReason.TURN] == [each.reason for each in stalled]
    assert long is stalled[1].blocker
    engine.scheduler.cache.release(kv)
    finish(engine)
    assert FinishReason.LENGTH is short.finish_reason


def test_in_traffic_those_who_wait_have_reasons_too() -> None:
    engine = make(32, limits=SchedulerLimits(2, 8, 8))
    add(engine, "a", 9, 9)
    twin = Request("twin", range(97000, 97013), SamplingParams(2))
    engine.scheduler.add_request(twin)
    budget = add(engine, "b", 3)
    engine.step()

    # One chunk of eight tokens is all that the first step computes.
    reasons = {each.request: each.reason for each in engine.scheduler.explain_stall()}
    assert {twin: StallReason.TOKEN_BUDGET, budget: StallReason.TOKEN_BUDGET} == reasons
    engine.step()
    cap = engine.scheduler.explain_stall()
    assert [StallReason.RUNNING_CAP] == [each.reason for each in cap]


def test_who_waits_for_a_prefix_is_told_whose() -> None:
    engine = make(32, limits=SchedulerLimits(4, 8, 4))
    leader = add(engine, "a", 13)
    twin = Request("twin", range(97000, 97013), SamplingParams(2))
    engine.scheduler.add_request(twin)
    engine.step()

    (stalled,) = engine.scheduler.explain_stall()
    assert StalledRequest(twin, StallReason.PREFIX, leader) == stalled
    assert "'twin': prefix of 'a'" == str(stalled)


# The message ------------------------------------------------------------------


def test_the_first_three_are_named_and_the_others_counted() -> None:
    engine = make(policy=NamesNobody())
    for name in "abcde":
        add(engine, name, 2)

    with pytest.raises(StalledError) as stall:
        engine.step()

    assert (
        "none of 5 waiting requests can go on: 'a': left out; 'b': left out; "
        "'c': left out; and 2 more"
    ) == str(stall.value)


def test_a_stall_is_caught_as_what_it_was_before() -> None:
    engine = make(policy=NamesNobody())
    add(engine, "a", 2)

    with pytest.raises(CacheBusyError):
        engine.step()


# Nothing else happens -----------------------------------------------------------


def test_b34_a_stall_is_told_after_one_look_and_changes_nothing() -> None:
    engine = make(2)
    cache = engine.scheduler.cache
    kv = stranger(engine, 8)
    request = add(engine, "a", 1)
    sizes = (cache.available_size, cache.evictable_size, cache.held_size)
    version = cache.version

    for _ in range(3):
        with pytest.raises(StalledError):
            engine.step()

    assert sizes == (cache.available_size, cache.evictable_size, cache.held_size)
    assert version == cache.version
    assert (0, 0) == (engine.scheduler.num_in_flight, engine.scheduler.num_running)
    assert (RequestStatus.WAITING, None) == (request.status, request.kv)
    cache.release(kv)
    finish(engine)


def test_b87_what_can_never_fit_is_no_stall_and_stalls_nobody() -> None:
    engine = make(4)
    never, small = add(engine, "a", 16), add(engine, "b", 4)
    engine.scheduler.cache.resize(3)

    report = engine.step()

    assert FinishReason.REFUSED is never.finish_reason
    assert {never, small} == {output.request for output in report.outputs}
    assert FinishReason.LENGTH is small.finish_reason


def test_nothing_to_do_is_no_stall() -> None:
    engine = make()

    assert [] == engine.step().outputs
    assert () == engine.scheduler.explain_stall()


def test_an_end_that_is_still_to_be_told_is_no_stall() -> None:
    engine = make(policy=NamesNobody())
    add(engine, "a", 2)
    add(engine, "b", 2)
    engine.scheduler.abort("a")

    (output,) = engine.step().outputs

    assert "a" == output.request.request_id
    with pytest.raises(StalledError, match="none of 1 "):
        engine.step()


def test_who_came_after_the_last_look_is_not_told_of() -> None:
    engine = make(policy=NamesNobody())
    assert () == engine.scheduler.explain_stall()
    first, gone = add(engine, "a", 2), add(engine, "b", 2)
    assert engine.scheduler.schedule() is None
    add(engine, "c", 2)
    engine.scheduler.abort(gone.request_id)

    assert [first] == [each.request for each in engine.scheduler.explain_stall()]


def test_a_look_that_failed_explains_nothing() -> None:
    policy = NamesNobody()
    engine = make(policy=policy)
    add(engine, "a", 2)
    assert engine.scheduler.schedule() is None
    policy.fails = True
    with pytest.raises(PolicyError):
        engine.scheduler.schedule()

    assert () == engine.scheduler.explain_stall()


# No false alarm -----------------------------------------------------------------


def test_with_nothing_else_to_do_it_looks_at_all_who_wait() -> None:
    engine = make(8)
    kv = stranger(engine, 25)
    long = [add(engine, name, 8) for name in "abcdefghijk"]
    short = add(engine, "z", 4)

    engine.step()

    assert FinishReason.LENGTH is short.finish_reason
    assert {None} == {request.finish_reason for request in long}
    engine.scheduler.cache.release(kv)
    finish(engine)


def test_others_start_in_the_step_in_which_all_who_ran_gave_their_pages_back() -> None:
    engine = make(4, limits=SchedulerLimits(1, 16, 16))
    running = add(engine, "a", 8, 9)
    engine.step()
    kv = stranger(engine, 8)
    short = add(engine, "b", 2)

    report = engine.step()

    assert 1 == running.num_retractions
    assert [short] == [output.request for output in report.outputs]
    with pytest.raises(StalledError, match="'a': no room"):
        finish(engine)
    engine.scheduler.cache.release(kv)
    finish(engine)
    assert 9 == running.num_output_tokens

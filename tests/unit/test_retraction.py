"""Whose pages are taken back, when, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from radixkv.mem_cache import ConfigError, PolicyError, RadixCache
from radixkv.scheduling import (
    FinishReason,
    LeastLoss,
    Newest,
    Request,
    RequestStatus,
    SamplingParams,
    SchedulerLimits,
)
from radixkv.scheduling.retraction_policies import retraction_order

from .deep_state import changes, deep_state
from .driver import Wrong, span
from .failing_steps import fail_steps
from .tiny_scheduler import TinyScheduler


class Gambler:
    """Sets nothing aside, and never learns."""

    def reserved_len(self, request: Request) -> int:
        return 0

    def on_step(self) -> None:
        pass

    def on_retraction(self, running: object) -> None:
        pass


def make(num_pages: int, page_size: int = 1, **options: Wrong) -> TinyScheduler:
    """Make a scheduler that runs out of pages soon."""
    options.setdefault("admission", Gambler())
    return TinyScheduler(num_pages, page_size, **options)


# Who goes ---------------------------------------------------------------------


def make_running(
    *, priority: int = 0, arrival: int = 0, admitted: int = 0, scheduled: int = 9
) -> Request:
    request = Request("a", [1] * 9, priority=priority)
    request.arrival = arrival
    request.admitted_len, request.scheduled_len = admitted, scheduled
    return request


def test_the_least_loss_goes_first_then_the_newest() -> None:
    lowest = make_running(priority=-1)
    back = make_running(admitted=9, arrival=7)
    back.reserves_all = True
    order = [
        lowest,
        make_running(admitted=8, arrival=1),
        make_running(admitted=2, arrival=3),
        make_running(admitted=2, arrival=2),
        back,
        make_running(admitted=9, priority=1),
    ]

    assert retraction_order(LeastLoss(), order[::-1]) == order


def test_the_newest_of_the_lowest_priority_goes_first() -> None:
    order = [
        make_running(priority=-1),
        make_running(arrival=3, admitted=2),
        make_running(arrival=2, admitted=9),
        make_running(arrival=1, admitted=8),
        make_running(arrival=9, priority=1),
    ]

    assert retraction_order(Newest(), order[::-1]) == order


@pytest.mark.parametrize(
    ("retraction", "victim"), [("least-loss", "c"), ("newest", "d")]
)
def test_whose_pages_are_taken_back_is_what_the_policy_says(
    retraction: str, victim: str
) -> None:
    tiny = make(20, retraction=retraction)
    tiny.add("x", span(1, 3))
    tiny.drain()
    tiny.add("a", [11, 12, 13], 9)
    tiny.add("b", [21, 22, 23], 9)
    tiny.add("c", [1, 2, 3, 4], 9)  # finds 3 of its 4
    tiny.add("d", [31, 32, 33], 9)

    tiny.step_until(lambda: tiny.waiting)

    assert tiny.waiting == victim
    tiny.drain()


def test_the_oldest_of_the_highest_priority_goes_on_whatever_the_policy() -> None:
    class Oldest:
        def key(self, request: Request) -> int:
            return request.arrival

    tiny = make(12, retraction=Oldest())
    tiny.add("a", [1], 9)
    tiny.add("b", [2], 9, priority=1)
    tiny.add("c", [3], 9, priority=1)
    seen = []

    while tiny.requests["b"].status is not RequestStatus.FINISHED:
        assert "b" in tiny.step()
        seen += [tiny.waiting] * bool(tiny.waiting)
    tiny.drain()

    assert seen[0] == "a"
    assert tiny.requests["b"].num_retractions == 0
    assert tiny.requests["c"].num_retractions > 0


def test_the_last_one_is_taken_back_only_for_strangers() -> None:
    tiny = make(8)
    request = tiny.add("a", [1, 2, 3], 5)
    tiny.step()
    stranger = tiny.cache.admit([9])
    assert stranger is not None
    tiny.cache.alloc_for_extend([stranger], [5])

    assert tiny.step() == ""
    assert (request.kv, request.num_retractions) == (None, 1)
    tiny.cache.release(stranger)
    tiny.drain()
    assert request.num_output_tokens == 5


# A policy of a caller ---------------------------------------------------------


@pytest.mark.parametrize("policy", [5, None, object(), LeastLoss, lambda request: 0])
def test_what_is_no_retraction_policy_is_refused(policy: Wrong) -> None:
    with pytest.raises(ConfigError, match="must be an object with a method key"):
        make(4, retraction=policy)


def test_an_unknown_retraction_policy_is_refused_with_those_that_there_are() -> None:
    message = r"must be one of \['least-loss', 'newest'\] or a Ret.*, got 'best'"
    with pytest.raises(ConfigError, match=message):
        make(4, retraction="best")


class Moody:
    """Has keys of its own.

    Attributes:
        key: Returns them.
    """

    def __init__(self, key: Callable[[Request], Wrong]) -> None:
        self.key = key


def fail(request: Request) -> Wrong:
    raise ZeroDivisionError


FAULTS: dict[str, Callable[[Request], Wrong]] = {
    "fails": fail,
    "of two kinds": lambda request: 0 if request.arrival % 2 else "0",
    "cannot compare": lambda request: object(),
    "none": lambda request: None,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_retraction_policy_that_fails_is_told_and_harms_nobody(fault: str) -> None:
    policy = Moody(FAULTS[fault])
    tiny = make(12, retraction=policy)
    for i, name in enumerate("abc"):
        tiny.add(name, [i], 9)
    tiny.step(4)
    ignored = frozenset({"Scheduler._num_looked_at", "Admissions.last_look"})
    before = deep_state(tiny.scheduler, ignored)

    for _ in range(2):
        with pytest.raises(PolicyError, match=r"Moody .* failed: ") as caught:
            tiny.step()
        assert caught.value.__cause__ is not None
        assert not changes(before, deep_state(tiny.scheduler, ignored))

    policy.key = Newest().key
    assert tiny.step() == "ab"
    tiny.drain()
    assert all(r.num_output_tokens == 9 for r in tiny.requests.values())


def test_a_policy_that_fails_at_the_second_victim_leaves_the_first_to_wait() -> None:
    keys = iter([1, 2, 3])
    policy = Moody(lambda request: next(keys))
    tiny = make(5, 4, retraction=policy)
    for i, name in enumerate("abcde"):
        tiny.add(name, [i] * 4, 4)
    policy.key = lambda request: next(keys)
    tiny.step()
    keys = iter([0, 1, 2, 3])

    with pytest.raises(PolicyError):
        tiny.step()

    tiny.cache.check_integrity()
    assert tiny.waiting == "b"
    policy.key = Newest().key
    tiny.drain()
    assert all(r.num_output_tokens == 4 for r in tiny.requests.values())


# How many go, and when they come back -----------------------------------------


def test_b36_no_more_are_retracted_than_pages_are_needed() -> None:
    tiny = make(5, 16)
    for i, name in enumerate("abcde"):
        tiny.add(name, [i] * 16, 3)
    tiny.step()
    assert (tiny.cache.available_size, tiny.cache.evictable_size) == (0, 0)

    assert tiny.step() == "ab"

    assert tiny.scheduler.num_retractions == 3
    tiny.drain()


def test_who_was_retracted_comes_back_when_all_that_it_needs_is_there() -> None:
    tiny = make(12)
    tiny.add("a", [1], 8)  # 8 positions
    tiny.add("b", [2], 8)
    tiny.step(6)
    assert tiny.cache.available_size == 0
    tiny.step()
    # Of 12 pages, "a" has 7 and gets 1 more; 4 are left, and "b" needs 8.
    assert (tiny.running, tiny.waiting) == ("a", "b")
    assert tiny.requests["b"].reserves_all

    assert tiny.step() == "a"
    assert tiny.step() == "b"
    assert tiny.requests["a"].status is RequestStatus.FINISHED
    tiny.drain()
    assert tiny.scheduler.num_retractions == 1


def test_who_is_retracted_again_ends_all_gambling_of_those_that_run() -> None:
    policy = Moody(lambda request: (not request.reserves_all, -request.arrival))
    tiny = make(11, retraction=policy)
    for i, (name, max_new_tokens) in enumerate([("a", 8), ("b", 2), ("c", 5)]):
        tiny.add(name, [i], max_new_tokens)
    last = tiny.add("d", [9], 5)
    tiny.step_until(lambda: last.num_retractions == 1)
    assert not tiny.requests["a"].reserves_all
    tiny.step_until(lambda: last.num_retractions == 2)

    assert tiny.running == "a"
    assert tiny.requests["a"].reserves_all
    tiny.drain()
    assert tiny.scheduler.num_retractions == 2


def test_nobody_starts_in_a_step_that_retracts() -> None:
    tiny = make(14, retraction="newest")
    tiny.add("a", [1], 9)
    tiny.add("b", [2], 9)
    tiny.add("c", [3] * 5, 9)
    tiny.step(3)
    tiny.add("d", [4])  # would fit in what "c" gives back

    assert tiny.step() == "ab"
    assert tiny.waiting == "cd"
    assert tiny.step() == "abd"
    tiny.drain()


def test_a_ceiling_takes_pages_back_in_its_own_namespace_only() -> None:
    tiny = make(40, retraction="newest")
    assert isinstance(tiny.cache, RadixCache)
    tiny.cache.set_quota("t", ceiling_size=8)
    tiny.add("a", [1], 8, namespace="t")
    tiny.add("b", [2], 8, namespace="t")
    tiny.add("c", [3], 30, namespace="other")  # the newest
    tiny.add("d", [4], 8)

    tiny.step_until(lambda: tiny.waiting)

    assert tiny.waiting == "b"
    assert tiny.cache.namespace_stats("t").used_size <= 8
    tiny.drain()
    assert tiny.scheduler.num_retractions == 1


def test_b83_the_last_request_ends_when_its_namespace_has_no_more_room() -> None:
    tiny = make(16, 4)
    assert isinstance(tiny.cache, RadixCache)
    request = tiny.add("a", span(1, 16), 1, namespace="t")
    other = tiny.add("b", span(1, 4), 1, namespace="t")
    tiny.step()
    assert request.finish_reason is other.finish_reason is FinishReason.LENGTH
    request = tiny.add("c", span(21, 32), 6, namespace="t")
    tiny.step(2)
    tiny.cache.set_quota("t", ceiling_size=16)

    tiny.step(4)

    assert request.finish_reason is FinishReason.REFUSED
    assert tiny.cache.protected_size == tiny.cache.held_size == 0
    after = tiny.add("d", [1, 2, 3, 4], 1, namespace="t")
    tiny.drain()
    assert after.finish_reason is FinishReason.LENGTH


def test_b88_a_failed_allocation_puts_a_request_back_where_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiny = make(16, 4)
    tiny.add("x", span(1, 5))
    tiny.drain()
    tiny.add("a", span(1, 8), 2)
    tiny.add("b", span(21, 24), 2)
    table = tiny.cache.memory.request_table
    with monkeypatch.context() as patch:
        fail_steps(patch, tiny.cache, "extend")
        assert tiny.step() == "b"

    assert tiny.requests["a"].kv is None
    assert table.num_free_rows == 7
    assert tiny.cache.protected_size == 4  # what "b" has published
    assert tiny.step() == "ba"
    assert tiny.requests["a"].num_cached_tokens == 4
    tiny.drain()


@pytest.mark.parametrize("preempts", [False, True])
def test_b90_a_row_goes_to_the_next_and_who_comes_back_gets_a_fresh_one(
    preempts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = make(32, 4, num_rows=2, preempts=preempts, policy="priority")
    table = tiny.cache.memory.request_table
    request = tiny.add("a", span(1, 6), 5)
    tiny.add("b", span(11, 18), 12, priority=1)
    tiny.step(3)
    first = request.kv
    assert first is not None
    row = first.req_pool_idx
    third = tiny.add("c", span(21, 26), 3, priority=2)
    assert table.num_free_rows == 0

    if not preempts:
        with monkeypatch.context() as patch:
            fail_steps(patch, tiny.cache, "decode")
            assert tiny.step() == "b"
        assert (table.num_free_rows, first.owner) == (1, None)
    assert tiny.step() == "bc"

    assert (request.kv, table.num_free_rows) == (None, 0)
    assert third.kv is not None
    assert third.kv.req_pool_idx == row
    names = tiny.step_until(lambda: request.kv)
    assert "a" in names
    assert request.kv not in (None, first)
    assert (request.admitted_len, table.num_free_rows) == (8, 0)
    tiny.drain()
    assert table.num_free_rows == 2


def test_b91_a_resumed_request_reuses_its_prompt_and_its_outputs() -> None:
    tiny = make(8, 4)
    tiny.add("a", [9], 24)
    request = tiny.add("b", span(1, 8), 20)
    tiny.step_until(lambda: request.num_retractions)
    output = request.output_tokens
    retracted_len = request.retracted_len
    stats = tiny.cache.stats()
    tiny.scheduler.abort("a")  # nobody needs the room

    assert tiny.step() == "b"

    now = tiny.cache.stats()
    whole = (request.num_tokens - 2) // 4 * 4
    assert whole > 8  # some of its output as well
    # Counted apart: no hit, and no miss but what is computed again.
    assert now.num_resumed_requests == stats.num_resumed_requests + 1
    assert now.num_resumed_cached_tokens == whole
    assert now.num_recomputed_tokens == retracted_len - whole
    assert now.num_cached_tokens == stats.num_cached_tokens == 0
    assert request.num_cached_tokens == 0
    assert output == request.output_tokens[:-1]
    assert request.usage.num_retractions == 1
    tiny.drain()


@pytest.mark.parametrize("num_failures", [0, 1, 2])
@pytest.mark.parametrize("is_cached", [True, False])
def test_b92_locks_balance_when_a_request_is_resumed(
    monkeypatch: pytest.MonkeyPatch, num_failures: int, is_cached: bool
) -> None:
    tiny = make(8, 4, is_cached=is_cached)
    tiny.add("a", [9], 20)
    request = tiny.add("b", span(1, 8), 20)
    tiny.step_until(lambda: request.num_retractions)
    tiny.scheduler.abort("a")

    with monkeypatch.context() as patch:
        fail_steps(patch, tiny.cache, "extend", num_failures)
        for _ in range(num_failures):
            assert tiny.step() == ""
            assert request.kv is None
            assert tiny.cache.protected_size == tiny.cache.held_size == 0
    tiny.drain()

    assert request.finish_reason is FinishReason.LENGTH
    assert tiny.cache.protected_size == 0


# Preemption -------------------------------------------------------------------


def make_preempting(
    num_pages: int, page_size: int = 1, **options: Wrong
) -> TinyScheduler:
    options.setdefault("admission", "worst-case")
    return make(num_pages, page_size, preempts=True, **options)


def test_without_the_option_nobody_is_preempted() -> None:
    tiny = make(8, admission="worst-case")
    tiny.add("a", [1], 8)
    tiny.step()
    tiny.add("b", [2], 8, priority=1)

    assert tiny.step() == "a"


def test_a_higher_priority_takes_the_place_of_the_least_valuable_that_suffice() -> None:
    tiny = make_preempting(20)
    tiny.add("a", [1], 5, priority=1)
    tiny.add("b", [2], 5)
    tiny.step()
    tiny.add("c", [3], 5)
    tiny.step()
    tiny.add("d", [4], 5)
    tiny.step()
    tiny.add("h", [5, 6], 8, priority=2)  # needs 9; 5 of each of two

    assert tiny.step() == "abh"
    assert tiny.waiting == "cd"  # they lose least
    tiny.drain()
    assert tiny.scheduler.num_retractions == 2


def test_equal_priorities_take_nobodys_place() -> None:
    tiny = make_preempting(8)
    tiny.add("a", [1], 8, priority=1)
    tiny.step()
    tiny.add("b", [2], 8, priority=1)

    assert tiny.step() == "a"


def test_nobody_goes_if_that_would_not_be_enough() -> None:
    tiny = make_preempting(20)
    tiny.add("a", [1], 12, priority=2)
    tiny.add("b", [2], 8)
    tiny.step()
    tiny.add("h", [3], 9, priority=1)

    assert tiny.step() == "ab"
    assert tiny.scheduler.num_retractions == 0
    tiny.drain()


def test_what_others_share_is_not_counted_as_given_back() -> None:
    tiny = make_preempting(26)
    tiny.add("a", span(1, 8), 8)  # 8 pages that all share, and 7
    tiny.step()
    tiny.add("b", [*span(1, 8), 9], 7)  # 7 more
    tiny.add("c", [*span(1, 8), 10], 3, priority=2)  # 3 more
    assert tiny.step() == "acb"
    tiny.add("h", [11], 16, priority=1)
    # Without "a" and "b", 15 pages are left, and it needs 16.
    assert tiny.step() == "acb"
    tiny.scheduler.abort("h")
    tiny.add("i", [12], 15, priority=1)

    assert tiny.step() == "ci"
    assert tiny.waiting == "ab"
    tiny.drain()


@pytest.mark.parametrize("limit", ["cap", "rows"])
def test_a_higher_priority_takes_a_place_where_places_are_short(limit: str) -> None:
    cap = SchedulerLimits(2 if limit == "cap" else 9, 64, 64)
    rows = 2 if limit == "rows" else 9
    tiny = make_preempting(40, limits=cap, num_rows=rows)
    tiny.add("a", [1], 5)
    tiny.add("b", [2], 5)
    tiny.step()
    tiny.add("h", [3], 5, priority=1)
    tiny.add("i", [4], 5, priority=1)

    assert tiny.step() == "ah"
    assert tiny.step() == "hi"
    assert tiny.step() == "hi"
    tiny.drain()
    assert tiny.scheduler.num_retractions == 2


def test_only_a_victim_of_its_own_namespace_helps_at_a_ceiling() -> None:
    tiny = make_preempting(40)
    assert isinstance(tiny.cache, RadixCache)
    tiny.cache.set_quota("t", ceiling_size=8)
    tiny.add("a", [1], 8, namespace="t")
    tiny.add("b", [2], 8, priority=-1)  # worth less, but of no help
    tiny.step()
    tiny.add("h", [3], 8, namespace="t", priority=1)

    assert tiny.step() == "bh"
    tiny.drain()
    assert tiny.scheduler.num_retractions == 1


def test_nobody_takes_a_place_and_loses_it_in_the_next_step() -> None:
    """Who came first does not start before who has a higher priority."""
    tiny = make_preempting(8)
    tiny.add("x", [9], 8, priority=2)
    tiny.step()
    tiny.add("a", [1], 8)
    tiny.add("h", [2], 8, priority=1)

    order = []
    while tiny.scheduler.has_requests:
        order.append(tiny.step())

    assert order == ["x"] * 7 + ["h"] * 8 + ["a"] * 8
    assert tiny.scheduler.num_retractions == 0


def test_lower_priorities_are_not_overtaken_but_wait() -> None:
    tiny = make_preempting(8, limits=SchedulerLimits(8, 64, 64, max_overtakes=1))
    tiny.add("a", [1], 8)
    for i, name in enumerate("hijk"):
        tiny.add(name, [2 + i], 8, priority=1)

    order = []
    while tiny.scheduler.has_requests:
        order.append(tiny.step())

    assert order == ["h"] * 8 + ["i"] * 8 + ["j"] * 8 + ["k"] * 8 + ["a"] * 8
    assert tiny.requests["a"].num_overtakes == 0


def test_who_preempts_gets_tokens_though_a_long_prompt_is_under_way() -> None:
    limits = SchedulerLimits(2, 4, 4)
    tiny = make_preempting(60, limits=limits)
    tiny.add("b", [41], 9)
    tiny.add("a", span(1, 40), 2)
    tiny.step(3)
    assert tiny.running == "ba"
    tiny.add("h", [50], 2, priority=1)

    assert tiny.step() == "ha"
    assert tiny.waiting == "b"
    tiny.drain()


def test_nobody_is_preempted_for_who_waits_for_a_prefix_anyway() -> None:
    limits = SchedulerLimits(9, 64, 4)
    tiny = make_preempting(24, 2, limits=limits)
    tiny.add("a", span(1, 20), 1)
    tiny.add("b", [31], 24)
    tiny.step()
    tiny.add("h", [*span(1, 20), 21], 2, priority=1)

    assert tiny.step() == "ba"
    assert tiny.requests["h"].num_deferrals == 1
    assert tiny.scheduler.num_retractions == 0
    tiny.drain()
    assert tiny.requests["h"].num_cached_tokens == 20


def test_guesses_do_not_take_the_pages_that_others_gave_back() -> None:
    class Guesser:
        def propose(self, request: Request, max_tokens: int) -> tuple[int, ...]:
            return (98,) * max_tokens

    tiny = make_preempting(
        12, admission=Gambler(), drafter=Guesser(), max_draft_tokens=8
    )
    tiny.add("a", [1, 1], 10, priority=1)
    tiny.add("b", [2] * 6, 6)
    tiny.step()
    tiny.add("h", [3] * 6, 1, priority=2)

    assert tiny.step() == "ah"
    assert tiny.waiting == "b"
    tiny.drain()


def test_a_step_ahead_preempts_nobody_and_the_next_one_does() -> None:
    tiny = make_preempting(8, overlap=True)
    scheduler = tiny.scheduler
    tiny.add("a", [1], 8)
    batch = scheduler.schedule()
    assert batch is not None
    tiny.add("h", [2], 8, priority=1)

    assert scheduler.schedule() is None
    assert scheduler.num_retractions == 0
    scheduler.update(batch, tiny.run(batch))
    assert tiny.step() == "h"
    assert tiny.waiting == "a"
    tiny.drain()


def test_a_policy_that_fails_preempts_nobody() -> None:
    policy = Moody(fail)
    tiny = make_preempting(8, retraction=policy)
    tiny.add("a", [1], 4)
    tiny.add("b", [2], 4)
    tiny.step()
    tiny.add("h", [3], 4, priority=1)
    ignored = frozenset({"Scheduler._num_looked_at", "Admissions.last_look"})
    before = deep_state(tiny.scheduler, ignored | {"Request.match_len"})

    with pytest.raises(PolicyError, match="failed: ZeroDivisionError"):
        tiny.step()

    after = deep_state(tiny.scheduler, ignored | {"Request.match_len"})
    changed = {key.rpartition(".")[2] for key in changes(before, after)}
    assert changed <= {"match_version", "_raw"}  # what was looked up
    policy.key = Newest().key
    assert tiny.step() == "ah"
    tiny.drain()


def test_a_preempted_request_needs_no_proof_and_finds_what_it_computed() -> None:
    tiny = make_preempting(8, 4, admission="estimate")
    request = tiny.add("a", span(1, 8), 20)
    tiny.step(6)
    tiny.add("h", [9] * 20, 12, priority=1)
    tiny.step()
    assert (request.num_retractions, request.reserves_all) == (1, False)

    tiny.drain()
    assert request.num_cached_tokens == 0
    assert SamplingParams(20).max_new_tokens == request.num_output_tokens

"""Scheduling policies: each by a small example, and those of callers that fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import cycle
from typing import TypeAlias

import numpy as np
import pytest

from radixkv.mem_cache import ConfigError, PolicyError, RadixCache
from radixkv.scheduling import (
    SCHEDULING_POLICIES,
    FirstComeFirstServed,
    LongestPrefixMatch,
    QueueView,
    RandomOrder,
    Request,
    RequestStatus,
    SamplingParams,
    Scheduler,
    SchedulerLimits,
    SchedulingPolicy,
)

from .deep_state import changes, deep_state
from .driver import Wrong, insert, make_cache, span

IGNORED = frozenset(
    {
        "Request.match_len",
        "Request.match_version",
        "Scheduler._num_looked_at",
        "Admissions.last_look",
    }
)
"""What a policy learns of the cache before it fails, and notes on the last step."""


def one_at_a_time(
    policy: str | SchedulingPolicy, cache: RadixCache | None = None
) -> Scheduler:
    """A scheduler that runs one request at a time, each for a step."""
    limits = SchedulerLimits(max_running_requests=1, max_deferrals=0)
    return Scheduler(cache or make_cache(), limits, policy=policy)


def add(
    scheduler: Scheduler,
    request_id: object,
    prompt: Iterable[int],
    *,
    max_new_tokens: int = 1,
    priority: int = 0,
    namespace: str | None = None,
) -> Request:
    request = Request(
        request_id,  # type: ignore[arg-type]
        list(prompt),
        SamplingParams(max_new_tokens),
        namespace=namespace,
        priority=priority,
    )
    scheduler.add_request(request)
    return request


def step(scheduler: Scheduler) -> list[object]:
    """Run a step, and name who was admitted."""
    batch = scheduler.schedule()
    assert batch is not None
    started = [e.request for e in batch.entries if e.request.admitted_len == e.start]
    scheduler.update(batch, np.full(batch.num_samples, 7, np.int32))
    return [request.request_id for request in started]


def admissions(scheduler: Scheduler) -> str:
    """Run all requests, and name them in the order in which they were admitted."""
    names: list[object] = []
    while scheduler.has_requests:
        names += step(scheduler)
    return " ".join(str(name) for name in dict.fromkeys(names))


def ordered(policy: str, scheduler: Scheduler) -> list[object]:
    """Name those who wait in the order of a policy."""
    order = SCHEDULING_POLICIES[policy]().order(scheduler._waiting)
    return [request.request_id for request in order]


# The policies -----------------------------------------------------------------


def test_fcfs_goes_by_arrival() -> None:
    scheduler = one_at_a_time("fcfs")
    add(scheduler, "long", span(1, 9))
    add(scheduler, "short", [1], priority=5)

    assert admissions(scheduler) == "long short"


def test_lpm_goes_by_the_cached_prefix() -> None:
    cache = make_cache()
    insert(cache, span(1, 8))
    scheduler = one_at_a_time("lpm", cache)
    add(scheduler, "none", span(50, 54))
    add(scheduler, "other tenant", span(1, 9), namespace="tenant")
    add(scheduler, "one page", [*span(1, 4), 9])
    add(scheduler, "two pages", span(1, 9))
    add(scheduler, "two as well", span(1, 10))

    assert admissions(scheduler) == "two pages two as well one page none other tenant"


def test_dfs_weight_goes_where_most_wait() -> None:
    cache = make_cache(page_size=1)
    for tokens in ([1, 2, 3, 4], [1, 2, 5], [6, 7]):
        insert(cache, tokens)
    scheduler = one_at_a_time("dfs-weight", cache)
    add(scheduler, "6 7", [6, 7, 0])
    add(scheduler, "new", [8, 8])
    add(scheduler, "1 2", [1, 2, 0])
    add(scheduler, "1 2 3 4", [1, 2, 3, 4, 0])
    add(scheduler, "1 2 5", [1, 2, 5, 0])
    add(scheduler, "1 2 5 again", [1, 2, 5, 0])

    expected = ["1 2 5", "1 2 5 again", "1 2 3 4", "1 2", "6 7", "new"]
    assert expected == ordered("dfs-weight", scheduler)


def test_dfs_weight_shares_whole_pages_and_no_part_of_one() -> None:
    cache = make_cache(page_size=2)
    for tokens in ([1, 1], [1, 2], [3, 3]):
        insert(cache, tokens)
    scheduler = one_at_a_time("dfs-weight", cache)
    for name, tokens in [("a", [1, 1]), ("b", [1, 2]), ("c", [3, 3]), ("d", [3, 3])]:
        add(scheduler, name, [*tokens, 9])

    # Where parts of pages are shared, a and b weigh as much as c and d.
    assert ordered("dfs-weight", scheduler) == ["c", "d", "a", "b"]


def test_dfs_weight_shares_whole_pages_below_those_that_all_share() -> None:
    cache = make_cache(page_size=2)
    prompts = {
        "d": [1, 1, 2, 6],
        "c": [1, 1, 2, 5, 9, 9],
        "a": [1, 1, 2, 5, 7, 7],
        "b": [1, 1, 2, 5, 7, 8],
    }
    scheduler = one_at_a_time("dfs-weight", cache)
    for name, tokens in prompts.items():
        insert(cache, tokens)
        add(scheduler, name, [*tokens, 0])

    assert ordered("dfs-weight", scheduler) == ["c", "a", "b", "d"]


def test_lof_goes_by_the_output_that_may_come() -> None:
    scheduler = one_at_a_time("lof")
    add(scheduler, "short", [1], max_new_tokens=2)
    add(scheduler, "long", [2], max_new_tokens=9)

    assert admissions(scheduler) == "long short"


def test_lof_counts_what_a_retracted_request_has_left() -> None:
    scheduler = one_at_a_time("lof")
    retracted = add(scheduler, "retracted", [1], max_new_tokens=9)
    for token in range(6):
        retracted.append(token)
    add(scheduler, "new", [2], max_new_tokens=5)

    assert admissions(scheduler) == "new retracted"


def test_shortest_prefill_first_counts_uncached_tokens() -> None:
    cache = make_cache()
    insert(cache, span(1, 8))
    scheduler = one_at_a_time("shortest-prefill-first", cache)
    add(scheduler, "three", span(50, 52))
    add(scheduler, "nine less eight", span(1, 9))
    add(scheduler, "two", span(60, 61))

    assert admissions(scheduler) == "nine less eight two three"


def test_hrrn_lets_a_long_prompt_pass_that_has_waited_as_long_as_it_is() -> None:
    scheduler = one_at_a_time("hrrn")
    add(scheduler, "first", span(1, 8))
    add(scheduler, "long", span(11, 20))
    assert step(scheduler) == ["first"]  # 8 tokens, while a prompt of 10 waits

    add(scheduler, "short", [31, 32])
    add(scheduler, "too late", [33])

    # 8/10 of its own length, against no time at all.
    assert step(scheduler) == ["long"]
    # 10/2 against 10/1.
    assert admissions(scheduler) == "too late short"


def test_hrrn_can_order_a_prompt_that_is_cached_as_a_whole() -> None:
    cache = make_cache()
    insert(cache, span(1, 8))
    scheduler = one_at_a_time("hrrn", cache)
    add(scheduler, "first", [9])
    add(scheduler, "cached", span(1, 8))

    assert admissions(scheduler) == "first cached"


def test_priority_goes_by_priority() -> None:
    scheduler = one_at_a_time("priority")
    for name, priority in [("a", 0), ("b", -1), ("c", 2), ("d", 2), ("e", 0)]:
        add(scheduler, name, [1], priority=priority)

    assert admissions(scheduler) == "c d a e b"


def test_random_is_the_same_in_every_process() -> None:
    orders = {}
    for seed in (0, 1):
        scheduler = one_at_a_time(RandomOrder(seed))
        for number in range(8):
            add(scheduler, number, [1])
        orders[seed] = admissions(scheduler)

    assert {0: "7 3 5 1 6 2 0 4", 1: "6 3 4 1 2 7 0 5"} == orders


@pytest.mark.parametrize("seed", [-1, 2**64, 1.0, True, "a", None])
def test_a_seed_is_an_integer_of_64_bits(seed: Wrong) -> None:
    with pytest.raises(ConfigError, match="seed"):
        RandomOrder(seed)


# Names and objects --------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULING_POLICIES)
def test_every_policy_has_a_name_and_a_class(name: str) -> None:
    by_class = one_at_a_time(SCHEDULING_POLICIES[name]())
    by_name = one_at_a_time(name)
    for scheduler in (by_class, by_name):
        for number in range(6):
            add(scheduler, number, span(1, 1 + number % 3), priority=number % 2)

    assert admissions(by_class) == admissions(by_name)


@pytest.mark.parametrize("policy", ["", "LPM", "lru"])
def test_a_name_that_there_is_not_is_refused_with_those_that_there_are(
    policy: str,
) -> None:
    with pytest.raises(ConfigError, match="'dfs-weight', 'fcfs', 'hrrn'"):
        Scheduler(make_cache(), policy=policy)


@pytest.mark.parametrize("policy", [None, 5, object(), FirstComeFirstServed, str.upper])
def test_what_has_no_order_is_no_policy(policy: Wrong) -> None:
    with pytest.raises(ConfigError, match=r"a method order\(queue\)"):
        Scheduler(make_cache(), policy=policy)


# Who is overtaken -----------------------------------------------------------------


class ByName:
    """Those that are named, in this order; the others wait."""

    def __init__(self, *names: object) -> None:
        self.names = names

    def order(self, queue: QueueView) -> Iterable[Request]:
        by_name = {request.request_id: request for request in queue}
        return [by_name[name] for name in self.names if name in by_name]


def test_who_is_overtaken_for_the_last_time_goes_next_in_the_same_step() -> None:
    limits = SchedulerLimits(max_overtakes=1)
    scheduler = Scheduler(make_cache(), limits, policy=ByName("c", "d", "a", "b"))
    for number, name in enumerate("abcd"):
        add(scheduler, name, [number])

    # c overtakes a and b; d would be one too many.
    assert step(scheduler) == ["c", "a", "b", "d"]


def test_who_was_passed_over_and_overtaken_too_often_ends_the_admissions() -> None:
    limits = SchedulerLimits(max_overtakes=1)
    policy = ByName("runs", "large", "b", "c")
    scheduler = Scheduler(make_cache(4, 4), limits, policy=policy)
    add(scheduler, "runs", span(1, 4), max_new_tokens=5)  # two pages at its longest
    assert step(scheduler) == ["runs"]
    add(scheduler, "large", span(11, 22))  # three pages: one too many
    add(scheduler, "b", [31])
    add(scheduler, "c", [32])

    assert step(scheduler) == ["b"]
    assert admissions(scheduler) == "large c"


def test_a_policy_is_not_asked_while_no_more_may_run() -> None:
    class Counts(FirstComeFirstServed):
        num_calls = 0

        def order(self, queue: QueueView) -> Iterable[Request]:
            self.num_calls += 1
            return super().order(queue)

    policy = Counts()
    scheduler = one_at_a_time(policy)
    add(scheduler, "a", [1], max_new_tokens=5)
    step(scheduler)
    assert policy.num_calls == 1  # nobody waits any more

    add(scheduler, "b", [2])
    for _ in range(3):
        step(scheduler)

    assert policy.num_calls == 1


def test_a_policy_may_be_a_generator_that_reads_the_queue_late() -> None:
    class Late:
        def order(self, queue: QueueView) -> Iterator[Request]:
            for request in queue:
                if queue.cached_len(request) == 0:
                    yield request

    scheduler = Scheduler(make_cache(), policy=Late())
    for number in range(5):
        add(scheduler, number, [number])

    assert step(scheduler) == [0, 1, 2, 3, 4]


def test_who_is_left_out_waits() -> None:
    policy = ByName("b")
    scheduler = one_at_a_time(policy)
    left_out = add(scheduler, "a", [1])
    add(scheduler, "b", [2])
    assert step(scheduler) == ["b"]

    assert scheduler.schedule() is None
    assert left_out.status is RequestStatus.WAITING

    policy.names = ("a",)
    assert step(scheduler) == ["a"]


# Policies that fail, or lie --------------------------------------------------------


class Stranger:
    """Is no request."""


Fault: TypeAlias = Callable[[QueueView, "Faulty"], Wrong]


class Faulty:
    """Fails in one way or another while it is told to.

    Attributes:
        fails: Whether it does now.
        scheduler: Whose policy it is.
        known: Requests of all states, by their ids.
    """

    scheduler: Scheduler

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.fails = False
        self.known: dict[object, Request] = {}

    def order(self, queue: QueueView) -> Wrong:
        return self.fault(queue, self) if self.fails else list(queue)

    def __repr__(self) -> str:
        return "Faulty()"


def fails(queue: QueueView, policy: Faulty) -> Wrong:
    raise KeyError("fault")


def fails_halfway(queue: QueueView, policy: Faulty) -> Wrong:
    yield next(iter(queue))
    raise KeyError("fault")


FAULTS: dict[str, tuple[Fault, str]] = {
    "fails": (fails, r"Faulty\(\) failed: KeyError\('fault'\)"),
    "fails halfway": (fails_halfway, r"Faulty\(\) failed: KeyError\('fault'\)"),
    "returns nothing": (lambda queue, policy: None, "failed: TypeError"),
    "is not iterable": (lambda queue, policy: 5, "failed: TypeError"),
    "returns ids": (
        lambda queue, policy: [request.request_id for request in queue],
        "got 'waits' which does not wait",
    ),
    "returns what has no hash": (
        lambda queue, policy: [[request] for request in queue],
        "failed: TypeError",
    ),
    "returns strangers": (
        lambda queue, policy: [*queue, Stranger()],
        "got <.*Stranger object at .*> which does not wait",
    ),
    "returns one twice": (
        lambda queue, policy: [*queue, *queue],
        r"got Request\('waits', 3 tokens, waiting\) twice",
    ),
    "never ends": (lambda queue, policy: cycle(queue), "'waits', .* twice"),
    "returns one that was never submitted": (
        lambda queue, policy: [Request("new", [1])],
        r"got Request\('new', 1 tokens, waiting\) which does not wait",
    ),
    "returns one that runs": (
        lambda queue, policy: [policy.known["runs"]],
        r"got Request\('runs', 5 tokens, running\) which does not wait",
    ),
    "returns one that has ended": (
        lambda queue, policy: [policy.known["ended"]],
        r"got Request\('ended', 2 tokens, finished\) which does not wait",
    ),
    "returns one that was aborted": (
        lambda queue, policy: [policy.known["aborted"]],
        r"got Request\('aborted', 1 tokens, finished\) which does not wait",
    ),
}


def busy_policy(fault: Fault) -> Faulty:
    """A policy that fails, of a scheduler with requests in every state."""
    policy = Faulty(fault)
    limits = SchedulerLimits(max_batched_tokens=256, chunked_prefill_size=4)
    scheduler = policy.scheduler = Scheduler(make_cache(), limits, policy=policy)
    requests = [
        add(scheduler, "ended", [9]),
        add(scheduler, "runs", span(1, 3), max_new_tokens=6),
        add(scheduler, "mid-chunk", span(11, 20), max_new_tokens=6),
    ]
    step(scheduler)
    step(scheduler)
    requests += [
        add(scheduler, "aborted", [8]),
        add(scheduler, "waits", span(31, 33), max_new_tokens=2),
        add(scheduler, "waits too", span(31, 34), max_new_tokens=2),
    ]
    scheduler.abort("aborted")
    scheduler.take_outputs()
    policy.known = {request.request_id: request for request in requests}
    policy.fails = True
    return policy


@pytest.mark.parametrize("fault", FAULTS)
def test_a_policy_that_fails_or_lies_refuses_the_step_and_changes_nothing(
    fault: str,
) -> None:
    method, message = FAULTS[fault]
    policy = busy_policy(method)
    scheduler = policy.scheduler
    before = deep_state(scheduler, IGNORED)

    with pytest.raises(PolicyError, match=message) as refusal:
        scheduler.schedule()

    assert ("failed" in message) == (refusal.value.__cause__ is not None)
    assert {} == changes(before, deep_state(scheduler, IGNORED))
    with pytest.raises(PolicyError, match=message):
        scheduler.schedule()
    assert {} == changes(before, deep_state(scheduler, IGNORED))
    scheduler.cache.check_integrity()
    policy.fails = False
    admissions(scheduler)
    reasons = {name: r.finish_reason for name, r in policy.known.items()}
    assert reasons.pop("aborted") == "abort"
    assert set(reasons.values()) == {"length"}
    assert scheduler.cache.held_size == scheduler.cache.protected_size == 0


def test_a_policy_that_aborts_what_it_returns_is_refused() -> None:
    def aborts(queue: QueueView, policy: Faulty) -> Wrong:
        order = list(queue)
        policy.scheduler.abort("waits")
        policy.scheduler.abort("runs")
        return order

    policy = busy_policy(aborts)
    scheduler = policy.scheduler

    with pytest.raises(PolicyError, match="must not be called from within"):
        scheduler.schedule()

    scheduler.cache.check_integrity()
    policy.fails = False
    assert admissions(scheduler) == "waits waits too"
    assert scheduler.cache.held_size == scheduler.cache.protected_size == 0


def test_a_policy_that_remembers_who_waited_before_is_found_out() -> None:
    remembered: dict[Request, None] = {}

    def remembers(queue: QueueView, policy: Faulty) -> Wrong:
        remembered.update(dict.fromkeys(queue))
        return remembered

    policy = busy_policy(remembers)
    assert step(policy.scheduler) == ["waits", "waits too"]
    add(policy.scheduler, "later", [5])

    with pytest.raises(PolicyError, match=r"'waits', .* running\) which does not"):
        policy.scheduler.schedule()


def test_a_policy_that_fails_while_a_step_is_in_flight_leaves_that_alone() -> None:
    policy = Faulty(fails)
    scheduler = Scheduler(make_cache(), policy=policy, overlap=True)
    first = add(scheduler, "first", [1], max_new_tokens=3)
    batch = scheduler.schedule()
    assert batch is not None
    add(scheduler, "second", [2])
    policy.fails = True
    before = deep_state(scheduler, IGNORED)

    with pytest.raises(PolicyError):
        scheduler.schedule()

    assert {} == changes(before, deep_state(scheduler, IGNORED))
    scheduler.update(batch, np.array([7], np.int32))
    policy.fails = False
    assert admissions(scheduler) == "second"
    assert first.output_tokens == [7, 7, 7]


# A policy of a caller ---------------------------------------------------------------


def test_a_policy_that_a_user_wrote_can_build_on_those_that_there_are() -> None:
    class PriorityThenPrefix(LongestPrefixMatch):
        def order(self, queue: QueueView) -> Iterable[Request]:
            return sorted(super().order(queue), key=lambda request: -request.priority)

    cache = make_cache()
    insert(cache, span(1, 8))
    scheduler = one_at_a_time(PriorityThenPrefix(), cache)
    add(scheduler, "low", span(1, 9))
    add(scheduler, "high", [50], priority=1)
    add(scheduler, "high and cached", span(1, 9), priority=1)

    assert admissions(scheduler) == "high and cached high low"

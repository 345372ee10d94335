"""Who is admitted, and how much is set aside for those who run."""

from __future__ import annotations

from collections.abc import Collection
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.mem_cache import (
    ConfigError,
    LengthError,
    MemoryManager,
    Obstacle,
    PolicyError,
    RadixCache,
)
from radixkv.scheduling import (
    Estimate,
    NullRunner,
    Request,
    SamplingParams,
    Scheduler,
    SchedulerLimits,
    WorstCase,
)

from .deep_state import changes, deep_state
from .driver import Wrong, admit, compute, span
from .tiny_scheduler import TinyScheduler

# The worst case ---------------------------------------------------------------


def test_requests_that_fit_exactly_are_admitted_and_no_other() -> None:
    tiny = TinyScheduler(10, 4)
    tiny.add("a", span(1, 9), 8)  # 16 positions, 4 pages
    tiny.add("b", span(11, 15), 8)  # 12 positions, 3 pages
    tiny.step()
    tiny.add("c", [*span(1, 8), 21], 8)  # 16 positions, 4 pages, of which a has 2
    tiny.add("d", [31, 32], 3)  # 4 positions, 1 page
    tiny.add("e", [41], 1)

    assert tiny.step() == "abcd"
    assert tiny.waiting == "e"
    tiny.drain()
    assert tiny.scheduler.num_retractions == 0


def test_what_a_request_finds_cached_is_no_room_for_it() -> None:
    tiny = TinyScheduler(10, 4)
    tiny.add("x", span(1, 12))
    tiny.drain()
    tiny.add("a", span(21, 24), 21)  # 24 positions, 6 pages, of which it has 1
    tiny.step()
    # It lacks 2 pages behind the 3 that it finds. 6 are free, and 5 are set aside.
    tiny.add("b", span(1, 13), 6)

    assert tiny.cache.match_prefix(span(1, 13)) == 12
    assert tiny.step() == "a"
    assert tiny.waiting == "b"
    tiny.drain()
    assert tiny.scheduler.num_retractions == 0


def test_a_request_that_does_not_fit_leaves_the_cache_alone() -> None:
    tiny = TinyScheduler(8, 4)
    tiny.add("x", span(1, 8))
    tiny.drain()
    tiny.add("a", span(11, 14), 17)  # 20 positions, 5 pages, of which it has 1
    tiny.step()
    tiny.add("b", span(1, 9), 8)  # 4 pages, of which 2 are cached
    order = tiny.cache.eviction_order(2)
    before = deep_state(tiny.cache)

    # 5 pages are free; 4 are set aside, and 2 missing.
    obstacle = tiny.cache.admission_obstacle(span(1, 9), 16, reserved_sizes={None: 16})

    assert obstacle is Obstacle.PAGES
    assert not changes(before, deep_state(tiny.cache))
    assert tiny.step() == "a"
    assert order == tiny.cache.eviction_order(2)


@pytest.mark.parametrize("page_size", [1, 2, 3, 16])
def test_each_request_is_rounded_up_for_itself(page_size: int) -> None:
    """Counted in tokens, all three would fit where the pages do not suffice."""
    tiny = TinyScheduler(5, page_size)
    for i, name in enumerate("abc"):
        tiny.add(name, [i] * page_size, 2)  # one token more than a page

    assert tiny.step() == "ab"
    tiny.drain()


# Submitting -------------------------------------------------------------------


@given(
    num_pages=st.integers(1, 6),
    page_size=st.sampled_from([1, 2, 3, 16]),
    max_context_len=st.integers(1, 60),
    floors=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    ceiling=st.none() | st.integers(1, 6),
    num_cached=st.integers(0, 6),
    data=st.data(),
)
def test_what_is_accepted_runs_alone_and_what_is_refused_does_not_fit(
    num_pages: int,
    page_size: int,
    max_context_len: int,
    floors: tuple[int, int],
    ceiling: int | None,
    num_cached: int,
    data: st.DataObject,
) -> None:
    cache = RadixCache(
        MemoryManager(
            num_pages, page_size, max_num_requests=1, max_context_len=max_context_len
        )
    )
    own, other = min(floors[0], num_pages), min(floors[1], num_pages - 1)
    own = min(own, num_pages - other)
    ceiling = None if ceiling is None else max(own, ceiling)
    for i in range(min(num_cached, num_pages)):
        name, text = data.draw(st.sampled_from("ab")), [i] * page_size
        if len(text) <= max_context_len:
            request = admit(cache, text, name)
            compute(cache, request, len(text))
            cache.cache_finished_req(request, text)
    cache.set_quota("b", floor_size=other * page_size)
    cache.set_quota(
        "a",
        floor_size=own * page_size,
        ceiling_size=None if ceiling is None else ceiling * page_size,
    )
    scheduler = Scheduler(cache, admission=data.draw(st.sampled_from(ADMISSIONS)))
    longest = cache.max_request_size("a")
    num_prompt = data.draw(st.integers(1, max(1, longest)))

    for length in (longest, longest + 1):
        params = SamplingParams(max(1, length + 1 - num_prompt))
        request = Request("a", [7] * num_prompt, params, namespace="a")
        if request.max_kv_len <= longest:
            scheduler.add_request(request)
            while scheduler.has_requests:
                batch = scheduler.schedule()
                assert batch is not None  # at once, and at every step
                scheduler.update(batch, NullRunner(9).run(batch))
            assert request.finish_reason == "length"
            assert scheduler.num_retractions == 0
        else:
            with pytest.raises(
                LengthError, match=f"the longest that fits is {longest}"
            ):
                scheduler.add_request(request)
            assert not scheduler.has_requests


ADMISSIONS = ("worst-case", "estimate")


def test_a_refusal_tells_all_numbers() -> None:
    tiny = TinyScheduler(4, 4)

    with pytest.raises(
        LengthError,
        match=r"14 prompt tokens and max_new_tokens 5 need 18 slots, the longest that "
        r"fits is 16; in pages of 4: 5 needed, capacity 4",
    ):
        tiny.add("a", span(1, 14), 5)
    assert not tiny.scheduler.has_requests
    tiny.add("a", span(1, 14), 3)
    tiny.drain()


# The estimate -----------------------------------------------------------------


def make_request(num_prompt: int, num_output: int, max_new_tokens: int) -> Request:
    request = Request("a", [1] * num_prompt, SamplingParams(max_new_tokens))
    for _ in range(num_output):
        request.append(1)
    return request


@pytest.mark.parametrize(
    ("ratio", "num_output", "max_new_tokens", "reserved_len"),
    [
        (0.5, 0, 101, 10 + 1 + 50),
        (0.5, 41, 101, 51 + 1 + 29),  # 59 positions are left
        (1.0, 0, 101, 111),
        (0.25, 0, 9001, 10 + 1 + 1024),  # reckons with 4,096 tokens at most
        (0.25, 1, 2, 11 + 1),
    ],
)
def test_an_estimate_sets_a_share_of_the_rest_aside(
    ratio: float, num_output: int, max_new_tokens: int, reserved_len: int
) -> None:
    policy = Estimate(initial_ratio=ratio, min_ratio=0)
    request = make_request(10, num_output, max_new_tokens)

    assert policy.reserved_len(request) == reserved_len


def test_an_estimate_falls_to_its_minimum_in_as_many_steps_as_it_should() -> None:
    policy = Estimate(initial_ratio=0.7, min_ratio=0.2, decay_steps=5)
    ratios = []
    for _ in range(7):
        policy.on_step()
        ratios.append(policy.new_token_ratio)

    assert pytest.approx([0.6, 0.5, 0.4, 0.3, 0.2, 0.2, 0.2]) == ratios


def test_a_retraction_raises_the_estimate_to_what_survivors_needed() -> None:
    policy = Estimate(initial_ratio=0.1, min_ratio=0, margin_steps=20)
    running = [make_request(5, 30, 100), make_request(5, 10, 59)]

    policy.on_retraction(running)

    # (decoded + steps * survivors) / (sum of max_new_tokens + 1)
    assert policy.new_token_ratio == (40 + 20 * 2) / (159 + 1)
    policy.on_retraction([make_request(5, 90, 91)])
    assert policy.new_token_ratio == 1
    policy.on_retraction(running)  # it never makes an estimate bolder
    assert policy.new_token_ratio == 1
    policy.on_retraction([])
    assert policy.new_token_ratio == 1


@pytest.mark.parametrize("value", [float("nan"), "0.5", True, None, -0.1, 1.1])
@pytest.mark.parametrize("name", ["initial_ratio", "min_ratio"])
def test_a_ratio_out_of_range_is_refused(name: str, value: Wrong) -> None:
    with pytest.raises(ConfigError, match=name):
        Estimate(**{name: value})


@pytest.mark.parametrize("value", [0, -1, 1.5, "5", True, None, 2**31])
@pytest.mark.parametrize("name", ["decay_steps", "max_new_tokens", "margin_steps"])
def test_a_number_of_steps_or_tokens_out_of_range_is_refused(
    name: str, value: Wrong
) -> None:
    with pytest.raises(ConfigError, match=name):
        Estimate(**{name: value})


def test_ratios_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"min_ratio 0\.5 and initial_ratio 0\.4"):
        Estimate(initial_ratio=0.4, min_ratio=0.5)
    with pytest.raises(ConfigError, match=r"initial_ratio 0\.0"):
        Estimate(initial_ratio=0, min_ratio=0)


@pytest.mark.parametrize("seed", range(3))
def test_an_estimate_admits_more_than_the_worst_case_and_retracts_few(
    seed: int,
) -> None:
    """Most outputs end long before they must, as they do on a server."""
    worst, estimate, gamble = (
        run_long(seed, policy)
        for policy in (
            WorstCase(),
            Estimate(),
            Estimate(initial_ratio=0.1, min_ratio=0, decay_steps=10),
        )
    )

    assert worst["retractions"] == 0
    assert 3 * estimate["steps"] < 2 * worst["steps"]
    assert estimate["retractions"] <= 2
    assert gamble["steps"] < estimate["steps"]
    assert 0 < gamble["retractions"] <= 30
    assert gamble["most"] == 1  # of one request


def run_long(seed: int, admission: WorstCase | Estimate) -> dict[str, int]:
    random = Random(seed)
    cache = RadixCache(MemoryManager(80, 16, max_num_requests=64, max_context_len=512))
    limits = SchedulerLimits(64, 512, 256)
    scheduler = Scheduler(cache, limits, admission=admission, eos_token_ids=(0,))
    requests = []
    for i in range(200):
        prompt = [random.randint(1, 9) for _ in range(random.randint(10, 60))]
        requests.append(Request(i, prompt, SamplingParams(192)))
        scheduler.add_request(requests[-1])
    runner, num_steps = NullRunner(40), 0
    while scheduler.has_requests:
        batch = scheduler.schedule()
        assert batch is not None
        scheduler.update(batch, runner.run(batch))
        num_steps += 1
    return {
        "steps": num_steps,
        "retractions": scheduler.num_retractions,
        "most": max(request.num_retractions for request in requests),
    }


# A policy of a caller ---------------------------------------------------------


class Own:
    """Returns what it is told to.

    Attributes:
        answer: Returned, or called.
        failing: A method that fails.
    """

    def __init__(self, answer: Wrong = None, failing: str = "") -> None:
        self.answer = answer
        self.failing = failing
        self.calls: list[str] = []

    def reserved_len(self, request: Request) -> int:
        self._call("reserved_len")
        if self.answer is None:
            return request.max_kv_len
        return self.answer  # type: ignore[no-any-return]

    def on_step(self) -> None:
        self._call("on_step")

    def on_retraction(self, running: Collection[Request]) -> None:
        self._call("on_retraction")

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.failing:
            raise KeyError(name)


@pytest.mark.parametrize(
    "policy",
    [5, None, object(), WorstCase, Own, type("Half", (), {"reserved_len": print})()],
)
def test_what_is_no_admission_policy_is_refused(policy: Wrong) -> None:
    with pytest.raises(ConfigError, match="admission must be an object with the meth"):
        TinyScheduler(4, admission=policy)


def test_an_unknown_admission_policy_is_refused_with_those_that_there_are() -> None:
    message = r"must be one of \['estimate', 'worst-case'\] or an Adm.*, got 'best'"
    with pytest.raises(ConfigError, match=message):
        TinyScheduler(4, admission="best")


@pytest.mark.parametrize(
    ("answer", "num_admitted"),
    [(-5, 3), (0, 3), (6, 2), (10**9, 1), (Wrong, 1)],
)
def test_a_reserved_length_is_never_too_little_nor_too_much(
    answer: Wrong, num_admitted: int
) -> None:
    """Each has 4 tokens and may need 9; `Wrong` stands for all that it may need."""
    tiny = TinyScheduler(13, admission=Own(None if answer is Wrong else answer))
    for i, name in enumerate("abc"):
        tiny.add(name, [i] * 4, 6)

    assert len(tiny.step()) == num_admitted
    tiny.drain()


@pytest.mark.parametrize("answer", ["5", 5.0, float("nan"), True, [5]])
def test_a_reserved_length_that_is_none_is_reported_and_harms_nobody(
    answer: Wrong,
) -> None:
    check_failure(Own(answer), match="must return a length in tokens, got ")


@pytest.mark.parametrize("failing", ["reserved_len", "on_step"])
def test_an_admission_policy_that_fails_is_reported_and_harms_nobody(
    failing: str,
) -> None:
    check_failure(Own(failing=failing), match=f"failed: KeyError.'{failing}'")


IGNORED = frozenset(
    {
        "Reservations._failure",
        "Scheduler._num_looked_at",
        "Admissions.last_look",
    }
)


def check_failure(policy: Own, match: str) -> None:
    tiny = TinyScheduler(13, admission=policy)
    for i, name in enumerate("ab"):
        tiny.add(name, [i] * 4, 6)
    assert tiny.step() == "a"  # reckoned with as the worst case
    before = deep_state(tiny.scheduler, IGNORED)

    with pytest.raises(PolicyError, match=match) as caught:
        tiny.step()

    assert not changes(before, deep_state(tiny.scheduler, IGNORED))
    assert (caught.value.__cause__ is None) == (policy.failing == "")
    assert tiny.step() == "a"  # it was told once
    policy.answer, policy.failing = None, ""
    with pytest.raises(PolicyError, match=match):
        tiny.step()
    tiny.drain()
    reasons = [request.finish_reason for request in tiny.requests.values()]
    assert reasons == ["length", "length"]


def test_an_admission_policy_that_fails_at_a_retraction_is_reported() -> None:
    policy = Own(answer=0, failing="on_retraction")
    tiny = TinyScheduler(13, admission=policy)
    for i, name in enumerate("abc"):
        tiny.add(name, [i] * 4, 6)
    while not tiny.scheduler.num_retractions:
        tiny.step()

    with pytest.raises(PolicyError, match=r"failed: KeyError.'on_retraction'"):
        tiny.step()
    policy.failing = ""
    tiny.drain()


# Namespaces with quotas -------------------------------------------------------


def make_tenants(**options: Wrong) -> TinyScheduler:
    """Tenant "a" may use 4 of 16 pages."""
    tiny = TinyScheduler(16, num_rows=16, **options)
    assert isinstance(tiny.cache, RadixCache)
    tiny.cache.set_quota("a", ceiling_size=4)
    return tiny


def test_a_tenant_at_its_ceiling_keeps_nobody_else_waiting() -> None:
    tiny = make_tenants()
    for i, name in enumerate("0123456789"):
        tiny.add(name, [i], 4, namespace="a")
    tiny.add("b", [1], 4, namespace="b")

    assert tiny.step() == "0b"
    tiny.drain()


def test_who_was_overtaken_at_its_ceiling_keeps_nobody_else_waiting() -> None:
    tiny = make_tenants(limits=SchedulerLimits(max_overtakes=1))
    tiny.add("0", [0], 4, namespace="a")
    tiny.add("1", [1], 4, namespace="a")
    for name in "bcde":
        tiny.add(name, [1], 3, namespace=name)

    assert tiny.step() == "0bcde"
    assert tiny.requests["1"].num_overtakes <= 1
    tiny.drain()


def test_within_a_tenant_at_its_ceiling_nobody_is_overtaken() -> None:
    tiny = make_tenants()
    tiny.add("0", [0], 2, namespace="a")
    tiny.add("1", [1], 4, namespace="a")
    tiny.add("2", [2], 1, namespace="a")

    assert tiny.step() == "0"
    assert tiny.step() == "0"
    assert tiny.step() == "1"


def test_what_a_floor_keeps_is_room_for_nobody_else() -> None:
    tiny = TinyScheduler(8)
    assert isinstance(tiny.cache, RadixCache)
    tiny.add("x", span(1, 4), namespace="a")
    tiny.drain()
    tiny.cache.set_quota("a", floor_size=6)
    # 4 pages are free, and the 4 of "a" are below its floor.
    tiny.add("b", [5], 2, namespace="b")
    tiny.add("c", [6], 2, namespace="c")
    tiny.add("d", [7], 1, namespace="d")

    assert tiny.step() == "bc"
    assert tiny.waiting == "d"
    tiny.drain()
    assert tiny.scheduler.num_retractions == 0
    assert tiny.cache.namespace_stats("a").evictable_size == 4


def test_a_floor_that_is_filled_with_free_pages_keeps_what_was_cached_before() -> None:
    tiny = TinyScheduler(8)
    assert isinstance(tiny.cache, RadixCache)
    tiny.add("x", span(1, 2), namespace="a")
    tiny.drain()
    tiny.cache.set_quota("a", floor_size=6)
    tiny.add("a", [5], 4, namespace="a")
    tiny.step()
    # "a" takes 3 more, of the 5 that are free if it likes; then its two cached ones
    # are still below its floor.
    assert tiny.cache.max_request_size("b") == 2
    tiny.add("b", [6], 2, namespace="b")
    tiny.add("c", [7], 1, namespace="c")

    assert tiny.step() == "ab"
    assert tiny.waiting == "c"
    tiny.drain()
    assert tiny.scheduler.num_retractions == 0


def test_without_a_free_row_nobody_is_started() -> None:
    tiny = TinyScheduler(8, num_rows=2)
    for i, name in enumerate("abc"):
        tiny.add(name, [i], 2)

    assert tiny.step() == "ab"
    assert [str(each.reason) for each in tiny.scheduler.explain_stall()] == ["no row"]
    tiny.drain()

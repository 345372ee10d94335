"""What every scheduling policy must do: checks for a policy of your own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from random import Random

from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky

from radixkv.mem_cache import MemoryManager, PolicyError, RadixCache

from ..base import QueueView, SchedulingPolicy
from ..limits import SchedulerLimits
from ..request import Request
from ..sampling_params import SamplingParams
from .checked_scheduler import CheckedScheduler

_NUM_TURNS = 12
_NUM_PAGES = 14

# What the queue itself remembers of a request when it is asked for its cached prefix.
_REMEMBERED = frozenset({"match_len", "match_version"})


def check_scheduling_policy(
    make_policy: Callable[[], SchedulingPolicy], *, max_examples: int = 50
) -> None:
    """Check that a policy keeps the promises of `SchedulingPolicy`.

    It serves random loads, each with a `CheckedScheduler` that has hardly any room, and
    checks that

    * `order` returns waiting requests, each once at most, and does not fail;
    * it changes nothing in a request, and keeps the queue as it is;
    * who is left out, or comes last, has its turn in the end, though others go on
      arriving, are aborted and come back;
    * the same load gives the same orders, with a fresh policy each time;
    * whatever it says, nobody is overtaken more often than may be.

    Args:
        make_policy: Makes a fresh policy, as the class itself does.
        max_examples: Loads to try.

    Raises:
        AssertionError: A promise is broken; Hypothesis adds the seed of a load that
            shows it.
        ConfigError: What `make_policy` makes has no `order`.

    Example:
        >>> from radixkv.scheduling import LongestPrefixMatch
        >>> check_scheduling_policy(LongestPrefixMatch, max_examples=5)
    """

    # The same loads each time: a policy passes, or it does not. Of seeds, none is more
    # simple than another.
    @settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    @given(
        seed=st.integers(0, 2**32 - 1),
        page_size=st.sampled_from([1, 2, 3]),
        overlap=st.booleans(),
    )
    def check(seed: int, page_size: int, overlap: bool) -> None:
        one, other = (
            _orders(make_policy(), seed, page_size, overlap) for _ in range(2)
        )
        assert one == other, (
            "the same load must give the same orders, with a fresh policy each time; "
            f"got {one}, then {other}"
        )

    try:
        check()
    except Flaky as error:
        raise AssertionError(
            f"a policy must do the same in every run, got\n{error}"
        ) from error


def _orders(
    policy: SchedulingPolicy, seed: int, page_size: int, overlap: bool
) -> list[list[object]]:
    """Serve a load; returns the ids in each order that the policy gave."""
    random = Random(seed)
    watched = _WatchedPolicy(policy) if hasattr(policy, "order") else policy
    max_running = random.randint(1, 4)
    memory = MemoryManager(
        _NUM_PAGES, page_size, max_num_requests=4, max_context_len=10 * page_size
    )
    checked = CheckedScheduler(
        RadixCache(memory),
        SchedulerLimits(
            max_running_requests=max_running,
            max_batched_tokens=random.choice([4, 7, 30]),
            max_overtakes=random.choice([0, 1, 4, 256]),
            max_deferrals=random.choice([0, 256]),
        ),
        policy=watched,
        admission=random.choice(["worst-case", "estimate"]),
        preempts=random.random() < 0.2,
        overlap=overlap,
    )
    try:
        _serve(checked, random)
    except PolicyError as error:
        if isinstance(error.__cause__, AssertionError):
            raise error.__cause__ from None  # a promise is broken
        raise AssertionError(f"order must not fail: {error}") from error.__cause__
    assert isinstance(watched, _WatchedPolicy)
    return watched.orders


def _serve(checked: CheckedScheduler, random: Random) -> None:
    """Let requests arrive and be aborted while steps run, then run all to their end."""
    page_size = checked.cache.page_size
    for _ in range(_NUM_TURNS):
        for _ in range(random.choice([0, 1, 2, 3])):
            kinds = random.choices([0, 0, 0, 1], k=random.randint(0, 3))
            pages = [kind for kind in kinds for _ in range(page_size)]
            tail = random.choices([0, 1], k=random.randint(1, 1 + page_size))
            checked.add(
                pages + tail,
                SamplingParams(random.randint(1, 7), ignore_eos=random.random() < 0.5),
                random.choice([None, None, None, "tenant"]),
                random.randint(-1, 1),
            )
        if random.random() < 0.1:
            checked.abort_any(random.randrange(10**6))
        checked.step()
        checked.check()
    checked.drain()


class _WatchedPolicy:
    """Passes all questions on, and remembers the answers.

    Attributes:
        orders: The ids in each order that it gave.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self.orders: list[list[object]] = []

    def __repr__(self) -> str:
        return repr(self._policy)

    def order(self, queue: QueueView) -> Iterable[Request]:
        """Ask the policy, and look whether anything changed."""
        waiting = list(queue)
        before = [_facts(request) for request in waiting]
        # One more than there are: an order that goes on for ever repeats itself.
        order = list(islice(self._policy.order(queue), len(waiting) + 1))
        assert waiting == list(queue), f"{self!r}: order must not change the queue"
        for request, facts in zip(waiting, before, strict=True):
            changed = [
                name for name, old in facts.items() if _get(request, name) != old
            ]
            assert not changed, (
                f"{self!r}: order must not change {changed} of {request}"
            )
        self.orders.append([request.request_id for request in order])
        return order


def _facts(request: Request) -> dict[str, object]:
    names = (name for name in Request.__slots__ if name not in _REMEMBERED)
    return {name: _get(request, name) for name in names}


def _get(request: Request, name: str) -> object:
    """Return an attribute as what compares."""
    return request.tokens.tolist() if name == "key" else getattr(request, name)

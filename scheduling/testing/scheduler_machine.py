"""A state machine that does anything to a scheduler, in any order."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from radixkv.mem_cache import MemoryManager, PrefixCache, RadixCache

from ..limits import SchedulerLimits
from ..sampling_params import SamplingParams
from .checked_scheduler import CheckedScheduler

_Choice = TypeVar("_Choice")

MAX_NUM_PAGES = 12
"""Most pages that a machine begins with, or resizes to."""

_letters = st.lists(st.integers(0, 1), max_size=3)


@st.composite
def scheduler_limits(draw: st.DrawFn) -> SchedulerLimits:
    """Return a strategy for limits that requests come up against."""
    max_running = draw(st.integers(1, 5))
    return SchedulerLimits(
        max_running_requests=max_running,
        max_batched_tokens=max_running + draw(st.sampled_from([0, 1, 2, 7, 100])),
        chunked_prefill_size=draw(st.sampled_from([1, 2, 3, 5, 16, 33, 100])),
        max_overtakes=draw(st.sampled_from([0, 1, 3, 256])),
        max_deferrals=draw(st.sampled_from([0, 1, 256])),
    )


class SchedulerMachine(RuleBasedStateMachine):
    """What clients and an engine may do, at any time at which they may do it.

    Requests arrive that share prefixes, with priorities and namespaces; they are
    aborted in every state; steps are scheduled, run, and fail; the cache evicts and is
    resized. `CheckedScheduler` checks everything after each of these, and in the end
    all requests run to theirs.

    Override `make_cache` and `make_scheduler` to test a policy, options or a scheduler
    of your own; pytest collects the `TestCase` of the class.

    Attributes:
        checked: The scheduler, after `start`.

    Example:
        >>> from hypothesis import settings
        >>> class Machine(SchedulerMachine):
        ...     def make_scheduler(self, cache, limits, overlap):
        ...         policy = self.choose(["lpm", "dfs-weight"])
        ...         return CheckedScheduler(
        ...             cache, limits, overlap=overlap, policy=policy
        ...         )
        >>> TestMachine = Machine.TestCase
        >>> TestMachine.settings = settings(max_examples=3, stateful_step_count=5)
        >>> TestMachine().runTest()
    """

    checked: CheckedScheduler

    def make_cache(self, memory: MemoryManager) -> PrefixCache:
        """Return the cache of the scheduler, here a `RadixCache` with nothing special.

        Args:
            memory: Its memory.
        """
        return RadixCache(memory)

    def make_scheduler(
        self, cache: PrefixCache, limits: SchedulerLimits, overlap: bool
    ) -> CheckedScheduler:
        """Return the scheduler to test, here one with nothing special.

        Args:
            cache: What `make_cache` returned.
            limits: How much it may do at a time.
            overlap: Whether it may prepare a step while one is in flight.
        """
        return CheckedScheduler(cache, limits, overlap=overlap)

    def choose(self, choices: Sequence[_Choice]) -> _Choice:
        """Choose one of several, in `make_cache` or `make_scheduler`.

        Hypothesis tries them all, and the first ones first when it looks for a simpler
        example.

        Args:
            choices: At least one.
        """
        choice: _Choice = self._data.draw(st.sampled_from(choices))
        return choice

    @initialize(
        num_pages=st.integers(1, MAX_NUM_PAGES),
        page_size=st.sampled_from([1, 2, 3, 16]),
        num_rows=st.integers(1, 5),
        shorter=st.integers(0, 2),
        limits=scheduler_limits(),
        overlap=st.booleans(),
        data=st.data(),
    )
    def start(
        self,
        num_pages: int,
        page_size: int,
        num_rows: int,
        shorter: int,
        limits: SchedulerLimits,
        overlap: bool,
        data: st.DataObject,
    ) -> None:
        """Make the cache and the scheduler.

        Args:
            num_pages: Usable pages.
            page_size: Tokens a page.
            num_rows: Requests that can have memory at a time.
            shorter: Tokens by which the longest request is shorter than its pages.
            limits: How much the scheduler may do at a time.
            overlap: Whether it may prepare a step while one is in flight.
            data: Where `choose` has its choices from.
        """
        self._data = data
        memory = MemoryManager(
            num_pages,
            page_size,
            max_num_requests=num_rows,
            max_context_len=10 * page_size - shorter,
        )
        self._num_pages = num_pages
        self._overlap = overlap
        self.checked = self.make_scheduler(self.make_cache(memory), limits, overlap)

    @rule(
        pages=_letters,
        tail=_letters,
        base=st.none() | st.integers(0, 9),
        max_new_tokens=st.sampled_from([1, 1, 2, 3, 5, 9, 18]),
        ignore_eos=st.booleans(),
        namespace=st.sampled_from([None, None, "tenant"]),
        priority=st.sampled_from([0, 0, 1, 2]),
    )
    def add(
        self,
        pages: list[int],
        tail: list[int],
        base: int | None,
        max_new_tokens: int,
        ignore_eos: bool,
        namespace: Hashable,
        priority: int,
    ) -> None:
        """Submit a new prompt, or one that goes on where another one is.

        Args:
            pages: The token of each of its pages.
            tail: The tokens behind them.
            base: Which other one; ``None`` for a new prompt.
            max_new_tokens: Where it ends.
            ignore_eos: Whether it ends nowhere else.
            namespace: Whose a new prompt is.
            priority: Its priority.
        """
        checked = self.checked
        known: list[int] = []
        if base is not None and checked.requests:
            request = checked.requests[base % len(checked.requests)]
            known, namespace = request.tokens.tolist(), request.namespace
        page_size = checked.cache.page_size
        prompt = known + [letter for letter in pages for _ in range(page_size)] + tail
        params = SamplingParams(max_new_tokens, ignore_eos=ignore_eos)
        checked.add(prompt or [0], params, namespace, priority)

    @rule(number=st.integers(0, 50))
    def abort(self, number: int) -> None:
        """Abort a request in any state.

        Args:
            number: Which one.
        """
        self.checked.abort_any(number)

    @precondition(lambda self: self.checked.may_schedule)
    @rule()
    def schedule(self) -> None:
        """Schedule a step."""
        self.checked.schedule()

    @precondition(lambda self: self.checked.batch is not None)
    @rule(
        fails=st.sampled_from([False] * 7 + [True]),
        is_received=st.booleans(),
        requeues=st.booleans(),
    )
    def run_step(self, fails: bool, is_received: bool, requeues: bool) -> None:
        """Run the oldest step in flight, or let it fail.

        Args:
            fails: Whether it does.
            is_received: Whether its message was applied before.
            requeues: Whether its requests are queued again then.
        """
        if fails:
            self.checked.fail(is_received=is_received, requeues=requeues)
        else:
            self.checked.run()

    @rule(count=st.integers(1, 20))
    def steps(self, count: int) -> None:
        """Schedule and run steps, as an engine does.

        Args:
            count: How many.
        """
        for _ in range(count):
            self.checked.step()
            self.checked.check()

    # Without overlap, an engine has nothing in flight when others have their turn.
    @precondition(lambda self: self.checked.batch is None or self._overlap)
    @rule(
        how=st.sampled_from(["evict", "resize", "drain"]),
        num_tokens=st.integers(0, 40),
        num_pages=st.integers(1, MAX_NUM_PAGES),
    )
    def reclaim(self, how: str, num_tokens: int, num_pages: int) -> None:
        """Take room from the cache, or run all requests to their ends.

        Args:
            how: What to do.
            num_tokens: Tokens to evict.
            num_pages: The new capacity; never more than there were at the start.
        """
        if how == "evict":
            self.checked.cache.evict(num_tokens)
        elif how == "resize":
            self.checked.resize(min(num_pages, self._num_pages))
        else:
            self.checked.drain()

    @invariant()
    def everything_holds(self) -> None:
        """Check everything after each rule."""
        self.checked.check()

    def teardown(self) -> None:
        """Run all requests to their ends."""
        if hasattr(self, "checked"):
            self.checked.drain()

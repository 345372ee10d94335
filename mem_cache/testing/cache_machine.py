"""A state machine that does anything to a cache, in any order."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ..memory_manager import MemoryManager
from ..prefix_cache import PrefixCache
from ..radix_cache import RadixCache
from .checked_cache import CheckedCache, Live
from .oracle import CacheOracle
from .refusals import bad_calls, bad_calls_of, late_calls
from .strategies import page_kinds, spell

MAX_NUM_PAGES = 16
"""Most pages that a machine resizes to."""

_picks = st.integers(0, 11)
_amounts = st.sampled_from([1, 1, 2, 3, 4, 15, 16, 17, 33, 400])
_namespaces = st.sampled_from([None, "tenant"])


class CacheMachine(RuleBasedStateMachine):
    """Every operation of a cache, allowed and refused, checked against the oracle.

    Override `make_cache` and `make_oracle` to test a cache with a policy or options of
    your own; pytest collects the `TestCase` of the class.

    There are few rules, each with a choice inside, since Hypothesis switches some of
    them off in every run.

    Attributes:
        checked: The cache with its oracle, after `start`.

    Example:
        >>> from hypothesis import settings
        >>> from radixkv.mem_cache import LFU
        >>> class Machine(CacheMachine):
        ...     def make_cache(self, memory):
        ...         return RadixCache(memory, LFU(), debug=True)
        ...
        ...     def make_oracle(self, num_pages, page_size, num_rows):
        ...         return CacheOracle(num_pages, page_size, num_rows, LFU())
        >>> TestMachine = Machine.TestCase
        >>> TestMachine.settings = settings(max_examples=3, stateful_step_count=5)
        >>> TestMachine().runTest()
    """

    checked: CheckedCache

    def make_cache(self, memory: MemoryManager) -> PrefixCache:
        """Return the cache to test, here a `RadixCache` with nothing special.

        Args:
            memory: Its memory.
        """
        return RadixCache(memory)

    def make_oracle(self, num_pages: int, page_size: int, num_rows: int) -> CacheOracle:
        """Return an oracle for the cache.

        Args:
            num_pages: Usable pages.
            page_size: Tokens a page.
            num_rows: Requests that can run at a time.
        """
        return CacheOracle(num_pages, page_size, num_rows, "lru")

    @initialize(
        num_pages=st.integers(1, 12) | st.integers(6, 12),
        page_size=st.sampled_from([1, 2, 3, 16]),
        num_rows=st.integers(1, 4),
        shorter=st.integers(0, 2),
    )
    def start(
        self, num_pages: int, page_size: int, num_rows: int, shorter: int
    ) -> None:
        """Make the cache and its oracle.

        Args:
            num_pages: Usable pages.
            page_size: Tokens a page.
            num_rows: Requests that can run at a time.
            shorter: Tokens by which the longest request is shorter than its pages.
        """
        memory = MemoryManager(
            num_pages,
            page_size,
            max_num_requests=num_rows,
            max_context_len=20 * page_size - shorter,
        )
        self.checked = CheckedCache(
            self.make_cache(memory),
            self.make_oracle(num_pages, page_size, num_rows),
            max_num_pages=MAX_NUM_PAGES,
        )

    def pick(self, number: int) -> Live:
        """Return a running request, by a `number`; admits one if there is none."""
        checked = self.checked
        if not checked.live:
            kinds = [number % 4] * (1 + number // 4)
            checked.admit(spell(checked.page_size, kinds, number)[: checked.max_len])
        return checked.live[number % len(checked.live)]

    @rule(
        base=_picks | st.none(),
        cut=st.integers(0, 5),
        kinds=page_kinds(),
        tail=_picks,
        namespace=_namespaces,
        priority=st.integers(0, 2),
        until=st.sampled_from(["admitted", "computed", "published", "finished"]),
    )
    def serve(
        self,
        base: int | None,
        cut: int,
        kinds: list[int],
        tail: int,
        namespace: Hashable,
        priority: int,
        until: str,
    ) -> None:
        """Take a prompt some way: a new one, or a known text, cut or continued.

        Args:
            base: Which known text to take; ``None`` for a new prompt.
            cut: Tokens to cut off it.
            kinds: Pages of the prompt.
            tail: Tokens behind them.
            namespace: Whose a new prompt is.
            priority: Its priority.
            until: How far it gets.
        """
        checked = self.checked
        tokens = spell(checked.page_size, kinds, tail)
        if base is not None and checked.texts:
            namespace, text = list(checked.texts)[base % len(checked.texts)]
            tokens = list(text[: len(text) - cut]) + tokens
        live = checked.admit(tokens[: checked.max_len] or [0], namespace, priority)
        if live is None or until == "admitted":
            return
        checked.extend([live], [len(live.tokens)])
        checked.commit(live, live.computed_len)
        if until == "published":
            checked.publish(live)
        elif until == "finished":
            checked.finish(live)

    @rule(
        batch=st.lists(st.tuples(_picks, _amounts), min_size=1, max_size=4),
        letter=st.integers(0, 1),
        commit=st.booleans(),
    )
    def extend(self, batch: list[tuple[int, int]], letter: int, commit: bool) -> None:
        """Compute the next part of some prompts, or one token more.

        Args:
            batch: Which requests, and how many tokens of each.
            letter: What drafts consist of.
            commit: Whether the step ends well.
        """
        checked = self.checked
        chosen: dict[Live, int] = {}
        for number, amount in batch:
            live = self.pick(number)
            start = live.kv.committed_len
            longest = min(max(len(live.tokens), start + 1), checked.max_len)
            if longest > start:
                chosen[live] = min(start + amount, longest)
        checked.extend(list(chosen), list(chosen.values()), letter)
        if commit:
            for live in chosen:
                checked.commit(live, live.computed_len)

    @rule(
        numbers=st.lists(_picks, min_size=1, max_size=4),
        num_tokens=st.sampled_from([1, 1, 1, 2, 3, 5, 17]),
        num_accepted=st.integers(0, 4),
        letter=st.integers(0, 1),
    )
    def decode(
        self, numbers: list[int], num_tokens: int, num_accepted: int, letter: int
    ) -> None:
        """Decode some requests; drafts that are not accepted are dropped.

        Args:
            numbers: Which requests.
            num_tokens: Tokens a request.
            num_accepted: How many of them are accepted.
            letter: What drafts consist of.
        """
        checked = self.checked
        chosen = dict.fromkeys(self.pick(number) for number in numbers)
        last_start = checked.max_len - num_tokens
        batch = [live for live in chosen if live.kv.committed_len <= last_start]
        checked.decode(batch, num_tokens, letter)
        for live in batch:
            accepted_len = live.kv.committed_len + num_accepted
            end = max(live.kv.committed_len, live.computed_len)
            checked.commit(live, min(accepted_len, end))
            if num_tokens > 1:
                checked.truncate(live, live.kv.committed_len)

    @rule(
        how=st.sampled_from(["commit", "truncate", "publish", "finish", "release"]),
        number=_picks,
        amount=_amounts,
    )
    def settle(self, how: str, number: int, amount: int) -> None:
        """Do something with one request.

        Args:
            how: What.
            number: Which request.
            amount: Of how many tokens.
        """
        checked = self.checked
        live = self.pick(number)
        kv = live.kv
        if how == "commit":
            new_len = min(kv.committed_len + amount, live.computed_len)
            checked.commit(live, max(kv.committed_len, new_len))
        elif how == "truncate":
            checked.truncate(live, max(kv.protected_len, kv.allocated_len - amount))
        elif how == "publish":
            checked.publish(live)
        elif how == "finish":
            checked.finish(live)
        else:
            checked.release(live)

    @rule(
        how=st.sampled_from(
            ["evict", "evict_if_needed", "drain", "resize", "reset", "bump"]
        ),
        amount=_amounts,
        num_pages=st.integers(1, MAX_NUM_PAGES),
        namespace=_namespaces,
    )
    def reclaim(
        self, how: str, amount: int, num_pages: int, namespace: Hashable
    ) -> None:
        """Do something with the whole cache.

        Args:
            how: What.
            amount: Of how many tokens.
            num_pages: The new capacity.
            namespace: Whose epoch ends.
        """
        checked = self.checked
        if how == "evict":
            checked.evict(amount)
        elif how == "evict_if_needed":
            checked.evict_if_needed(amount)
        elif how == "drain":
            checked.drain()
        elif how == "resize":
            checked.resize(num_pages)
        elif how == "bump":
            checked.bump_epoch(namespace)
        else:
            checked.reset()

    @rule(call=st.integers(0, 39), number=_picks)
    def refuse(self, call: int, number: int) -> None:
        """Call what must be refused, with a typed error and without any change.

        Args:
            call: Which call.
            number: Which request.
        """
        checked = self.checked
        calls = bad_calls(checked)
        if checked.gone:
            calls += late_calls(checked, checked.gone[number % len(checked.gone)])
        calls += bad_calls_of(checked, self.pick(number))
        kind, function = calls[call % len(calls)]
        with checked.refused(kind):
            function()

    @rule(kinds=page_kinds(), tail=_picks, namespace=_namespaces)
    def match(self, kinds: list[int], tail: int, namespace: Hashable) -> None:
        """Ask for a prompt: the oracle's answer, and no change.

        Args:
            kinds: Pages of the prompt.
            tail: Tokens behind them.
            namespace: Whose it is.
        """
        checked = self.checked
        tokens = spell(checked.page_size, kinds, tail)
        before = checked.snapshot()
        matched = checked.cache.match_prefix(np.array(tokens, np.int64), namespace)

        assert checked.oracle.match(namespace, tokens) == matched
        assert before == checked.snapshot()

    @invariant()
    def everything_agrees(self) -> None:
        """Compare everything after each step."""
        self.checked.check()

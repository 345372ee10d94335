"""Any operations in any order: the cache equals the oracle, and the law holds."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from .checked_cache import MAX_NUM_PAGES, CheckedCache, Live
from .refusals import bad_calls, bad_calls_of, late_calls

picks = st.integers(0, 11)
amounts = st.sampled_from([1, 1, 2, 3, 4, 15, 16, 17, 33, 400])
namespaces = st.sampled_from([None, "tenant"])
page_kinds = st.lists(st.integers(0, 3), max_size=3) | st.lists(
    st.integers(0, 1), max_size=20
)


def text_of(page_size: int, kinds: list[int], tail: int) -> list[int]:
    """Spell pages that differ in all, in their last, or in all but their first token.

    Long prompts then share prefixes at every page size.
    """
    tokens: list[int] = []
    for kind in kinds:
        first, inner, last = [(0, 0, 0), (1, 1, 1), (0, 0, 2), (0, 1, 1)][kind]
        tokens += [first, *[inner] * (page_size - 2), last][-page_size:]
    return tokens + [tail % 2] * (tail % page_size)


class CacheMachine(RuleBasedStateMachine):
    """Every operation of a cache, allowed and refused.

    There are few rules, each with a choice inside, since Hypothesis switches some of
    them off in every run.
    """

    @initialize(
        policy=st.sampled_from(["lru", "lru", "lfu", "priority", "none"]),
        num_pages=st.integers(1, 12) | st.integers(6, 12),
        page_size=st.sampled_from([1, 2, 3, 16]),
        num_rows=st.integers(1, 4),
        shorter=st.integers(0, 2),
        partial_pages=st.booleans(),
    )
    def start(
        self,
        policy: str,
        num_pages: int,
        page_size: int,
        num_rows: int,
        shorter: int,
        partial_pages: bool,
    ) -> None:
        self.checked = CheckedCache(
            policy,
            num_pages,
            page_size,
            num_rows,
            max_len=20 * page_size - shorter,
            partial_pages=partial_pages,
        )

    def pick(self, number: int) -> Live:
        """One of the running requests; admits one if there is none."""
        checked = self.checked
        if not checked.live:
            kinds = [number % 4] * (1 + number // 4)
            checked.admit(text_of(checked.page_size, kinds, number)[: checked.max_len])
        return checked.live[number % len(checked.live)]

    @rule(
        base=picks | st.none(),
        cut=st.integers(0, 5),
        kinds=page_kinds,
        tail=picks,
        namespace=namespaces,
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
        """Take a prompt some way: a new one, or a known text, cut or continued."""
        checked = self.checked
        tokens = text_of(checked.page_size, kinds, tail)
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
        batch=st.lists(st.tuples(picks, amounts), min_size=1, max_size=4),
        letter=st.integers(0, 1),
        commit=st.booleans(),
    )
    def extend(self, batch: list[tuple[int, int]], letter: int, commit: bool) -> None:
        """Compute the next part of some prompts, or one token more."""
        checked = self.checked
        chosen: dict[Live, int] = {}
        for number, amount in batch:
            live = self.pick(number)
            start = live.kv.committed_len
            longest = min(max(len(live.tokens), start + 1), checked.max_len)
            if longest > start:
                chosen[live] = min(start + amount, longest)
        checked.extend(list(chosen), list(chosen.values()), letter)
        for live in chosen if commit else []:
            checked.commit(live, live.computed_len)

    @rule(
        numbers=st.lists(picks, min_size=1, max_size=4),
        num_tokens=st.sampled_from([1, 1, 1, 2, 3, 5, 17]),
        num_accepted=st.integers(0, 4),
        letter=st.integers(0, 1),
    )
    def decode(
        self, numbers: list[int], num_tokens: int, num_accepted: int, letter: int
    ) -> None:
        """Decode some requests; drafts that are not accepted are dropped."""
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
        number=picks,
        amount=amounts,
    )
    def settle(self, how: str, number: int, amount: int) -> None:
        """Do something with one request."""
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
        amount=amounts,
        num_pages=st.integers(1, MAX_NUM_PAGES),
        namespace=namespaces,
    )
    def reclaim(
        self, how: str, amount: int, num_pages: int, namespace: Hashable
    ) -> None:
        """Do something with the whole cache."""
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

    @rule(call=st.integers(0, 39), number=picks)
    def refuse(self, call: int, number: int) -> None:
        """Call what must be refused, with a typed error and without any change."""
        checked = self.checked
        calls = bad_calls(checked)
        if checked.gone:
            calls += late_calls(checked, checked.gone[number % len(checked.gone)])
        calls += bad_calls_of(checked, self.pick(number))
        kind, function = calls[call % len(calls)]
        with checked.refused(kind):
            function()

    @rule(kinds=page_kinds, tail=picks, namespace=namespaces)
    def match(self, kinds: list[int], tail: int, namespace: Hashable) -> None:
        """Ask for a prompt: the oracle's answer, and no change."""
        checked = self.checked
        tokens = text_of(checked.page_size, kinds, tail)
        before = checked.snapshot()
        matched = checked.cache.match_prefix(np.array(tokens, np.int64), namespace)

        assert checked.oracle.match(namespace, tokens) == matched
        assert before == checked.snapshot()

    @invariant()
    def everything_agrees(self) -> None:
        self.checked.check()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(stateful_step_count=40)

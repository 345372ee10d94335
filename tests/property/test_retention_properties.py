"""Retention and output marks in any life of a cache: who goes next, page by page."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.mem_cache import ConfigError, LengthError, MemoryManager, RadixCache
from radixkv.mem_cache.testing import CacheOracle, CheckedCache, Live, ModelRequest
from radixkv.mem_cache.testing.oracle import Key

NUM_PAGES = 16
MAX_NUM_PAGES = 8
NAMES = [None, "tenant"]
OUTPUT = -1


@dataclass
class Clock:
    """Moves by hand."""

    time: float = 0.0

    def __call__(self) -> float:
        return self.time


@dataclass
class Grant:
    """What retains one page."""

    since: int
    priority: int = 0
    ttl: float = 0.0
    expires: float = -inf


@dataclass
class Levels:
    """Which pages are retained, and which are output."""

    grants: dict[Key, Grant] = field(default_factory=dict)
    outputs: dict[Key, None] = field(default_factory=dict)

    def copy(self) -> Levels:
        return Levels(dict(self.grants), dict(self.outputs))


class LevelOracle(CacheOracle):
    """The model of a cache in which pages have levels; its time never goes back."""

    def __init__(
        self,
        policy: str,
        num_pages: int,
        page_size: int,
        share: float,
        *,
        outputs_first: bool,
    ) -> None:
        super().__init__(num_pages, page_size, 3, policy)
        self.share = share
        self.outputs_first = outputs_first
        self.levels = Levels()
        self.now = 0.0
        self.num_granted = 0

    @property
    def budget(self) -> int:
        return int(self.share * self.num_pages)

    def settle(self) -> None:
        """Forget what is over: out of time, evicted, stale, or beyond the budget."""
        self.levels.grants = {
            key: grant
            for key, grant in self.levels.grants.items()
            if grant.expires > self.now and key in self.cached
        }
        oldest_first = sorted(
            self.levels.grants, key=lambda key: self.levels.grants[key].since
        )
        for key in oldest_first[self.budget :]:
            del self.levels.grants[key]
        for key in list(self.levels.outputs):
            if key not in self.cached:
                del self.levels.outputs[key]

    def retain(
        self, namespace: Hashable, tokens: Sequence[int], priority: int, ttl: float
    ) -> int:
        self.settle()
        hit = self.hit(namespace, tokens)
        kept = [key for key in hit if key in self.levels.grants]
        room = self.budget - len(self.levels.grants)
        granted = hit[: len(kept) + room]
        for key in granted:
            self.num_granted += key not in self.levels.grants
            grant = self.levels.grants.setdefault(key, Grant(self.num_granted))
            grant.priority = max(grant.priority, priority)
            grant.ttl = max(grant.ttl, ttl)
            grant.expires = max(grant.expires, self.now + ttl)
        return len(granted) * self.page_size

    def admit(
        self, tokens: Sequence[int], namespace: Hashable, priority: int = 0
    ) -> ModelRequest | None:
        self.settle()
        request = super().admit(tokens, namespace, priority)
        for key in request.keys if request else []:
            self.levels.outputs.pop(key, None)
            grant = self.levels.grants.get(key)
            if grant is not None:
                grant.expires = max(grant.expires, self.now + grant.ttl)
        return request

    def publish_part(
        self, request: ModelRequest, tokens: Sequence[int], prompt_len: int
    ) -> None:
        before = list(self.cached)
        first = len(request.keys)
        self.publish(request, tokens)
        num_prompt_pages = self.pages_for(prompt_len)
        if num_prompt_pages > first and len(request.keys) > first:
            for key in request.keys[:num_prompt_pages]:
                self.levels.outputs.pop(key, None)
        for key in request.keys[num_prompt_pages:]:
            if self.outputs_first and key not in before:
                self.levels.outputs[key] = None

    def worth(self, key: Key) -> tuple[Any, ...]:
        epoch, *rest = super().worth(key)
        if epoch < 2:
            return (epoch, *rest)
        level = OUTPUT if key in self.levels.outputs else 0
        grant = self.levels.grants.get(key)
        return (epoch, grant.priority if grant else level, *rest)

    def evict(self, num_pages: int) -> list[Key]:
        self.settle()
        victims = super().evict(num_pages)
        self.settle()
        return victims

    def eviction_order(self, num_pages: int) -> list[tuple[Key, int]]:
        before = self.levels.copy()
        order = super().eviction_order(num_pages)
        self.levels = before
        return order

    def resize(self, num_pages: int) -> int:
        needed = super().resize(num_pages)
        self.settle()
        return needed

    def reset(self) -> None:
        super().reset()
        self.settle()

    def bump_epoch(self, namespace: Hashable) -> None:
        super().bump_epoch(namespace)
        self.settle()


class CheckedLevels(CheckedCache):
    """A cache with a clock, grants and output marks, beside its oracle."""

    def __init__(
        self,
        policy: str,
        page_size: int,
        share: float = 0.4,
        *,
        num_pages: int = NUM_PAGES,
        outputs_first: bool = False,
    ) -> None:
        memory = MemoryManager(
            num_pages,
            page_size,
            max_num_requests=3,
            max_context_len=MAX_NUM_PAGES * page_size,
        )
        self.clock = Clock()
        self.radix = RadixCache(
            memory,
            policy,
            retention_share=share,
            clock=self.clock,
            outputs_first=outputs_first,
        )
        oracle = LevelOracle(
            policy, num_pages, page_size, share, outputs_first=outputs_first
        )
        super().__init__(self.radix, oracle)
        self.oracle: LevelOracle = oracle
        self.prompt_lens: dict[Live, int] = {}

    def text(self, letters: list[int]) -> list[int]:
        return [letter for letter in letters for _ in range(self.page_size)]

    def move_clock(self, seconds: float) -> None:
        if seconds < 0:
            self.radix.retain([])  # so that the cache has seen the latest time
        self.clock.time += seconds
        self.oracle.now = max(self.oracle.now, self.clock.time)

    def retain(
        self, tokens: list[int], namespace: Hashable, priority: int, ttl: float | None
    ) -> None:
        expected = self.oracle.retain(namespace, tokens, priority, ttl or inf)
        before = [self.cache.match_prefix(text, name) for name, text in self.texts]
        granted = self.radix.retain(tokens, namespace, priority=priority, ttl=ttl)

        assert expected == granted <= self.cache.match_prefix(tokens, namespace)
        after = [self.cache.match_prefix(text, name) for name, text in self.texts]
        assert before == after

    def publish(self, live: Live) -> None:
        prompt_len = self.prompt_lens.get(live)
        self.cache.cache_unfinished_req(live.kv, live.tokens, prompt_len=prompt_len)
        self._publish_model(live)

    def finish(self, live: Live) -> None:
        prompt_len = self.prompt_lens.get(live)
        self.cache.cache_finished_req(live.kv, live.tokens, prompt_len=prompt_len)
        self._publish_model(live)
        self.oracle.release(live.model)
        self._close(live)

    def _publish_model(self, live: Live) -> None:
        prompt_len = self.prompt_lens.get(live, len(live.tokens))
        self.oracle.publish_part(live.model, live.tokens, prompt_len)

    def look(self) -> None:
        """Compare what is retained, and who would go, with the oracle."""
        self.oracle.settle()
        num_retained = len(self.oracle.levels.grants)

        assert num_retained <= self.oracle.budget
        assert num_retained * self.page_size == self.radix.retained_size
        expected = [page for _, page in self.oracle.eviction_order(NUM_PAGES)]
        victims = self.radix.eviction_order(NUM_PAGES)
        assert expected == [victim.page for victim in victims]


@dataclass(frozen=True)
class Step:
    """Something that happens to a cache; `number` chooses what it happens to."""

    action: str
    letters: list[int]
    number: int


actions = st.sampled_from(
    3 * ["serve", "retain", "open", "finish"]
    + 2 * ["move_clock", "evict", "look", "publish"]
    + ["release", "resize", "reset", "bump"]
)
# Most texts are prefixes of one another.
letters = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=6)
steps = st.lists(
    st.builds(Step, actions, letters, st.integers(0, 23)), min_size=10, max_size=40
)


def take(step: Step, checked: CheckedLevels) -> None:
    tokens = checked.text(step.letters)
    number = step.number
    name = NAMES[number % 5 // 4]
    if step.action in ("serve", "open"):
        live = checked.admit([*tokens, 0], name, number % 3)
        if live is not None:
            if number % 2:
                checked.prompt_lens[live] = min(number // 2, len(live.tokens))
            checked.extend([live], [len(live.tokens)])
            checked.commit(live, live.computed_len)
            if step.action == "serve":
                checked.finish(live)
    elif step.action == "retain":
        ttl = [None, 1.0, 4.0, 2.5, inf][number % 5]
        checked.retain(tokens, NAMES[number % 7 // 6], 1 + number % 3, ttl)
    elif step.action == "move_clock":
        checked.move_clock([0.5, 1.0, 3.0, -2.0][number % 4])
    elif step.action == "evict":
        checked.evict(number % 4 * checked.page_size)
    elif step.action == "resize":
        checked.resize(NUM_PAGES - number // 2)
    elif step.action == "reset":
        checked.reset()
    elif step.action == "bump":
        checked.bump_epoch(name)
    elif step.action == "look":
        checked.look()
    elif checked.live:
        live = checked.live[number % len(checked.live)]
        getattr(checked, step.action)(live)


@pytest.mark.parametrize("policy", ["lru", "lfu", "filo", "priority"])
@given(
    steps=steps,
    page_size=st.sampled_from([1, 2, 3, 16]),
    share=st.sampled_from([0.0, 0.2, 0.4, 1.0]),
    outputs_first=st.booleans(),
)
def test_pages_go_by_level_then_by_policy(
    policy: str, steps: list[Step], page_size: int, share: float, outputs_first: bool
) -> None:
    """requests, grants, time, epochs, resizes: the oracle has no nodes to split."""
    checked = CheckedLevels(policy, page_size, share, outputs_first=outputs_first)
    for step in steps:
        take(step, checked)
        checked.check()
    checked.look()
    checked.drain()
    checked.check()

    assert checked.radix.retained_size == 0


@given(
    steps=st.lists(
        st.builds(
            Step,
            st.sampled_from(
                2 * ["open", "serve", "finish", "release"] + ["publish", "evict"]
            ),
            letters,
            st.integers(0, 23),
        ),
        max_size=25,
    ),
    page_size=st.sampled_from([1, 2, 3, 16]),
)
def test_outputs_go_before_prompts(steps: list[Step], page_size: int) -> None:
    """Until somebody uses them as a prompt, whoever publishes first."""
    checked = CheckedLevels("lru", page_size, outputs_first=True)
    for step in steps:
        take(step, checked)
        checked.cache.check_integrity()
        checked.look()
    checked.check()


@given(steps=steps, seconds=st.sampled_from([1.0, 4.0]))
def test_at_expiry_pages_are_as_if_they_had_never_been_retained(
    steps: list[Step], seconds: float
) -> None:
    """Not even those that a grant had split, or that were used while it lasted."""
    kept = CheckedLevels("lru", 1, num_pages=300)
    free = CheckedLevels("lru", 1, num_pages=300)
    for step in steps:
        if step.action == "retain":
            kept.retain(step.letters, None, 1 + step.number % 3, seconds)
        elif step.action == "move_clock":
            kept.move_clock(0.5)
        elif step.action not in ("evict", "resize"):
            take(step, kept)
            take(step, free)
    kept.move_clock(seconds)

    pages = [victim.page for victim in free.radix.eviction_order(300)]
    assert pages == [victim.page for victim in kept.radix.eviction_order(300)]
    assert kept.radix.retained_size == 0


@given(steps=steps, number=st.integers(0, 20))
def test_refused_calls_change_nothing(steps: list[Step], number: int) -> None:
    checked = CheckedLevels("lru", 2, outputs_first=True)
    for step in steps:
        take(step, checked)
    radix = checked.radix
    for arguments in (
        {"priority": 0},
        {"priority": 1.5},
        {"ttl": 0},
        {"ttl": -1.0},
        {"ttl": float("nan")},
        {"ttl": True},
        {"ttl": "1"},
        {"ttl": 10**400},
        {"namespace": []},
    ):
        with checked.refused(ConfigError):
            radix.retain([0, 0], **arguments)  # type: ignore[arg-type]
    for live in checked.live:
        for prompt_len in (-1, len(live.tokens) + 1, 0.5, True):
            for publish in (radix.cache_unfinished_req, radix.cache_finished_req):
                with checked.refused(LengthError):
                    publish(live.kv, live.tokens, prompt_len=prompt_len)  # type: ignore[arg-type]
    checked.look()
    checked.check()

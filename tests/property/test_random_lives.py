"""Busy lives: many requests that share prefixes in a pool that is always too small.

The state machine tries everything that can happen, and shrinks what fails. Here chance
is weighted like a scheduler's day: splits, duplicates, evictions and retractions happen
all the time.
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.mem_cache.testing import CheckedCache, Live

from .caches import make_checked

NUM_STEPS = 100


class RandomLife:
    """Does what a scheduler would do, and some things that none would."""

    def __init__(self, checked: CheckedCache, random: Random) -> None:
        self.checked = checked
        self.random = random

    def step(self) -> None:
        operations = {
            self.admit: 6,
            self.extend: 8,
            self.decode: 3,
            self.publish: 3,
            self.finish: 3,
            self.truncate: 1,
            self.release: 1,
            self.evict: 1,
            self.resize: 1,
            self.checked.reset: 1,
            self.bump: 1,
        }
        choices, weights = list(operations), list(operations.values())
        self.random.choices(choices, weights)[0]()
        self.checked.check()

    def pick(self) -> Live | None:
        """One request, more often than not one that has something to publish."""
        live = self.checked.live
        ready = [x for x in live if x.kv.committed_len > x.kv.protected_len]
        choice = ready if ready and self.random.random() < 0.7 else live
        return self.random.choice(choice) if choice else None

    def some(self, live: list[Live]) -> list[Live]:
        size = self.random.choice([1, 1, self.random.randint(0, len(live))])
        return self.random.sample(live, min(size, len(live)))

    def text(self) -> list[int]:
        """Pages of one letter, seldom with another one inside; any last page."""
        page_size = self.checked.page_size
        tokens: list[int] = []
        for _ in range(self.random.choice([0, 1, 1, 2, 2, 3, 5, 9])):
            page = [self.random.choice([0, 0, 1])] * page_size
            if self.random.random() < 0.2:
                page[self.random.randrange(page_size)] = 2
            tokens += page
        return tokens + [0] * self.random.randrange(page_size)

    def admit(self) -> None:
        texts = list(self.checked.texts)
        namespace = self.random.choice([None, None, "tenant"])
        tokens = self.text()
        if texts and self.random.random() < 0.7:
            namespace, known = self.random.choice(texts)
            cut = self.random.choice([len(known), self.random.randint(0, len(known))])
            tokens = [*known[:cut], *(tokens if self.random.random() < 0.5 else [])]
        # Most requests fit in half of the pool, some in nothing.
        fits = self.checked.cache.total_size // 2
        longest = min(self.checked.max_len, self.random.choice([fits, fits, fits, 999]))
        tokens = tokens[:longest] or [0]
        self.checked.admit(tokens, namespace, self.random.choice([0, 0, 1, 2]))

    def extend(self) -> None:
        waiting = [x for x in self.checked.live if x.kv.committed_len < len(x.tokens)]
        batch = self.some(waiting)
        lens = [
            self.random.choice(
                [
                    len(live.tokens),
                    self.random.randint(live.kv.committed_len + 1, len(live.tokens)),
                ]
            )
            for live in batch
        ]
        self.checked.extend(batch, lens)
        for live in batch:
            self.commit(live)

    def decode(self) -> None:
        num_tokens = self.random.choice([1, 1, 1, 2, 4, self.checked.page_size + 1])
        last_start = self.checked.max_len - num_tokens
        fit = [x for x in self.checked.live if x.kv.committed_len <= last_start]
        batch = self.some(fit)
        self.checked.decode(batch, num_tokens, self.random.choice([0, 0, 1]))
        for live in batch:
            self.commit(live)
            if num_tokens > 1:
                self.checked.truncate(live, live.kv.committed_len)

    def commit(self, live: Live) -> None:
        start = live.kv.committed_len
        if live.computed_len > start and self.random.random() < 0.9:
            some = self.random.randint(start, live.computed_len)
            self.checked.commit(live, self.random.choice([some, live.computed_len]))

    def publish(self) -> None:
        if live := self.pick():
            self.checked.publish(live)

    def finish(self) -> None:
        if live := self.pick():
            self.checked.finish(live)

    def truncate(self) -> None:
        if live := self.pick():
            kv = live.kv
            new_len = self.random.randint(kv.protected_len, kv.allocated_len)
            self.checked.truncate(live, new_len)

    def release(self) -> None:
        if live := self.pick():
            self.checked.release(live)

    def evict(self) -> None:
        num_tokens = self.random.randint(0, 3 * self.checked.page_size)
        self.random.choice([self.checked.evict, self.checked.evict_if_needed])(
            num_tokens
        )

    def resize(self) -> None:
        now = self.checked.oracle.num_pages
        self.checked.resize(min(16, max(1, now + self.random.randint(-3, 3))))

    def bump(self) -> None:
        self.checked.bump_epoch(self.random.choice([None, None, "tenant"]))


# Five policies see as many lives as other properties see examples, and a half more.
@pytest.mark.parametrize("policy", ["lru", "lfu", "priority", "filo", "none"])
@settings(max_examples=max(10, settings().max_examples * 3 // 10))
@given(
    num_pages=st.integers(4, 12),
    page_size=st.sampled_from([1, 2, 3, 16]),
    num_rows=st.integers(2, 5),
    partial_pages=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_busy_cache_equals_the_oracle(
    policy: str,
    num_pages: int,
    page_size: int,
    num_rows: int,
    partial_pages: bool,
    seed: int,
) -> None:
    checked = make_checked(
        policy,
        num_pages,
        page_size,
        num_rows,
        20 * page_size,
        partial_pages=partial_pages,
    )
    life = RandomLife(checked, Random(seed))
    for _ in range(NUM_STEPS):
        life.step()
    checked.drain()
    checked.check()

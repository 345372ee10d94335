"""Every report and every counter equals that of a dictionary of page prefixes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.mem_cache import HitReport, KVCacheInfo, RequestKV
from radixkv.mem_cache.testing import (
    CacheOracle,
    CheckedCache,
    Live,
    ModelRequest,
    PastEpoch,
)
from radixkv.mem_cache.testing.oracle import Key

from .caches import MAX_NUM_PAGES, make_cache
from .test_random_lives import RandomLife

NUM_STEPS = 60
REASONS = [
    "evicted",
    "unpublished",
    "other_epoch",
    "other_namespace",
    "forgotten",
    "cold",
    "unaligned",
]


class RecordingOracle(CacheOracle):
    """Takes down whom it evicts, in order."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.victims: list[Key] = []

    def evict(self, num_pages: int) -> list[Key]:
        victims = super().evict(num_pages)
        self.victims += victims
        return victims

    def eviction_order(self, num_pages: int) -> list[tuple[Key, int]]:
        order = super().eviction_order(num_pages)
        self.victims.clear()
        return order


class ExplainedCache(CheckedCache):
    """A checked cache whose reports and counters are checked, too.

    Attributes:
        young: By whom each page of the young generation was evicted, and after how many
            admissions.
        old: The same of the old one.
        most: Most pages of a new generation.
        seen: All that ever was cached since the last reset, in this epoch.
        lost: What of that was evicted and forgotten once.
        admitted: The whole pages of what running requests were admitted with.
        pending: The reports of requests that have no pages of their own yet.
        booked: What `stats` must tell.
    """

    def __init__(
        self,
        policy: str,
        num_pages: int,
        page_size: int,
        num_rows: int,
        max_len: int,
        *,
        partial_pages: bool,
        random: Random,
    ) -> None:
        cache = make_cache(
            policy, num_pages, page_size, num_rows, max_len, partial_pages=partial_pages
        )
        self.recorder = RecordingOracle(
            num_pages, page_size, num_rows, policy, partial_pages=partial_pages
        )
        super().__init__(cache, self.recorder, max_num_pages=MAX_NUM_PAGES)
        self.random = random
        self.policy = "LRU" if policy == "keyed lru" else policy
        self.young: dict[Key, tuple[str, int]] = {}
        self.old: dict[Key, tuple[str, int]] = {}
        self.most = max(1, num_pages // 2)
        self.seen: set[Key] = set()
        self.lost: set[Key] = set()
        # Only how many pages go together; which they are, the oracle knows.
        self.groups: list[int] = []
        cache._tree.on_evicted.append(
            lambda node, key, pages: self.groups.append(len(pages) // 4)
        )
        self.num_admissions = 0
        self.admitted: dict[ModelRequest, tuple[int, ...]] = {}
        self.pending: dict[ModelRequest, HitReport] = {}
        self.booked: Counter[str] = Counter()

    # What happens -----------------------------------------------------------

    @contextmanager
    def noting(self, cause: str) -> Iterator[None]:
        """Take down what is evicted and what is published meanwhile."""
        yield
        victims = self.recorder.victims
        assert sum(self.groups) == len(victims)
        for num_pages in self.groups:
            self.remember(victims[:num_pages], cause)
            del victims[:num_pages]
        self.groups.clear()
        self.seen.update(self.oracle.cached)
        for key in self.oracle.cached:
            self.young.pop(key, None)
            self.old.pop(key, None)

    def remember(self, keys: list[Key], cause: str) -> None:
        """Remember what went together, the last page first."""
        if isinstance(keys[0][0], PastEpoch):
            return
        if len(self.young) + len(keys) > self.most:
            self.lost.update(self.old)
            self.old, self.young = self.young, {}
        if len(keys) > self.most:
            self.lost.update(self.old, keys)
            self.old = {}
        for key in keys[-self.most :]:
            self.young[key] = (cause, self.num_admissions)

    @property
    def evicted(self) -> dict[Key, tuple[str, int]]:
        """Both generations."""
        return {**self.old, **self.young}

    def admit(
        self,
        tokens: list[int],
        namespace: Hashable = None,
        priority: int = 0,
        computed_len: int = 0,
    ) -> Live | None:
        if self.random.random() < 0.2:
            computed_len = self.random.randint(0, len(tokens))
        # The admission itself may evict some of it, for a page of its own.
        available_len = self.oracle.match(namespace, tokens)
        with self.noting(self.policy):
            live = super().admit(tokens, namespace, priority, computed_len)
        if live is None:
            return None
        if self.policy == "none":
            assert live.kv.hit_report is None
            return live
        report = self.explain(
            tokens, namespace, live.model, available_len, computed_len
        )
        report = self.allow_to_forget(report, live, tokens)
        assert report == live.kv.hit_report
        whole = len(tokens) // self.page_size * self.page_size
        self.admitted[live.model] = tuple(tokens[:whole])
        self.pending[live.model] = report
        self.num_admissions += 1
        return live

    def publish(self, live: Live) -> None:
        with self.noting("nobody"):
            super().publish(live)

    def finish(self, live: Live) -> None:
        with self.noting("nobody"):
            super().finish(live)

    def evict(self, num_tokens: int) -> None:
        with self.noting("manual"):
            super().evict(num_tokens)

    def evict_if_needed(self, num_tokens: int) -> None:
        with self.noting("manual"):
            super().evict_if_needed(num_tokens)

    def resize(self, num_pages: int) -> None:
        with self.noting("resize"):
            super().resize(num_pages)
        self.most = max(1, self.oracle.num_pages // 2)

    def reset(self) -> None:
        super().reset()
        if not self.live:
            self.young.clear()
            self.old.clear()
            self.groups.clear()
            self.seen.clear()
            self.lost.clear()

    def bump_epoch(self, namespace: Hashable) -> None:
        super().bump_epoch(namespace)
        # They are still remembered, for nobody.
        for lost in (self.young, self.old):
            for key in [key for key in lost if key[0] == namespace]:
                lost[object(), key[1]] = lost.pop(key)
        for keys in (self.seen, self.lost):
            keys.difference_update([key for key in keys if key[0] == namespace])

    def _close(self, live: Live) -> None:
        super()._close(live)
        self.admitted.pop(live.model, None)
        self.pending.pop(live.model, None)

    def _run(
        self,
        lives: Sequence[Live],
        lens: list[int],
        letter: int,
        alloc: Callable[[list[RequestKV]], KVCacheInfo],
    ) -> None:
        before = [live.model.allocated_len for live in lives]
        with self.noting(self.policy):
            super()._run(lives, lens, letter, alloc)
        for live, allocated_len in zip(lives, before, strict=True):
            if live.model.allocated_len > allocated_len and live.model in self.pending:
                self.book(self.pending.pop(live.model), live.kv.computed_len)

    # What must be told ------------------------------------------------------

    def reason(self, key: Key) -> str:
        """Why a page was no part of a hit."""
        namespace, tokens = key
        if key in self.evicted:
            return "evicted"
        for request, admitted in self.admitted.items():
            if request.namespace == namespace and admitted[: len(tokens)] == tokens:
                return "unpublished"
        others = [name for name, known in self.oracle.cached if known == tokens]
        past = [name.namespace for name in others if isinstance(name, PastEpoch)]
        if namespace in past:
            return "other_epoch"
        return "other_namespace" if len(past) < len(others) else "cold"

    def allow_to_forget(
        self, report: HitReport, live: Live, tokens: list[int]
    ) -> HitReport:
        """Let what is cold be called forgotten, if it begins like what was forgotten.

        What is called cold was never seen, whatever has been evicted since.
        """
        told = live.kv.hit_report
        assert told is not None
        keys = self.oracle.keys_of(live.model.namespace, tokens[:-1])
        cold = [key for key in keys[len(live.model.keys) :] if self.is_cold(key)]
        if told.num_forgotten_tokens:
            first = keys[0]
            assert any(first[1] == key[1][: self.page_size] for key in self.lost)
            return msgspec.structs.replace(
                report,
                num_cold_tokens=0,
                num_forgotten_tokens=report.num_cold_tokens,
            )
        assert not report.num_cold_tokens or self.seen.isdisjoint(cold)
        return report

    def is_cold(self, key: Key) -> bool:
        return self.reason(key) == "cold"

    def explain(
        self,
        tokens: list[int],
        namespace: Hashable,
        model: ModelRequest,
        available_len: int,
        computed_len: int,
    ) -> HitReport:
        keys = self.oracle.keys_of(namespace, tokens[:-1])
        reasons = ["cached"] * len(model.keys)
        reasons += [self.reason(key) for key in keys[len(model.keys) :]]
        by_token = [reason for reason in reasons for _ in range(self.page_size)]
        by_token += ["unaligned"] * (len(tokens) - len(by_token))
        counted = max(model.committed_len, computed_len)
        counts = Counter(by_token[counted:])
        first = keys[len(model.keys)] if len(model.keys) < len(keys) else None
        by, when = self.evicted.get(first, (None, None)) if first else (None, None)
        return HitReport(
            num_tokens=len(tokens),
            available_len=available_len,
            granted_len=model.committed_len,
            num_recomputed_tokens=counted - model.committed_len,
            num_evicted_tokens=counts["evicted"],
            num_quota_tokens=0,
            num_unpublished_tokens=counts["unpublished"],
            num_other_epoch_tokens=counts["other_epoch"],
            num_other_namespace_tokens=counts["other_namespace"],
            num_cold_tokens=counts["cold"],
            num_unaligned_tokens=counts["unaligned"],
            evicted_by=by,
            evicted_ago=None if when is None else self.num_admissions - when,
        )

    def book(self, report: HitReport, computed_len: int) -> None:
        resumed = min(report.granted_len, computed_len)
        is_new = computed_len == 0  # or its prompt counted when it first came
        booked = {
            "num_admitted_requests": 1,
            "num_resumed_requests": int(not is_new),
            "num_prompt_tokens": report.num_tokens * is_new,
            "num_cached_tokens": report.granted_len * is_new,
            "num_resumed_cached_tokens": resumed,
            "num_recomputed_tokens": computed_len - resumed,
        }
        for reason in REASONS if is_new else ():
            booked[f"num_missed_{reason}_tokens"] = getattr(
                report, f"num_{reason}_tokens"
            )
        self.booked.update(booked)

    def check(self) -> None:
        super().check()
        if self.policy == "none":
            return
        stats = self.cache.stats()
        assert self.booked == Counter(
            {name: getattr(stats, name) for name in self.booked}
        )
        missed = sum(
            getattr(stats, f"num_missed_{reason}_tokens") for reason in REASONS
        )
        assert stats.num_prompt_tokens == stats.num_cached_tokens + missed


@pytest.mark.parametrize("policy", ["lru", "lfu", "keyed lru", "none"])
@given(
    num_pages=st.integers(4, 12),
    page_size=st.sampled_from([1, 2, 3, 16]),
    num_rows=st.integers(2, 5),
    partial_pages=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_miss_has_the_reason_of_the_reference(
    policy: str,
    num_pages: int,
    page_size: int,
    num_rows: int,
    partial_pages: bool,
    seed: int,
) -> None:
    random = Random(seed)
    checked = ExplainedCache(
        policy,
        num_pages,
        page_size,
        num_rows,
        20 * page_size,
        partial_pages=partial_pages,
        random=random,
    )
    life = RandomLife(checked, random)
    for _ in range(NUM_STEPS):
        life.step()


def test_what_an_admission_evicts_for_a_page_of_its_own_was_available() -> None:
    """A run in which the page that it copies from is the one that goes."""
    random = Random(123258)
    checked = ExplainedCache(
        "keyed lru", 4, 2, 2, 40, partial_pages=True, random=random
    )
    life = RandomLife(checked, random)
    for _ in range(NUM_STEPS):
        life.step()

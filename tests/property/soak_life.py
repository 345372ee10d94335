"""A random life of a cache: everything that it can do, mixed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from radixkv.mem_cache import (
    LRU,
    ConfigError,
    MemoryManager,
    OutOfContentsError,
    OutOfPagesError,
    PagesInUseError,
    RadixCache,
    TokenError,
)

from .watched_cache import Run, WatchedCache

T = TypeVar("T")

PAGE_SIZES = (1, 2, 3, 16, 64)
POLICIES = ("lru", "keyed lru", "lfu", "fifo", "mru", "filo", "slru", "priority")
NAMESPACES: tuple[Hashable, ...] = (None, "tenant", ("adapter", 2))
DIGESTS = [bytes([i]) * 16 for i in range(12)]

MAX_NUM_PAGES = 40
MAX_NUM_CONTENTS = 4
MAX_PAGES_PER_REQUEST = 12
NUM_ROWS = 7
NUM_TEXTS = 40
RETENTION_SHARE = 0.4

OPERATIONS_PER_CHECK = 100


class Chance:
    """Draws from a seeded generator, many numbers at a time."""

    def __init__(self, seed: Sequence[int]) -> None:
        self._numbers = self._draw(np.random.default_rng(seed))

    @staticmethod
    def _draw(generator: np.random.Generator) -> Iterator[int]:
        while True:
            yield from generator.integers(0, 2**62, 4096).tolist()

    def below(self, end: int) -> int:
        return next(self._numbers) % end

    def pick(self, items: Sequence[T]) -> T:
        return items[self.below(len(items))]

    def happens(self, percent: int) -> bool:
        return self.below(100) < percent


@dataclass
class Text:
    """What was asked for once, and may be again.

    Attributes:
        tokens: Token ids; the virtual ones may be dead by now.
        namespace: Whose it is.
        computed_len: Tokens that were computed before a retraction.
    """

    tokens: list[int]
    namespace: Hashable
    computed_len: int = 0


class Life(WatchedCache):
    """One cache from its first operation to its last; chance decides everything."""

    def __init__(
        self, page_size: int, policy: str, chance: Chance, *, has_all: bool
    ) -> None:
        """Begin a life.

        Args:
            page_size: Tokens a page.
            policy: Who is evicted first.
            chance: Decides everything.
            has_all: Whether all features are on, or each with a chance of a half.
        """

        def is_on() -> bool:
            return has_all or chance.happens(50)

        self.chance = chance
        self.now = 0.0
        memory = MemoryManager(
            12 + chance.below(MAX_NUM_PAGES - 11),
            page_size,
            max_num_requests=NUM_ROWS,
            max_context_len=MAX_PAGES_PER_REQUEST * page_size,
        )
        cache = RadixCache(
            memory,
            LRU() if policy == "keyed lru" else policy,
            retention_share=RETENTION_SHARE,
            clock=lambda: self.now,
            outputs_first=is_on(),
            partial_pages=is_on(),
            max_num_contents=MAX_NUM_CONTENTS,
            explain=is_on(),
        )
        super().__init__(
            cache,
            max_num_pages=MAX_NUM_PAGES,
            namespaces=NAMESPACES,
            retention_share=RETENTION_SHARE,
        )
        self.texts: list[Text] = [Text([1], None)]
        self.waiting: list[Text] = []
        self.digests: dict[int, bytes] = {}
        self.has_contents = is_on()
        weights: list[tuple[Callable[[], None], int]] = [
            (self.admit, 22),
            (self.extend, 22),
            (self.decode, 22),
            (self.publish, 6),
            (self.finish, 10),
            (self.retract, 4),
            (self.abort, 1),
            (self.truncate, 2),
            (self.lose_a_message, 1),
            (self.evict, 2),
            (self.evict_if_needed, 1),
            (self.ask, 2),
            (self.wait, 2),
            (self.retain, 2 if is_on() else 0),
            (self.set_quota, 1 if is_on() else 0),
            (self.bump_epoch, 1 if is_on() else 0),
            (self.resize, 2 if is_on() else 0),
        ]
        self.operations = [
            operation for operation, weight in weights for _ in range(weight)
        ]

    def live(self, num_operations: int) -> None:
        """Do as many random operations, then end everything."""
        for number in range(1, num_operations + 1):
            self.operate()
            if number % OPERATIONS_PER_CHECK == 0:
                self.check_everything()
        self.end()

    def operate(self) -> None:
        """Do one random operation."""
        # A reset ends everything, so it must be seldom.
        if self.chance.below(600):
            self.chance.pick(self.operations)()
        else:
            self.reset()
        self.check_law()

    # A request's life -------------------------------------------------------

    def admit(self) -> None:
        text = self.waiting.pop(0) if self.waiting else self.invent()
        try:
            tokens = [self.intern_again(token) for token in text.tokens]
            matched = self.cache.match_prefix(tokens, text.namespace)
        except (OutOfContentsError, TokenError):
            # Too many contents, or the last of them took the place of the first.
            self.events["out of contents"] += 1
            assert self.cache.stats().num_contents == MAX_NUM_CONTENTS
            return
        kv = self.cache.admit(
            tokens,
            namespace=text.namespace,
            priority=self.chance.below(3),
            computed_len=min(text.computed_len, len(tokens)),
        )
        if kv is None:
            self.events["no row"] += 1
            return
        self.events["admitted"] += 1
        self.events["resumed"] += text.computed_len > 0
        run = Run(kv, tokens, text.namespace, self.epochs[text.namespace], len(tokens))
        self.runs.append(run)
        hit = min(matched, (len(tokens) - 1) // self.page_size * self.page_size)
        assert hit <= kv.committed_len < len(tokens)
        assert matched % self.page_size == 0
        self.events["hit"] += hit > 0
        self.events["partial page"] += kv.committed_len > hit
        self.check_content([run])
        self.check_report(run)

    def extend(self) -> None:
        batch = [x for x in self.some() if x.kv.committed_len < len(x.tokens)]
        lens: list[int] = []
        for run in batch:
            rest = len(run.tokens) - run.kv.committed_len
            chunk = rest if self.chance.happens(60) else 1 + self.chance.below(rest)
            lens.append(run.kv.committed_len + chunk)
        kvs = [run.kv for run in batch]
        if not self.step(batch, lens, lambda: self.cache.alloc_for_extend(kvs, lens)):
            self.retract()
            return
        for run, new_len in zip(batch, lens, strict=True):
            if self.chance.happens(95):
                self.cache.commit(run.kv, new_len)

    def decode(self) -> None:
        num_tokens = self.chance.pick([1, 1, 1, 2, 4, self.page_size + 1])
        batch = [
            run
            for run in self.some()
            if run.kv.committed_len == len(run.tokens) <= self.max_len - num_tokens
        ]
        lens = [run.kv.committed_len + num_tokens for run in batch]
        kvs = [run.kv for run in batch]
        alloc = self.cache.alloc_for_decode
        if not self.step(batch, lens, lambda: alloc(kvs, num_tokens)):
            self.retract()
            return
        for run, new_len in zip(batch, lens, strict=True):
            num_accepted = self.chance.below(num_tokens + 1)
            run.tokens += self.drafts_of(run, new_len)[:num_accepted]
            self.cache.commit(run.kv, len(run.tokens))
            self.events["accepted draft"] += num_accepted
            self.events["rejected draft"] += num_tokens - num_accepted
            if self.chance.happens(80):
                self.cache.truncate(run.kv, len(run.tokens))

    def publish(self) -> None:
        if self.runs:
            run = self.chance.pick(self.runs)
            before = self.cache.match_prefix(run.tokens, run.namespace)
            self.cache.cache_unfinished_req(
                run.kv, run.tokens, prompt_len=self.prompt_len_of(run)
            )
            self.check_published(run, before)

    def finish(self) -> None:
        if self.runs:
            run = self.take()
            before = self.cache.match_prefix(run.tokens, run.namespace)
            self.cache.cache_finished_req(
                run.kv, run.tokens, prompt_len=self.prompt_len_of(run)
            )
            self.check_published(run, before)
            self.remember(Text(run.tokens, run.namespace))

    def retract(self) -> None:
        if self.runs:
            run = self.take()
            if self.chance.happens(50):
                self.cache.cache_unfinished_req(run.kv, run.tokens)
            self.waiting.append(Text(run.tokens, run.namespace, run.kv.committed_len))
            self.cache.release(run.kv)

    def abort(self) -> None:
        if self.runs:
            self.cache.release(self.take().kv)

    def truncate(self) -> None:
        if self.runs:
            run = self.chance.pick(self.runs)
            kv = run.kv
            span = kv.allocated_len - kv.protected_len
            self.cache.truncate(kv, kv.protected_len + self.chance.below(span + 1))

    def lose_a_message(self) -> None:
        """A step that fails before a worker hears of it: its requests must go."""
        batch = [x for x in self.some() if x.kv.committed_len < self.max_len]
        try:
            info = self.cache.alloc_for_decode([run.kv for run in batch])
        except OutOfPagesError:
            return
        self.cache.recall(info)
        self.events["recalled"] += 1
        for run in batch:
            self.runs.remove(run)
            self.cache.release(run.kv)

    # The whole cache --------------------------------------------------------

    def evict(self) -> None:
        num_pages = self.chance.below(5)
        pages = [victim.page for victim in self.cache.eviction_order(num_pages)]
        before = set(self.free_pages())
        used = {name: self.spare_size(name) for name in NAMESPACES}
        evicted = self.cache.evict(num_pages * self.page_size)
        self.events["evicted"] += evicted

        assert len(pages) * self.page_size == evicted
        assert set(pages) == set(self.free_pages()) - before
        for name, spare in used.items():
            assert self.spare_size(name) >= min(spare, 0)

    def evict_if_needed(self) -> None:
        num_tokens = self.chance.below(8 * self.page_size)
        free = self.cache.available_size
        evicted = self.cache.evict_if_needed(num_tokens)

        assert evicted % self.page_size == 0
        assert evicted < max(1, num_tokens - free + self.page_size)

    def retain(self) -> None:
        text = self.chance.pick(self.texts)
        try:
            matched = self.cache.match_prefix(text.tokens, text.namespace)
        except TokenError:
            assert min(text.tokens) < 0  # one of its contents is forgotten
            return
        granted = self.cache.retain(
            text.tokens,
            text.namespace,
            priority=1 + self.chance.below(3),
            ttl=self.chance.pick([None, 1.0, 5.0, 50.0]),
        )
        self.events["retained"] += granted

        assert granted <= matched
        self.check_retained()

    def set_quota(self) -> None:
        floor = self.chance.pick([0, 0, 1, 2, 4, 20])
        ceiling = self.chance.pick([None, None, 8, 12, 24])
        try:
            self.cache.set_quota(
                self.chance.pick(NAMESPACES),
                floor_size=floor * self.page_size,
                ceiling_size=None if ceiling is None else ceiling * self.page_size,
            )
        except ConfigError:
            self.events["quota refused"] += 1

    def bump_epoch(self) -> None:
        namespace = self.chance.pick(NAMESPACES)
        self.cache.bump_epoch(namespace)
        self.epochs[namespace] += 1
        self.events["epoch"] += 1
        text = self.chance.pick(self.texts)
        if text.namespace == namespace and min(text.tokens) >= 0:
            assert self.cache.match_prefix(text.tokens, namespace) == 0

    def resize(self) -> None:
        now = self.cache.memory.num_pages
        num_pages = min(max(6, now + self.chance.below(21) - 10), MAX_NUM_PAGES)
        pending = len(self.cache.memory.page_copies.pending)
        try:
            self.cache.resize(num_pages)
        except (PagesInUseError, ConfigError):
            self.events["resize refused"] += 1
            assert now == self.cache.memory.num_pages
            return
        self.events["moved"] += len(self.cache.memory.page_copies.pending) > pending
        assert num_pages == self.cache.memory.num_pages
        for run in self.runs:
            assert self.cache.slots(run.kv).max(initial=0) < (
                (num_pages + 1) * self.page_size
            )
        self.check_content(self.runs)

    def reset(self) -> None:
        while self.runs:
            self.cache.release(self.runs.pop().kv)
        self.cache.reset()
        self.events["reset"] += 1

        assert self.cache.available_size == self.cache.total_size

    def ask(self) -> None:
        """Ask what costs more than a glance, and changes nothing."""
        sizes = self.sizes()
        stats = self.cache.stats()
        assert sizes == (
            stats.available_size,
            stats.evictable_size,
            stats.protected_size,
            stats.held_size,
        )
        assert stats.num_requests == len(self.runs)
        assert stats.num_contents <= MAX_NUM_CONTENTS
        spaces = [self.cache.namespace_stats(name) for name in NAMESPACES]
        assert sum(space.held_size for space in spaces) == stats.held_size
        assert 0 <= self.cache.max_request_size() <= self.max_len
        order = self.cache.eviction_order(MAX_NUM_PAGES)
        assert len({victim.page for victim in order}) == len(order)
        assert self.cache.stats() == stats

    def wait(self) -> None:
        self.now += self.chance.pick([0.25, 1.0, 10.0])
        self.check_retained()

    def end(self) -> None:
        """Nothing stays behind."""
        while self.runs:
            self.finish()
            self.check_law()
        for namespace in NAMESPACES:
            self.cache.set_quota(namespace)
        self.check_everything()
        while self.cache.evict(3 * self.page_size):
            self.check_law()
        self.check_everything()

        assert self.cache.available_size == self.cache.total_size
        assert self.cache.retained_size == 0
        assert self.cache.stats().num_requests == 0

    # What they are made of --------------------------------------------------

    def some(self) -> list[Run]:
        """Each running request with a chance of a half, in any order."""
        start = self.chance.below(len(self.runs) + 1)
        turned = self.runs[start:] + self.runs[:start]
        return [run for run in turned if self.chance.happens(50)]

    def take(self) -> Run:
        return self.runs.pop(self.chance.below(len(self.runs)))

    def prompt_len_of(self, run: Run) -> int | None:
        return run.prompt_len if self.chance.happens(80) else None

    def invent(self) -> Text:
        """A known text, cut or continued; or a new one."""
        namespace = self.chance.pick(NAMESPACES)
        tokens: list[int] = []
        if self.chance.happens(80):
            known = self.chance.pick(self.texts)
            namespace = known.namespace
            tokens = list(known.tokens)
            if self.chance.happens(50):
                del tokens[self.chance.below(len(tokens) + 1) :]
        if self.chance.happens(60):
            for _ in range(self.chance.below(7)):
                tokens += [self.chance.below(2)] * self.page_size
            tokens += [self.chance.below(3)] * self.chance.below(self.page_size + 1)
        if self.has_contents and self.chance.happens(25):
            tokens.insert(self.chance.below(len(tokens) + 1), self.new_content())
        tokens = tokens[: self.max_len] or [2]
        text = Text(tokens, namespace)
        self.remember(text)
        return text

    def remember(self, text: Text) -> None:
        if len(self.texts) < NUM_TEXTS:
            self.texts.append(text)
        else:
            self.texts[self.chance.below(NUM_TEXTS)] = text

    def new_content(self) -> int:
        try:
            return self.intern(self.chance.pick(DIGESTS))
        except OutOfContentsError:
            self.events["out of contents"] += 1
            return 2

    def intern(self, digest: bytes) -> int:
        token = self.cache.intern(digest)
        self.events["content"] += 1
        # Numbers are not given out again for a long time.
        assert self.digests.setdefault(token, digest) == digest
        return token

    def intern_again(self, token: int) -> int:
        """The token that a content has by now."""
        return token if token >= 0 else self.intern(self.digests[token])

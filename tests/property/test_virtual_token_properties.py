"""Contents that come and go: no false match, no missed match, nothing kept too long.

Texts hold small numbers for tokens, and numbers from 100 on for contents. The oracle
compares these; the cache gets the virtual tokens that the contents have at the time.
Which contents are alive is recounted from the oracle's pages and requests.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from radixkv.mem_cache import (
    CacheBusyError,
    ChunkCache,
    MemoryManager,
    OutOfContentsError,
    OutOfPagesError,
    PagesInUseError,
    PrefixCache,
    RadixCache,
    RadixKVError,
    RequestKV,
    TokenError,
)
from radixkv.mem_cache.testing import CacheOracle, ModelRequest, NoRoomError
from radixkv.mem_cache.virtual_tokens import LOWEST_TOKEN

FIRST_CONTENT = 100
NUM_CONTENTS = 6
NEVER_GIVEN = -12_345
MAX_PAGES = 10

contents = st.integers(FIRST_CONTENT, FIRST_CONTENT + NUM_CONTENTS - 1)
outputs = st.integers(0, 1) | contents
picks = st.integers(0, 11)


def digest_of(content: int) -> bytes:
    """Digests of several lengths that differ in their last byte only."""
    return bytes(15 + content % 3) + bytes([content])


@dataclass(eq=False)
class Live:
    """A running request; `admitted` are the contents that it was admitted with."""

    kv: RequestKV
    model: ModelRequest
    text: list[int]
    admitted: set[int]


class VirtualTokenMachine(RuleBasedStateMachine):
    """Interns, admits, publishes and evicts, and recounts who is alive after it."""

    @initialize(
        kind=st.sampled_from(["lru", "lru", "lfu", "none"]),
        page_size=st.sampled_from([1, 1, 2, 3, 16]),
        num_pages=st.integers(3, MAX_PAGES),
        max_num_contents=st.integers(1, 4),
        last_token=st.sampled_from([0, 0, LOWEST_TOKEN + 2]),
    )
    def start(
        self,
        kind: str,
        page_size: int,
        num_pages: int,
        max_num_contents: int,
        last_token: int,
    ) -> None:
        self.max_len = 8 * page_size
        memory = MemoryManager(
            num_pages, page_size, max_num_requests=3, max_context_len=self.max_len
        )
        self.cache: PrefixCache = (
            ChunkCache(memory, max_num_contents=max_num_contents)
            if kind == "none"
            else RadixCache(memory, kind, max_num_contents=max_num_contents)
        )
        self.cache._virtual.last_token = last_token
        self.last_token = last_token
        self.max_num_contents = max_num_contents
        self.oracle = CacheOracle(num_pages, page_size, 3, kind)
        self.live: list[Live] = []
        self.texts: dict[tuple[Hashable, tuple[int, ...]], None] = {}
        self.tokens: dict[int, int] = {}  # the last that each content had
        self.claims: dict[int, int] = {}
        self.waiting_since: dict[int, int] = {}  # contents that only claims keep
        self.clock = 0

    # The model of what is alive ---------------------------------------------

    def in_use(self) -> set[int]:
        cached = {token for _, tokens in self.oracle.cached for token in tokens}
        admitted = [content for live in self.live for content in live.admitted]
        return {x for x in [*cached, *admitted] if x >= FIRST_CONTENT}

    def alive(self) -> set[int]:
        return self.in_use() | {x for x, count in self.claims.items() if count}

    def age(self) -> None:
        """Take note of contents that lost their last use."""
        self.clock += 1
        waiting = self.alive() - self.in_use()
        self.waiting_since = {
            content: self.waiting_since.get(content, self.clock) for content in waiting
        }

    def encode(self, text: list[int]) -> list[int]:
        return [
            token if token < FIRST_CONTENT else self.tokens.get(token, NEVER_GIVEN)
            for token in text
        ]

    def all_alive(self, text: list[int]) -> bool:
        return {token for token in text if token >= FIRST_CONTENT} <= self.alive()

    def is_alive(self, content: int) -> bool:
        """What the cache says."""
        try:
            self.cache.match_prefix([self.tokens.get(content, NEVER_GIVEN)])
        except TokenError:
            return False
        return True

    def snapshot(self) -> tuple[object, ...]:
        return (
            self.cache.stats(),
            {content for content in self.tokens if self.is_alive(content)},
            [repr(live.kv) for live in self.live],
            [self.cache.slots(live.kv).tolist() for live in self.live],
        )

    def refuse(self, kind: type[RadixKVError], call: Callable[[], object]) -> str:
        """Expect a typed error and no change; its message."""
        before = self.snapshot()
        with pytest.raises(kind) as caught:
            call()

        assert before == self.snapshot()
        return str(caught.value)

    # Interning --------------------------------------------------------------

    @rule(content=contents)
    def claim(self, content: int) -> None:
        """Intern a content that may never be used."""
        self.intern(content)

    def intern(self, content: int) -> bool:
        """Intern; tells whether there was room."""
        alive, waiting = self.alive(), self.alive() - self.in_use()
        if content not in alive:
            is_full = len(alive) == self.max_num_contents
            if is_full and not waiting:
                self.refuse_content(content)
                return False
            token = self.cache.intern(digest_of(content))
            gone = {x for x in alive if not self.is_alive(x)}
            assert len(gone) == is_full
            for dropped in gone:
                oldest = min(self.waiting_since[x] for x in waiting)
                assert oldest == self.waiting_since[dropped]
                self.claims[dropped] = 0
            assert token == self.next_token()
            self.tokens[content] = self.last_token = token
        else:
            assert self.tokens[content] == self.cache.intern(digest_of(content))
        self.claims[content] = self.claims.get(content, 0) + 1
        self.waiting_since.pop(content, None)
        self.age()
        return True

    def refuse_content(self, content: int) -> None:
        message = self.refuse(
            OutOfContentsError, lambda: self.cache.intern(digest_of(content))
        )
        in_requests = {x for live in self.live for x in live.admitted}
        assert f"all are in use: {len(in_requests)} by running" in message

    def next_token(self) -> int:
        token = self.last_token - 1
        taken = {self.tokens[content] for content in self.alive()}
        while token < LOWEST_TOKEN or token in taken:
            token = token - 1 if token > LOWEST_TOKEN else -1
        return token

    # Requests ---------------------------------------------------------------

    @rule(
        parts=st.lists(
            st.tuples(st.integers(0, 1) | contents, st.integers(0, 3)),
            min_size=1,
            max_size=4,
        ),
        base=picks | st.none(),
        namespace=st.sampled_from([None, None, "tenant"]),
        interned=st.integers(0, 9),
        until=st.sampled_from(["admitted", "computed", "published", "finished"]),
    )
    def serve(
        self,
        parts: list[tuple[int, int]],
        base: int | None,
        namespace: Hashable,
        interned: int,
        until: str,
    ) -> None:
        """Take a prompt some way: a new one, or a known text, continued."""
        page_size = self.oracle.page_size
        sizes = [1, max(1, page_size - 1), page_size, 2 * page_size]
        text = [token for token, size in parts for _ in range(sizes[size])]
        if base is not None and self.texts:
            namespace, known = list(self.texts)[base % len(self.texts)]
            text = [*known, *text]
        text = text[: self.max_len]
        for content in dict.fromkeys(x for x in text if x >= FIRST_CONTENT):
            if interned and not self.intern(content):
                return
        tokens = self.encode(text)
        if not self.all_alive(text):
            self.refuse(TokenError, lambda: self.cache.match_prefix(tokens))
            self.refuse(TokenError, lambda: self.cache.admit(tokens))
            return
        self.texts[namespace, tuple(text)] = None
        live = self.admit(text, namespace)
        if live is None or until == "admitted" or not self.compute(live, len(text)):
            return
        if until == "published":
            self.publish(live)
        elif until == "finished":
            self.finish(live)

    def admit(self, text: list[int], namespace: Hashable) -> Live | None:
        kv = self.cache.admit(self.encode(text), namespace=namespace)
        model = self.oracle.admit(text, namespace)
        if kv is None or model is None:
            assert kv is model
            return None
        admitted = {token for token in text if token >= FIRST_CONTENT}
        for content in admitted:
            self.claims[content] = max(0, self.claims.get(content, 0) - 1)
        live = Live(kv, model, list(text), admitted)
        self.live.append(live)
        self.age()
        return live

    def compute(self, live: Live, stop: int) -> bool:
        """Compute up to `stop`, or retract the request if there is no room."""
        try:
            self.oracle.alloc([live.model], [stop])
        except NoRoomError:
            call = self.cache.alloc_for_extend
            self.refuse(OutOfPagesError, lambda: call([live.kv], [stop]))
            self.release(live)
            return False
        self.cache.alloc_for_extend([live.kv], [stop])
        slots = self.cache.slots(live.kv)[:: self.oracle.page_size]
        self.oracle.see_pages(live.model, (slots // self.oracle.page_size).tolist())
        self.cache.commit(live.kv, stop)
        self.oracle.commit(live.model, stop)
        self.age()
        return True

    def publish(self, live: Live) -> bool:
        """Publish, or be refused for an output that is no longer alive."""
        tokens = self.encode(live.text)
        start, stop = live.kv.protected_len, live.kv.committed_len
        new = live.text[start : stop // self.oracle.page_size * self.oracle.page_size]
        if self.oracle.policy != "none" and not self.all_alive(new):
            publish, finish = (
                self.cache.cache_unfinished_req,
                self.cache.cache_finished_req,
            )
            self.refuse(TokenError, lambda: publish(live.kv, tokens))
            self.refuse(TokenError, lambda: finish(live.kv, tokens))
            return False
        self.cache.cache_unfinished_req(live.kv, tokens)
        self.oracle.publish(live.model, live.text)
        self.age()
        return True

    def finish(self, live: Live) -> None:
        if self.publish(live):
            self.cache.cache_finished_req(live.kv, self.encode(live.text))
            self.oracle.finish(live.model, live.text)
            self.live.remove(live)
            self.age()

    def release(self, live: Live) -> None:
        self.cache.release(live.kv)
        self.oracle.release(live.model)
        self.live.remove(live)
        for content in live.admitted:
            self.claims[content] = self.claims.get(content, 0) + 1
        self.age()

    @rule(
        how=st.sampled_from(["compute", "decode", "publish", "finish", "release"]),
        number=picks,
        output=outputs,
    )
    def settle(self, how: str, number: int, output: int) -> None:
        """Do something with one request."""
        if not self.live:
            return
        live = self.live[number % len(self.live)]
        if how == "compute" and live.kv.committed_len < len(live.text):
            self.compute(live, len(live.text))
        elif how == "decode" and len(live.text) == live.kv.committed_len < self.max_len:
            if self.compute(live, len(live.text) + 1):
                live.text.append(output)
        elif how == "publish":
            self.publish(live)
        elif how == "finish":
            self.finish(live)
        elif how == "release":
            self.release(live)

    # The whole cache --------------------------------------------------------

    @rule(
        how=st.sampled_from(["evict", "evict", "drain", "epoch", "resize", "reset"]),
        num_pages=st.integers(1, MAX_PAGES),
    )
    def reclaim(self, how: str, num_pages: int) -> None:
        """Do something with the whole cache."""
        if how == "evict":
            victims = self.oracle.evict(num_pages % 3)
            num_tokens = num_pages % 3 * self.oracle.page_size
            assert len(victims) * self.oracle.page_size == self.cache.evict(num_tokens)
        elif how == "drain":
            while self.live:
                self.release(self.live[0])
            self.cache.evict(self.cache.evictable_size)
            self.oracle.evict(MAX_PAGES)
            assert not self.in_use()
        elif how == "epoch":
            self.cache.bump_epoch(None)
            self.oracle.bump_epoch(None)
        elif how == "resize":
            if self.oracle.resize(num_pages) > num_pages:
                self.refuse(PagesInUseError, lambda: self.cache.resize(num_pages))
            else:
                self.cache.resize(num_pages)
        elif self.live:
            self.refuse(CacheBusyError, self.cache.reset)
        else:
            self.cache.reset()
            self.oracle.reset()
        self.age()

    # The checks -------------------------------------------------------------

    @invariant()
    def exactly_those_who_are_needed_are_alive(self) -> None:
        alive = self.alive()

        assert alive == {content for content in self.tokens if self.is_alive(content)}
        assert len(alive) == self.cache.stats().num_contents <= self.max_num_contents

    @invariant()
    def every_match_is_the_oracles(self) -> None:
        self.cache.check_integrity()
        *parts, _ = self.oracle.sizes()
        cache = self.cache

        assert [
            cache.available_size,
            cache.evictable_size,
            cache.protected_size,
            cache.held_size,
        ] == parts
        for namespace, text in list(self.texts)[-12:]:
            if self.all_alive(list(text)):
                expected = self.oracle.match(namespace, text)
                assert expected == cache.match_prefix(
                    self.encode(list(text)), namespace
                )


TestVirtualTokenMachine = VirtualTokenMachine.TestCase
TestVirtualTokenMachine.settings = settings(stateful_step_count=20)

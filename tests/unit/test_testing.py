"""The exported test tools: they notice what they are for, and let the rest pass."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NoReturn

import pytest
from hypothesis import Phase, given, settings

from radixkv.mem_cache import (
    FIFO,
    FILO,
    LFU,
    LRU,
    MRU,
    SLRU,
    ConfigError,
    EvictionPolicy,
    LengthError,
    MemoryManager,
    PrefixCache,
    Priority,
    RadixCache,
    RadixNode,
    RequestHandle,
)
from radixkv.mem_cache.sizes import Integer
from radixkv.mem_cache.testing import (
    CacheMachine,
    CacheOracle,
    CheckedCache,
    check_policy,
    prompts,
)

from .driver import Wrong, make_memory, span


@pytest.fixture(autouse=True)
def find_without_shrinking() -> Iterator[None]:
    """Looking for a smaller example takes longer than finding one."""
    before = settings.get_current_profile_name()
    settings.register_profile("find", deadline=None, phases=[Phase.generate])
    settings.load_profile("find")
    yield
    settings.load_profile(before)


def test_the_library_itself_needs_no_hypothesis() -> None:
    code = "import sys, radixkv.scheduling; print('hypothesis' in sys.modules)"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, check=True, capture_output=True, text=True)

    assert result.stdout.strip() == "False"


def test_the_tools_need_no_pytest() -> None:
    code = "import sys, radixkv.scheduling.testing; print('pytest' in sys.modules)"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, check=True, capture_output=True, text=True)

    assert result.stdout.strip() == "False"


# Policies ---------------------------------------------------------------------


@pytest.mark.parametrize("policy", [LRU, MRU, FIFO, FILO, LFU, SLRU, Priority])
def test_the_built_in_policies_keep_their_promises(
    policy: Callable[[], EvictionPolicy],
) -> None:
    check_policy(policy, max_examples=5)


class Random:
    def __init__(self) -> None:
        self.random = random.Random()

    def key(self, node: RadixNode) -> float:
        return self.random.random()


class RandomOnce(Random):
    """Keys that stay, but are others in each run."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: dict[tuple[RadixNode, int], float] = {}

    def key(self, node: RadixNode) -> float:
        return self.keys.setdefault((node, node.last_use), self.random.random())


class Size:
    def key(self, node: RadixNode) -> int:
        return node.num_pages


class Siblings:
    def key(self, node: RadixNode) -> int:
        return len(node.parent.children)


class Meddler:
    def key(self, node: RadixNode) -> int:
        node.priority += 1
        return 0


class NoNumber:
    def key(self, node: RadixNode) -> float:
        return float("nan")


class Sets:
    """Of two sets, often none is less."""

    def key(self, node: RadixNode) -> frozenset[int]:
        return frozenset([node.created])


class Mixed:
    def key(self, node: RadixNode) -> int | None:
        return None if node.num_hits else 0


class Fails:
    def key(self, node: RadixNode) -> float:
        return 1 / (2 - node.num_hits)


class FailsToLearn(LRU):
    def evicted(self, node: RadixNode, key: bytes, pages: bytes) -> NoReturn:
        raise KeyError("evicted")


class Counts:
    """Changes the keys of leaves that nobody used."""

    def __init__(self) -> None:
        self.num_admissions = 0

    def used(self, nodes: list[RadixNode]) -> None:
        self.num_admissions += 1

    def key(self, node: RadixNode) -> int:
        return self.num_admissions


@pytest.mark.parametrize(
    ("policy", "promise"),
    [
        (Random, "must do the same in every run|must stay the same"),
        (RandomOnce, "must do the same in every run|must give the same order"),
        (Size, "must stay the same until its next use"),
        (Siblings, "must stay the same until its next use"),
        (Meddler, "key must not change RadixNode"),
        (NoNumber, "a key must equal itself, got nan"),
        (Sets, "of two keys one must be less, or both equal"),
        (Mixed, "no method may fail"),
        (Fails, "key must not fail: ZeroDivisionError"),
        (FailsToLearn, "no method may fail"),
        (Counts, "must stay the same until its next use"),
    ],
)
def test_a_policy_that_breaks_a_promise_is_told_which(
    policy: Callable[[], EvictionPolicy], promise: str
) -> None:
    with pytest.raises(AssertionError, match=promise):
        check_policy(policy)


class Learns:
    """Counts how often each first page was published, which is fine."""

    def __init__(self) -> None:
        self.seen: dict[RadixNode, int] = {}

    def published(self, node: RadixNode, start: int) -> None:
        self.seen.setdefault(node, len(self.seen))

    def key(self, node: RadixNode) -> int:
        return self.seen.get(node, -1)


def test_a_policy_that_learns_may_pass() -> None:
    check_policy(Learns, max_examples=10)


# Caches -----------------------------------------------------------------------


class Machine(CacheMachine):
    """The state machine with a cache of its own."""

    policy: EvictionPolicy = LFU()

    def make_cache(self, memory: MemoryManager) -> PrefixCache:
        return RadixCache(memory, self.policy, debug=True)

    def make_oracle(self, num_pages: int, page_size: int, num_rows: int) -> CacheOracle:
        return CacheOracle(num_pages, page_size, num_rows, self.policy)


def serve(checked: CheckedCache, tokens: list[int]) -> None:
    live = checked.admit(tokens)
    assert live is not None
    checked.extend([live], [len(tokens)])
    checked.commit(live, len(tokens))
    checked.finish(live)


def run(machine: type[CacheMachine]) -> None:
    case = machine.TestCase
    case.settings = settings(
        max_examples=100, stateful_step_count=20, derandomize=True, database=None
    )
    case().runTest()


@pytest.mark.parametrize("policy", [FILO(), SLRU()])
def test_a_sound_cache_with_any_policy_passes(policy: EvictionPolicy) -> None:
    class Sound(Machine):
        pass

    Sound.policy = policy
    run(Sound)


class KeepsTooMuch(RadixCache):
    """Forgets to give pages back."""

    def truncate(self, request: RequestHandle, new_len: Integer) -> None:
        self.commit(request, max(request.committed_len, new_len))


class MatchesTooLittle(RadixCache):
    def match_prefix(self, tokens: Wrong, namespace: Hashable = None) -> int:
        return max(0, super().match_prefix(tokens, namespace) - self.page_size)


class TellsNothing(RadixCache):
    def evict(self, num_tokens: Integer) -> int:
        super().evict(num_tokens)
        return 0


class RefusesBadly(RadixCache):
    def commit(self, request: RequestHandle, new_len: Integer) -> None:
        if request.allocated_len < new_len:
            self.evict(1)
            raise LengthError("too far")
        super().commit(request, new_len)


class RefusesNothing(RadixCache):
    def commit(self, request: RequestHandle, new_len: Integer) -> None:
        if new_len <= request.allocated_len:
            super().commit(request, new_len)


@pytest.mark.parametrize(
    "cache",
    [KeepsTooMuch, MatchesTooLittle, TellsNothing, RefusesBadly, RefusesNothing],
)
def test_a_cache_with_a_fault_fails(cache: type[RadixCache]) -> None:
    class Faulty(CacheMachine):
        def make_cache(self, memory: MemoryManager) -> PrefixCache:
            return cache(memory)

    with pytest.raises((AssertionError, ExceptionGroup)):
        run(Faulty)


@pytest.mark.parametrize("policy", ["lru", "mru"])
def test_a_cache_with_another_policy_than_the_oracle_fails(policy: str) -> None:
    checked = CheckedCache(
        RadixCache(make_memory(8), policy), CacheOracle(8, 4, 8, "lru")
    )
    for first in (10, 20, 30):
        serve(checked, span(first, first + 4))
        checked.check()

    if policy == "lru":
        checked.drain()
        return
    with pytest.raises(AssertionError):
        checked.drain()


def test_an_oracle_knows_the_built_in_policies_only() -> None:
    with pytest.raises(ConfigError, match="policy must be one of"):
        CacheOracle(8, 1, 1, "best")


def test_a_call_that_is_not_refused_fails() -> None:
    checked = CheckedCache(RadixCache(make_memory(8)), CacheOracle(8, 4, 8, "lru"))
    with (
        pytest.raises(AssertionError, match="the call was not refused"),
        checked.refused(LengthError),
    ):
        checked.cache.evict(0)


def test_kv_of_somebody_else_in_a_slot_is_noticed() -> None:
    checked = CheckedCache(RadixCache(make_memory(8)), CacheOracle(8, 4, 8, "lru"))
    live = checked.admit(span(1, 8))
    assert live is not None
    checked.extend([live], [8])
    checked.commit(live, 8)
    checked.check()
    checked.worker.compute(live.kv.req_pool_idx, 2, 3, [0, 0, 7])

    with pytest.raises(AssertionError):
        checked.check()


# Strategies -------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 2, 3, 16])
def test_prompts_fit_and_share_prefixes(page_size: int) -> None:
    seen: list[Sequence[int]] = []

    @settings(max_examples=50, derandomize=True, database=None, deadline=None)
    @given(prompts(page_size, 5))
    def collect(prompt: list[int]) -> None:
        assert 0 < len(prompt) <= 6 * page_size
        assert set(prompt) <= {0, 1, 2}
        seen.append(prompt)

    collect()
    whole = [tuple(prompt[:page_size]) for prompt in seen if len(prompt) >= page_size]
    assert len(set(whole)) < len(whole)
    assert len({tuple(prompt) for prompt in seen}) > 5


def test_prompts_of_no_page_at_all_have_a_token() -> None:
    @settings(max_examples=20, derandomize=True, database=None)
    @given(prompts(1, 0))
    def collect(prompt: list[int]) -> None:
        assert prompt == [0]

    collect()

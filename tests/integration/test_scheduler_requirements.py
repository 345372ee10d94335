"""Requirements that concern the scheduler, by their id."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray

from radixkv.mem_cache import (
    ChunkCache,
    KVCacheInfo,
    MemoryManager,
    PrefixCache,
    RadixCache,
    RequestKV,
)
from radixkv.scheduling import (
    Batch,
    Engine,
    NullRunner,
    Request,
    SamplingParams,
    Scheduler,
    SchedulerLimits,
)
from radixkv.scheduling.testing import LabelRunner

from ..unit.failing_steps import watch_steps

PROMPTS = [list(range(10)), [*range(8), 50, 51], list(range(20, 43))]


def make_cache(page_size: int = 4) -> RadixCache:
    return RadixCache(
        MemoryManager(
            40 // page_size, page_size, max_num_requests=4, max_context_len=40
        )
    )


def make_requests() -> list[Request]:
    return [Request(i, prompt, SamplingParams(6)) for i, prompt in enumerate(PROMPTS)]


def outputs_of(requests: list[Request]) -> list[list[int]]:
    return [request.output_tokens for request in requests]


@dataclass
class FakeKV:
    """The least that a scheduler reads of a running request."""

    committed_len: int = 0
    allocated_len: int = 0
    num_pages: int = 0


class FakeStep:
    """The least that a scheduler needs of a step."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls
        self.starts: list[int] = []
        self.stops: list[int] = []

    def extend(self, requests: Sequence[FakeKV], new_lens: Sequence[int]) -> None:
        self.calls.append("extend")
        self.starts += [kv.committed_len for kv in requests]
        self.stops += new_lens

    def decode(self, requests: Sequence[FakeKV]) -> None:
        self.calls.append("decode")
        self.starts += [kv.committed_len for kv in requests]
        self.stops += [kv.committed_len + 1 for kv in requests]

    def message(self) -> KVCacheInfo:
        zeros = [0] * len(self.starts)
        return KVCacheInfo.pack(zeros, self.starts, self.stops, zeros, [0, *zeros], b"")

    def recall(self) -> None:
        self.calls.append("recall")


class FakeCache:
    """The least that a scheduler needs: endless memory, and a log of the calls."""

    shares_prefixes = False

    def __init__(self) -> None:
        self.page_size = 1
        self.version = 0
        self.total_size = self.available_size = 10**6
        self.evictable_size = 0
        self.memory = SimpleNamespace(
            max_context_len=10**6, claim=lambda scheduler: None
        )
        self.calls: list[str] = []

    def max_request_size(self, namespace: Hashable = None) -> int:
        return 10**6

    def match_prefix(self, tokens: object, namespace: Hashable = None) -> int:
        return 0

    def admission_obstacle(
        self, tokens: object, max_len: int, **options: object
    ) -> None:
        return None

    def admit(
        self,
        tokens: object,
        *,
        namespace: Hashable = None,
        priority: int = 0,
        computed_len: int = 0,
    ) -> FakeKV:
        self.calls.append("admit")
        return FakeKV()

    def begin_step(self) -> FakeStep:
        return FakeStep(self.calls)

    def commit(self, request: FakeKV, new_len: int) -> None:
        request.committed_len = new_len

    def cache_unfinished_req(
        self, request: FakeKV, tokens: object, *, prompt_len: int
    ) -> None:
        self.calls.append("cache_unfinished_req")

    def cache_finished_req(
        self, request: FakeKV, tokens: object, *, prompt_len: int
    ) -> None:
        self.calls.append("cache_finished_req")


def test_s0_1_a_server_runs_without_torch_and_without_a_pool() -> None:
    code = """
import sys
from radixkv.mem_cache import MemoryManager, RadixCache
from radixkv.scheduling import *

cache = RadixCache(MemoryManager(8, 4, max_num_requests=2, max_context_len=32))
engine = Engine(Scheduler(cache), NullRunner(9))
request, = engine.generate([Request(0, range(10), SamplingParams(5))])
print(len(request.output_tokens), "torch" in sys.modules)
""".replace("import *", "import Engine, NullRunner, Request, SamplingParams, Scheduler")
    command = [sys.executable, "-c", code]

    result = subprocess.run(command, check=True, capture_output=True, text=True)

    assert ["5", "False"] == result.stdout.split()


def test_s0_8_a_fake_cache_can_be_injected() -> None:
    cache = FakeCache()
    scheduler = Scheduler(
        cast(PrefixCache, cache), SchedulerLimits(chunked_prefill_size=6)
    )
    request = Request("a", range(10), SamplingParams(max_new_tokens=3))

    Engine(scheduler, NullRunner(9)).generate([request])

    assert len(request.output_tokens) == 3
    expected = ["admit", *["extend", "cache_unfinished_req"] * 2]
    expected += ["decode"] * 2 + ["cache_finished_req"]
    assert expected == cache.calls


def test_s0_9_engines_with_other_page_sizes_run_side_by_side() -> None:
    expected = outputs_of(
        Engine(Scheduler(make_cache()), NullRunner(99)).generate(make_requests())
    )
    engines: list[tuple[Engine, list[Request]]] = []
    for page_size in (1, 2, 5):
        cache = make_cache(page_size)
        engine = Engine(Scheduler(cache), LabelRunner(cache, 99), on_error="raise")
        requests = make_requests()
        for request in requests:
            engine.scheduler.add_request(request)
        engines.append((engine, requests))

    while any(engine.scheduler.has_requests for engine, _ in engines):
        for engine, _ in engines:
            engine.step()
            engine.scheduler.cache.check_integrity()

    for _, requests in engines:
        assert expected == outputs_of(requests)


class Recorder:
    """Keeps every message."""

    def __init__(self) -> None:
        self.messages: list[KVCacheInfo] = []
        self._null = NullRunner(99)

    def run(self, batch: Batch) -> NDArray[np.int32]:
        self.messages.append(batch.kv_cache_info)
        return self._null.run(batch)


def test_s0_9_a_replayed_workload_sends_the_same_messages() -> None:
    recorders = [Recorder(), Recorder()]

    for recorder in recorders:
        Engine(Scheduler(make_cache(2)), recorder).generate(make_requests())

    assert len(recorders[0].messages) > 6
    assert recorders[0].messages == recorders[1].messages


def test_s2_3_a_decode_allocates_before_the_length_grows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = make_cache()
    scheduler = Scheduler(cache)
    engine = Engine(scheduler, NullRunner(9))
    request = Request("a", range(4), SamplingParams(max_new_tokens=3))
    scheduler.add_request(request)
    engine.step()
    seen: list[tuple[int, int, int]] = []

    def note(
        decode: Callable[[Sequence[RequestKV]], None], kvs: Sequence[RequestKV]
    ) -> None:
        (kv,) = kvs
        before = (request.num_tokens, kv.committed_len, kv.allocated_len)
        decode([kv])
        assert before[:2] == (request.num_tokens, kv.committed_len)
        # The new slot stands where the newest token does.
        assert kv.allocated_len == request.num_tokens
        seen.append(before)

    watch_steps(monkeypatch, cache, "decode", note)
    engine.step()

    assert [(5, 4, 4)] == seen


@pytest.mark.parametrize("kind", [RadixCache, ChunkCache])
def test_s2_2_the_scheduler_gets_memory_in_two_ways_only(
    kind: type[RadixCache] | type[ChunkCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = kind(MemoryManager(10, 4, max_num_requests=4, max_context_len=40))
    for method in ("evict", "evict_if_needed", "truncate", "reset", "resize"):
        monkeypatch.delattr(f"radixkv.mem_cache.prefix_cache.PrefixCache.{method}")

    requests = Engine(Scheduler(cache), NullRunner(9)).generate(make_requests())

    assert [6, 6, 6] == [request.num_output_tokens for request in requests]


def test_s2_8_nothing_is_evicted_when_enough_is_free() -> None:
    cache = make_cache()
    engine = Engine(Scheduler(cache), NullRunner(9))

    engine.generate([Request("first", range(10), SamplingParams(5))])
    engine.generate([Request("second", range(50, 60), SamplingParams(5))])

    assert cache.stats().num_evicted_tokens == 0
    assert cache.match_prefix(range(10)) == 8

"""One engine process, two worker processes, and nothing but messages between them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import msgspec
import pytest

from radixkv.mem_cache import KVCacheInfo, MemoryManager, RadixCache, RequestKV

from .kv_worker import Read, Resize, Setup, Step, chain, receive, send

NUM_PAGES = 24
PAGE_SIZE = 4
NUM_ROWS = 5
MAX_LEN = 32


class Workers:
    """Two processes that get every message, once and in order."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("kv_worker.py")
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-P", str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for _ in range(2)
        ]
        self.broadcast(Setup(NUM_PAGES, PAGE_SIZE, NUM_ROWS, MAX_LEN // PAGE_SIZE))

    def broadcast(self, message: msgspec.Struct) -> None:
        for process in self.processes:
            assert process.stdin is not None
            send(process.stdin, message)

    def read(self, slots: list[int]) -> list[list[list[int]]]:
        """Ask each worker for K and V of some slots."""
        self.broadcast(Read(slots))
        answers = []
        for process in self.processes:
            assert process.stdout is not None
            wire = receive(process.stdout)
            assert wire is not None
            answers.append(msgspec.msgpack.decode(wire, type=list[list[int]]))
        return answers

    def close(self) -> None:
        for process in self.processes:
            process.communicate(timeout=30)
            assert process.returncode == 0


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers()
    yield workers
    workers.close()


class Driver:
    """The engine side: it holds no K and no V, and never sees a worker's pool."""

    def __init__(self, workers: Workers, *, partial_pages: bool = False) -> None:
        memory = MemoryManager(
            NUM_PAGES, PAGE_SIZE, max_num_requests=NUM_ROWS, max_context_len=MAX_LEN
        )
        self.cache = RadixCache(memory, partial_pages=partial_pages)
        self.workers = workers
        self.random = Random(11)
        self.texts: list[list[int]] = [[1, 2, 3]]
        self.running: dict[RequestKV, list[int]] = {}
        self.num_copies = 0
        self.num_partial_hits = 0

    def step(self) -> None:
        """Admit, prefill, decode, publish, finish and abort, a bit of each."""
        self.admit()
        new = [x for x in self.running if x.committed_len < len(self.running[x])]
        if new:
            lens = [len(self.running[request]) for request in new]
            self.run(new, lambda: self.cache.alloc_for_extend(new, lens))
        old = [x for x in self.running if len(self.running[x]) < MAX_LEN]
        for request in old:
            self.running[request].append(self.random.randrange(9))
        if old:
            self.run(old, lambda: self.cache.alloc_for_decode(old))
        for request, tokens in list(self.running.items()):
            chance = self.random.random()
            if chance < 0.3:
                self.cache.cache_unfinished_req(request, tokens)
            elif chance < 0.5 or len(tokens) == MAX_LEN:
                self.cache.cache_finished_req(request, tokens)
                self.texts.append(self.running.pop(request))
            elif chance < 0.6:
                self.cache.release(request)
                del self.running[request]

    def admit(self) -> None:
        for _ in range(2):
            text = self.random.choice(self.texts)[: self.random.randint(1, 20)]
            tokens = [*text, self.random.randrange(9)]
            if len(self.running) == NUM_ROWS - 2:  # so that there is always room
                return
            request = self.cache.admit(tokens)
            assert request is not None
            self.running[request] = tokens
            self.num_partial_hits += request.committed_len % PAGE_SIZE > 0

    def run(self, batch: list[RequestKV], alloc: Callable[[], KVCacheInfo]) -> None:
        """Let the workers compute a step, and take note that they did."""
        info = alloc()
        self.num_copies += info.num_copies
        tokens: list[int] = []
        for request, stop in zip(batch, info.stops.tolist(), strict=True):
            tokens += self.running[request][request.committed_len : stop]
            self.cache.commit(request, stop)
        self.workers.broadcast(Step(info, tokens))

    def shrink_and_grow(self) -> None:
        """Cut the pools as far as they go; the workers follow with the next message."""
        cache = self.cache
        in_use = (cache.protected_size + cache.held_size) // PAGE_SIZE
        num_pages = min(NUM_PAGES, max(1, in_use + self.random.randrange(3)))
        cache.resize(num_pages)
        self.run([], lambda: cache.alloc_for_extend([], []))
        self.workers.broadcast(Resize(num_pages))
        self.workers.broadcast(Resize(NUM_PAGES))
        cache.resize(NUM_PAGES)

    def check(self) -> None:
        """Both workers hold what each running request's own tokens lead to."""
        slots: list[int] = []
        expected: list[int] = []
        for request, tokens in self.running.items():
            slots += self.cache.slots(request, 0, request.committed_len).tolist()
            value = 0
            for token in tokens[: request.committed_len]:
                value = chain(value, token)
                expected.append(value)
        for k, v in self.workers.read(slots):
            assert expected == k
            assert [-x for x in expected] == v


def test_s0_11_all_workers_end_with_the_same_and_right_kv(workers: Workers) -> None:
    driver = Driver(workers)
    for _ in range(120):
        driver.step()
        driver.check()
        driver.cache.check_integrity()
    stats = driver.cache.stats()

    assert stats.num_evicted_tokens > 100
    assert stats.num_duplicate_tokens > 0
    assert stats.num_cached_tokens > 500
    first, second = workers.read(list(range(PAGE_SIZE, (NUM_PAGES + 1) * PAGE_SIZE)))
    assert first == second
    assert len(set(first[0])) > 50


def test_workers_follow_when_pages_move_and_when_requests_begin_inside_one(
    workers: Workers,
) -> None:
    driver = Driver(workers, partial_pages=True)
    for number in range(60):
        driver.step()
        if number % 2:
            driver.shrink_and_grow()
        driver.check()
        driver.cache.check_integrity()

    assert driver.num_partial_hits > 5
    assert driver.num_copies > 2 * driver.num_partial_hits

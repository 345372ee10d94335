"""A scheduler with a runner, for tests that drive it step by step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixkv.mem_cache import ChunkCache, MemoryManager, PrefixCache, RadixCache
from radixkv.scheduling import (
    Batch,
    NullRunner,
    Request,
    RequestStatus,
    SamplingParams,
    Scheduler,
    SchedulerLimits,
)


class TinyScheduler:
    """A few pages, and requests by name.

    Attributes:
        cache: The cache.
        scheduler: The scheduler.
        requests: All that were accepted, by name.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int = 1,
        *,
        num_rows: int = 8,
        is_cached: bool = True,
        limits: SchedulerLimits | None = None,
        **options: Any,  # noqa: ANN401 - those of Scheduler
    ) -> None:
        memory = MemoryManager(
            num_pages,
            page_size,
            max_num_requests=num_rows,
            max_context_len=num_pages * page_size,
        )
        self.cache: PrefixCache = (
            RadixCache(memory) if is_cached else ChunkCache(memory)
        )
        self.scheduler = Scheduler(self.cache, limits, **options)
        self.requests: dict[str, Request] = {}
        self._runner = NullRunner(99)

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        max_new_tokens: int = 1,
        *,
        namespace: Hashable = None,
        priority: int = 0,
    ) -> Request:
        """Submit a request that always generates all that it may."""
        request = Request(
            name,
            prompt,
            SamplingParams(max_new_tokens),
            namespace=namespace,
            priority=priority,
        )
        self.scheduler.add_request(request)
        self.requests[name] = request
        return request

    def step(self, count: int = 1) -> str:
        """Compute steps; the names of those in the last one, in its order."""
        names = ""
        for _ in range(count):
            batch = self.scheduler.schedule()
            if batch is None:
                self.scheduler.take_outputs()
                return ""
            names = "".join(str(entry.request.request_id) for entry in batch.entries)
            self.scheduler.update(batch, self.run(batch))
            self.cache.check_integrity()
        return names

    def step_until(self, is_there: Callable[[], object]) -> str:
        """Compute steps until something is there, at least one; see `step`."""
        for _ in range(200):
            names = self.step()
            if is_there():
                return names
        raise AssertionError("it never came")

    def run(self, batch: Batch) -> NDArray[np.int32]:
        """Sample the next tokens."""
        return self._runner.run(batch)

    def drain(self) -> None:
        """Compute everything to its end."""
        while self.scheduler.has_requests:
            assert self.step() or not self.scheduler.num_waiting
        assert self.cache.held_size == self.cache.protected_size == 0

    def names(self, status: RequestStatus) -> str:
        """Those with a status, in the order of arrival."""
        return "".join(n for n, r in self.requests.items() if r.status is status)

    @property
    def running(self) -> str:
        return self.names(RequestStatus.RUNNING)

    @property
    def waiting(self) -> str:
        return self.names(RequestStatus.WAITING)

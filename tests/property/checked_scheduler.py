"""A scheduler whose every promise is checked at every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import cast

import pytest

from radixkv.mem_cache import (
    ChunkCache,
    LengthError,
    MemoryManager,
    PagesInUseError,
    PrefixCache,
    RadixCache,
)
from radixkv.scheduling import (
    Batch,
    BatchEntry,
    FinishReason,
    NullRunner,
    Request,
    RequestOutput,
    RequestStatus,
    SamplingParams,
    Scheduler,
    SchedulerLimits,
)

from .label_runner import LabelRunner

VOCAB_SIZE = 3
EOS_TOKEN_IDS = (2,)


def serial_output(prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """Generate without any scheduler: token after token, each on its own."""
    runner = NullRunner(VOCAB_SIZE)
    tokens = list(prompt)
    while len(tokens) - len(prompt) < params.max_new_tokens:
        entry = BatchEntry(Request("alone", tokens), 0, len(tokens))
        batch = cast(Batch, SimpleNamespace(entries=[entry]))
        tokens += runner.run(batch).tolist()
        if tokens[-1] in EOS_TOKEN_IDS and not params.ignore_eos:
            break
    return tokens[len(prompt) :]


class CheckedScheduler:
    """A scheduler with a `LabelRunner`, and the clients' view of the requests.

    Attributes:
        seen: What happened so far, so that a test can show that it tries everything.
    """

    def __init__(
        self,
        *,
        is_cached: bool,
        num_pages: int,
        page_size: int,
        num_rows: int,
        max_len: int,
        limits: SchedulerLimits,
    ) -> None:
        memory = MemoryManager(
            num_pages, page_size, max_num_requests=num_rows, max_context_len=max_len
        )
        self.cache: PrefixCache = (
            RadixCache(memory) if is_cached else ChunkCache(memory)
        )
        self.scheduler = Scheduler(self.cache, limits, eos_token_ids=EOS_TOKEN_IDS)
        self.runner = LabelRunner(self.cache, VOCAB_SIZE)
        self.batch: Batch | None = None
        self.requests: list[Request] = []
        self.expected: dict[Request, list[int]] = {}
        self.streamed: dict[Request, list[int]] = {}
        self.ended: dict[Request, FinishReason] = {}
        self.hits: dict[Request, int] = {}
        self.num_computed: Counter[Request] = Counter()
        self.seen: Counter[str] = Counter()

    # What a client does -----------------------------------------------------

    def add(
        self, prompt: Sequence[int], params: SamplingParams, namespace: Hashable = None
    ) -> None:
        """Submit a request; one that can never fit must be refused."""
        request = Request(len(self.requests), prompt, params, namespace=namespace)
        needed = self._num_slots(request)
        if needed > min(self.cache.total_size, self.cache.memory.max_context_len):
            before = (self.scheduler.num_waiting, self.scheduler.has_requests)
            with pytest.raises(LengthError, match=f"need {needed} slots"):
                self.scheduler.add_request(request)
            assert before == (self.scheduler.num_waiting, self.scheduler.has_requests)
            return
        self.scheduler.add_request(request)
        self.requests.append(request)
        self.expected[request] = serial_output(prompt, params)
        self.streamed[request] = []

    def abort_any(self, number: int) -> None:
        """Abort one of all requests that there ever were; each state is as likely."""
        states = sorted({self._state(request) for request in self.requests})
        if not states:
            self.scheduler.abort("unknown")
            return
        state = states[number % len(states)]
        choice = [r for r in self.requests if self._state(r) == state]
        self.seen[f"abort {state}"] += 1
        self.abort(choice[number // len(states) % len(choice)])

    def abort(self, request: Request) -> None:
        """Abort a request; its memory is back at once if no step computes it."""
        held = self.cache.stats().num_requests
        owns = request.kv is not None and not self._is_in_flight(request)

        self.scheduler.abort(request.request_id)

        assert request.status is RequestStatus.FINISHED
        assert held - owns == self.cache.stats().num_requests

    def resize(self, num_pages: int) -> None:
        """Change the pool while requests run, if none of them needs what would go."""
        with suppress(PagesInUseError):
            is_smaller = num_pages < self.cache.memory.num_pages
            self.cache.resize(num_pages)
            self.seen["shrink"] += is_smaller

    # What an engine does ----------------------------------------------------

    def schedule(self) -> None:
        decoding = {r for r in self._running() if self._num_uncomputed(r) == 1}
        waiting = self._waiting()
        alive = self._running() + waiting
        num_retractions = self.scheduler.num_retractions
        # Only the newest has a prompt that is half computed.
        assert all(self._num_uncomputed(r) == 1 for r in self._running()[:-1])

        self.batch = self.scheduler.schedule()

        self.seen["retraction"] += self.scheduler.num_retractions - num_retractions
        for request in alive:
            if request.finish_reason is FinishReason.REFUSED:
                assert self._num_slots(request) > self.cache.total_size
        retracted = [r for r in decoding if r.status is RequestStatus.WAITING]
        if self.batch is None:
            return
        self._check_budget(self.batch, decoding)
        in_batch = {entry.request for entry in self.batch.entries}
        # Who can decode does decode, and retraction takes the newest.
        assert {r for r in decoding if r.status is RequestStatus.RUNNING} <= in_batch
        assert all(r.status is RequestStatus.RUNNING for r in in_batch)
        assert self._running()[0] in in_batch  # the oldest always goes on
        started = {r for r in waiting if r in in_batch}
        assert not (retracted and started)
        for entry in self.batch.entries:
            request = entry.request
            self.hits.setdefault(request, entry.start)
            self.seen["hit"] += request in started and entry.start > 0
            self.seen["resumed"] += request in started and request.num_retractions > 0
            self.seen["chunk"] += not entry.samples

    def run(self) -> None:
        """Compute the batch in flight and bring its tokens back."""
        batch = self.batch
        assert batch is not None
        next_tokens = self.runner.run(batch)
        for entry in batch.entries:
            if entry.request.status is RequestStatus.RUNNING:
                self.num_computed[entry.request] += entry.stop - entry.start
        self.batch = None
        self._stream(self.scheduler.update(batch, next_tokens))

    def fail(self, *, is_received: bool) -> None:
        """Let the step in flight fail, before or after its message was applied."""
        batch = self.batch
        assert batch is not None
        if is_received:
            self.runner.worker.receive(batch.kv_cache_info)
        else:
            self.cache.recall(batch.kv_cache_info)
        self.batch = None
        self.seen["failed step"] += 1
        self.scheduler.cancel(batch)
        assert all(e.request.status is RequestStatus.FINISHED for e in batch.entries)

    def step(self) -> None:
        if self.batch is None:
            self.schedule()
        if self.batch is not None:
            self.run()

    def drain(self) -> None:
        """Run everything to its end, within ten times the serial number of steps."""
        chunk = self.scheduler.limits.chunked_prefill_size
        serial = sum(
            -(-r.num_tokens // chunk) + r.sampling_params.max_new_tokens
            for r in self.requests
            if r.status is not RequestStatus.FINISHED
        )
        for _ in range(10 * serial + 10):
            if not self.scheduler.has_requests:
                break
            self.step()
            self.check()
        self._stream(self.scheduler.take_outputs())
        self.check()
        self._check_idle()

    # The checks -------------------------------------------------------------

    def check(self) -> None:
        cache = self.cache
        cache.check_integrity()
        parts = (cache.available_size, cache.evictable_size, cache.protected_size)
        assert cache.total_size == sum(parts) + cache.held_size
        self._check_queues()
        self._check_content()
        for request in self.requests:
            if request.status is not RequestStatus.FINISHED:
                output = request.output_tokens
                assert self.streamed[request] == output
                assert self.expected[request][: len(output)] == output
                assert self.num_computed[request] == request.num_computed_tokens
                assert self.hits.get(request, 0) == request.num_cached_tokens
        num_retractions = sum(request.num_retractions for request in self.requests)
        assert num_retractions == self.scheduler.num_retractions

    def _check_queues(self) -> None:
        """Each request is in one queue, and who waits came after who runs."""
        running = self._running()
        waiting = self._waiting()
        assert len(waiting) == self.scheduler.num_waiting
        assert len(running) == self.scheduler.num_running
        assert len(running) <= self.scheduler.limits.max_running_requests
        rows = [r.kv.req_pool_idx for r in running if r.kv is not None]
        assert len(rows) == len(set(rows)) == self.cache.stats().num_requests
        for request in self.requests:
            is_finished = request.status is RequestStatus.FINISHED
            assert is_finished == (request.finish_reason is not None)
            is_running = request.status is RequestStatus.RUNNING
            assert is_running == (request.kv is not None) or (
                is_finished and self._is_in_flight(request)
            )
        if running and waiting:
            assert running[-1].request_id < waiting[0].request_id  # type: ignore[operator]

    def _check_content(self) -> None:
        """What a running request has computed is its own prefix."""
        for request in self._running():
            kv = request.kv
            assert kv is not None
            labels = self.runner.worker.labels_of(
                request.namespace, request.tokens[: kv.committed_len].tolist()
            )
            slots = self.cache.slots(kv, 0, kv.committed_len)
            copies = self.cache.memory.page_copies.pending
            assert labels == self.runner.worker.labels_after(copies)[slots].tolist()

    def _check_budget(self, batch: Batch, decoding: set[Request]) -> None:
        limits = self.scheduler.limits
        assert batch.num_tokens <= limits.max_batched_tokens
        requests = [entry.request for entry in batch.entries]
        assert len(requests) == len(set(requests))
        prefill = [e for e in batch.entries if e.request not in decoding]
        num_tokens = sum(entry.stop - entry.start for entry in prefill)
        assert num_tokens <= limits.chunked_prefill_size
        for entry in batch.entries:
            assert entry.request.kv is not None
            assert entry.start == entry.request.kv.committed_len

    def _check_idle(self) -> None:
        """Nobody is left: every request ended once, and owns nothing."""
        cache = self.cache
        assert not self.scheduler.has_requests
        assert self.scheduler.num_waiting == self.scheduler.num_running == 0
        assert cache.held_size == cache.protected_size == 0
        assert cache.stats().num_requests == 0
        assert set(self.requests) == set(self.ended)
        for request, reason in self.ended.items():
            output = request.output_tokens
            assert self.streamed[request] == output
            assert self.expected[request][: len(output)] == output
            if reason in ("length", "stop"):
                assert self.expected[request] == output
                is_stopped = output[-1] in EOS_TOKEN_IDS
                is_stopped &= not request.sampling_params.ignore_eos
                assert reason == ("stop" if is_stopped else "length")

    # ------------------------------------------------------------------------

    def _stream(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            assert output.request not in self.ended
            if output.token is not None:
                self.streamed[output.request].append(output.token)
            if output.finish_reason is not None:
                self.ended[output.request] = output.finish_reason
                assert output.finish_reason is output.request.finish_reason
                self.seen[output.finish_reason] += 1

    def _running(self) -> list[Request]:
        """The requests that own memory, in the order of arrival."""
        return [request for request in self.requests if request.kv is not None]

    def _waiting(self) -> list[Request]:
        return [r for r in self.requests if r.status is RequestStatus.WAITING]

    def _is_in_flight(self, request: Request) -> bool:
        entries = self.batch.entries if self.batch else ()
        return any(entry.request is request for entry in entries)

    def _state(self, request: Request) -> str:
        if self._is_in_flight(request):
            return "in flight"
        if request.status is RequestStatus.WAITING:
            return "retracted" if request.num_retractions else "waiting"
        if request.status is RequestStatus.FINISHED:
            return "finished"
        return "mid-chunk" if self._num_uncomputed(request) > 1 else "running"

    def _num_slots(self, request: Request) -> int:
        """What a request needs at its longest; the last token needs no slot."""
        return request.num_prompt_tokens + request.sampling_params.max_new_tokens - 1

    def _num_uncomputed(self, request: Request) -> int:
        assert request.kv is not None
        return request.num_tokens - request.kv.committed_len

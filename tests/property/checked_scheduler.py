"""A scheduler whose every promise is checked at every step."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

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
FINISHED = RequestStatus.FINISHED
EOS_TOKEN_IDS = (2,)


def serial_output(prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """Generate without any scheduler: token after token, each on its own."""
    runner = NullRunner(VOCAB_SIZE)
    tokens = list(prompt)
    while len(tokens) - len(prompt) < params.max_new_tokens:
        entry = BatchEntry(Request("alone", tokens), 0, len(tokens), 1)
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
        **options: Any,  # noqa: ANN401 - those of Scheduler
    ) -> None:
        memory = MemoryManager(
            num_pages, page_size, max_num_requests=num_rows, max_context_len=max_len
        )
        self.cache: PrefixCache = (
            RadixCache(memory) if is_cached else ChunkCache(memory)
        )
        self.overlap = bool(options.get("overlap"))
        self.preempts = bool(options.get("preempts"))
        self.drafts = options.get("drafter") is not None
        # Whoever sets all aside that may be needed retracts nobody, unless for others.
        self.proves = options.get("admission", "worst-case") == "worst-case"
        self.scheduler = Scheduler(
            self.cache, limits, eos_token_ids=EOS_TOKEN_IDS, **options
        )
        self.runner = LabelRunner(self.cache, VOCAB_SIZE, is_late=self.overlap)
        self.batches: deque[Batch] = deque()
        self.requests: list[Request] = []
        self.expected: dict[Request, list[int]] = {}
        self.streamed: dict[Request, list[int]] = {}
        self.ended: dict[Request, FinishReason] = {}
        self.num_computed: Counter[Request] = Counter()
        self.seen: Counter[str] = Counter()

    @property
    def batch(self) -> Batch | None:
        """The batch that runs next."""
        return self.batches[0] if self.batches else None

    @property
    def may_schedule(self) -> bool:
        return len(self.batches) < 1 + self.overlap

    # What a client does -----------------------------------------------------

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        namespace: Hashable = None,
        priority: int = 0,
    ) -> None:
        """Submit a request; one that can never fit must be refused."""
        request = Request(
            len(self.requests), prompt, params, namespace=namespace, priority=priority
        )
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

        assert request.status is FINISHED
        assert held - owns == self.cache.stats().num_requests

    def resize(self, num_pages: int) -> None:
        """Change the pool while requests run, if none of them needs what would go."""
        with suppress(PagesInUseError):
            is_smaller = num_pages < self.cache.memory.num_pages
            self.cache.resize(num_pages)
            self.seen["shrink"] += is_smaller
            self.proves &= not is_smaller

    # What an engine does ----------------------------------------------------

    def schedule(self) -> None:
        is_ahead = bool(self.batches)
        before = {request: request.num_tokens for request in self.requests}
        decoding = [r for r in self._running() if r.scheduled_len >= r.prefill_len]
        waiting = self._waiting()
        alive = self._running() + waiting
        num_retractions = self.scheduler.num_retractions

        batch = self.scheduler.schedule()

        num_retractions = self.scheduler.num_retractions - num_retractions
        self.seen["retraction"] += num_retractions
        assert not (num_retractions and is_ahead)
        assert not (num_retractions and self.proves and not self.preempts)
        assert before == {request: request.num_tokens for request in self.requests}
        for request in alive:
            if request.finish_reason is FinishReason.REFUSED:
                assert self._num_slots(request) > self.cache.total_size
        if batch is None:
            return
        self.batches.append(batch)
        self.seen["ahead"] += is_ahead
        self._check_budget(batch)
        in_batch = {entry.request for entry in batch.entries}
        assert all(r.status is RequestStatus.RUNNING for r in in_batch)
        if not is_ahead:
            # Who can decode does decode; who must go back is not the oldest.
            still = {r for r in decoding if r.status is RequestStatus.RUNNING}
            assert still <= in_batch
            if decoding and not self.preempts:
                oldest = max(self._running(), key=lambda r: (r.priority, -r.arrival))
                assert oldest in in_batch or oldest not in decoding
        started = {r for r in waiting if r in in_batch}
        assert not (num_retractions and started) or self.preempts
        for entry in batch.entries:
            request = entry.request
            self.seen["hit"] += request in started and entry.start > 0
            self.seen["resumed"] += request in started and request.num_retractions > 0
            self.seen["chunk"] += not entry.num_samples
            self.seen["draft"] += bool(entry.drafts)

    def run(self) -> None:
        """Compute the oldest batch in flight and bring its tokens back."""
        batch = self.batches.popleft()
        next_tokens = self.runner.run(batch)
        running = [e for e in batch.entries if e.request.status is not FINISHED]
        num_tokens = [entry.request.num_tokens for entry in running]
        self._stream(self.scheduler.update(batch, next_tokens))
        for entry, num_before in zip(running, num_tokens, strict=True):
            num_new = entry.request.num_tokens - num_before
            num_computed = num_new if entry.drafts else entry.stop - entry.start
            self.num_computed[entry.request] += num_computed
            self.seen["accepted draft"] += num_new > 1

    def fail(self, *, is_received: bool) -> None:
        """Let the step in flight fail, before or after its message was applied.

        What is behind it in flight cannot be told to anybody any more either, if it was
        not received; so it is taken back first.
        """
        self.seen["failed step"] += 1
        failed = [self.batches.popleft()]
        if is_received:
            self.runner.worker.receive(failed[0].kv_cache_info)
        else:
            failed += self.batches
            self.batches.clear()
            for batch in reversed(failed):
                self.cache.recall(batch.kv_cache_info)
        for batch in failed:
            self.scheduler.cancel(batch)
            assert all(e.request.status is FINISHED for e in batch.entries)

    def step(self) -> None:
        while self.may_schedule:
            num_in_flight = len(self.batches)
            self.schedule()
            if len(self.batches) == num_in_flight:
                break
        if self.batches:
            self.run()

    def drain(self) -> None:
        """Run everything to its end, within ten times the serial number of steps."""
        chunk = self.scheduler.limits.chunked_prefill_size
        serial = sum(
            -(-r.num_tokens // chunk) + r.sampling_params.max_new_tokens
            for r in self.requests
            if r.status is not RequestStatus.FINISHED
        )
        for _ in range(10 * serial + 10 + len(self.batches)):
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
                usage = request.usage
                assert usage.num_output_tokens == len(output)
                assert usage.num_accepted_tokens <= usage.num_draft_tokens
        num_retractions = sum(request.num_retractions for request in self.requests)
        assert num_retractions == self.scheduler.num_retractions

    def _check_queues(self) -> None:
        """Each request is in one queue, and owns memory if it runs or did just now."""
        scheduler = self.scheduler
        running = [r for r in self.requests if r.status is RequestStatus.RUNNING]
        assert len(self._waiting()) == scheduler.num_waiting
        assert len(running) == scheduler.num_running
        assert len(running) <= scheduler.limits.max_running_requests
        assert scheduler.num_in_flight == len(self.batches)
        rows = [r.kv.req_pool_idx for r in self.requests if r.kv is not None]
        assert len(rows) == len(set(rows)) == self.cache.stats().num_requests
        for request in self.requests:
            is_finished = request.status is FINISHED
            assert is_finished == (request.finish_reason is not None)
            is_running = request.status is RequestStatus.RUNNING
            is_in_flight = self._is_in_flight(request)
            assert (request.kv is not None) == (is_running or is_in_flight)
            assert request.num_in_flight == self._num_in_flight(request)

    def _check_content(self) -> None:
        """What a running request has computed is its own prefix."""
        # The messages in flight copy pages, and so will the next one.
        copies: dict[int, int] = {}
        for batch in self.batches:
            info = batch.kv_cache_info
            pairs = zip(
                info.copy_targets.tolist(), info.copy_sources.tolist(), strict=True
            )
            copies |= {target: copies.get(page, page) for target, page in pairs}
        pending = self.cache.memory.page_copies.pending.items()
        copies |= {target: copies.get(page, page) for target, page in pending}
        labels_by_slot = self.runner.worker.labels_after(copies)
        for request in self._running():
            kv = request.kv
            assert kv is not None
            if request.status is FINISHED:
                continue  # the step before may have failed
            # What steps in flight compute is not there yet, though it may be committed.
            starts = [
                entry.start
                for batch in self.batches
                for entry in batch.entries
                if entry.request is request
            ]
            computed_len = min([kv.committed_len, *starts])
            labels = self.runner.worker.labels_of(
                request.namespace, request.tokens[:computed_len].tolist()
            )
            slots = self.cache.slots(kv, 0, computed_len)
            assert labels == labels_by_slot[slots].tolist()

    def _check_budget(self, batch: Batch) -> None:
        limits = self.scheduler.limits
        assert 0 < batch.num_tokens <= limits.max_batched_tokens
        requests = [entry.request for entry in batch.entries]
        assert len(requests) == len(set(requests))
        for entry in batch.entries:
            request = entry.request
            assert request.kv is not None
            assert entry.start == request.kv.committed_len
            assert entry.stop <= self._num_slots(request)
            assert entry.num_samples in (0, 1 + len(entry.drafts))
            if entry.start < request.prefill_len:
                assert entry.stop - entry.start <= limits.chunked_prefill_size
                is_last = entry.stop == request.prefill_len
                assert (entry.num_samples, entry.drafts) == (int(is_last), ())
            else:
                assert entry.stop - entry.start == entry.num_samples

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
            assert output.tokens or output.finish_reason
            self.streamed[output.request] += output.tokens
            if output.finish_reason is not None:
                self.ended[output.request] = output.finish_reason
                assert output.finish_reason is output.request.finish_reason
                self.seen[output.finish_reason] += 1

    def _running(self) -> list[Request]:
        """The requests that own memory, in the order of arrival."""
        return [request for request in self.requests if request.kv is not None]

    def _waiting(self) -> list[Request]:
        return [r for r in self.requests if r.status is RequestStatus.WAITING]

    def _num_in_flight(self, request: Request) -> int:
        entries = [entry for batch in self.batches for entry in batch.entries]
        return sum(entry.request is request for entry in entries)

    def _is_in_flight(self, request: Request) -> bool:
        return self._num_in_flight(request) > 0

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

"""The batch scheduler: which tokens of which requests the next step computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from radixkv.mem_cache import (
    LengthError,
    OutOfPagesError,
    PrefixCache,
    RequestKV,
    RequestStateError,
    TokenError,
)
from radixkv.mem_cache.sizes import as_size
from radixkv.mem_cache.tokens import as_tokens

from .batch import Batch, BatchEntry
from .batch_builder import BatchBuilder, kv_of
from .limits import SchedulerLimits
from .request import FinishReason, Request, RequestStatus


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What a step did to one request.

    Attributes:
        request: The request.
        token: Its new token; ``None`` if it ended without one.
        finish_reason: Why it ended; ``None`` if it goes on.
    """

    request: Request
    token: int | None
    finish_reason: FinishReason | None


class Scheduler:
    """Continuous batching over a prefix cache, first come first served.

    A step decodes one token for every request that has its prompt computed, and fills
    up with chunks of prompts. When decodes run out of pages, the newest requests give
    theirs back and wait again, so the oldest always goes on. What they had computed
    stays cached as long as nobody needs the room.

    Use it in turns: `schedule`, run the batch, `update`.
    """

    def __init__(
        self,
        cache: PrefixCache,
        limits: SchedulerLimits | None = None,
        *,
        eos_token_ids: Iterable[int] = (),
        vocab_size: int | None = None,
    ) -> None:
        """Make a scheduler without requests.

        Args:
            cache: Where the K and V of its requests are kept.
            limits: How much it may do at a time.
            eos_token_ids: Tokens that end every request that does not ignore them.
            vocab_size: Tokens that the model knows, ``[0, vocab_size)``: one unknown
                token would fail the whole step. ``None`` for no bound.

        Raises:
            ConfigError: A token or `vocab_size` is out of range.
        """
        self.cache = cache
        self.limits = limits or SchedulerLimits()
        self.eos_token_ids = frozenset(
            as_size("an end-of-sequence token", token, 0) for token in eos_token_ids
        )
        self.vocab_size = (
            None if vocab_size is None else as_size("vocab_size", vocab_size)
        )
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # in the order of arrival
        self._requests: dict[str | int, Request] = {}
        self._in_flight: Batch | None = None
        self._outputs: list[RequestOutput] = []
        self._num_retractions = 0

    @property
    def num_retractions(self) -> int:
        """How often requests gave their pages back so that others could go on."""
        return self._num_retractions

    @property
    def num_waiting(self) -> int:
        """Requests without a part of the cache."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests with a part of the cache."""
        return len(self._running)

    @property
    def has_requests(self) -> bool:
        """Whether there is anything left to do, or to tell by `take_outputs`."""
        return bool(self._requests or self._running or self._outputs)

    def add_request(self, request: Request) -> None:
        """Queue a request that can run to its end, at least alone.

        Raises:
            LengthError: Prompt and `max_new_tokens` together can never fit.
            TokenError: The prompt has a token outside of the vocabulary.
            RequestStateError: The request is not new, or its id is in use.
        """
        self.check_request(request)
        self._requests[request.request_id] = request
        self._waiting.append(request)

    def check_request(self, request: Request) -> None:
        """Refuse what `add_request` would refuse; changes nothing.

        Raises:
            LengthError: Prompt and `max_new_tokens` together can never fit.
            TokenError: The prompt has a token outside of the vocabulary.
            RequestStateError: The request is not new, or its id is in use.
        """
        is_new = request.status is RequestStatus.WAITING and not request.output_tokens
        if not is_new or request.request_id in self._requests:
            raise RequestStateError(
                f"a request must be new, with an id of its own, got {request!r}"
            )
        needed = _num_slots(request)
        longest = self.cache.max_request_size(request.namespace)
        if needed > longest:
            raise LengthError(
                f"request {request.request_id!r}: {request.num_tokens} prompt tokens "
                f"and max_new_tokens {request.sampling_params.max_new_tokens} need "
                f"{needed} slots, the longest that fits is {longest}"
            )
        highest = int(request.tokens.max())
        if self.vocab_size is not None and highest >= self.vocab_size:
            raise TokenError(
                f"request {request.request_id!r}: tokens must be < {self.vocab_size}, "
                f"got {highest}"
            )

    def abort(self, request_id: str | int) -> None:
        """End a request in whatever state; unknown and finished ids are ignored.

        Its last output comes with the next `update` or `take_outputs`. If a step is
        computing it, its memory is given back only when that step is done.
        """
        request = self._requests.get(request_id)
        if request is None:
            return
        if request.status is RequestStatus.WAITING:
            self._waiting.remove(request)
        self._end(request, FinishReason.ABORT)

    def schedule(self) -> Batch | None:
        """Choose the next step and give it slots.

        Returns:
            What to compute; pass it to `update` when it is done. ``None`` if no request
            can go on.

        Raises:
            RequestStateError: The last batch was not passed to `update`.
            PolicyError: The cache's eviction policy failed; the requests that were
                part of the step already are aborted.
        """
        if self._in_flight is not None:
            raise RequestStateError("the last batch must go to update() first")
        step = BatchBuilder(self.cache)
        try:
            self._fill(step)
        except BaseException:
            # The messages made so far will reach no worker: nobody may build on them.
            for entry in step.entries:
                self._end(entry.request, FinishReason.ABORT)
            step.recall()
            raise
        self._in_flight = step.batch()
        return self._in_flight

    def update(
        self, batch: Batch, next_tokens: NDArray[np.int32]
    ) -> list[RequestOutput]:
        """Take note that a step is done.

        Args:
            batch: What `schedule` returned last.
            next_tokens: The sampled token of each entry that samples, in order.

        Returns:
            What became of the requests since the last call, each end exactly once.

        Raises:
            RequestStateError: `batch` is not the last one.
            LengthError: Not one token for each entry that samples.
            TokenError: `next_tokens` are no token ids.
        """
        sampled = as_tokens(next_tokens).tolist()
        num_sampled = sum(entry.samples for entry in batch.entries)
        if len(sampled) != num_sampled:
            raise LengthError(f"need {num_sampled} next tokens, got {len(sampled)}")
        self._land(batch)
        tokens = iter(sampled)
        for entry in batch.entries:
            token = next(tokens) if entry.samples else None
            self._advance(entry, token)
        return self.take_outputs()

    def cancel(self, batch: Batch) -> None:
        """Take note that a step failed: its requests end as aborted.

        If its message reached no worker, `PrefixCache.recall` it before.

        Raises:
            RequestStateError: `batch` is not the last one.
        """
        self._land(batch)
        for entry in batch.entries:
            if entry.request.status is RequestStatus.FINISHED:  # aborted meanwhile
                self._release(entry.request)
            else:
                self._end(entry.request, FinishReason.ABORT)

    def take_outputs(self) -> list[RequestOutput]:
        """Return what became of the requests since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    # One step ---------------------------------------------------------------

    def _land(self, batch: Batch) -> None:
        if batch is not self._in_flight:
            raise RequestStateError("need the batch that schedule() returned last")
        self._in_flight = None

    def _fill(self, step: BatchBuilder) -> None:
        num_retractions = self._num_retractions
        self._decode(step)
        budget = self.limits.max_batched_tokens - len(step.entries)
        budget = min(budget, self.limits.chunked_prefill_size)
        budget = self._continue_prefill(step, budget)
        if num_retractions == self._num_retractions:
            # Whoever was retracted must not come back before the pages are used.
            self._admit(step, budget)

    def _decode(self, step: BatchBuilder) -> None:
        """Give a slot to every request that lacks one token."""
        while True:
            decoding = [r for r in self._running if r.num_uncomputed_tokens == 1]
            try:
                return step.decode(decoding)
            except OutOfPagesError:
                self._retract_newest()

    def _continue_prefill(self, step: BatchBuilder, budget: int) -> int:
        """Go on with a half-computed prompt; returns the budget that is left.

        Only the newest can be half computed: who comes next starts with what is left of
        the budget.
        """
        if not self._running or self._running[-1].num_uncomputed_tokens == 1:
            return budget
        try:
            return budget - step.extend(self._running[-1], budget)
        except OutOfPagesError:
            if not step.entries:
                self._retract_newest()
            return 0  # others go on, and their pages come free

    def _admit(self, step: BatchBuilder, budget: int) -> None:
        """Start waiting requests, in order, as long as all of their prompt fits."""
        cache = self.cache
        while (
            budget
            and self._waiting
            and len(self._running) < self.limits.max_running_requests
        ):
            request = self._waiting[0]
            if _num_slots(request) > cache.max_request_size(request.namespace):
                # The pool was shrunk, or a quota was set, while it waited.
                self._waiting.popleft()
                self._end(request, FinishReason.REFUSED)
                continue
            hit = cache.match_prefix(request.tokens, request.namespace)
            if not self._fits(request, hit):
                return  # without having touched the cache
            kv = cache.admit(
                request.tokens,
                namespace=request.namespace,
                priority=request.priority,
                computed_len=request.retracted_len,
            )
            if kv is None:
                return
            try:
                num_tokens = self._start(step, request, kv, budget)
            except BaseException:
                request.kv = None
                cache.release(kv)
                raise
            if not num_tokens:
                cache.release(kv)
                return
            budget -= num_tokens

    def _fits(self, request: Request, cached_len: int) -> bool:
        """Tell whether the rest behind `cached_len` fits beside what is running.

        Counted in whole pages: the rest of every prompt, and what each running request
        needs to decode one more page of tokens.
        """
        cache = self.cache
        page_size = cache.page_size
        needed = _page_gap(cached_len, request.num_tokens, page_size)
        for other in self._running:
            next_len = min(other.num_tokens + page_size, _num_slots(other))
            needed += _page_gap(kv_of(other).allocated_len, next_len, page_size)
        return needed <= cache.available_size + cache.evictable_size

    def _start(
        self, step: BatchBuilder, request: Request, kv: RequestKV, budget: int
    ) -> int:
        """Run the first who waits; how many of its tokens, 0 if there is no room."""
        if not self._fits(request, kv.committed_len):
            return 0  # its hit was counted as room: now it is locked
        request.kv = kv
        try:
            num_tokens = step.extend(request, budget)
        except OutOfPagesError:
            request.kv = None
            return 0
        self._waiting.popleft()
        request.status = RequestStatus.RUNNING
        if not request.num_computed_tokens:
            request.num_cached_tokens = kv.committed_len
        # Newer than all that run: retraction takes the newest.
        self._running.append(request)
        return num_tokens

    def _retract_newest(self) -> None:
        """Take the pages of the newest request back; what it computed stays cached."""
        request = self._running[-1]
        if _num_slots(request) > self.cache.max_request_size(request.namespace):
            # The pool was shrunk under it, or a quota was set.
            self._end(request, FinishReason.REFUSED)
            return
        self._running.pop()
        self._num_retractions += 1
        kv = kv_of(request)
        request.retracted_len = max(request.retracted_len, kv.committed_len)
        self.cache.cache_finished_req(
            kv, request.tokens, prompt_len=request.num_prompt_tokens
        )
        request.kv = None
        request.status = RequestStatus.WAITING
        request.num_retractions += 1
        # Older than all that were never admitted, newer than those retracted next.
        self._waiting.appendleft(request)

    # One request ------------------------------------------------------------

    def _advance(self, entry: BatchEntry, token: int | None) -> None:
        request = entry.request
        kv = kv_of(request)
        if request.status is RequestStatus.FINISHED:  # aborted meanwhile
            self._release(request)
            return
        self.cache.commit(kv, entry.stop)
        num_computed = entry.stop - entry.start
        request.num_computed_tokens += num_computed
        if num_computed > 1 or entry.start < request.num_prompt_tokens:
            self.cache.cache_unfinished_req(
                kv, request.tokens, prompt_len=request.num_prompt_tokens
            )
        if token is None:
            return
        request.append(token)
        reason = self._finish_reason(request, token)
        self._outputs.append(RequestOutput(request, token, reason))
        if reason is not None:
            request.status = RequestStatus.FINISHED
            request.finish_reason = reason
            del self._requests[request.request_id]
            self._running.remove(request)
            self.cache.cache_finished_req(
                kv, request.tokens, prompt_len=request.num_prompt_tokens
            )
            request.kv = None

    def _finish_reason(self, request: Request, token: int) -> FinishReason | None:
        params = request.sampling_params
        ends = token in self.eos_token_ids and not params.ignore_eos
        if ends or token in params.stop_token_ids:
            return FinishReason.STOP
        if request.num_output_tokens >= params.max_new_tokens:
            return FinishReason.LENGTH
        return None

    def _end(self, request: Request, reason: FinishReason) -> None:
        """End a request without a new token."""
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        del self._requests[request.request_id]
        self._outputs.append(RequestOutput(request, None, reason))
        batch = self._in_flight
        in_flight = batch is not None and any(
            entry.request is request for entry in batch.entries
        )
        if request.kv is not None and not in_flight:
            self._release(request)

    def _release(self, request: Request) -> None:
        self._running.remove(request)
        self.cache.release(kv_of(request))
        request.kv = None


def _num_slots(request: Request) -> int:
    """Return the slots for all that a request can become."""
    # The newest token needs no slot: it is never fed back.
    return request.num_prompt_tokens + request.sampling_params.max_new_tokens - 1


def _page_gap(allocated_len: int, num_tokens: int, page_size: int) -> int:
    """Return the slots that `num_tokens` need beyond `allocated_len`, whole pages."""
    num_pages = -(-num_tokens // page_size) - -(-allocated_len // page_size)
    return max(0, num_pages) * page_size

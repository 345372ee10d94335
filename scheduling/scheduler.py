"""The batch scheduler: which tokens of which requests the next step computes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable

import numpy as np
from numpy.typing import NDArray

from radixkv.mem_cache import (
    CacheBusyError,
    LengthError,
    NonFiniteLogitsError,
    PrefixCache,
    RequestKV,
    RequestStateError,
    TokenError,
)
from radixkv.mem_cache.sizes import as_size, check_hashable, check_kind, num_pages_for
from radixkv.mem_cache.tokens import as_tokens

from .admission_policies import Reservations, as_admission_policy
from .base import (
    INVALID_TOKEN,
    AdmissionPolicy,
    Drafter,
    RetractionPolicy,
    SchedulingPolicy,
)
from .batch import Batch, BatchEntry
from .batch_builder import BatchBuilder, kv_of
from .drafts import Drafts
from .limits import SchedulerLimits
from .policies import Policies
from .request import FinishReason, Request, RequestStatus
from .request_output import RequestOutput
from .retraction_policies import as_retraction_policy
from .running_queue import RunningQueue
from .scheduling_policies import as_scheduling_policy
from .stall import StalledRequest
from .step_planner import StepPlanner
from .turn import Turn
from .waiting_queue import WaitingQueue


class Scheduler:
    """Continuous batching over a prefix cache.

    A step decodes for every request that has its prompt computed, and fills up with
    chunks of prompts: first those that are begun, then those that the policy puts
    first and that the admission policy has room for. When decodes run out of pages all
    the same, some requests give theirs back and wait again; the oldest never does. What
    they had computed stays cached as long as nobody needs the room.

    Use it in turns: `schedule`, run the batch, `update`. With `overlap`, the next batch
    may be prepared while the runner computes the last one.

    A scheduler has one owner thread: the first that calls `schedule`; when that has
    ended, the next that calls anything. All methods refuse other threads with a
    `WrongThreadError`. The properties are safe: each is a number of the moment.

    A cache has one scheduler at a time: until it is closed, or nobody holds it.

    Attributes:
        cache: Where the K and V of its requests are kept.
        limits: How much it may do at a time.
        overlap: Whether the next batch may be prepared while one is in flight.
        eos_token_ids: Tokens that end every request that does not ignore them.
        vocab_size: Tokens that the model knows, ``[0, vocab_size)``, if there is a
            bound.
    """

    def __init__(
        self,
        cache: PrefixCache,
        limits: SchedulerLimits | None = None,
        *,
        policy: str | SchedulingPolicy = "fcfs",
        admission: str | AdmissionPolicy = "worst-case",
        retraction: str | RetractionPolicy = "least-loss",
        preempts: bool = False,
        overlap: bool = False,
        drafter: Drafter | None = None,
        max_draft_tokens: int = 4,
        eos_token_ids: Iterable[int] = (),
        vocab_size: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Make a scheduler without requests.

        Args:
            cache: Where the K and V of its requests are kept.
            limits: How much it may do at a time.
            policy: Who is admitted first, see `SCHEDULING_POLICIES`.
            admission: How much is set aside for a request, see `ADMISSION_POLICIES`.
            retraction: Whose pages are taken back, see `RETRACTION_POLICIES`.
            preempts: Whether a waiting request may take the place of running ones of
                lower priority. Then the priority goes before the policy.
            overlap: Whether `schedule` may be called again before the last batch is
                passed to `update`: once.
            drafter: Guesses tokens for speculative decoding.
            max_draft_tokens: Guesses a request and step at most, at least 1.
            eos_token_ids: Tokens that end every request that does not ignore them.
            vocab_size: Tokens that the model knows, ``[0, vocab_size)``: one unknown
                token would fail the whole step. ``None`` for no bound.
            clock: Seconds, for `Request.usage` only; it decides nothing.

        Raises:
            ConfigError: A number is out of range, or a policy is unknown.
            RequestStateError: The cache has another scheduler.
        """
        check_kind("limits", limits, SchedulerLimits | None)
        self.cache = cache
        self.limits = limits or SchedulerLimits()
        self.eos_token_ids = frozenset(
            as_size("an end-of-sequence token", token, 0) for token in eos_token_ids
        )
        self.vocab_size = (
            None if vocab_size is None else as_size("vocab_size", vocab_size)
        )
        max_draft_tokens = as_size("max_draft_tokens", max_draft_tokens)
        drafts = None
        if drafter is not None:
            drafts = Drafts(drafter, max_draft_tokens, self.vocab_size)
        policies = Policies(
            scheduling=as_scheduling_policy(policy),
            admission=Reservations(as_admission_policy(admission)),
            retraction=as_retraction_policy(retraction),
            preempts=preempts,
            drafts=drafts,
        )
        self.overlap = overlap
        self._clock = clock
        self._requests: dict[Hashable, Request] = {}
        self._waiting = WaitingQueue(cache, self.limits.max_overtakes)
        self._running = RunningQueue(cache)
        self._planner = StepPlanner(
            cache, self.limits, policies, self._waiting, self._running
        )
        self._in_flight: deque[Batch] = deque()
        # Those to be queued again once no step in flight computes them, and how many
        # of their positions are good.
        self._rolling_back: dict[Request, int] = {}
        self._outputs: list[RequestOutput] = []
        self._num_arrivals = 0
        self._num_looked_at = 0
        self._turn = Turn()
        self._is_closed = False
        cache.memory.claim(self)

    def close(self) -> None:
        """Leave the cache to another scheduler, with all that is cached.

        Raises:
            CacheBusyError: There are requests, or outputs that nobody has taken.
            RequestStateError: The call comes from within another one.
            WrongThreadError: Another thread owns the scheduler.
        """
        with self._turn:
            if self.has_requests:
                raise CacheBusyError(
                    "only a scheduler without requests can be closed, got "
                    f"{len(self._requests)}, {len(self._in_flight)} batches in flight "
                    f"and {len(self._outputs)} outputs to take"
                )
            self._is_closed = True
            self.cache.memory.unclaim(self)

    @property
    def num_retractions(self) -> int:
        """How often requests gave their pages back so that others could go on."""
        return self._running.num_retractions

    @property
    def num_waiting(self) -> int:
        """Requests without a part of the cache."""
        return len(self._waiting) + len(self._rolling_back)

    @property
    def num_running(self) -> int:
        """Requests with a part of the cache that are not at their end."""
        return len(self._running)

    @property
    def num_in_flight(self) -> int:
        """Batches that `schedule` returned and that are not done."""
        return len(self._in_flight)

    @property
    def in_flight(self) -> tuple[Batch, ...]:
        """The batches that `schedule` returned and that are not done, oldest first."""
        return tuple(self._in_flight)

    @property
    def has_requests(self) -> bool:
        """Whether there is anything left to do, or to tell by `take_outputs`."""
        return bool(self._requests or self._in_flight or self._outputs)

    def add_request(self, request: Request) -> None:
        """Queue a request that can run to its end, at least alone. O(log waiting).

        Raises:
            LengthError: Prompt and `max_new_tokens` together can never fit.
            TokenError: The prompt has a token outside of the vocabulary.
            ConfigError: `request` is none.
            RequestStateError: The request is not new, or its id is in use; or it comes
                from within another call of the scheduler, or after `close`.
            WrongThreadError: Another thread owns the scheduler.
        """
        self.check_request(request)
        now = self._clock()
        with self._turn:
            self._requests[request.request_id] = request
            request.arrival = self._num_arrivals
            request.arrived_at = self._waiting.num_computed_tokens
            request.arrived_s = now
            params = request.sampling_params
            request.sampling_params = params.with_seed(request.arrival)
            self._num_arrivals += 1
            self._waiting.add(request)

    def check_request(self, request: Request) -> None:
        """Refuse what `add_request` would refuse; changes nothing.

        Raises:
            LengthError: Prompt and `max_new_tokens` together can never fit.
            TokenError: The prompt has a token outside of the vocabulary.
            ConfigError: `request` is none.
            RequestStateError: The request is not new, or its id is in use.
            WrongThreadError: Another thread owns the scheduler.
        """
        self._turn.check_thread()
        check_kind("request", request, Request)
        if self._is_closed:
            raise RequestStateError("a scheduler that is closed takes no requests")
        is_new = request.arrival < 0 and not request.num_output_tokens
        if not is_new or request.request_id in self._requests:
            raise RequestStateError(
                f"a request must be new, with an id of its own, got {request!r}"
            )
        longest = self.cache.max_request_size(request.namespace)
        if request.max_kv_len > longest:
            page_size = self.cache.page_size
            raise LengthError(
                f"request {request.request_id!r}: {request.num_tokens} prompt tokens "
                f"and max_new_tokens {request.sampling_params.max_new_tokens} need "
                f"{request.max_kv_len} slots, the longest that fits is {longest}; in "
                f"pages of {page_size}: {num_pages_for(request.max_kv_len, page_size)} "
                f"needed, capacity {self.cache.total_size // page_size}"
            )
        highest = int(request.tokens.max())
        if self.vocab_size is not None and highest >= self.vocab_size:
            raise TokenError(
                f"request {request.request_id!r}: tokens must be < {self.vocab_size}, "
                f"got {highest}"
            )

    def abort(self, request_id: Hashable) -> None:
        """End a request in whatever state; unknown and finished ids are ignored.

        There are two phases. From now on no step computes it, and its last output comes
        with the next `update` or `take_outputs`. Its memory is given back at once, or
        when the last step is done that computes it: until then a runner may write.

        Raises:
            ConfigError: `request_id` is not hashable.
            RequestStateError: The call comes from within another one.
            WrongThreadError: Another thread owns the scheduler.
        """
        self._turn.check_thread()
        check_hashable("request_id", request_id)
        request = self._requests.get(request_id)
        if request is not None:
            now = self._clock()
            with self._turn:
                self._end(request, FinishReason.ABORT, now)

    def schedule(self) -> Batch | None:
        """Choose the next step and give it slots.

        Returns:
            What to compute; pass it to `update` when it is done. ``None`` if no request
            can go on, at least not before the steps in flight are done.

        Raises:
            RequestStateError: As many batches as may be are in flight; or the call
                comes from within another one.
            WrongThreadError: Another thread owns the scheduler.
            PolicyError: The cache's eviction policy failed; the requests that were
                part of the step already end with this error. Or the drafter failed, or
                another policy, in this step or in the last one, which harms nobody: try
                again.
            TokenError: The drafter returned what are no tokens; it harms nobody either.
        """
        now = self._clock()
        with self._turn:
            self._turn.own()
            return self._schedule(now)

    def update(
        self, batch: Batch, next_tokens: NDArray[np.int32]
    ) -> list[RequestOutput]:
        """Take note that a step is done.

        Args:
            batch: What `schedule` returned, the oldest that is in flight.
            next_tokens: What the runner sampled, int32 `[batch.num_samples]`. A request
                that gets to an `INVALID_TOKEN` ends with a `NonFiniteLogitsError`.
                Nothing that this step or a later one computed of it is published.

        Returns:
            What became of the requests since the last call, each end exactly once.

        Raises:
            RequestStateError: `batch` is not the oldest in flight; or the call comes
                from within another one.
            WrongThreadError: Another thread owns the scheduler.
            LengthError: Not as many tokens as the batch samples.
            TokenError: `next_tokens` are no token ids, or not in the vocabulary.
        """
        self._turn.check_thread()
        self._check_oldest(batch)
        sampled = as_tokens(next_tokens, (INVALID_TOKEN,)).tolist()
        if len(sampled) != batch.num_samples:
            raise LengthError(f"need {batch.num_samples} tokens, got {len(sampled)}")
        is_valid = INVALID_TOKEN not in sampled
        highest = max(sampled, default=0)
        if self.vocab_size is not None and highest >= self.vocab_size:
            raise TokenError(f"tokens must be < {self.vocab_size}, got {highest}")
        now = self._clock()
        with self._turn:
            self._in_flight.popleft()
            self._waiting.num_computed_tokens += batch.num_tokens
            end = 0
            for entry in batch.entries:
                begin, end = end, end + entry.num_samples
                tokens = sampled[begin:end]
                if is_valid or INVALID_TOKEN not in tokens:
                    self._advance(entry, tokens, now)
                else:
                    self._advance_to_error(entry, tokens, now)
            return self.take_outputs()

    def cancel(
        self,
        batch: Batch,
        error: BaseException | None = None,
        *,
        max_requeues: int | None = 0,
    ) -> None:
        """Take note that a step failed: its requests end, or are queued again.

        Who is queued again computes once more what the step was to compute, and what is
        not cached any more; the tokens are the same as without the failure. Those that
        it has, it keeps.

        If the message of the batch reached no worker, `PrefixCache.recall` it before;
        but first that of the batch that was made after it, if there is one, which is
        lost as well.

        Args:
            batch: What `schedule` returned, the oldest that is in flight.
            error: What went wrong: its requests end with the reason ``"error"``.
                ``None`` if nothing did: they end with ``"abort"``.
            max_requeues: How often a request is queued again, before it ends, without a
                new token in between. ``None`` for as often as it takes.

        Raises:
            ConfigError: `max_requeues` is negative.
            RequestStateError: `batch` is not the oldest in flight; or the call comes
                from within another one.
            WrongThreadError: Another thread owns the scheduler.
        """
        self._turn.check_thread()
        self._check_oldest(batch)
        if max_requeues is not None:
            max_requeues = as_size("max_requeues", max_requeues, 0)
        now = self._clock()
        with self._turn:
            self._in_flight.popleft()
            for entry in batch.entries:
                request = entry.request
                request.num_in_flight -= 1
                if request.status is not RequestStatus.RUNNING:
                    self._land(request)
                elif _may_requeue(request, max_requeues):
                    self._roll_back(request, entry.start)
                elif error is None:
                    self._end(request, FinishReason.ABORT, now)
                else:
                    self._end(request, FinishReason.ERROR, now, error)

    def explain_stall(self) -> tuple[StalledRequest, ...]:
        """Say why each request waits that the last `schedule` found and did not start.

        If that returned ``None`` and no step is in flight, these are all requests that
        there are, and none of them goes on until what it waits for is there.

        Returns:
            The requests in the order of arrival. None after a `schedule` that failed.

        Raises:
            WrongThreadError: Another thread owns the scheduler.
        """
        self._turn.check_thread()
        return self._planner.last_look.explain(
            request
            for request in self._waiting
            if request.arrival < self._num_looked_at
        )

    def take_outputs(self) -> list[RequestOutput]:
        """Return what became of the requests since the last call.

        Raises:
            WrongThreadError: Another thread owns the scheduler.
        """
        self._turn.check_thread()
        outputs, self._outputs = self._outputs, []
        return outputs

    # One step ---------------------------------------------------------------

    def _schedule(self, now: float) -> Batch | None:
        if len(self._in_flight) == (2 if self.overlap else 1):
            raise RequestStateError("the last batch must go to update() first")
        step = BatchBuilder(self.cache)
        self._num_looked_at = 0
        try:
            self._planner.fill(
                step,
                is_ahead=bool(self._in_flight),
                refuse=lambda request: self._end(request, FinishReason.REFUSED, now),
            )
        except BaseException as error:
            # The messages made so far will reach no worker: nobody may build on them.
            step.recall()
            for entry in step.entries:
                if entry.request.status is not RequestStatus.FINISHED:
                    self._end(entry.request, FinishReason.ERROR, now, error)
            raise
        self._num_looked_at = self._num_arrivals
        batch = step.batch()
        if batch is not None:
            self._in_flight.append(batch)
            for entry in batch.entries:
                if entry.request.admitted_s is None:
                    entry.request.admitted_s = now
        return batch

    def _check_oldest(self, batch: Batch) -> None:
        if not self._in_flight or batch is not self._in_flight[0]:
            raise RequestStateError("need the oldest batch that schedule() returned")

    # One request ------------------------------------------------------------

    def _advance(self, entry: BatchEntry, sampled: list[int], now: float) -> None:
        """Take note of what a step has computed of a request."""
        request = entry.request
        request.num_in_flight -= 1
        if request.status is not RequestStatus.RUNNING:  # it ended meanwhile
            self._land(request)
            return
        if sampled:
            request.num_pending -= 1
            tokens, reason = self._accept(request, entry.drafts, sampled)
        else:
            tokens, reason = (), None
        kv = kv_of(request)
        stop = entry.stop
        if entry.drafts:
            stop = entry.start + len(tokens)  # the others were rejected
            request.scheduled_len = stop
        if kv.committed_len < stop:
            self.cache.commit(kv, stop)
        if stop < entry.stop:
            self.cache.truncate(kv, stop)
        request.num_computed_tokens += stop - entry.start
        if entry.start < request.prefill_len:
            self._publish(request, kv)
        if tokens:
            if request.first_token_s is None:
                request.first_token_s = now
            self._outputs.append(RequestOutput(request, tokens, reason))
            if reason is not None:
                self._finish(request, reason, now)

    def _advance_to_error(
        self, entry: BatchEntry, sampled: list[int], now: float
    ) -> None:
        """Take note of what a step has sampled up to where the model says nothing."""
        request = entry.request
        valid = sampled[: sampled.index(INVALID_TOKEN)]
        drafts = entry.drafts[: len(valid)]
        # What follows a wrong draft or an end is dropped, whatever it is.
        num_before = request.num_output_tokens
        if drafts != tuple(valid) or any(
            self._finish_reason(request, token, num_before + i)
            for i, token in enumerate(valid, 1)
        ):
            self._advance(entry, sampled, now)
            return
        request.num_in_flight -= 1
        if request.status is not RequestStatus.RUNNING:
            self._land(request)
            return
        request.num_pending -= 1
        for token in valid:
            request.append(token)
        request.num_draft_tokens += len(entry.drafts)
        request.num_accepted_tokens += len(valid)
        num_behind = len(sampled) - len(valid) - 1
        request.num_computed_tokens += entry.stop - entry.start - num_behind
        error = NonFiniteLogitsError(
            f"request {request.request_id!r}: the logits behind position "
            f"{request.num_tokens - 1} have a NaN, a positive infinity, or nothing but "
            "negative infinities"
        )
        self._end(request, FinishReason.ERROR, now, error, tuple(valid))

    def _land(self, request: Request) -> None:
        """Take note that a step is done that computed for a request in vain."""
        if request.num_in_flight:
            return
        if request.status is RequestStatus.FINISHED:
            self._running.close(request)
        else:
            self._requeue(request, self._rolling_back.pop(request))

    def _roll_back(self, request: Request, good_len: int) -> None:
        """Queue a request again, once no step in flight writes to its pages."""
        self._running.remove(request)
        request.status = RequestStatus.WAITING
        if request.num_in_flight:
            self._rolling_back[request] = good_len
        else:
            self._requeue(request, good_len)

    def _requeue(self, request: Request, good_len: int) -> None:
        self._running.roll_back(request, good_len)
        request.num_pending = 0
        self._waiting.add(request)

    def _accept(
        self, request: Request, drafts: tuple[int, ...], sampled: list[int]
    ) -> tuple[tuple[int, ...], FinishReason | None]:
        """Append what was sampled, as far as the drafts before it were right."""
        if not drafts:
            token = sampled[0]
            request.append(token)
            num_output_tokens = request.num_output_tokens
            return (token,), self._finish_reason(request, token, num_output_tokens)
        num_right = 0
        for draft, token in zip(drafts, sampled, strict=False):
            if draft != token:
                break
            num_right += 1
        tokens: tuple[int, ...] = ()
        reason = None
        for token in sampled[: num_right + 1]:
            request.append(token)
            tokens += (token,)
            reason = self._finish_reason(request, token, request.num_output_tokens)
            if reason is not None:
                break
        request.num_draft_tokens += len(drafts)
        request.num_accepted_tokens += min(num_right, len(tokens))
        return tokens, reason

    def _publish(self, request: Request, kv: RequestKV) -> None:
        """Publish the whole pages of a prompt that are computed."""
        self.cache.cache_unfinished_req(
            kv, request.key, prompt_len=request.num_prompt_tokens
        )
        if kv.committed_len >= request.prefill_len:
            self._running.unpublished.pop(request, None)

    def _finish_reason(
        self, request: Request, token: int, num_output_tokens: int
    ) -> FinishReason | None:
        """Tell whether a request ends with a token, the last of so many."""
        params = request.sampling_params
        if token in self.eos_token_ids and not params.ignore_eos:
            return FinishReason.STOP
        if token in params.stop_token_ids:
            return FinishReason.STOP
        if num_output_tokens >= params.max_new_tokens:
            return FinishReason.LENGTH
        return None

    def _end(
        self,
        request: Request,
        reason: FinishReason,
        now: float,
        error: BaseException | None = None,
        tokens: tuple[int, ...] = (),
    ) -> None:
        """End a request for another reason than its last token."""
        if request in self._rolling_back:
            del self._rolling_back[request]
        elif request.status is RequestStatus.WAITING:
            self._waiting.remove(request)
        request.error = error
        self._outputs.append(RequestOutput(request, tokens, reason, error))
        self._finish(request, reason, now)

    def _finish(self, request: Request, reason: FinishReason, now: float) -> None:
        """Let a request compute no more, and own nothing once no step is at work."""
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.finished_s = now
        del self._requests[request.request_id]
        self._running.remove(request)
        if request.kv is not None and not request.num_in_flight:
            self._running.close(request)


def _may_requeue(request: Request, max_requeues: int | None) -> bool:
    """Count a failed step, and tell whether its request may be queued again."""
    if request.num_tokens > request.failed_len:
        request.failed_len = request.num_tokens
        request.num_failures = 0
    request.num_failures += 1
    if max_requeues is not None and request.num_failures > max_requeues:
        return False
    request.num_requeues += 1
    return True

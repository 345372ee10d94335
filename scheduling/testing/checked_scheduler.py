"""A scheduler whose every promise is checked at every step."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from typing import TypedDict, Unpack

from radixkv.mem_cache import (
    LengthError,
    PagesInUseError,
    PrefixCache,
    RequestStateError,
)

from ..admission_policies import WorstCase
from ..base import AdmissionPolicy, Drafter, RetractionPolicy, SchedulingPolicy
from ..batch import Batch
from ..limits import SchedulerLimits
from ..request import FinishReason, Request, RequestStatus
from ..request_output import RequestOutput
from ..sampling_params import SamplingParams
from ..scheduler import Scheduler
from .label_runner import LabelRunner, serial_output, stops_at
from .queue_check import check_overtakes, check_queues, num_in_flight, state_of
from .step_check import StepCheck, longest_len

_VOCAB_SIZE = 3


class SchedulerOptions(TypedDict, total=False):
    """How a scheduler decides: options of `Scheduler`, which says what they mean."""

    policy: str | SchedulingPolicy
    admission: str | AdmissionPolicy
    retraction: str | RetractionPolicy
    preempts: bool
    overlap: bool
    drafter: Drafter | None
    max_draft_tokens: int
    vocab_size: int | None
    clock: Callable[[], float]


class CheckedScheduler:
    """A scheduler with a `LabelRunner`, and the clients' view of the requests.

    Its methods are what clients and an engine do. Each of them makes the call of the
    scheduler, and raises an `AssertionError` if what came of it breaks a promise: that
    nobody is lost, starved, or given what it did not ask for; that steps keep to the
    limits; that memory is taken and given back when it should be; that every request
    has the tokens that it would have alone. `check` looks at everything between two
    calls, and `drain` runs all requests to their ends.

    Attributes:
        cache: The cache.
        scheduler: The scheduler.
        runner: Computes the steps.
        requests: All that were accepted, in the order of arrival.
        expected: The tokens that each must have in the end, if it is not aborted.
        streamed: The tokens that its client has.
        ended: Why it ended, as its client was told.
        batches: Those in flight, the oldest first.
        may_retract: Whether a retraction is no fault. It is one if all is set aside for
            each request that it can need, until `resize` takes some of that away; set
            it where others use the same cache.
        seen: What happened so far, by name, so that a test can show that it tries
            everything.

    Example:
        >>> from radixkv.mem_cache import MemoryManager, RadixCache
        >>> memory = MemoryManager(8, 4, max_num_requests=2, max_context_len=32)
        >>> checked = CheckedScheduler(RadixCache(memory), policy="lpm", overlap=True)
        >>> for prompt in ([1, 1, 1, 1, 0], [1, 1, 1, 1, 1]):
        ...     request = checked.add(prompt, SamplingParams(3, ignore_eos=True))
        >>> checked.step()
        >>> checked.abort(request)
        >>> checked.drain()
        >>> [str(reason) for reason in checked.ended.values()]
        ['abort', 'length']
    """

    def __init__(
        self,
        cache: PrefixCache,
        limits: SchedulerLimits | None = None,
        *,
        make_scheduler: Callable[..., Scheduler] = Scheduler,
        eos_token_ids: Iterable[int] = (2,),
        max_num_pages: int | None = None,
        **options: Unpack[SchedulerOptions],
    ) -> None:
        """Begin without requests.

        Args:
            cache: A cache that nobody else uses.
            limits: How much the scheduler may do at a time.
            make_scheduler: Makes it, as `Scheduler` does; for a class of your own.
            eos_token_ids: Tokens that end an output. The runner samples from the tokens
                0 to 2, or from all below `vocab_size` if that is given.
            max_num_pages: Most pages that `resize` will ever ask for; ``None`` for as
                many as there are.
            **options: The other options of `Scheduler`, see `SchedulerOptions`.

        Raises:
            ConfigError: As for `Scheduler`.
            RequestStateError: The cache has another scheduler.
        """
        self.cache = cache
        self.scheduler = make_scheduler(
            cache, limits, eos_token_ids=eos_token_ids, **options
        )
        self._vocab_size = options.get("vocab_size") or _VOCAB_SIZE
        self._overlap = self.scheduler.overlap
        self.runner = LabelRunner(
            cache, self._vocab_size, overlap=self._overlap, max_num_pages=max_num_pages
        )
        self._preempts = options.get("preempts", False)
        admission = options.get("admission", "worst-case")
        proves = admission == "worst-case" or isinstance(admission, WorstCase)
        self.may_retract = self._preempts or not proves
        self.batches: deque[Batch] = deque()
        self.requests: list[Request] = []
        self.expected: dict[Request, list[int]] = {}
        self.streamed: dict[Request, list[int]] = {}
        self.ended: dict[Request, FinishReason] = {}
        self.seen: Counter[str] = Counter()
        self._num_computed: Counter[Request] = Counter()

    @property
    def batch(self) -> Batch | None:
        """The batch that runs next, if there is one."""
        return self.batches[0] if self.batches else None

    @property
    def may_schedule(self) -> bool:
        """Whether another batch may be in flight."""
        return len(self.batches) < 1 + self._overlap

    # What a client does -----------------------------------------------------

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        namespace: Hashable = None,
        priority: int = 0,
    ) -> Request | None:
        """Submit a request; one that can never fit must be refused.

        Args:
            prompt: Its token ids.
            params: Where it ends.
            namespace: Whose it is.
            priority: Its priority.

        Returns:
            The request; ``None`` if it was refused.
        """
        scheduler = self.scheduler
        request = Request(
            len(self.requests), prompt, params, namespace=namespace, priority=priority
        )
        longest = self.cache.max_request_size(namespace)
        bound = min(self.cache.total_size, self.cache.memory.max_context_len)
        assert longest <= bound, f"a request of {longest} slots, the cache has {bound}"
        before = (scheduler.num_waiting, scheduler.has_requests)
        refusal = None
        try:
            scheduler.add_request(request)
        except LengthError as error:
            refusal = str(error)
        needed = longest_len(request)
        assert (refusal is not None) == (needed > longest), (
            f"{request!r} needs {needed} slots, can have {longest}, and was "
            f"{'refused' if refusal else 'not refused'}"
        )
        if refusal is not None:
            assert f"need {needed} slots" in refusal, f"needs {needed}, got {refusal}"
            after = (scheduler.num_waiting, scheduler.has_requests)
            assert before == after, (
                f"{request!r} was refused, and is there all the same"
            )
            return None
        self.requests.append(request)
        self.expected[request] = serial_output(
            prompt,
            request.sampling_params,
            vocab_size=self._vocab_size,
            eos_token_ids=scheduler.eos_token_ids,
        )
        self.streamed[request] = []
        return request

    def abort(self, request: Request) -> None:
        """Abort a request; its memory must be back at once if no step computes it.

        Args:
            request: One of `requests`; one at its end stays as it is.
        """
        held = self.cache.stats().num_requests
        owns = request.kv is not None and not num_in_flight(request, self.batches)
        self.scheduler.abort(request.request_id)
        assert request.status is RequestStatus.FINISHED, f"{request!r} was aborted"
        num_left = self.cache.stats().num_requests
        assert held - owns == num_left, (
            f"{request!r} was aborted: {held} requests had memory, then {num_left}"
        )

    def abort_any(self, number: int) -> None:
        """Abort one of all requests that there ever were.

        Args:
            number: Which one, at least 0; each state that there is is as likely.
        """
        states = sorted({state_of(request, self.batches) for request in self.requests})
        if not states:
            self.scheduler.abort("unknown")
            return
        state = states[number % len(states)]
        choice = [r for r in self.requests if state_of(r, self.batches) == state]
        self.seen[f"abort {state}"] += 1
        self.abort(choice[number // len(states) % len(choice)])

    def resize(self, num_pages: int) -> None:
        """Resize the cache while requests run, if none of them needs what would go.

        Without overlap, call it when no batch is in flight, as an engine would.

        Args:
            num_pages: The new capacity.
        """
        with suppress(PagesInUseError):
            is_smaller = num_pages < self.cache.memory.num_pages
            self.cache.resize(num_pages)
            self.seen["shrink"] += is_smaller
            self.may_retract |= is_smaller

    # What an engine does ----------------------------------------------------

    def schedule(self) -> Batch | None:
        """Schedule a step; returns its batch, which is in flight then, or ``None``."""
        check = StepCheck(self.scheduler, self.requests, is_ahead=bool(self.batches))
        batch = self.scheduler.schedule()
        if batch is not None:
            self.batches.append(batch)
        self.seen += check.check(
            batch, may_retract=self.may_retract, preempts=self._preempts
        )
        return batch

    def run(self) -> None:
        """Compute the oldest batch in flight, and bring its tokens back.

        Raises:
            RequestStateError: No batch is in flight.
        """
        batch = self._oldest()
        next_tokens = self.runner.run(batch)
        self.batches.popleft()
        running = [
            entry
            for entry in batch.entries
            if entry.request.status is RequestStatus.RUNNING
        ]
        num_tokens = [entry.request.num_tokens for entry in running]
        self._stream(self.scheduler.update(batch, next_tokens))
        for entry, num_before in zip(running, num_tokens, strict=True):
            num_new = entry.request.num_tokens - num_before
            num_computed = num_new if entry.drafts else entry.stop - entry.start
            self._num_computed[entry.request] += num_computed
            self.seen["accepted draft"] += num_new > 1

    def fail(self, *, is_received: bool, requeues: bool = False) -> None:
        """Let the oldest step in flight fail.

        Args:
            is_received: Whether its message was applied before. If not, what is behind
                it in flight cannot be told to anybody any more either: so that is taken
                back first, and fails as well.
            requeues: Whether its requests are queued again; otherwise they end.

        Raises:
            RequestStateError: No batch is in flight.
        """
        failed = [self._oldest()]
        self.batches.popleft()
        self.seen["failed step"] += 1
        if is_received:
            self.runner.worker.receive(failed[0].kv_cache_info)
        else:
            failed += self.batches
            self.batches.clear()
            for batch in reversed(failed):
                self.cache.recall(batch.kv_cache_info)
        for batch in failed:
            self.scheduler.cancel(batch, max_requeues=None if requeues else 0)
            for request in (entry.request for entry in batch.entries):
                waits = requeues and request.status is RequestStatus.WAITING
                assert waits or request.status is RequestStatus.FINISHED, (
                    f"{request!r}: its step failed, and it goes on"
                )
                self.seen["requeued"] += waits

    def step(self) -> None:
        """Schedule as far ahead as may be, and run one step if there is one."""
        while self.may_schedule and self.schedule() is not None:
            pass
        if self.batches:
            self.run()

    def drain(self) -> None:
        """Run everything to its end, and check that nothing is left behind.

        Raises:
            AssertionError: A promise is broken; or requests are left after ten times
                the steps that all would take one after the other.
        """
        chunk = self.scheduler.limits.chunked_prefill_size
        num_serial = sum(
            -(-r.num_tokens // chunk) + r.sampling_params.max_new_tokens
            for r in self.requests
            if r.status is not RequestStatus.FINISHED
        )
        for _ in range(10 * num_serial + 10 + len(self.batches)):
            if not self.scheduler.has_requests:
                break
            self.step()
            self.check()
        self._stream(self.scheduler.take_outputs())
        self.check()
        self._check_idle()

    # The checks -------------------------------------------------------------

    def check(self) -> None:
        """Check everything that must be true between two calls.

        Raises:
            AssertionError: Something is not.
            IntegrityError: The cache is not sound.
        """
        cache, scheduler = self.cache, self.scheduler
        cache.check_integrity()
        parts = (cache.available_size, cache.evictable_size, cache.protected_size)
        assert cache.total_size == sum(parts) + cache.held_size, "slots were lost"
        check_queues(scheduler, self.requests, self.batches)
        self.runner.check(self.requests, self.batches)
        for request in self.requests:
            if request.status is not RequestStatus.FINISHED:
                self._check_output(request)
        if not self._preempts:
            check_overtakes(scheduler, self.requests)
        num_retractions = sum(request.num_retractions for request in self.requests)
        assert num_retractions == scheduler.num_retractions, (
            f"{num_retractions} retractions, counted {scheduler.num_retractions}"
        )

    def _check_output(self, request: Request) -> None:
        """Check what a request has generated and computed so far."""
        output = request.output_tokens
        assert self.streamed[request] == output, (
            f"{request!r} has the output {output}, told {self.streamed[request]}"
        )
        expected = self.expected[request][: len(output)]
        assert expected == output, f"{request!r}: alone {expected}, here {output}"
        num_computed = self._num_computed[request]
        assert num_computed == request.num_computed_tokens, (
            f"{request!r}: {num_computed} positions were computed, "
            f"counted {request.num_computed_tokens}"
        )
        usage = request.usage
        assert usage.num_output_tokens == len(output), f"{request!r}: {usage}"
        assert usage.num_accepted_tokens <= usage.num_draft_tokens, f"{usage}"

    def _check_idle(self) -> None:
        """Nobody is left: every request ended once, and owns nothing."""
        cache, scheduler = self.cache, self.scheduler
        left = [r for r in self.requests if r.status is not RequestStatus.FINISHED]
        why = "; ".join(map(str, scheduler.explain_stall()))
        assert not left, f"{left} do not come to an end ({why})"
        assert not scheduler.has_requests, "the scheduler has requests of nobody"
        sizes = (cache.held_size, cache.protected_size, cache.stats().num_requests)
        assert sizes == (0, 0, 0), f"nobody runs, and {sizes} is held and protected"
        untold = [request for request in self.requests if request not in self.ended]
        assert not untold, f"no client was told of the ends of {untold}"
        for request, reason in self.ended.items():
            output, expected = self.streamed[request], self.expected[request]
            assert request.output_tokens == output, f"{request!r}: told {output}"
            if reason not in (FinishReason.LENGTH, FinishReason.STOP):
                expected = expected[: len(output)]
            assert expected == output, f"{request!r}: alone {expected}, here {output}"
            if reason in (FinishReason.LENGTH, FinishReason.STOP):
                stops = stops_at(
                    output[-1], request.sampling_params, scheduler.eos_token_ids
                )
                assert stops == (reason is FinishReason.STOP), f"{request!r}: {reason}"

    # ------------------------------------------------------------------------

    def _oldest(self) -> Batch:
        if not self.batches:
            raise RequestStateError("no batch is in flight: schedule() first")
        return self.batches[0]

    def _stream(self, outputs: list[RequestOutput]) -> None:
        """Tell the clients."""
        for output in outputs:
            request, reason = output.request, output.finish_reason
            assert request in self.streamed, f"an output of {request!r}, of nobody here"
            assert request not in self.ended, f"{request!r} has an output after its end"
            assert output.tokens or reason, f"{request!r} has an empty output"
            self.streamed[request] += output.tokens
            if reason is not None:
                self.ended[request] = reason
                assert reason is request.finish_reason, f"{request!r}: told {reason}"
                self.seen[reason] += 1

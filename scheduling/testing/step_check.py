"""What must be true of every step that a scheduler makes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ..batch import Batch, BatchEntry
from ..limits import SchedulerLimits
from ..request import FinishReason, Request, RequestStatus
from ..scheduler import Scheduler


def longest_len(request: Request) -> int:
    """Return the slots a request needs at its longest; the last token needs none."""
    return request.num_prompt_tokens + request.sampling_params.max_new_tokens - 1


class StepCheck:
    """What there was before a step was scheduled; says whether the step may be.

    Attributes:
        is_ahead: Whether another step was in flight.
    """

    def __init__(
        self, scheduler: Scheduler, requests: Iterable[Request], *, is_ahead: bool
    ) -> None:
        """Look at all requests; `schedule` is to be called next.

        Args:
            scheduler: What makes the step.
            requests: All that it has, in the order of arrival.
            is_ahead: Whether another step is in flight.
        """
        self.is_ahead = is_ahead
        self._scheduler = scheduler
        self._requests = list(requests)
        self._num_tokens = {r: r.num_tokens for r in self._requests}
        self._waiting = self._all(RequestStatus.WAITING)
        self._running = [r for r in self._requests if r.kv is not None]
        self._decoding = [r for r in self._running if r.scheduled_len >= r.prefill_len]
        self._num_retractions = scheduler.num_retractions

    def check(
        self, batch: Batch | None, *, may_retract: bool, preempts: bool
    ) -> Counter[str]:
        """Check what came of the step.

        Args:
            batch: What `schedule` returned.
            may_retract: Whether a retraction is no fault.
            preempts: Whether one may be for the sake of a higher priority.

        Returns:
            What the step did, by name.

        Raises:
            AssertionError: It did what it must not.
        """
        num_retractions = self._scheduler.num_retractions - self._num_retractions
        assert not (num_retractions and self.is_ahead), (
            "nobody may be retracted while a step is in flight"
        )
        assert may_retract or not num_retractions, (
            f"{num_retractions} requests were retracted, though all that they could "
            "need was set aside for them"
        )
        for request in self._requests:
            before = self._num_tokens[request]
            assert before == request.num_tokens, (
                f"schedule() changed the tokens of {request!r}, which had {before}"
            )
        self._check_refused()
        seen = Counter({"retraction": num_retractions})
        if batch is None:
            return seen
        check_batch(batch, self._scheduler.limits)
        computed = {entry.request for entry in batch.entries}
        if not self.is_ahead:
            self._check_decodes(computed, preempts=preempts)
        started = {request for request in self._waiting if request in computed}
        assert preempts or not (num_retractions and started), (
            f"{started} were admitted to pages that were taken back for others"
        )
        seen["ahead"] += self.is_ahead
        for entry in batch.entries:
            is_new = entry.request in started
            seen["hit"] += is_new and entry.start > 0
            seen["resumed"] += is_new and entry.request.num_retractions > 0
            seen["chunk"] += not entry.num_samples
            seen["draft"] += bool(entry.drafts)
        return seen

    def _check_refused(self) -> None:
        """Check that only who can never run any more was refused."""
        for request in (*self._waiting, *self._running):
            if request.finish_reason is FinishReason.REFUSED:
                longest = self._scheduler.cache.max_request_size(request.namespace)
                assert longest_len(request) > longest, (
                    f"{request!r} was refused, though it fits into {longest} slots"
                )

    def _check_decodes(self, computed: set[Request], *, preempts: bool) -> None:
        """Check that who can decode does decode; who must go back is not the oldest."""
        for request in self._decoding:
            assert request in computed or request.status is not RequestStatus.RUNNING, (
                f"{request!r} could decode, and was left out of the step"
            )
        if preempts or not self._decoding:
            return
        oldest = max(self._running, key=lambda r: (r.priority, -r.arrival))
        assert (
            oldest in computed
            or oldest not in self._decoding
            or oldest.status is RequestStatus.FINISHED
        ), f"{oldest!r} was retracted, though it is the oldest of the highest priority"

    def _all(self, status: RequestStatus) -> list[Request]:
        return [request for request in self._requests if request.status is status]


def check_batch(batch: Batch, limits: SchedulerLimits) -> None:
    """Check that a step keeps to the limits, and computes what comes next.

    Args:
        batch: What `schedule` returned, not run yet.
        limits: The scheduler's.

    Raises:
        AssertionError: It does not.
    """
    assert 0 < batch.num_tokens <= limits.max_batched_tokens, (
        f"a step computes {batch.num_tokens} tokens, "
        f"may be 1 to {limits.max_batched_tokens}"
    )
    requests = [entry.request for entry in batch.entries]
    assert len(requests) == len(set(requests)), f"a request is twice in {requests}"
    for entry in batch.entries:
        _check_entry(entry, limits)


def _check_entry(entry: BatchEntry, limits: SchedulerLimits) -> None:
    request, start, stop = entry.request, entry.start, entry.stop
    assert request.status is RequestStatus.RUNNING, f"{request!r} must not be computed"
    assert request.kv is not None, f"{request!r} is computed, and has no pages"
    assert start == request.kv.committed_len, (
        f"{request!r} goes on at position {start}, "
        f"its first without K and V is {request.kv.committed_len}"
    )
    assert stop <= longest_len(request), f"{request!r} is computed up to {stop}"
    num_samples = 1 + len(entry.drafts)
    if start >= request.prefill_len:
        assert stop - start == entry.num_samples == num_samples, (
            f"a decode must sample at each position, got {entry!r}"
        )
        return
    assert stop - start <= limits.chunked_prefill_size, (
        f"a chunk of {request!r} has {stop - start} tokens, "
        f"may have {limits.chunked_prefill_size}"
    )
    assert not entry.drafts, f"a chunk of a prompt has drafts: {entry!r}"
    assert entry.num_samples == (stop == request.prefill_len), (
        f"the last chunk of a prompt samples, and no other: {entry!r}"
    )

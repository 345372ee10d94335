"""What must be true of the queues of a scheduler between two calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from ..batch import Batch
from ..request import Request, RequestStatus
from ..scheduler import Scheduler


def num_in_flight(request: Request, batches: Iterable[Batch]) -> int:
    """Count the steps in flight that compute a request."""
    entries = [entry for batch in batches for entry in batch.entries]
    return sum(entry.request is request for entry in entries)


def state_of(request: Request, batches: Iterable[Batch]) -> str:
    """Name where a request is, more finely than its status does."""
    if num_in_flight(request, batches):
        return "in flight"
    if request.status is RequestStatus.WAITING:
        return "retracted" if request.num_retractions else "waiting"
    if request.status is RequestStatus.FINISHED:
        return "finished"
    return "mid-chunk" if request.num_uncomputed_tokens > 1 else "running"


def check_queues(
    scheduler: Scheduler, requests: Iterable[Request], batches: Collection[Batch]
) -> None:
    """Check that each request is in one queue, and owns memory only if it may.

    Args:
        scheduler: The only user of its cache.
        requests: All that it was given.
        batches: Those in flight.

    Raises:
        AssertionError: Something is not as it must be.
    """
    requests = list(requests)
    states = Counter(request.status for request in requests)
    num_waiting = states[RequestStatus.WAITING]
    num_running = states[RequestStatus.RUNNING]
    counted = (scheduler.num_waiting, scheduler.num_running)
    assert (num_waiting, num_running) == counted, (
        f"{num_waiting} requests wait and {num_running} run, counted {counted}"
    )
    max_running = scheduler.limits.max_running_requests
    assert num_running <= max_running, f"{num_running} run, may be {max_running}"
    assert scheduler.num_in_flight == len(batches), "a batch was lost"
    rows = [r.kv.req_pool_idx for r in requests if r.kv is not None]
    assert len(rows) == len(set(rows)), f"a row has two requests, got {rows}"
    num_held = scheduler.cache.stats().num_requests
    assert len(rows) == num_held, f"{len(rows)} have memory, counted {num_held}"
    for request in requests:
        _check_request(request, num_in_flight(request, batches))


def check_overtakes(scheduler: Scheduler, requests: Iterable[Request]) -> None:
    """Check that nobody was overtaken more often than may be.

    Args:
        scheduler: One that does not preempt: higher priorities do not count.
        requests: All that it was given.

    Raises:
        AssertionError: A request was.
    """
    most = scheduler.limits.max_overtakes
    for request in requests:
        assert request.num_overtakes <= most, (
            f"{request!r} was overtaken {request.num_overtakes} times, max. {most}"
        )


def _check_request(request: Request, times_in_flight: int) -> None:
    is_finished = request.status is RequestStatus.FINISHED
    assert is_finished == (request.finish_reason is not None), (
        f"{request!r} has the finish reason {request.finish_reason}"
    )
    assert request.num_in_flight == times_in_flight, (
        f"{request!r} is {times_in_flight} times in flight, "
        f"counted {request.num_in_flight}"
    )
    needs_kv = request.status is RequestStatus.RUNNING or times_in_flight > 0
    assert (request.kv is not None) == needs_kv, (
        f"{request!r}, {times_in_flight} times in flight, "
        f"{'must not have' if request.kv else 'needs'} memory"
    )

"""How waiting requests come to run."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Final

from radixkv.mem_cache import Obstacle, OutOfPagesError, PrefixCache, QuotaError

from .admission_room import AdmissionRoom
from .batch_builder import BatchBuilder
from .limits import SchedulerLimits
from .policies import Policies
from .preemption import Preemption, find_preemption
from .prefixes_in_flight import PrefixesInFlight
from .request import Request, RequestStatus
from .running_queue import RunningQueue
from .scheduling_policies import order_of
from .stall import LastLook, StallReason
from .waiting_queue import WaitingQueue

NUM_PASSED_OVER = 8
"""Waiting requests that may lack room in a step before it looks at no more of them."""

_STALL_REASONS: Final = {
    Obstacle.PAGES: StallReason.NO_ROOM,
    Obstacle.QUOTA: StallReason.QUOTA,
    Obstacle.ROW: StallReason.NO_ROW,
}


class Admissions:
    """Starts waiting requests, as far as the limits and the room go.

    Attributes:
        last_look: Why those who wait were not started by the last step.
    """

    def __init__(
        self,
        cache: PrefixCache,
        limits: SchedulerLimits,
        policies: Policies,
        waiting: WaitingQueue,
        running: RunningQueue,
    ) -> None:
        """Join the queues and the policies; see `StepPlanner`."""
        self._cache = cache
        self._limits = limits
        self._policies = policies
        self._waiting = waiting
        self._running = running
        self.last_look = LastLook()

    def order(self, step: BatchBuilder) -> list[Request] | None:
        """Put those who wait into order; ``None`` if nobody can start in any case.

        Raises:
            PolicyError: The scheduling policy failed.
        """
        preempts = self._policies.preempts
        if not self._waiting or (self._limit_reached(step) and not preempts):
            return None
        order = order_of(self._policies.scheduling, self._waiting)
        if preempts:
            # Or who is admitted now would lose its place again in the next step.
            order.sort(key=lambda request: -request.priority)
        return order

    def preemption(self) -> Preemption | None:
        """Find out whether a waiting request should take the place of running ones.

        Raises:
            PolicyError: The retraction policy failed.
        """
        running = self._running
        if not self._policies.preempts or not self._waiting or not running:
            return None
        least = min(request.priority for request in running)
        waiting = [request for request in self._waiting if request.priority > least]
        prefixes = PrefixesInFlight(self._cache, running.unpublished)
        for request in sorted(waiting, key=lambda r: (-r.priority, r.arrival)):
            longest = self._cache.max_request_size(request.namespace)
            if request.max_kv_len > longest or self._leader(request, prefixes):
                continue
            return find_preemption(
                request,
                self._waiting.cached_len(request),
                list(running),
                self._limits.max_running_requests,
                AdmissionRoom(self._cache, self._policies.admission, running),
                self._policies.retraction,
            )
        return None

    def start_preempting(self, step: BatchBuilder, request: Request) -> None:
        """Start the request that others gave their pages back for."""
        room = AdmissionRoom(self._cache, self._policies.admission, self._running)
        if self._start(step, request, room) is None:
            self._count_overtakes(request, set())

    def admit(
        self,
        step: BatchBuilder,
        order: list[Request] | None,
        refuse: Callable[[Request], None],
    ) -> None:
        """Start waiting requests as long as there is room for them.

        Args:
            step: What is scheduled already; gets their first chunks.
            order: What `order` returned before.
            refuse: Ends a request that cannot even run alone any more.
        """
        cache, limits, look = self._cache, self._limits, self.last_look
        look.stop(self._limit_reached(step) or StallReason.RUNNING_CAP)
        if not self._waiting or self._limit_reached(step) is not None:
            return
        room = AdmissionRoom(cache, self._policies.admission, self._running)
        prefixes = PrefixesInFlight(cache, self._running.unpublished)
        held_up: set[Request] = set()
        full: dict[Hashable, Request] = {}
        num_passed_over = 0
        for request in self._candidates(order or [], held_up):
            reached = self._limit_reached(step)
            if reached is not None:
                look.stop(reached)
                return
            if request.max_kv_len > cache.max_request_size(request.namespace):
                # The pool was shrunk, or a quota was set, while it waited.
                refuse(request)
                continue
            if (blocker := full.get(request.namespace)) is not None:
                held_up.add(request)
                look.keep(request, StallReason.TURN, blocker=blocker)
                continue
            if (leader := self._leader(request, prefixes)) is not None:
                held_up.add(request)
                request.num_deferrals += 1
                look.keep(request, StallReason.PREFIX, blocker=leader)
                continue
            obstacle = self._start(step, request, room)
            if obstacle is None:
                prefixes.add(request)
                self._count_overtakes(request, held_up)
            elif obstacle is Obstacle.QUOTA:
                # That is nobody else's affair but its namespace's.
                held_up.add(request)
                full[request.namespace] = request
            elif obstacle is Obstacle.ROW:
                look.stop(StallReason.NO_ROW)
                return
            else:
                num_passed_over += 1
                if (
                    request.num_overtakes >= limits.max_overtakes
                    # In a step that is empty so far, there is time to look at all.
                    or (num_passed_over >= NUM_PASSED_OVER and step.entries)
                ):
                    look.stop(StallReason.TURN, blocker=request)
                    return
        if order is not None:
            look.stop(StallReason.LEFT_OUT)

    def _limit_reached(self, step: BatchBuilder) -> StallReason | None:
        """Tell which limit keeps others from starting, if one does."""
        limits = self._limits
        if len(self._running) >= limits.max_running_requests:
            return StallReason.RUNNING_CAP
        if step.num_tokens >= limits.max_batched_tokens:
            return StallReason.TOKEN_BUDGET
        return None

    def _candidates(
        self, order: list[Request], held_up: set[Request]
    ) -> Iterator[Request]:
        """Iterate over who waits: the overtaken first, then as the policy says.

        Who is overtaken for the last time on the way goes next, even if there was no
        room for it before: then nobody else may be admitted. Those in `held_up` are
        left out from then on.
        """
        rest = iter(order)
        request = next(rest, None)
        while True:
            urgent = next(self._overtaken(held_up, request), None)
            if urgent is not None:
                yield urgent
            elif request is None:
                return
            else:
                if request.status is RequestStatus.WAITING and request not in held_up:
                    yield request
                request = next(rest, None)

    def _overtaken(
        self, held_up: set[Request], before: Request | None
    ) -> Iterator[Request]:
        """Iterate over those that nobody may overtake, and that go before another."""
        for request in self._waiting.overtaken:
            if request not in held_up and not (
                self._policies.preempts
                and before is not None
                and request.priority < before.priority
            ):
                yield request

    def _count_overtakes(self, request: Request, held_up: set[Request]) -> None:
        """Take note that a request was admitted before older ones."""
        least = request.priority if self._policies.preempts else None
        self._waiting.count_overtakes(request, held_up, least)

    def _leader(self, request: Request, prefixes: PrefixesInFlight) -> Request | None:
        """Return who computes what a request should wait for, if anybody does."""
        if (
            request.num_deferrals >= self._limits.max_deferrals
            or not self._cache.shares_prefixes
        ):
            return None
        cached_len = self._waiting.cached_len(request)
        return prefixes.leader_of(request, cached_len)

    def _start(
        self, step: BatchBuilder, request: Request, room: AdmissionRoom
    ) -> Obstacle | None:
        """Admit a request and schedule its first chunk; or tell what is in the way."""
        cache = self._cache
        cached_len = self._waiting.cached_len(request)
        obstacle = room.obstacle(request, cached_len)
        if obstacle is not None:
            self._keep(request, obstacle, room)
            return obstacle  # the cache was not touched
        kv = cache.admit(
            request.key,
            priority=request.priority,
            computed_len=request.retracted_len,
        )
        assert kv is not None  # there is a row
        request.kv = kv
        request.prefill_len = request.num_tokens
        request.scheduled_len = request.admitted_len = kv.committed_len
        try:
            step.extend(request, chunk_len(step, request, self._limits))
        except BaseException as error:
            request.kv = None
            cache.release(kv)
            if not isinstance(error, OutOfPagesError):
                raise
            is_quota = isinstance(error, QuotaError)
            obstacle = Obstacle.QUOTA if is_quota else Obstacle.PAGES
            self._keep(request, obstacle, room)
            return obstacle
        if not (request.num_retractions or request.num_requeues):
            request.num_cached_tokens = kv.committed_len
        self._waiting.remove(request)
        self._running.add(request)
        room.take(request)
        return None

    def _keep(self, request: Request, obstacle: Obstacle, room: AdmissionRoom) -> None:
        """Take note of why a request was not started."""
        shortage = None
        if obstacle is Obstacle.PAGES:
            shortage = room.shortage(request, self._waiting.cached_len(request))
        self.last_look.keep(request, _STALL_REASONS[obstacle], shortage=shortage)


def chunk_len(step: BatchBuilder, request: Request, limits: SchedulerLimits) -> int:
    """Return how many tokens of its prompt a request may have scheduled in a step."""
    return min(
        limits.chunked_prefill_size,
        limits.max_batched_tokens - step.num_tokens,
        request.num_tokens - request.scheduled_len,
    )

"""What the next step computes."""

from __future__ import annotations

from collections.abc import Callable

from radixkv.mem_cache import OutOfPagesError, PrefixCache, QuotaError

from .admissions import Admissions, chunk_len
from .batch_builder import BatchBuilder, kv_of
from .drafts import cut_to_pages
from .limits import SchedulerLimits
from .policies import Policies
from .request import Request
from .running_queue import RunningQueue
from .stall import LastLook, StallReason
from .waiting_queue import WaitingQueue


class StepPlanner:
    """Fills steps: first decodes, then prompts that are begun, then new ones."""

    def __init__(
        self,
        cache: PrefixCache,
        limits: SchedulerLimits,
        policies: Policies,
        waiting: WaitingQueue,
        running: RunningQueue,
    ) -> None:
        """Join the queues and the policies.

        Args:
            cache: Where K and V are kept.
            limits: How much a step may do.
            policies: Who decides what.
            waiting: Who waits.
            running: Who runs.
        """
        self._cache = cache
        self._limits = limits
        self._policies = policies
        self._waiting = waiting
        self._running = running
        self._admissions = Admissions(cache, limits, policies, waiting, running)

    @property
    def last_look(self) -> LastLook:
        """Why those who wait were not started by the last step."""
        return self._admissions.last_look

    def fill(
        self,
        step: BatchBuilder,
        *,
        is_ahead: bool,
        refuse: Callable[[Request], None],
    ) -> None:
        """Schedule a step, and retract whom it has no pages for.

        Args:
            step: An empty one; it stays empty if nobody can go on.
            is_ahead: Whether a step before it is in flight. Then nobody is retracted:
                where that is needed, the step stays empty, and is tried again after the
                other.
            refuse: Ends a request that cannot even run alone any more.

        Raises:
            PolicyError: A policy failed. If it was the scheduling policy, nothing has
                changed; nor if it was the admission policy, which may have failed
                while the step before was filled.
        """
        num_running = len(self._running)
        self._fill(step, is_ahead, refuse)
        if not step.entries and len(self._running) < num_running:
            # Nobody uses the pages that were taken back: others may start at once.
            self._fill(step, is_ahead, refuse)

    def _fill(
        self, step: BatchBuilder, is_ahead: bool, refuse: Callable[[Request], None]
    ) -> None:
        """Look once at who runs and who waits."""
        self.last_look.begin()
        admissions, running = self._admissions, self._running
        # Asked before anything is scheduled: if a policy fails, nothing has changed.
        self._policies.admission.check()
        order = admissions.order(step)
        preemption = admissions.preemption()
        if preemption is not None:
            if is_ahead:
                return
            for victim in preemption.victims:
                self._take_back(victim)
        num_retractions = running.num_retractions
        if not self._decode(step, is_ahead, refuse, drafts=preemption is None):
            return
        begun = list(running.prefilling)
        if preemption is not None and running.num_retractions == num_retractions:
            # Before prompts that are begun, or they might use up all tokens.
            admissions.start_preempting(step, preemption.request)
        self._continue_prefill(step, begun, is_ahead, refuse)
        if running.num_retractions == num_retractions:
            # Whoever was retracted must not come back before the pages are used.
            admissions.admit(step, order, refuse)
            self._policies.admission.on_step()

    # Decodes ----------------------------------------------------------------

    def _decode(
        self,
        step: BatchBuilder,
        is_ahead: bool,
        refuse: Callable[[Request], None],
        *,
        drafts: bool,
    ) -> bool:
        """Schedule the newest tokens; False if a retraction must wait for a step.

        Pages that were taken back for somebody are not there for guesses.
        """
        requests: list[Request] = self._ready(is_ahead)
        guesses: dict[Request, tuple[int, ...]] = {}
        if drafts:
            guesses = self._propose(requests)
        while requests:
            try:
                step.decode(requests, guesses)
                return True
            except OutOfPagesError as error:
                # Guesses cost nobody a page: without them, it would be the same ones
                # that lack one.
                fewer = cut_to_pages(guesses, self._cache.page_size)
                if fewer != guesses:
                    guesses = fewer
                    continue
                if is_ahead:
                    return False
                self._retract(error, refuse)
                requests = [request for request in requests if request.kv is not None]
        return True

    def _ready(self, is_ahead: bool) -> list[Request]:
        """List who has all tokens scheduled but the newest, known or not."""
        if not is_ahead:
            return list(self._running.decoding)
        requests: list[Request] = []
        needs_tokens = self._policies.drafts is not None
        for request in self._running.decoding:
            num_pending = request.num_pending
            if request.num_tokens + num_pending != request.scheduled_len + 1 or (
                needs_tokens and num_pending
            ):
                continue
            if request.scheduled_len < request.max_kv_len:
                self._commit_scheduled(request)
                requests.append(request)
        return requests

    def _propose(self, requests: list[Request]) -> dict[Request, tuple[int, ...]]:
        """Guess how requests go on, as far as the step has room for it."""
        drafts = self._policies.drafts
        if drafts is None:
            return {}
        budget = self._limits.max_batched_tokens - len(requests)
        if self._running.prefilling or self._waiting:
            budget //= 2  # for prompts, so that these never starve
        return drafts.propose(requests, budget)

    # Prompts ----------------------------------------------------------------

    def _continue_prefill(
        self,
        step: BatchBuilder,
        begun: list[Request],
        is_ahead: bool,
        refuse: Callable[[Request], None],
    ) -> None:
        """Go on with the prompts that are begun, the first that was admitted first."""
        limits = self._limits
        for request in begun:
            while request.kv is not None and (
                num_tokens := chunk_len(step, request, limits)
            ):
                if is_ahead:
                    self._commit_scheduled(request)
                try:
                    self._extend(step, request, num_tokens)
                    break
                except OutOfPagesError as error:
                    if step.entries or is_ahead:
                        break  # others go on, and their pages come free
                    self._retract(error, refuse)

    def _extend(self, step: BatchBuilder, request: Request, num_tokens: int) -> None:
        step.extend(request, num_tokens)
        self._running.move_on(request)

    def _commit_scheduled(self, request: Request) -> None:
        """Reckon with what a step in flight computes: the next one comes behind it."""
        if request.num_in_flight:
            self._cache.commit(kv_of(request), request.scheduled_len)

    # Retraction -------------------------------------------------------------

    def _retract(
        self, error: OutOfPagesError, refuse: Callable[[Request], None]
    ) -> None:
        """Take the pages of one request back, or end who cannot even run alone."""
        running = self._running
        victim = running.victim(self._policies.retraction, _concerned(error))
        assert victim is not None  # whoever ran out of pages is one
        if victim.max_kv_len > self._cache.max_request_size(victim.namespace):
            # The pool was shrunk under it, or a quota was set.
            refuse(victim)
            return
        self._take_back(victim)
        # Hysteresis: it comes back when there is room for all that it can need. Who is
        # retracted once more all the same has seen others outgrow what was set aside
        # for them, so that ends for all that run now.
        for request in running if victim.reserves_all else ():
            request.reserves_all = True
        victim.reserves_all = True
        self._policies.admission.on_retraction(list(running))

    def _take_back(self, victim: Request) -> None:
        self._running.retract(victim)
        self._waiting.add(victim)
        self.last_look.keep(victim, StallReason.RETRACTION)


def _concerned(error: OutOfPagesError) -> Callable[[Request], bool]:
    """Tell whose pages would help against an error."""
    if isinstance(error, QuotaError):
        namespace = error.namespace
        return lambda request: request.namespace == namespace
    return lambda request: True

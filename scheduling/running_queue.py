"""The requests that run, and how they come to run and cease to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

from radixkv.mem_cache import PrefixCache, RequestKV

from .base import RetractionPolicy
from .batch_builder import kv_of
from .request import FinishReason, Request, RequestStatus
from .retraction_policies import retraction_order


class RunningQueue:
    """The requests with a part of the cache that are not at their end.

    Attributes:
        prefilling: Those that have some of their prompt to schedule, in the order of
            admission.
        decoding: Those that have all of it scheduled, in the order in which they had.
        unpublished: Those of both whose prompt is not all computed yet.
        num_retractions: How often one gave its pages back so that others could go on.
    """

    def __init__(self, cache: PrefixCache) -> None:
        """Start without requests."""
        self._cache = cache
        self.prefilling: dict[Request, None] = {}
        self.decoding: dict[Request, None] = {}
        self.unpublished: dict[Request, None] = {}
        self.num_retractions = 0

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the requests, those that compute their prompt first."""
        return chain(self.prefilling, self.decoding)

    def __len__(self) -> int:
        """Count the requests."""
        return len(self.prefilling) + len(self.decoding)

    def add(self, request: Request) -> None:
        """Take a request in whose first chunk is scheduled."""
        request.status = RequestStatus.RUNNING
        self.unpublished[request] = None
        if request.scheduled_len < request.num_tokens:
            self.prefilling[request] = None
        else:
            self.decoding[request] = None

    def move_on(self, request: Request) -> None:
        """Let a request decode whose prompt is all scheduled."""
        if request.scheduled_len == request.num_tokens:
            del self.prefilling[request]
            self.decoding[request] = None

    def remove(self, request: Request) -> None:
        """Take a request out; it keeps its part of the cache until it is closed."""
        self.prefilling.pop(request, None)
        self.decoding.pop(request, None)
        self.unpublished.pop(request, None)

    def victim(
        self, policy: RetractionPolicy, among: Callable[[Request], bool]
    ) -> Request | None:
        """Choose whose pages are taken back.

        Args:
            policy: Who goes first.
            among: Whose may be taken.

        Returns:
            One of those that no step in flight computes. The oldest of the highest
            priority only if there is no other: so it ends, and then the next.

        Raises:
            PolicyError: The policy failed, or its keys do not compare.
        """
        choice = [request for request in self if among(request)]
        if len(choice) > 1:
            choice.remove(max(choice, key=lambda r: (r.priority, -r.arrival)))
        choice = [request for request in choice if not request.num_in_flight]
        return next(iter(retraction_order(policy, choice)), None)

    def retract(self, request: Request) -> None:
        """Take the pages of a request back; what it computed stays cached."""
        self.remove(request)
        self.num_retractions += 1
        request.num_retractions += 1
        self._take_back(request)

    def roll_back(self, request: Request, good_len: int) -> None:
        """Take the pages of a request back; a step that computed it has failed.

        Args:
            request: It is out of the queue, and no step in flight computes it.
            good_len: Positions that were computed before that step. These stay cached.
        """
        kv = kv_of(request)
        if good_len < kv.allocated_len:
            self._cache.truncate(kv, good_len)
        self._take_back(request)

    def close(self, request: Request) -> None:
        """Give the part of the cache back that a request at its end still has."""
        kv = kv_of(request)
        if request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._publish_and_release(request, kv)
        else:
            self._cache.release(kv)
            request.kv = None

    def _take_back(self, request: Request) -> None:
        kv = kv_of(request)
        request.retracted_len = max(request.retracted_len, kv.committed_len)
        self._publish_and_release(request, kv)
        request.status = RequestStatus.WAITING

    def _publish_and_release(self, request: Request, kv: RequestKV) -> None:
        self._cache.cache_finished_req(
            kv, request.key, prompt_len=request.num_prompt_tokens
        )
        request.kv = None

"""Who is admitted first: the orders that are built in.

Equals always go in the order of arrival, and no order looks at a clock: a run with the
same requests makes the same steps. How often a request may be overtaken is no matter of
an order, see `SchedulerLimits.max_overtakes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hashlib import blake2b
from itertools import islice
from typing import Final

from radixkv.mem_cache.errors import ConfigError, PolicyError
from radixkv.mem_cache.sizes import as_integer

from .base import QueueView, SchedulingPolicy
from .prefix_orders import DFSWeight, LongestPrefixMatch
from .request import Request


class FirstComeFirstServed:
    """The order of arrival."""

    def order(self, queue: QueueView) -> Iterable[Request]:
        """Return the requests as they came."""
        return list(queue)


class HighestPriorityFirst:
    """The order of `Request.priority`, the highest first."""

    def order(self, queue: QueueView) -> Iterable[Request]:
        """Sort by priority."""
        return sorted(queue, key=lambda request: request.priority, reverse=True)


class LongestOutputFirst:
    """Who may still generate the most tokens goes first.

    So the long ones do not run on alone when all others have ended. It is the rule of
    the longest processing time: Graham, "Bounds on Multiprocessing Timing Anomalies"
    (1969).
    """

    def order(self, queue: QueueView) -> Iterable[Request]:
        """Sort by the output tokens to come, at their most."""
        return sorted(queue, key=_max_rest, reverse=True)


class ShortestPrefillFirst:
    """Who has the fewest tokens to compute before its next token goes first.

    It is the shortest job first, where the job is the uncached rest of the prompt: the
    mean time to the first token is short, and long prompts wait.
    """

    def order(self, queue: QueueView) -> Iterable[Request]:
        """Sort by the uncached tokens."""
        return sorted(queue, key=lambda request: _num_uncached(queue, request))


class HighestResponseRatioNext:
    """Who has waited longest, measured by what it needs, goes first.

    A short prompt goes before a long one, unless that has waited longer by as much. The
    response ratio is ``(waiting + service) / service``: Brinch Hansen, "An Analysis of
    Response Ratio Scheduling" (1971). Different from it: both times are counted in
    tokens, those that the scheduler has computed since the arrival and those that the
    request has to compute, so no clock decides.
    """

    def order(self, queue: QueueView) -> Iterable[Request]:
        """Sort by the ratio."""
        now = queue.num_computed_tokens

        def ratio(request: Request) -> float:
            # Less 1, which changes no order. One token at least is always computed.
            service = max(1, _num_uncached(queue, request))
            return (now - request.arrived_at) / service

        return sorted(queue, key=ratio, reverse=True)


class RandomOrder:
    """An order by lot, as a baseline to compare others with.

    Each request has one lot for good, drawn from the seed and its arrival number. If
    all were shuffled anew for each step, a request at the head could be at the end in
    the next, and the outcome would depend on how often the scheduler asked. And no
    generator has a state that a second scheduler or a re-run could find elsewhere: the
    order is the same in every process.
    """

    def __init__(self, seed: int = 0) -> None:
        """Set the seed, in `[0, 2**64)`.

        Raises:
            ConfigError: `seed` is no such integer.
        """
        seed = as_integer("seed", seed)
        if not 0 <= seed < 2**64:
            raise ConfigError(f"seed must be in [0, 2**64), got {seed}")
        self._key = seed.to_bytes(8, "little")

    def order(self, queue: QueueView) -> Iterable[Request]:
        """Sort by lot."""
        return sorted(queue, key=self._lot)

    def _lot(self, request: Request) -> bytes:
        number = request.arrival.to_bytes(8, "little")
        return blake2b(number, digest_size=8, key=self._key).digest()


SCHEDULING_POLICIES: Final[dict[str, Callable[[], SchedulingPolicy]]] = {
    "dfs-weight": DFSWeight,
    "fcfs": FirstComeFirstServed,
    "hrrn": HighestResponseRatioNext,
    "lof": LongestOutputFirst,
    "lpm": LongestPrefixMatch,
    "priority": HighestPriorityFirst,
    "random": RandomOrder,
    "shortest-prefill-first": ShortestPrefillFirst,
}
"""Makes a policy of each name that `Scheduler` takes."""


def as_scheduling_policy(policy: str | SchedulingPolicy) -> SchedulingPolicy:
    """Return the policy of a name, or the caller's own.

    Raises:
        ConfigError: There is no such name, or the object has no `order`.
    """
    if isinstance(policy, str):
        if policy not in SCHEDULING_POLICIES:
            raise ConfigError(
                f"policy must be one of {sorted(SCHEDULING_POLICIES)} or a "
                f"SchedulingPolicy, got {policy!r}"
            )
        return SCHEDULING_POLICIES[policy]()
    if isinstance(policy, type) or not callable(getattr(policy, "order", None)):
        raise ConfigError(
            f"policy must be an object with a method order(queue), got {policy!r}"
        )
    return policy


def order_of(policy: SchedulingPolicy, queue: QueueView) -> list[Request]:
    """Ask a policy for its order, and check what it returns.

    Raises:
        PolicyError: It failed, returned what does not wait, or a request twice.

    Complexity: O(waiting requests), beside what the policy costs.
    """
    try:
        # One more than there are: an order that goes on for ever repeats itself.
        order = list(islice(policy.order(queue), len(queue) + 1))
        waiting = dict.fromkeys(queue, True)
        wrong = [request for request in order if not waiting.pop(request, False)]
    except Exception as error:
        raise PolicyError(f"{policy!r} failed: {error!r}") from error
    if wrong:
        is_repeated = order.count(wrong[0]) > 1
        raise PolicyError(
            f"{policy!r} must return waiting requests, each once, got {wrong[0]!r} "
            f"{'twice' if is_repeated else 'which does not wait'}"
        )
    return order


def _max_rest(request: Request) -> int:
    return request.sampling_params.max_new_tokens - request.num_output_tokens


def _num_uncached(queue: QueueView, request: Request) -> int:
    return request.num_tokens - queue.cached_len(request)

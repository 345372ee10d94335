"""Whose pages are taken back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from radixkv.mem_cache.errors import ConfigError, PolicyError

from .base import RetractionPolicy
from .request import Request


class LeastLoss:
    """Of the lowest priority, who loses least; of equals, the newest.

    What a request found in the cache when it was admitted will most likely be there
    again; what it has computed since may have to be computed again. Who came back after
    a retraction goes after those who have lost nothing so far.
    """

    def key(self, request: Request) -> tuple[int, bool, int, int]:
        """Compare by priority, what was lost before, what would be lost, and age."""
        num_lost = request.scheduled_len - request.admitted_len
        return request.priority, request.reserves_all, num_lost, -request.arrival


class Newest:
    """Of the lowest priority, the newest: first come, first served to the end."""

    def key(self, request: Request) -> tuple[int, int]:
        """Compare by priority and by age."""
        return request.priority, -request.arrival


RETRACTION_POLICIES: Final[dict[str, type[LeastLoss] | type[Newest]]] = {
    "least-loss": LeastLoss,
    "newest": Newest,
}


def as_retraction_policy(policy: str | RetractionPolicy) -> RetractionPolicy:
    """Return the policy of a name, or the caller's own.

    Raises:
        ConfigError: There is no such name, or the object has no `key`.
    """
    if isinstance(policy, str):
        if policy not in RETRACTION_POLICIES:
            raise ConfigError(
                f"retraction must be one of {sorted(RETRACTION_POLICIES)} or a "
                f"RetractionPolicy, got {policy!r}"
            )
        return RETRACTION_POLICIES[policy]()
    if isinstance(policy, type) or not callable(getattr(policy, "key", None)):
        raise ConfigError(
            f"retraction must be an object with a method key(request), got {policy!r}"
        )
    return policy


def retraction_order(
    policy: RetractionPolicy, requests: Iterable[Request]
) -> list[Request]:
    """Sort running requests: whose pages are taken back first is at the front.

    Raises:
        PolicyError: The policy failed, or its keys do not compare.
    """
    try:
        return sorted(requests, key=policy.key)
    except Exception as error:  # whatever the caller's code raises
        raise PolicyError(f"{policy!r} failed: {error!r}") from error

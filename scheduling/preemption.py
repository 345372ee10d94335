"""Who takes the place of whom, where a waiting request has a higher priority."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .admission_room import AdmissionRoom
from .base import RetractionPolicy
from .request import Request
from .retraction_policies import retraction_order


@dataclass(frozen=True, slots=True)
class Preemption:
    """A waiting request, and those that give their pages back for it.

    Attributes:
        request: Who starts.
        victims: Who is retracted; each of them is needed.
    """

    request: Request
    victims: list[Request]


def victims_for(
    fits: Callable[[Sequence[Request]], bool], order: Sequence[Request]
) -> list[Request]:
    """Choose who must go: as few as possible, those that go first before others.

    Args:
        fits: Tells whether there is room without some requests; once there is, there is
            without more of them.
        order: Who may go, the first to go at the front.

    Returns:
        The victims, in order. Without any one of them there would be no room. None, if
        all together are not enough.

    Complexity: O(log n + victims) questions.
    """
    if not fits(order):
        return []
    low, high = 0, len(order)  # too few, enough
    while high - low > 1:
        middle = (low + high) // 2
        if fits(order[:middle]):
            high = middle
        else:
            low = middle
    victims = list(order[:high])
    # The last one is needed. Of those before it, some may have been no help.
    for victim in reversed(order[: high - 1]):
        rest = [other for other in victims if other is not victim]
        if fits(rest):
            victims = rest
    return victims


def find_preemption(
    request: Request,
    cached_len: int,
    running: Sequence[Request],
    max_running: int,
    room: AdmissionRoom,
    policy: RetractionPolicy,
) -> Preemption | None:
    """Find who should be retracted for a waiting request.

    Args:
        request: It waits.
        cached_len: Its leading tokens that are cached, whole pages.
        running: All that run.
        max_running: How many may run at a time.
        room: What they leave.
        policy: Who of lower priority goes first.

    Returns:
        ``None`` if the request needs nobody's place, or if those of lower priority
        would not be enough.

    Raises:
        PolicyError: The policy failed.
    """

    def fits(without: Sequence[Request]) -> bool:
        num_running = len(running) - len(without)
        return num_running < max_running and (
            room.obstacle(request, cached_len, without) is None
        )

    lower = [other for other in running if other.priority < request.priority]
    if not lower or fits(()):
        return None
    victims = victims_for(fits, retraction_order(policy, lower))
    return Preemption(request, victims) if victims else None

"""Why requests wait: what the last look at each of them found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec

from .request import Request

_NUM_NAMED = 3


class StallReason(StrEnum):
    """Why a request was not started."""

    NO_ROOM = "no room"
    """Too little is free, can be evicted, and is set aside for nobody else."""
    QUOTA = "quota"
    """It would push its namespace above its ceiling."""
    NO_ROW = "no row"
    """All rows of the request table are taken."""
    PREFIX = "prefix"
    """Another request is computing its prefix."""
    TURN = "turn"
    """It is the turn of another request, which cannot start."""
    LEFT_OUT = "left out"
    """The scheduling policy did not name it."""
    RUNNING_CAP = "running cap"
    """As many requests run as may, or did so when the step was begun."""
    TOKEN_BUDGET = "token budget"
    """The step computes as many tokens as it may."""
    RETRACTION = "retraction"
    """Pages are taken back for those who run; nobody starts in such a step."""


class Shortage(msgspec.Struct, frozen=True, gc=False):
    """The room that a request did not find, in tokens.

    What it finds cached is room for nobody: if no running request protects it, it is
    part of `evictable_size`, and will not be any more once the request has started. Nor
    is what the floors of other namespaces keep.

    Attributes:
        needed_size: What is set aside for it once it runs, in whole pages.
        cached_size: What of that it finds cached.
        reserved_size: What is set aside for running requests, and not theirs yet.
        available_size: Free.
        evictable_size: In the tree, and needed by no running request.
        protected_size: In the tree, and needed by a running request.
        held_size: In pages that running requests own outside the tree.
    """

    needed_size: int
    cached_size: int
    reserved_size: int
    available_size: int
    evictable_size: int
    protected_size: int
    held_size: int

    def __str__(self) -> str:
        """Say what is needed and where the pages are."""
        return (
            f"needs {self.needed_size} slots ({self.cached_size} cached) beside "
            f"{self.reserved_size} set aside, got {self.available_size} free and "
            f"{self.evictable_size} evictable; others hold {self.held_size} and "
            f"protect {self.protected_size}"
        )


class StalledRequest(msgspec.Struct, frozen=True, gc=False):
    """A request that waits, and why.

    Attributes:
        request: The request.
        reason: Why it was not started.
        blocker: Who computes its prefix, or goes first.
        shortage: The numbers, where there is no room. Those of a quota are in
            `RadixCache.namespace_stats`.
    """

    request: Request
    reason: StallReason
    blocker: Request | None = None
    shortage: Shortage | None = None

    def __str__(self) -> str:
        """Name the request, the reason, and the numbers."""
        text = f"{self.request.request_id!r}: {self.reason}"
        if self.reason is StallReason.QUOTA:
            text += f" of namespace {self.request.namespace!r}"
        if self.blocker is not None:
            text += f" of {self.blocker.request_id!r}"
        if self.shortage is not None:
            text += f", {self.shortage}"
        return text


class LastLook:
    """What was found when `schedule` last looked at the requests that wait."""

    def __init__(self) -> None:
        """Start before the first look."""
        self._found: dict[Request, StalledRequest] = {}
        self._rest = StallReason.RETRACTION
        self._blocker: Request | None = None

    def begin(self) -> None:
        """Forget the look before; until `stop`, everybody waits for a retraction."""
        self._found.clear()
        self._rest = StallReason.RETRACTION
        self._blocker = None

    def keep(
        self,
        request: Request,
        reason: StallReason,
        *,
        blocker: Request | None = None,
        shortage: Shortage | None = None,
    ) -> None:
        """Take note that a request waits on, and why."""
        self._found[request] = StalledRequest(request, reason, blocker, shortage)

    def stop(self, reason: StallReason, *, blocker: Request | None = None) -> None:
        """Take note of why those wait on who were not looked at."""
        self._rest = reason
        self._blocker = blocker

    def explain(self, waiting: Iterable[Request]) -> tuple[StalledRequest, ...]:
        """Say why requests wait that were there at the last look."""
        rest = (self._rest, self._blocker)
        return tuple(
            self._found.get(request) or StalledRequest(request, *rest)
            for request in waiting
        )


def stall_message(stalled: Sequence[StalledRequest]) -> str:
    """Say which requests wait, and why; the first few by name."""
    named = "; ".join(str(each) for each in stalled[:_NUM_NAMED])
    others = len(stalled) - _NUM_NAMED
    more = f"; and {others} more" if others > 0 else ""
    return f"none of {len(stalled)} waiting requests can go on: {named}{more}"

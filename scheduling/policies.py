"""Who decides what in a scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from .admission_policies import Reservations
from .base import RetractionPolicy, SchedulingPolicy
from .drafts import Drafts


@dataclass(frozen=True, slots=True)
class Policies:
    """Who decides what.

    Attributes:
        scheduling: Who is admitted first.
        admission: How much memory is set aside for who runs.
        retraction: Whose pages are taken back.
        preempts: Whether those of lower priority lose theirs to who waits.
        drafts: Guesses tokens, if anybody does.
    """

    scheduling: SchedulingPolicy
    admission: Reservations
    retraction: RetractionPolicy
    preempts: bool
    drafts: Drafts | None

"""What a step did to one request."""

from __future__ import annotations

import msgspec

from .request import FinishReason, Request


class RequestOutput(msgspec.Struct, frozen=True, gc=False):
    """What a step did to one request, for its client's stream.

    Attributes:
        request: The request; its `usage` says what it has cost.
        tokens: Its new tokens; none if it ended without one.
        finish_reason: Why it ended; ``None`` if it goes on. Set exactly once a request.
        error: What went wrong, if the reason is ``"error"``.
    """

    request: Request
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None
    error: BaseException | None = None

"""What a step did to one request."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeAlias

import msgspec

from .request import FinishReason, Request
from .usage import RequestUsage

PlainId: TypeAlias = str | int | tuple[str | int, ...]
"""What a request id is in a message; samples of a request have tuples."""


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

    def message(self) -> OutputMessage:
        """Return the same as plain values, which any encoder can send.

        The usage comes with the last output alone.

        Example:
            >>> import msgspec
            >>> request = Request("a", [1, 2])
            >>> output = RequestOutput(request, (3,), None)
            >>> msgspec.json.encode(output.message())
            b'{"request_id":"a","tokens":[3]}'
        """
        error = self.error
        return OutputMessage(
            request_id=plain_id(self.request.request_id),
            tokens=self.tokens,
            finish_reason=self.finish_reason,
            error=None if error is None else ErrorMessage.of(error),
            usage=None if self.finish_reason is None else self.request.usage,
        )


class ErrorMessage(msgspec.Struct, frozen=True):
    """An exception in plain values.

    Attributes:
        type: Name of its class.
        message: What it says.
    """

    type: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> ErrorMessage:
        """Describe an exception."""
        return cls(type(error).__name__, str(error))


class OutputMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """A `RequestOutput` in plain values, to send: msgspec encodes and decodes it.

    Attributes:
        request_id: The request's id, if it is a string, an integer, or a tuple of
            these; of any other id, its `repr`.
        tokens: The new tokens.
        finish_reason: Why the request ended, if it did.
        error: What went wrong, if that is why.
        usage: What the request has cost, once it has ended.

    Example:
        >>> import msgspec
        >>> message = OutputMessage(request_id=("a", 0), tokens=(3,))
        >>> raw = msgspec.json.encode(message)
        >>> msgspec.json.decode(raw, type=OutputMessage) == message
        True
    """

    request_id: PlainId
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: ErrorMessage | None = None
    usage: RequestUsage | None = None


def plain_id(request_id: Hashable) -> PlainId:
    """Return a request id if a message can have it, or its `repr`."""
    if type(request_id) in (str, int):
        return request_id  # type: ignore[return-value] # mypy narrows no `in`
    if type(request_id) is tuple and all(type(x) in (str, int) for x in request_id):
        return request_id
    return repr(request_id)

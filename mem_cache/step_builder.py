"""The step builder: what one step computes, and its message, packed once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .errors import RequestStateError
from .kv_cache_info import KVCacheInfo
from .packed_numbers import pack_numbers
from .request_handle import RequestHandle
from .request_kv import RequestKV
from .sizes import Integer

if TYPE_CHECKING:
    from .prefix_cache import PrefixCache


class StepBuilder:
    """Gives slots to the requests of one step, and packs its one message.

    `PrefixCache.begin_step` makes it. `extend` and `decode` may come in any order and
    number; each is all or nothing for its own requests, and if one is refused, the step
    may go on without them. `message` or `recall` ends the step; from its first request
    until then, the cache makes no other message.

    Attributes:
        is_open: Whether the step has not ended yet.
        requests: Those that have slots in this step. For the cache, as all that
            follows, in the order in which they were added.
        rows: The row of each.
        starts: The first position to compute of each.
        stops: The end of the positions to compute of each.
        page_starts: The column at which the new pages of each begin.
        page_indptr: The bounds of the new pages of each.
        pages: The new pages, in parts: the bytes of int32.
        forgotten_rows: Rows that were given back before the last requests were added.
    """

    __slots__ = (
        "_cache",
        "forgotten_rows",
        "is_open",
        "page_indptr",
        "page_starts",
        "pages",
        "requests",
        "rows",
        "starts",
        "stops",
    )

    def __init__(self, cache: PrefixCache) -> None:
        """Begin a step without requests."""
        self._cache = cache
        self.is_open = True
        self.requests: set[RequestKV] = set()
        self.rows: list[int] = []
        self.starts: list[int] = []
        self.stops: list[int] = []
        self.page_starts: list[int] = []
        self.page_indptr: list[int] = [0]
        self.pages: list[bytes] = []
        self.forgotten_rows: list[int] = []

    def __repr__(self) -> str:
        """Show how much was added."""
        state = "" if self.is_open else ", ended"
        return (
            f"StepBuilder({len(self.rows)} rows, {self.page_indptr[-1]} pages{state})"
        )

    def extend(
        self, requests: Sequence[RequestHandle], new_lens: Sequence[Integer]
    ) -> None:
        """Give slots to the next part of each request's prompt.

        Args:
            requests: Running requests, none of which is in the step.
            new_lens: See `PrefixCache.alloc_for_extend`.

        Raises:
            OutOfPagesError: Not even eviction makes enough room.
            QuotaError: A namespace would pass its ceiling, whatever it evicts.
            PolicyError: The eviction policy failed.
            LengthError: A length does not go forward, or passes `max_context_len`.
            RequestStateError: A request is released, foreign, named twice or in the
                step already; or one in the step was given back; or the step has ended.
        """
        self._cache._extend_step(self, requests, new_lens)  # pyright: ignore[reportPrivateUsage]

    def decode(
        self, requests: Sequence[RequestHandle], num_tokens: Integer = 1
    ) -> None:
        """Give each request slots for its next tokens, behind its `committed_len`.

        Args:
            requests: Running requests, none of which is in the step.
            num_tokens: Tokens a request: 1, or more for drafts.

        Raises:
            OutOfPagesError: Not even eviction makes enough room.
            QuotaError: A namespace would pass its ceiling, whatever it evicts.
            PolicyError: The eviction policy failed.
            ConfigError: `num_tokens` is below 1.
            LengthError: A length passes `max_context_len`.
            RequestStateError: See `extend`.
        """
        self._cache._decode_step(self, requests, num_tokens)  # pyright: ignore[reportPrivateUsage]

    def message(self) -> KVCacheInfo:
        """End the step.

        Returns:
            The message, which is to reach every worker. It lists the requests in the
            order in which they were added, the rows to forget, and the pages to copy
            before anything else.

        Raises:
            RequestStateError: The step has ended.
        """
        return self._cache._end_step(self)  # pyright: ignore[reportPrivateUsage]

    def recall(self) -> None:
        """End the step without a message: no worker will hear of it.

        Its requests must be released.

        Raises:
            RequestStateError: The step has ended.
        """
        self._cache._drop_step(self)  # pyright: ignore[reportPrivateUsage]

    def check_open(self) -> None:
        """Refuse a step that has ended.

        Raises:
            RequestStateError: It has.
        """
        if not self.is_open:
            raise RequestStateError(f"{self!r} has its message, or was recalled")

    def pack(self, copies: Mapping[int, int]) -> KVCacheInfo:
        """Return the message.

        Args:
            copies: Source page by target page.
        """
        head = pack_numbers(
            [
                *self.rows,
                *self.starts,
                *self.stops,
                *self.page_starts,
                *self.page_indptr,
            ]
        )
        parts = [head, *self.pages]
        if self.forgotten_rows or copies:
            parts.append(
                pack_numbers([*self.forgotten_rows, *copies.values(), *copies])
            )
        num_pages = self.page_indptr[-1]
        return KVCacheInfo(len(self.rows), num_pages, b"".join(parts), len(copies))

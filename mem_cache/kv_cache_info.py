"""The per-step message from the engine to its workers."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from struct import error as StructError
from typing import NoReturn, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from .errors import ConfigError, RequestStateError
from .packed_numbers import pack_numbers


class KVCacheInfo(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a worker must know of the cache to run one step, and nothing else.

    It holds no K or V and says nothing of layers or heads. Every number is an int32 in
    one packed buffer, so that a worker uploads a step in one copy::

        payload = rows [num_reqs] | starts [num_reqs] | stops [num_reqs]
                | page_starts [num_reqs] | page_indptr [num_reqs + 1]
                | new_pages [num_new_pages] | forgotten_rows [...]
                | copy_sources [num_copies] | copy_targets [num_copies]

    The messages of one cache are a log: a worker applies each of them once, in order.
    Within a message the forgotten rows come first, since a row may be used again at
    once.

    Page copies come before any K and V of the step, all at a time: every source is read
    as it was before the message, then every target is written, each once. A page may be
    the source of some copies and the target of one.

    Attributes:
        num_reqs: Requests in this step.
        num_new_pages: Page ids that the workers have not seen yet.
        payload: The packed int32 numbers, in the byte order of the machine.
        num_copies: Pages to copy before the step.
    """

    num_reqs: int
    num_new_pages: int
    payload: bytes
    num_copies: int = 0

    @classmethod
    def pack(
        cls,
        rows: Sequence[int],
        starts: Sequence[int],
        stops: Sequence[int],
        page_starts: Sequence[int],
        page_indptr: Sequence[int],
        new_pages: bytes,
        forgotten_rows: Sequence[int] = (),
    ) -> Self:
        """Pack the numbers of a step into one message.

        Args:
            rows: Request-table row of each request, `[num_reqs]`.
            starts: First position to compute, `[num_reqs]`.
            stops: End of the positions to compute, `[num_reqs]`.
            page_starts: Column at which each request's new pages begin, `[num_reqs]`.
            page_indptr: Bounds of each request's part of `new_pages`,
                `[num_reqs + 1]`.
            new_pages: Page ids, the bytes of int32 `[num_new_pages]`.
            forgotten_rows: Rows that were given back since the last message.

        Raises:
            ConfigError: A number is no int32, or the lengths contradict each other; the
                message names the field.
        """
        num_reqs = len(rows)
        for name, numbers, length in (
            ("starts", starts, num_reqs),
            ("stops", stops, num_reqs),
            ("page_starts", page_starts, num_reqs),
            ("page_indptr", page_indptr, num_reqs + 1),
        ):
            if len(numbers) != length:
                raise ConfigError(
                    f"{name} must be {length} for {num_reqs} rows, got {len(numbers)}"
                )
        head = [*rows, *starts, *stops, *page_starts, *page_indptr]
        try:
            payload = pack_numbers(head) + new_pages + pack_numbers(forgotten_rows)
        except (StructError, TypeError) as error:
            _refuse_numbers(
                error,
                rows=rows,
                starts=starts,
                stops=stops,
                page_starts=page_starts,
                page_indptr=page_indptr,
                forgotten_rows=forgotten_rows,
            )
        if len(new_pages) != 4 * page_indptr[-1]:
            raise ConfigError(
                f"new_pages must be the {4 * page_indptr[-1]} bytes of int32 that "
                f"page_indptr ends at, got {len(new_pages)}"
            )
        return cls(len(rows), len(new_pages) // 4, payload)

    def with_copies(self, copies: Mapping[int, int]) -> Self:
        """Return this message, which has no copies, with page copies.

        Args:
            copies: Source page by target page.
        """
        payload = self.payload + array("i", [*copies.values(), *copies]).tobytes()
        return type(self)(self.num_reqs, self.num_new_pages, payload, len(copies))

    @classmethod
    def merge(cls, infos: Sequence[Self]) -> Self:
        """Join the messages of one step, for example of its extend and its decode.

        No message may copy a page that the step of one before it writes: all copies
        come first.

        Args:
            infos: The messages, in the order in which they were made.

        Raises:
            RequestStateError: A message forgets a row that one before it uses: such a
                request was given back within the step.
        """
        if len(infos) == 1:
            return infos[0]
        used: set[int] = set()
        for info in infos:
            if not used.isdisjoint(info.forgotten_rows.tolist()):
                raise RequestStateError("a request was given back within the step")
            used.update(info.rows.tolist())
        indptr = [0]
        for info in infos:
            base = indptr[-1]
            indptr.extend(base + int(end) for end in info.page_indptr[1:])
        merged = cls.pack(
            [int(x) for info in infos for x in info.rows],
            [int(x) for info in infos for x in info.starts],
            [int(x) for info in infos for x in info.stops],
            [int(x) for info in infos for x in info.page_starts],
            indptr,
            b"".join(info.new_pages.tobytes() for info in infos),
            [int(x) for info in infos for x in info.forgotten_rows],
        )
        copies: dict[int, int] = {}
        for info in infos:
            chain_copies(copies, info.copies)
        return merged.with_copies(copies) if copies else merged

    @property
    def num_tokens(self) -> int:
        """Positions to compute, of all requests."""
        return int((self.stops - self.starts).sum())

    @property
    def numbers(self) -> NDArray[np.int32]:
        """All of the payload, int32, in the order of `part_lengths`."""
        return np.frombuffer(self.payload, np.int32)

    @property
    def part_lengths(self) -> list[int]:
        """Length of each part of the payload, in their order, both of the copies one.

        What is left of the payload is the forgotten rows.
        """
        num_reqs, num_copies = self.num_reqs, 2 * self.num_copies
        known = 5 * num_reqs + 1 + self.num_new_pages + num_copies
        num_forgotten = len(self.payload) // 4 - known
        return [
            *[num_reqs] * 4,
            num_reqs + 1,
            self.num_new_pages,
            num_forgotten,
            num_copies,
        ]

    def _part(self, start: int, count: int) -> NDArray[np.int32]:
        return np.frombuffer(self.payload, np.int32, count, 4 * start)

    @property
    def rows(self) -> NDArray[np.int32]:
        """Request-table row of each request, int32 `[num_reqs]`."""
        return self._part(0, self.num_reqs)

    @property
    def starts(self) -> NDArray[np.int32]:
        """First position to compute of each request, int32 `[num_reqs]`."""
        return self._part(self.num_reqs, self.num_reqs)

    @property
    def stops(self) -> NDArray[np.int32]:
        """Length of each request after this step, int32 `[num_reqs]`."""
        return self._part(2 * self.num_reqs, self.num_reqs)

    @property
    def page_starts(self) -> NDArray[np.int32]:
        """Column at which each request's new pages begin, int32 `[num_reqs]`."""
        return self._part(3 * self.num_reqs, self.num_reqs)

    @property
    def page_indptr(self) -> NDArray[np.int32]:
        """Bounds of each request's part of `new_pages`, int32 `[num_reqs + 1]`."""
        return self._part(4 * self.num_reqs, self.num_reqs + 1)

    @property
    def new_pages(self) -> NDArray[np.int32]:
        """New page ids, request after request, int32 `[num_new_pages]`."""
        return self._part(5 * self.num_reqs + 1, self.num_new_pages)

    @property
    def forgotten_rows(self) -> NDArray[np.int32]:
        """Rows to zero before anything else, int32."""
        head = 5 * self.num_reqs + 1 + self.num_new_pages
        return self._part(head, len(self.payload) // 4 - head - 2 * self.num_copies)

    @property
    def copy_sources(self) -> NDArray[np.int32]:
        """Page to read of each copy, int32 `[num_copies]`."""
        end = len(self.payload) // 4
        return self._part(end - 2 * self.num_copies, self.num_copies)

    @property
    def copy_targets(self) -> NDArray[np.int32]:
        """Page to write of each copy, all different, int32 `[num_copies]`."""
        end = len(self.payload) // 4
        return self._part(end - self.num_copies, self.num_copies)

    @property
    def copies(self) -> dict[int, int]:
        """Source page by target page."""
        pairs = zip(self.copy_targets.tolist(), self.copy_sources.tolist(), strict=True)
        return dict(pairs)


def check_lengths(info: KVCacheInfo) -> None:
    """Refuse a payload that is shorter than its parts, or cut within a number.

    Args:
        info: The message.

    Raises:
        ConfigError: The payload, or a count of the message, is wrong.
    """
    counts = info.num_reqs, info.num_new_pages, info.num_copies
    least = 4 * (5 * counts[0] + 1 + counts[1] + 2 * counts[2])
    if min(counts) < 0:
        raise ConfigError(
            f"num_reqs, num_new_pages and num_copies must be >= 0, got {counts}"
        )
    if len(info.payload) % 4 or len(info.payload) < least:
        raise ConfigError(
            f"payload must be >= {least} bytes, a multiple of 4, for num_reqs, "
            f"num_new_pages and num_copies {counts}, got {len(info.payload)}"
        )


def _refuse_numbers(error: Exception, **fields: Sequence[int]) -> NoReturn:
    """Say which field of a message could not be packed."""
    for name, numbers in fields.items():
        try:
            array("i", numbers)
        except (TypeError, OverflowError):
            raise ConfigError(
                f"{name} must be integers in -2**31..2**31 - 1, got {list(numbers)}"
            ) from error
    raise ConfigError(f"new_pages must be the bytes of int32: {error}") from error


def chain_copies(first: dict[int, int], then: Mapping[int, int]) -> None:
    """Add page copies that come after others, so that one reading serves both.

    Args:
        first: Source page by target page; changed in place.
        then: The copies that come after, all at a time: a source that `first` writes
            stands for what is written there.
    """
    origins = [first.get(source, source) for source in then.values()]
    for target, origin in zip(then, origins, strict=True):
        if origin == target:  # it is back where it came from
            first.pop(target, None)
        else:
            first[target] = origin

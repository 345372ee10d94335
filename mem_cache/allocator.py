"""The token-to-KV-pool allocator: which pages are free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

import numpy as np
from mypy_extensions import mypyc_attr
from numpy.typing import NDArray

from .errors import (
    ConfigError,
    DoubleFreeError,
    ForeignPageError,
    IntegrityError,
    PagesInUseError,
)
from .packed_numbers import Packed, pack_numbers, unpack_numbers
from .sizes import Integer, as_integer, as_size

_INT32: Final = np.dtype(np.int32)

_FEW: Final = 16
"""So many pages are moved one by one, which costs less than numpy's calls."""

HOLD_PAGE: Final = 0
"""Padded tokens write there. It is first, so no resize can move it."""


@mypyc_attr(allow_interpreted_subclasses=True)
class TokenToKVPoolAllocator:
    """Hands out the pages ``1..num_pages`` of a paged token-to-KV pool.

    The free pages are a stack in one array with a moving top: `alloc` and `free` touch
    only the pages that they move. A map of the pages in use makes every wrong `free`
    loud, in every configuration.

    A fresh allocator hands out ascending pages, and pages that were freed together come
    back together, so that runs of neighbours survive: a transfer costs per run.

    Attributes:
        page_size: Slots a page; here is its only home.
        num_pages: Usable pages, free or not. For reading; see `resize`.
        num_free_pages: Pages that `alloc` can hand out now. For reading.

    Example:
        >>> allocator = TokenToKVPoolAllocator(num_pages=4, page_size=16)
        >>> pages = allocator.alloc(3)
        >>> pages
        array([1, 2, 3], dtype=int32)
        >>> allocator.alloc(2) is None
        True
        >>> allocator.free(pages)
        >>> allocator.num_free_pages
        4
    """

    def __init__(self, num_pages: Integer, page_size: Integer) -> None:
        """Make an allocator with all pages free.

        Args:
            num_pages: Usable pages, at least 1; page 0 is not counted.
            page_size: Slots a page, at least 1.

        Raises:
            ConfigError: A number is not in ``[1, 2**31)``.
        """
        self.page_size: Final = as_size("page_size", page_size)
        self.num_pages = as_size("num_pages", num_pages)
        self.num_free_pages = 0
        self.free_all()

    def __repr__(self) -> str:
        """Show the sizes."""
        return (
            f"{type(self).__name__}(num_pages={self.num_pages}, "
            f"page_size={self.page_size}, num_free_pages={self.num_free_pages})"
        )

    def alloc(self, num_pages: Integer) -> NDArray[np.int32] | None:
        """Take pages off the stack, all or nothing.

        Args:
            num_pages: Pages to take; 0 gives an empty array.

        Returns:
            Page ids, int32 `[num_pages]`, ascending. The array is the caller's own.
            ``None`` if fewer are free; then nothing has changed.

        Raises:
            ConfigError: `num_pages` is negative, or no integer.
        """
        wanted = as_integer("num_pages", num_pages)
        if wanted > self.num_free_pages:
            return None
        if wanted < 0:
            raise ConfigError(f"num_pages must be >= 0, got {wanted}")
        return np.frombuffer(bytearray(self.take(wanted)), np.int32)

    def free(self, pages: NDArray[np.integer[Any]] | Sequence[int]) -> None:
        """Put pages back on the stack. A wrong call is refused as a whole.

        Args:
            pages: Page ids in any order: integers, `[num_pages]`; an array, a list or
                a tensor (a tensor on a device is copied to the host first).

        Raises:
            ForeignPageError: An id is outside ``1..num_pages``, or no integer.
            DoubleFreeError: A page is free already, or is named twice.
        """
        self._push(self._as_pages(pages))

    def take(self, num_pages: Integer) -> bytes:
        """Do as `alloc`, for callers that keep page ids as the bytes of int32.

        Args:
            num_pages: Pages to take; as many must be free.
        """
        count = int(num_pages)
        end = self.num_free_pages
        top = end - count
        self.num_free_pages = top
        if count > _FEW:
            return self._take_many(top, end)
        state = self._state_view
        ids = self._stack_view[top:end].tolist()
        ids.sort()
        for page in ids:
            state[page] = page
        return pack_numbers(ids)

    def _take_many(self, top: int, end: int) -> bytes:
        """Mark the pages of ``stack[top:end]`` as in use, and return them in order."""
        pages = self._stack[top:end]
        # Those that nobody had yet lie in descending order, those that one request gave
        # back in the order of its row, which mostly ascends.
        if pages[0] > pages[-1]:
            pages = pages[::-1]
        if not (pages[1:] > pages[:-1]).all():
            pages = np.sort(pages)
        first = int(pages[0])
        last = int(pages[-1])
        if last - first == len(pages) - 1:  # one run of neighbours
            self._state[first : last + 1] = pages
        else:
            self._state[pages.astype(np.int64)] = pages
        return pages.tobytes()

    def give_back(self, pages: Packed) -> None:
        """Do as `free`, for callers that keep page ids as the bytes of int32."""
        if len(pages) > 4 * _FEW:
            self._push(np.frombuffer(pages, np.int32))
            return
        state = self._state_view
        stack = self._stack_view
        top = self.num_free_pages
        num_pages = self.num_pages
        for page in unpack_numbers(pages):
            # The state of a page that was named before is 0 by now.
            if not 0 < page <= num_pages or state[page] != page:
                for before in stack[self.num_free_pages : top]:
                    state[before] = before
                self._refuse(np.frombuffer(pages, np.int32))
            state[page] = 0
            stack[top] = page
            top += 1
        self.num_free_pages = top

    def _push(self, ids: NDArray[np.int32]) -> None:
        top = self.num_free_pages
        end = top + len(ids)
        if end == top:
            return
        state = self._state
        at = ids.astype(np.int64)  # numpy indexes several times faster with int64
        try:
            # A negative id wraps around, but never to a state that equals it.
            if end > self.num_pages or state[at].tobytes() != ids.tobytes():
                self._refuse(ids)
        except IndexError:
            self._refuse(ids)
        # Of two places, a page named twice remembers only one.
        places = self._places[: end - top]
        state[at] = places
        if state[at].tobytes() != places.tobytes():
            state[at] = ids
            self._refuse(ids)
        state[at] = 0
        self._stack[top:end] = ids
        self.num_free_pages = end

    def free_all(self) -> None:
        """Take every page back: equal to a fresh allocator, order included."""
        self._make(self.num_pages)

    def _make(self, n: int) -> None:
        """Have so many pages, all of them free."""
        # All that may lack memory comes first, so that nothing has changed then.
        stack = np.arange(n, 0, -1, dtype=np.int32)
        places = np.arange(n, dtype=np.int32)
        state = np.zeros(n + 1, dtype=np.int32)
        self.num_pages = n
        self._stack = stack
        self._places = places
        # Invariant: a page in use has itself as its state, a free page has 0. Page 0 is
        # neither: its state is no page id at all.
        self._state = state
        self._state[HOLD_PAGE] = -1
        # Reading one number through a view costs half of what an array asks for it.
        self._stack_view = self._stack.data
        self._state_view = self._state.data
        self.num_free_pages = n

    def resize(self, num_pages: Integer) -> None:
        """Change the number of usable pages; every page in use keeps its id.

        Costs O(pages).

        Args:
            num_pages: The new number of usable pages, at least 1.

        Raises:
            ConfigError: `num_pages` is out of range.
            PagesInUseError: A page above the new end is in use.
        """
        end = as_size("num_pages", num_pages)
        last_page = int(self._state.max())
        if last_page > end:
            raise PagesInUseError(needed=last_page, available=end)
        num_new = max(0, end - self.num_pages)
        in_use = self.in_use()
        free = self._stack[: self.num_free_pages]
        free = free[free <= end]
        self._make(end)
        # Pages that come in stay below the others: they are handed out last.
        self.num_free_pages = num_new + len(free)
        self._stack[num_new : self.num_free_pages] = free
        self._state[in_use] = in_use

    def in_use(self) -> NDArray[np.int32]:
        """List the pages in use, int32, ascending. Costs O(pages)."""
        return np.flatnonzero(self._state > 0).astype(np.int32)

    def is_in_use(self, page: Integer) -> bool:
        """Tell whether `page` is handed out; a page above the end is not."""
        return bool(page <= self.num_pages and self._state_view[page] > 0)

    def free_pages(self) -> NDArray[np.int32]:
        """List the free pages, int32, those to be handed out next last."""
        return self._stack[: self.num_free_pages].copy()

    def fragmentation(self) -> float:
        """Tell the runs of neighbouring ids per thousand free pages.

        1000 means that no two free pages are neighbours; 0 that none is free. Costs
        O(free pages).
        """
        free = np.sort(self._stack[: self.num_free_pages])
        if len(free) == 0:
            return 0.0
        runs = 1 + int(np.count_nonzero(np.diff(free) != 1))
        return 1000 * runs / len(free)

    def check_integrity(self) -> None:
        """Recount the free list against the map. Costs O(pages).

        Raises:
            IntegrityError: They contradict each other; the message names the pages.
        """
        free = self._stack[: self.num_free_pages]
        if free.size and not (free.min() >= 1 and free.max() <= self.num_pages):
            raise IntegrityError("allocator: the free list holds a foreign page")
        owners = np.bincount(free, minlength=self.num_pages + 1)
        owners[self.in_use()] += 1
        faults = [
            f"{what}: pages {(np.flatnonzero(bad) + 1).tolist()}"
            for what, bad in (
                ("no owner", owners[1:] < 1),
                ("two owners", owners[1:] > 1),
            )
            if bad.any()
        ]
        in_use = self.in_use()
        if (self._state[in_use] != in_use).any() or self._state[HOLD_PAGE] != -1:
            faults.append("a page has a state that is not its own")
        if faults:
            raise IntegrityError("allocator: " + "; ".join(faults))

    def _as_pages(
        self, pages: NDArray[np.integer[Any]] | Sequence[int]
    ) -> NDArray[np.int32]:
        if isinstance(pages, np.ndarray) and pages.dtype == _INT32 and pages.ndim == 1:
            return cast("NDArray[np.int32]", pages)
        # A tensor on a device offers `cpu`; torch itself is not needed here.
        to_host = getattr(pages, "cpu", None)
        try:
            array: NDArray[Any] = np.asarray(to_host() if to_host else pages)
        except ValueError as error:
            raise ForeignPageError(f"pages must be flat: {error}") from None
        if array.ndim != 1:
            raise ForeignPageError(f"pages must be flat, got {array.ndim} dimensions")
        if array.size and array.dtype.kind not in ("i", "u"):
            raise ForeignPageError(f"page ids must be integers, got {array.dtype}")
        outside = array[(array < 1) | (array > self.num_pages)]
        if outside.size:
            self._raise_foreign(outside)
        return array.astype(_INT32)

    def _refuse(self, pages: NDArray[np.int32]) -> None:
        """Raise the error that says why `pages` cannot be given back."""
        outside = pages[(pages < 1) | (pages > self.num_pages)]
        if outside.size:
            self._raise_foreign(outside)
        free = pages[self._state[pages] != pages]
        if free.size:
            raise DoubleFreeError(f"pages are free already: {free.tolist()}")
        ids, counts = np.unique(pages, return_counts=True)
        raise DoubleFreeError(f"pages are named twice: {ids[counts > 1].tolist()}")

    def _raise_foreign(self, pages: NDArray[Any]) -> None:
        raise ForeignPageError(
            f"page ids must be in 1..{self.num_pages}, got {pages.tolist()}"
        )

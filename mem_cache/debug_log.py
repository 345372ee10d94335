"""The debug log: checks a cache after every call, and keeps the last of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from reprlib import Repr
from typing import TYPE_CHECKING, Final, ParamSpec, TypeVar, cast

import numpy as np

from .cache_state import Room, cache_state
from .errors import IntegrityError
from .kv_cache_info import KVCacheInfo
from .radix_tree import RadixTree
from .request_kv import RequestKV
from .running_requests import RunningRequests

if TYPE_CHECKING:
    from .prefix_cache import PrefixCache

NUM_OPERATIONS: Final = 64
"""Calls that a log keeps."""

_P = ParamSpec("_P")
_T = TypeVar("_T")


class DebugLog:
    """The last calls of a cache: what was asked, what came of it, the sizes afterwards.

    After each call it recounts the whole cache. After a call that was refused, it also
    compares everything with what was there before.
    """

    def __init__(
        self,
        cache: PrefixCache,
        tree: RadixTree,
        running: RunningRequests,
        rooms: Iterable[Room],
        max_num_operations: int = NUM_OPERATIONS,
    ) -> None:
        """Start without a call.

        Args:
            cache: Whose calls go through here.
            tree: What it has cached.
            running: Its requests.
            rooms: What else has a state; may grow later.
            max_num_operations: Calls to keep.
        """
        self._cache = cache
        self._tree = tree
        self._running = running
        self._rooms = rooms
        self._operations: deque[str] = deque(maxlen=max_num_operations)
        self._num_operations = 0

    def call(self, method: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call a method, check the cache, and pass on what it returned or raised.

        Args:
            method: A bound method of the cache.
            *args: Its arguments.
            **kwargs: Its arguments by name.

        Raises:
            IntegrityError: The cache contradicts itself, or a call that was refused has
                changed it; the message ends with the last calls.

        Complexity: O(pages + nodes).
        """
        name = method.__name__
        # Before the call, which changes the lengths of requests.
        operation = f"{name}({_show_arguments(args, kwargs)})"
        before = self._state()
        try:
            result = method(*args, **kwargs)
        except IntegrityError as error:
            self._record(f"{operation} found a fault")
            raise self._report(str(error)) from None
        except Exception as error:
            self._record(f"{operation} raised {type(error).__name__}: {error}")
            self._check(name, before)
            raise
        self._record(operation if result is None else f"{operation} -> {_show(result)}")
        # Without a row, `admit` answers ``None``: refused, although it is no fault.
        self._check(name, before if name == "admit" and result is None else {})
        return result

    def _record(self, operation: str) -> None:
        cache = self._cache
        self._num_operations += 1
        self._operations.append(
            f"#{self._num_operations} {operation} | {cache.available_size} free, "
            f"{cache.evictable_size} evictable, {cache.protected_size} protected, "
            f"{cache.held_size} held"
        )

    def _check(self, name: str, before: Mapping[str, object]) -> None:
        """Raise if the cache is unsound, or no longer what it must still be."""
        try:
            self._cache.check_integrity()
        except IntegrityError as error:
            raise self._report(str(error)) from None
        if before:
            after = self._state()
            parts = [part for part, state in before.items() if state != after[part]]
            if parts:
                changed = ", ".join(parts)
                raise self._report(f"{name} was refused, but changed: {changed}")

    def _state(self) -> dict[str, object]:
        state = cache_state(self._cache.memory, self._tree, self._running, self._rooms)
        state["statistics"] = self._cache.stats()
        return state

    def _report(self, fault: str) -> IntegrityError:
        title = "the last calls, the newest at the end, and the sizes after each:"
        return IntegrityError("\n".join([fault, title, *self._operations]))


_MAX_NUM_SHOWN: Final = 6
_SHORT: Final = Repr()
_SHORT.maxother = 60


def _show_arguments(args: tuple[object, ...], kwargs: Mapping[str, object]) -> str:
    shown = [_show(value) for value in args]
    shown += [f"{name}={_show(value)}" for name, value in kwargs.items()]
    return ", ".join(shown)


def _show(value: object) -> str:
    """Show a value in short: of long ones the beginning, of requests the row."""
    if isinstance(value, RequestKV):
        return (
            f"row {value.req_pool_idx} (protected {value.protected_len}, "
            f"committed {value.committed_len}, allocated {value.allocated_len})"
        )
    if isinstance(value, KVCacheInfo):
        return f"{value.num_reqs} rows, {value.num_new_pages} new pages"
    if isinstance(value, np.ndarray) and value.ndim:
        first: list[object] = value[:_MAX_NUM_SHOWN].tolist()
        return _show_items(first, len(cast("Sequence[object]", value)))
    if isinstance(value, list | tuple):
        items = cast("Sequence[object]", value)
        return _show_items(items[:_MAX_NUM_SHOWN], len(items))
    return _SHORT.repr(value)


def _show_items(first: Sequence[object], num_items: int) -> str:
    shown = [_show(item) for item in first]
    if num_items > len(shown):
        shown.append(f"... {num_items} in all")
    return f"[{', '.join(shown)}]"

"""What sees every call that may change a cache: shared counters and the debug log."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from .debug_log import DebugLog
    from .prefix_cache import PrefixCache
    from .shared_counters import SharedCounters

_P = ParamSpec("_P")
_T = TypeVar("_T")


class CallWatch:
    """Stands before the public methods of a cache that may change it.

    Such a method begins with ``if self.watch is not None: return self.watch.call(...)``
    and comes back here with its own bound method and arguments: so the watch sees every
    call and what became of it, and a cache without a watch pays for one comparison.

    Attributes:
        log: Checks and records the calls; ``None`` unless the cache is to be debugged.
    """

    def __init__(
        self,
        cache: PrefixCache,
        log: DebugLog | None,
        counters: SharedCounters | None,
    ) -> None:
        """Watch the calls of `cache`, which must keep this as its `watch`.

        Args:
            cache: Whose calls go through here.
            log: Checks and records them.
            counters: Other processes read the sizes here.

        Raises:
            ConfigError: `counters` can only be read, are closed, or have a cache.
        """
        if counters is not None:
            counters.take()
        self._cache = cache
        self._counters = counters
        self.log = log

    def call(self, method: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call a method of the cache, and pass on what it returns or raises.

        Args:
            method: The bound method.
            *args: Its arguments.
            **kwargs: Its arguments by name.

        Raises:
            WrongThreadError: It is a thread that does not own the cache. Asked before
                anything else: the owner may be in the middle of a call.
            IntegrityError: The debug log found a fault after the call.
        """
        self._cache._check_thread()  # pyright: ignore[reportPrivateUsage]
        self._cache.watch = None  # so that the method does not come here again
        try:
            if self.log is None:
                return method(*args, **kwargs)
            return self.log.call(method, *args, **kwargs)
        finally:
            self._cache.watch = self
            self.write_counters()

    def write_counters(self) -> None:
        """Tell other processes the sizes."""
        if self._counters is not None:
            cache = self._cache
            self._counters.write(
                cache.available_size,
                cache.evictable_size,
                cache.protected_size,
                cache.held_size,
                cache.total_size,
            )

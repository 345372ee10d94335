"""The caller's clock, as far as one can trust it."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from .errors import ConfigError


class SteadyClock:
    """Time that never goes backwards, and never stops those who read it.

    Where the caller's clock goes backwards, fails, or returns no finite number, time
    stands still.
    """

    def __init__(self, clock: Callable[[], float] | None) -> None:
        """Wrap a clock, or none; it is first asked when somebody reads the time.

        Args:
            clock: Returns seconds since any fixed moment.

        Raises:
            ConfigError: `clock` cannot be called.
        """
        if clock is not None and not callable(clock):
            raise ConfigError(f"clock must be a function or None, got {clock!r}")
        self._clock = clock
        self._latest = -inf
        self._failure: object = None

    def now(self) -> float:
        """Return the time in seconds; minus infinity before the clock first worked."""
        if self._clock is not None:
            try:
                now = self._clock()
                if self._latest < now < inf:
                    self._latest = float(now)
                elif not -inf < now < inf:
                    self._failure = now
            except Exception as error:  # whatever the caller's code raises
                self._failure = error
        return self._latest

    def check(self) -> None:
        """Refuse to rely on a clock that has never worked.

        Raises:
            ConfigError: There is none, or it failed, or returned no finite number.
        """
        if self._clock is None:
            raise ConfigError("ttl needs a cache with a clock, got none")
        if self.now() == -inf:
            raise ConfigError(f"clock must return seconds, got {self._failure!r}")

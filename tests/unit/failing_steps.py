"""Steps whose allocations fail, or are looked at, whatever is free."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from radixkv.mem_cache import OutOfPagesError, PrefixCache, StepBuilder


class WatchedStep:
    """A step whose calls of one method go through a function."""

    def __init__(
        self, step: StepBuilder, method: str, call: Callable[..., object]
    ) -> None:
        self._step = step
        self._method = method
        self._call = call

    def __getattr__(self, name: str) -> object:
        work = getattr(self._step, name)
        if name != self._method:
            return work
        return lambda *args: self._call(work, *args)


def watch_steps(
    patch: pytest.MonkeyPatch,
    cache: PrefixCache,
    method: str,
    call: Callable[..., object],
) -> None:
    """Let calls of a method of all steps go through ``call(method, *arguments)``."""
    begin = cache.begin_step
    patch.setattr(cache, "begin_step", lambda: WatchedStep(begin(), method, call))


def fail_steps(
    patch: pytest.MonkeyPatch, cache: PrefixCache, method: str, times: int = 1
) -> None:
    """Let the next calls of a method of steps find no room."""
    num_left = times

    def fail(work: Callable[..., object], *args: object) -> object:
        nonlocal num_left
        num_left -= 1
        if num_left < 0:
            return work(*args)
        raise OutOfPagesError(1, 0, 0, 0, 0)

    watch_steps(patch, cache, method, fail)

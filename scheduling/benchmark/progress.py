"""Shows how far a benchmark is: bars on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
)

from .one_batch import Progress as OnProgress

_INTERVAL_S = 5.0
"""From one line to the next, at least; a run that is shorter prints none."""


@contextmanager
def shown_progress() -> Generator[OnProgress]:
    """Yield what is told of every step, and shows it on the error output."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield progress_lines(sys.stderr)
        return
    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        console=console,
        transient=True,
    )
    tasks: dict[str, TaskID] = {}

    def show(what: str, done: int, total: int) -> None:
        if what not in tasks:
            tasks[what] = bars.add_task(what)
        bars.update(tasks[what], completed=done, total=total)

    with bars:
        yield show


def progress_lines(
    file: TextIO, clock: Callable[[], float] = time.monotonic
) -> OnProgress:
    """Return what prints a line every few seconds.

    Args:
        file: Where to.
        clock: Seconds.
    """
    last = clock()

    def show(what: str, done: int, total: int) -> None:
        nonlocal last
        now = clock()
        if now - last >= _INTERVAL_S:
            last = now
            print(f"{what}: {done} of {total} tokens", file=file, flush=True)

    return show

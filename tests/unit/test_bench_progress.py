"""Where there is no terminal, progress is a line every few seconds."""

from __future__ import annotations

import io

from radixkv.scheduling.benchmark.progress import progress_lines


def test_a_line_comes_every_five_seconds_at_most() -> None:
    now = 0.0
    file = io.StringIO()
    show = progress_lines(file, clock=lambda: now)

    for done in range(13):
        now = float(done)
        show("cold", done, 13)

    expected = ["cold: 5 of 13 tokens", "cold: 10 of 13 tokens"]
    assert expected == file.getvalue().splitlines()


def test_a_short_run_prints_none() -> None:
    file = io.StringIO()

    progress_lines(file, clock=lambda: 7.0)("cold", 1, 1)

    assert not file.getvalue()

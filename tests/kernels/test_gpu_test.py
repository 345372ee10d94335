"""The script of `make gpu-test`, as far as it runs without a GPU."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from radixkv.kernels.backend import Backend

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALL = {
    "device": torch.device("cpu"),
    "dtype": torch.float32,
    "num_reqs": 3,
    "context_len": 16,
    "new_len": 4,
    "page_size": 4,
    "num_layers": 2,
    "num_q_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "latent_dim": 16,
    "rope_dim": 16,
}
KERNELS = (
    "attention_decode",
    "attention_extend",
    "attention_indices",
    "kv_store",
    "page_table",
    "pages",
    "slot_mapping",
)


@pytest.fixture(scope="module")
def gpu_cases() -> Any:  # noqa: ANN401 - not a module of the package
    return load("gpu_cases")


@pytest.fixture(scope="module")
def gpu_test() -> Any:  # noqa: ANN401
    return load("gpu_test")


def load(name: str) -> Any:  # noqa: ANN401
    """Import a script as it imports its neighbours."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return import_module(name)
    finally:
        sys.path.remove(str(BENCHMARKS))


def a_millisecond(call: Callable[[], object]) -> float:
    call()
    return 0.001


def test_all_cases_are_right_and_launch_every_kernel(
    gpu_cases: Any,  # noqa: ANN401
    gpu_test: Any,  # noqa: ANN401
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched: set[str] = set()
    kernels: set[str] = set()

    class Spy:
        """A kernel that notes its launches."""

        def __init__(self, name: str, kernel: Any) -> None:  # noqa: ANN401
            self.name = name
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> object:
            launched.add(self.name)
            return self.kernel[grid]

    for name in KERNELS:
        module = import_module(f"radixkv.kernels.triton.{name}")
        for each, kernel in list(vars(module).items()):
            if each.endswith("_kernel") and hasattr(kernel, "__getitem__"):
                kernels.add(each)
                monkeypatch.setattr(module, each, Spy(each, kernel))
    floors = gpu_test.Floors(bytes_per_s=1e9, launch_s=1e-6)

    cases = list(gpu_cases.all_cases(gpu_cases.Sizes(**SMALL)))
    results = [gpu_test.run_case(case, a_millisecond, floors) for case in cases]

    assert [] == [(x.case.op, x.error) for x in results if not x.is_right]
    # Heads of 16 numbers are aligned; those that are not have a kernel of their own.
    assert {"unaligned_kernel"} == kernels - launched
    assert all(case.num_bytes > 0 for case in cases)


def test_what_torch_computes_is_the_same(gpu_cases: Any) -> None:  # noqa: ANN401
    cases = list(gpu_cases.all_cases(gpu_cases.Sizes(**SMALL)))
    compared = [case for case in cases if case.baseline]

    assert 3 == len(compared)
    for case in compared:
        (expected,) = case.run("reference")
        torch.testing.assert_close(
            expected, case.baseline().transpose(1, 2).flatten(0, 1)
        )


def make_case(
    gpu_cases: Any,  # noqa: ANN401
    made: list[float],
    expected: list[float],
    tolerance: float,
) -> Any:  # noqa: ANN401
    def run(backend: Backend) -> tuple[torch.Tensor, ...]:
        return (torch.tensor(made if backend == "triton" else expected),)

    return gpu_cases.Case("op", "what", run, 5_000_000, tolerance=tolerance)


@pytest.mark.parametrize(
    ("made", "expected", "tolerance", "is_right"),
    [
        ([1, 2], [1, 2], 0, True),
        ([1, 2], [1, 2.0001], 0, False),
        ([1, 2], [1, 2.0001], 0.001, True),
        ([1, 2], [1.1, 2], 0.001, False),
        ([float("nan"), 2], [1, 2], 0.5, False),
        ([float("nan"), 2], [1, 2], 0, False),
    ],
)
def test_a_kernel_that_is_wrong_is_found_out(
    gpu_cases: Any,  # noqa: ANN401
    gpu_test: Any,  # noqa: ANN401
    made: list[float],
    expected: list[float],
    tolerance: float,
    is_right: bool,
) -> None:
    case = make_case(gpu_cases, made, expected, tolerance)

    result = gpu_test.run_case(case, a_millisecond, gpu_test.Floors(1e9, 0))

    assert is_right == result.is_right


def test_a_write_to_the_wrong_place_is_found_out(
    gpu_cases: Any,  # noqa: ANN401
    gpu_test: Any,  # noqa: ANN401
) -> None:
    buffer = torch.zeros(4)

    def run(backend: Backend) -> tuple[torch.Tensor, ...]:
        buffer[1] = 5
        if backend == "triton":
            buffer[3] = 5  # which no reference puts right
        return ()

    case = gpu_cases.Case("op", "what", run, 1, (buffer,))

    assert not gpu_test.run_case(case, a_millisecond, gpu_test.Floors(1, 0)).is_right


def test_the_table_shows_times_and_floors(
    gpu_cases: Any,  # noqa: ANN401
    gpu_test: Any,  # noqa: ANN401
) -> None:
    # 5 MB at 10 GB/s take 500 us, and a millisecond is twice as long.
    floors = gpu_test.Floors(bytes_per_s=1e10, launch_s=3e-6)
    right = make_case(gpu_cases, [1], [1], 0)
    wrong = make_case(gpu_cases, [1], [2], 0)
    results = [
        gpu_test.Result(right, 0.0, 0.001, floors.of(right.num_bytes), None),
        gpu_test.Result(wrong, 0.5, 0.001, floors.of(1), 0.002),
    ]

    table = gpu_test.make_table(results, floors, "A GPU")

    console = Console(width=150, file=io.StringIO())
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert "A GPU: 10 GB/s, 3.0 us a launch" == lines[0].strip()
    cells = [line.replace("┃", "│").split("│") for line in lines]
    shown = [[cell.strip() for cell in row[1:-1]] for row in cells if len(row) > 2]
    assert [
        ["op", "what", "right", "us", "floor us", "of floor", "GB/s", "torch us"],
        ["op", "what", "yes", "1,000.0", "500.0", "2.0 x", "5", ""],
        ["op", "what", "NO (0.5)", "1,000.0", "3.0", "333.3 x", "5", "2,000.0"],
    ] == [row[:-1] for row in shown]
    assert ["of torch", "", "0.50 x"] == [row[-1] for row in shown]


def test_floors_are_measured_with_a_copy_that_reads_and_writes(
    gpu_test: Any,  # noqa: ANN401
) -> None:
    floors = gpu_test.measure_floors(a_millisecond, torch.device("cpu"), 1_000)

    assert (2e6, 0.001) == (floors.bytes_per_s, floors.launch_s)
    assert 0.5 == floors.of(1_000_000)
    assert 0.001 == floors.of(1)


def test_without_a_gpu_it_says_so_and_ends_well() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}

    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu_test.py")],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )

    assert "" == done.stderr
    assert done.stdout.startswith("SKIPPED: gpu-test needs a GPU")

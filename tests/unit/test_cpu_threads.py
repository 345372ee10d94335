"""Threads are no more than the cores that the process may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from radixkv.mem_cache import ConfigError
from radixkv.scheduling.cpu_threads import num_usable_cores, use_num_threads


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8),
        ({"sys/fs/cgroup/cpu.max": "max 100000"}, 8),
        ({"sys/fs/cgroup/cpu.max": "200000 100000"}, 2),
        ({"sys/fs/cgroup/cpu.max": "150000 100000"}, 2),
        ({"sys/fs/cgroup/cpu.max": "1000 100000"}, 1),
        ({"sys/fs/cgroup/cpu.max": "9000000 100000"}, 8),
        ({"sys/fs/cgroup/cpu.max": "nonsense"}, 8),
        (
            {
                "proc/self/cgroup": "0::/a/b",
                "sys/fs/cgroup/a/cpu.max": "300000 100000",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000",
            },
            3,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/job\n3:memory:/x",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "400000",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000",
            },
            4,
        ),
        (
            {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            8,
        ),
    ],
)
def test_a_quota_bounds_the_cores(
    tmp_path: Path, files: dict[str, str], expected: int
) -> None:
    write(tmp_path, files)

    assert expected == num_usable_cores(tmp_path)


def test_cores_that_the_process_is_bound_to_bound_them_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5})

    assert 1 == num_usable_cores(tmp_path)


def test_torch_gets_no_more_threads_than_there_are_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setattr("radixkv.scheduling.cpu_threads.num_usable_cores", lambda: 1)
    torch.set_num_threads(3)

    assert 1 == use_num_threads()
    assert 1 == torch.get_num_threads()


def test_what_the_environment_says_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr("radixkv.scheduling.cpu_threads.num_usable_cores", lambda: 1)
    torch.set_num_threads(3)

    assert 3 == use_num_threads()


def test_a_number_goes_before_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")

    assert 2 == use_num_threads(2)


@pytest.mark.parametrize("number", [0, -1, 1.5, True])
def test_numbers_out_of_range_are_refused(number: int) -> None:
    before = torch.get_num_threads()

    with pytest.raises(ConfigError, match="num_threads must be"):
        use_num_threads(number)

    assert before == torch.get_num_threads()

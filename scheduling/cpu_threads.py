"""How many threads torch should compute with, which it does not find out by itself."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from radixkv.mem_cache.sizes import as_size

_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def use_num_threads(num_threads: int | None = None) -> int:
    """Let torch compute with a sane number of threads, in this whole process.

    Torch takes as many as the machine has cores. Where this process may use fewer, they
    wait for each other all the time, and a step takes a hundred times as long. So call
    this once, before the first step, in a program of your own; `radixkv
    bench-one-batch` does.

    Args:
        num_threads: How many, at least 1. If not given, what the environment says
            (`OMP_NUM_THREADS`), or as many cores as this process may use.

    Raises:
        ConfigError: `num_threads` is out of range.

    Returns:
        How many it is.
    """
    if num_threads is not None:
        torch.set_num_threads(as_size("num_threads", num_threads))
    elif not any(os.environ.get(name) for name in _VARIABLES):
        torch.set_num_threads(min(torch.get_num_threads(), num_usable_cores()))
    return torch.get_num_threads()


def num_usable_cores(root: Path = Path("/")) -> int:
    """Count the cores that this process may use, at least 1.

    Args:
        root: Where the files of the system are.

    Returns:
        The least of the cores of the machine, those that the process is bound to, and
        what a container's CPU quota is worth, rounded up.
    """
    if hasattr(os, "sched_getaffinity"):
        num_cores = len(os.sched_getaffinity(0))
    else:
        num_cores = os.cpu_count() or 1
    return max(1, min([num_cores, *map(math.ceil, _quotas(root))]))


def _quotas(root: Path) -> list[float]:
    """Return the CPU quotas of this process's control groups, in cores."""
    groups = _groups(_read(root / "proc/self/cgroup"))
    quotas: list[float] = []
    folder = root / "sys/fs/cgroup"
    for path in _with_parents(groups.get("", "/")):
        quota, _, period = _read(folder / path / "cpu.max").partition(" ")
        quotas += _quota(quota, period)
    for path in _with_parents(groups.get("cpu", "/")):
        for name in ("cpu", "cpu,cpuacct"):
            group = folder / name / path
            quota = _read(group / "cpu.cfs_quota_us")
            quotas += _quota(quota, _read(group / "cpu.cfs_period_us"))
    return quotas


def _groups(text: str) -> Mapping[str, str]:
    """Return the path of each control group, by controller; "" is that of version 2."""
    groups: dict[str, str] = {}
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        groups |= dict.fromkeys(controllers.split(","), path)
    return groups


def _with_parents(path: str) -> list[str]:
    """Return a path and those above it; in a container, it may be known as the root."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return ["/".join(parts[:n]) for n in range(len(parts) + 1)]


def _quota(quota: str, period: str) -> list[float]:
    """Return a quota in cores, in a list that is empty if there is none."""
    try:
        cores = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):  # "max", or no such file
        return []
    return [cores] if cores > 0 else []


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""

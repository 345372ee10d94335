"""What a worker has for its cache: a share of what is left, or what it is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from radixkv.mem_cache import ConfigError
from radixkv.scheduling import available_memory, get_available_memory

GIB = 2**30


def set_meminfo(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str | None
) -> None:
    """Make the system say how much RAM is free, or nothing."""
    path = tmp_path / "meminfo"
    if content is not None:
        path.write_text(content)
    monkeypatch.setattr(available_memory, "_MEMINFO", path)


class Device:
    """A CUDA device of 80 GiB: 10 of weights, 2 of others, 5 at the peak of a step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.weights, self.others, self.reserved = 10 * GIB, 2 * GIB, 11 * GIB
        self.peak = 30 * GIB  # while the weights were loaded
        self.calls: list[str] = []
        for name in (
            "empty_cache",
            "reset_peak_memory_stats",
            "synchronize",
            "max_memory_allocated",
            "mem_get_info",
            "memory_reserved",
            "is_available",
            "device_count",
        ):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def empty_cache(self) -> None:
        self.reserved = self.weights

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.peak = self.weights

    def run_largest_step(self) -> None:
        self.calls.append("step")
        self.peak = self.weights + 5 * GIB
        self.reserved = self.weights + 6 * GIB

    def synchronize(self, device: torch.device) -> None:
        self.calls.append("synchronize")

    def max_memory_allocated(self, device: torch.device) -> int:
        self.calls.append("peak")
        return self.peak

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 80 * GIB - self.reserved - self.others, 80 * GIB

    def memory_reserved(self, device: torch.device) -> int:
        return self.reserved


def test_on_cuda_the_peak_of_a_step_and_what_others_use_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device(monkeypatch)

    available_bytes = get_available_memory(
        "cuda", mem_fraction=0.5, run_largest_step=device.run_largest_step
    )

    assert (40 - 10 - 5 - 2) * GIB == available_bytes
    assert ["step", "synchronize", "peak"] == device.calls


def test_on_cuda_without_a_step_only_the_weights_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Device(monkeypatch)

    assert (80 - 10 - 2) * GIB == get_available_memory("cuda:0", mem_fraction=1)


def test_on_cuda_a_share_that_the_weights_fill_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Device(monkeypatch)

    assert 0 == get_available_memory("cuda", mem_fraction=0.1)


def test_on_a_cpu_it_is_a_share_of_the_free_ram(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_meminfo(monkeypatch, tmp_path, "MemFree: 1 kB\nMemAvailable:  8192 kB\n")

    assert 6 * 2**20 == get_available_memory("cpu", mem_fraction=0.75)


@pytest.mark.parametrize("meminfo", [None, "MemFree: 1 kB\n"])
def test_where_linux_does_not_tell_the_free_pages_are_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, meminfo: str | None
) -> None:
    set_meminfo(monkeypatch, tmp_path, meminfo)
    pages = {"SC_AVPHYS_PAGES": 100, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(available_memory.os, "sysconf_names", pages)
    monkeypatch.setattr(available_memory.os, "sysconf", pages.__getitem__)

    assert 409600 == get_available_memory("cpu", mem_fraction=1)


def test_a_system_that_does_not_tell_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_meminfo(monkeypatch, tmp_path, None)
    monkeypatch.setattr(available_memory.os, "sysconf_names", {})

    with pytest.raises(ConfigError, match="available_bytes must be given"):
        get_available_memory("cpu")


def test_this_system_tells() -> None:
    assert 0 < get_available_memory("cpu")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_told_is_not_measured(device: str) -> None:
    assert 12345 == get_available_memory(device, available_bytes=12345)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mem_fraction": 0}, r"mem_fraction must be in \(0, 1\], got 0"),
        ({"mem_fraction": 1.1}, r"mem_fraction must be in \(0, 1\], got 1.1"),
        ({"mem_fraction": float("nan")}, r"mem_fraction must be in \(0, 1\], got nan"),
        ({"mem_fraction": "half"}, "mem_fraction must be a number"),
        ({"available_bytes": -1}, "available_bytes must be >= 0, got -1"),
        ({"available_bytes": 1.5}, "available_bytes must be an integer"),
    ],
)
def test_an_argument_out_of_range_is_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        get_available_memory("cpu", **options)


@pytest.mark.parametrize("device", ["tpu?", None])
def test_a_device_that_torch_does_not_know_is_refused(device: Any) -> None:  # noqa: ANN401
    with pytest.raises(ConfigError, match="device must be one that torch knows, got"):
        get_available_memory(device)


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)

    with pytest.raises(ConfigError, match="of 1 CUDA devices, got cuda:1"):
        get_available_memory("cuda:1", run_largest_step=device.run_largest_step)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="of 0 CUDA devices, got cuda"):
        get_available_memory("cuda", run_largest_step=device.run_largest_step)
    assert [] == device.calls

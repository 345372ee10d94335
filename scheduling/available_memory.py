"""How much memory a worker has for its cache."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from radixkv.mem_cache.errors import ConfigError
from radixkv.mem_cache.sizes import as_integer, as_number

_MEMINFO = Path("/proc/meminfo")


def get_available_memory(
    device: torch.device | str,
    *,
    mem_fraction: float = 0.9,
    available_bytes: int | None = None,
    run_largest_step: Callable[[], object] | None = None,
) -> int:
    """Return the bytes that a worker has for its cache, its weights being loaded.

    On CUDA it is a share of the device, less the peak of the largest step (weights and
    activations), less what others use: the driver, and other processes. Elsewhere it is
    a share of the RAM that is free now; activations there come and go beside it.

    Args:
        device: Where the weights are and the cache will be.
        mem_fraction: Share of the memory that may be used, in ``(0, 1]``.
        available_bytes: The answer, if it is known: nothing is measured then.
        run_largest_step: Computes the largest step of the scheduler's limits, without a
            cache; on CUDA only, where its peak is measured. Without it, only what is
            allocated now is left out.

    Raises:
        ConfigError: An argument is out of range, there is no such device, or the system
            does not tell how much RAM is free.
    """
    if available_bytes is not None:
        available_bytes = as_integer("available_bytes", available_bytes)
        if available_bytes < 0:
            raise ConfigError(f"available_bytes must be >= 0, got {available_bytes}")
        return available_bytes
    if not 0 < as_number("mem_fraction", mem_fraction) <= 1:
        raise ConfigError(f"mem_fraction must be in (0, 1], got {mem_fraction}")
    device = _as_device(device)
    if device.type == "cuda":
        return _available_on_cuda(device, mem_fraction, run_largest_step)
    return int(_free_ram_bytes() * mem_fraction)


def _as_device(name: torch.device | str) -> torch.device:
    """Return a device that is there, or refuse it."""
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"device must be one that torch knows, got {name!r}"
        ) from error
    if device.type == "cuda":
        num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= num_devices:
            raise ConfigError(
                f"device must be one of {num_devices} CUDA devices, got {device}"
            )
    return device


def _available_on_cuda(
    device: torch.device,
    mem_fraction: float,
    run_largest_step: Callable[[], object] | None,
) -> int:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    if run_largest_step is not None:
        run_largest_step()
        torch.cuda.synchronize(device)
    peak_bytes = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    # What torch still holds is part of the peak.
    others_bytes = total_bytes - free_bytes - torch.cuda.memory_reserved(device)
    return max(0, int(total_bytes * mem_fraction) - peak_bytes - others_bytes)


def _free_ram_bytes() -> int:
    """Return the RAM that can be had without swapping."""
    if _MEMINFO.exists():
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    if "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    raise ConfigError("available_bytes must be given: the system does not say it")

"""What a GPU has that kernels must be made for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch

from .errors import BackendUnavailableError


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """What the device of a launch has.

    Attributes:
        shared_bytes: Shared memory that a program may have; `None` where that is no
            question: in the interpreter, and on AMD's GPUs, which have tiles of their
            own.
        capability: Compute capability of an NVIDIA GPU, such as ``(8, 6)``; `None` of
            others.
    """

    shared_bytes: int | None = None
    capability: tuple[int, int] | None = None

    def check_dtypes(self, *dtypes: torch.dtype) -> None:
        """Refuse dtypes that the device has no instructions for.

        Args:
            *dtypes: What the kernels are to compute with.

        Raises:
            BackendUnavailableError: One is bfloat16, which NVIDIA's GPUs have from
                Ampere, compute capability 8.0, on.
        """
        if (
            self.capability is not None
            and self.capability < (8, 0)
            and torch.bfloat16 in dtypes
        ):
            major, minor = self.capability
            raise BackendUnavailableError(
                "backend 'triton' takes bfloat16 on GPUs of compute capability >= 8.0, "
                f"got {major}.{minor}; float16, float32 and backend 'reference' work "
                "there too"
            )


def device_limits(device: torch.device) -> DeviceLimits:
    """Return what a device has; asked once for each, as a launch must not wait."""
    if device.type != "cuda" or torch.version.hip is not None:
        return DeviceLimits()
    return _limits_of_gpu(device.index)


@cache
def _limits_of_gpu(index: int) -> DeviceLimits:
    # Triton's own figure is the one that it holds a kernel against.
    driver: Any = import_module("triton.runtime").driver
    properties = driver.active.utils.get_device_properties(index)
    cuda: Any = torch.cuda  # the type of what follows is partial
    return DeviceLimits(
        shared_bytes=int(properties["max_shared_mem"]),
        capability=cuda.get_device_capability(index),
    )

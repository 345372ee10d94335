"""Which implementation of an op runs: its Triton kernel, or its reference."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Literal, get_args

import torch

from .errors import BackendUnavailableError, ConfigError

Backend = Literal["auto", "triton", "reference"]
"""What a launcher may be asked for; "auto" takes the best that runs on its tensors."""


def pick_backend(
    backend: Backend, device: torch.device
) -> Literal["triton", "reference"]:
    """Return the implementation that an op runs on its tensors.

    "auto" is Triton for tensors on a GPU, if Triton is installed, and the reference
    elsewhere. Triton itself is not imported here, nor by the module of any op before a
    kernel runs.

    Args:
        backend: What the caller asks for.
        device: Where the tensors of the op live.

    Raises:
        BackendUnavailableError: Triton was asked for, but is not installed, or cannot
            run on the device.
        ConfigError: There is no such backend.
    """
    if backend == "reference":
        return backend
    if backend == "auto":
        return "triton" if device.type == "cuda" and has_triton() else "reference"
    if backend != "triton":
        choices = get_args(Backend)
        raise ConfigError(f"backend must be one of {choices}, got {backend!r}")
    if not has_triton():
        raise BackendUnavailableError(
            "backend 'triton' needs the package triton, which is not installed; "
            "'auto' and 'reference' work without"
        )
    # Torch calls AMD's GPUs "cuda" too.
    if device.type != "cuda" and not is_interpreted():
        raise BackendUnavailableError(
            f"backend 'triton' needs tensors on a GPU, got device {str(device)!r}; "
            "'auto' and 'reference' run anywhere, and with TRITON_INTERPRET=1 in the "
            "environment Triton's interpreter runs on the CPU"
        )
    return backend


@cache
def has_triton() -> bool:
    """Tell whether Triton is installed; it exists for Linux only."""
    return find_spec("triton") is not None


@cache
def is_interpreted() -> bool:
    """Tell whether Triton runs kernels in its interpreter, on the CPU.

    Triton decides it when a function is defined, so its own functions tell.
    """
    from .triton.language import tl

    return type(tl.sum).__name__ == "InterpretedFunction"

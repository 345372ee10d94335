"""Bring numbers from the host to a device, without waiting for either."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray


def upload(numbers: NDArray[np.int32], device: torch.device) -> torch.Tensor:
    """Copy numbers to a device.

    The copy goes through pinned memory, which torch keeps until it is done: neither
    does the host wait, nor may a later upload overwrite what is under way.

    Args:
        numbers: int32 `[n]`; may change once this returns.
        device: Where to.

    Returns:
        int32 `[n]` on the device.
    """
    pinned = torch.empty(
        len(numbers), dtype=torch.int32, pin_memory=device.type == "cuda"
    )
    pinned.numpy()[:] = numbers
    return pinned.to(device, non_blocking=True)

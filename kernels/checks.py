"""What an op takes: checked where it is called, for its kernel and its reference alike.

Nothing here waits for a device: shapes, dtypes, strides and what lives on the host can
be checked, numbers on a device cannot. Tensors of numbers, such as rows, lengths, slots
and page ids, may have any stride: kernels count on numbers one after another, and get a
copy where they are not. What is written in place is never copied, but refused.
"""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from .errors import BackendUnavailableError, ConfigError

INTEGERS: Final = (torch.int32, torch.int64)
"""Dtypes of rows, lengths, slots and page ids."""

FLOAT32_MAX: Final = torch.finfo(torch.float32).max
FLOAT32_TINY: Final = torch.finfo(torch.float32).tiny
"""The largest and the smallest normal number of float32, in which factors are used."""


def as_numbers(**numbers: object) -> list[torch.Tensor]:
    """Return tensors of numbers as kernels take them, each in one piece.

    Args:
        numbers: The tensors by name, int32 or int64 `[n]`, with any stride; the same
            `n` for all.

    Returns:
        The same tensors, but copies of those that are not in one piece.

    Raises:
        ConfigError: One is no such tensor, or their lengths differ.
    """
    taken: list[torch.Tensor] = []
    for name, tensor in numbers.items():
        if (
            not isinstance(tensor, torch.Tensor)
            or tensor.dtype not in INTEGERS
            or tensor.dim() != 1
        ):
            raise ConfigError(
                f"{name} must be a tensor of int32 or int64 [n], got {_what(tensor)}"
            )
        if taken and len(tensor) != len(taken[0]):
            raise ConfigError(
                f"{name} must be as many as {next(iter(numbers))}, {len(taken[0])}, "
                f"got {len(tensor)}"
            )
        taken.append(tensor.contiguous())
    return taken


def check_table(page_table: torch.Tensor, page_size: int) -> None:
    """Refuse what is no page table, or no size of a page.

    Args:
        page_table: Page ids by row and column, int32 or int64
            `[num_rows, max_pages_per_request]`, with any strides.
        page_size: Slots a page, at least 1.

    Raises:
        ConfigError: It is no such tensor, or the size is out of range.
    """
    check_count("page_size", page_size, minimum=1)
    if page_table.dim() != 2 or page_table.dtype not in INTEGERS:
        raise ConfigError(
            "page_table must be int32 or int64 [num_rows, max_pages_per_request], got "
            f"{_what(page_table)}"
        )


def check_count(
    name: str, count: object, *, minimum: int = 0, maximum: int = 2**31 - 1
) -> None:
    """Refuse what is no count in ``[minimum, maximum]``.

    Args:
        name: What it is called in the message.
        count: Any integer type but bool.
        minimum: The least allowed.
        maximum: The greatest allowed.

    Raises:
        ConfigError: `count` is no such integer.
    """
    if (
        isinstance(count, bool)
        or not isinstance(count, Integral)
        or not minimum <= int(count) <= maximum
    ):
        raise ConfigError(
            f"{name} must be >= {minimum} and <= {maximum}, an integer, got {count!r}"
        )


def check_factor(name: str, factor: object, *, is_divisor: bool = False) -> None:
    """Refuse what float32 does not have; a tensor too, which may be on a device.

    Kernels compute with factors in float32, where a larger one would be infinite, and a
    divisor that is less than the smallest normal number zero, on some devices.

    Args:
        name: What it is called in the message.
        factor: Any real type but bool.
        is_divisor: Refuse as well what is not above 0.

    Raises:
        ConfigError: `factor` is no such number.
    """
    value = _as_float(factor)
    if not abs(value) <= FLOAT32_MAX or (is_divisor and value < FLOAT32_TINY):
        least = "> 0 and " if is_divisor else ""
        begin = f"from {FLOAT32_TINY:.6g} " if is_divisor else ""
        raise ConfigError(
            f"{name} must be {least}finite, a number {begin}to {FLOAT32_MAX:.6g} as "
            f"float32 has it, got {factor!r}"
        )


def _as_float(factor: object) -> float:
    """Return a factor as a float, NaN if it is no real number."""
    if isinstance(factor, bool) or not isinstance(factor, Real):
        return math.nan
    try:
        return float(factor)
    except OverflowError:  # an integer or a fraction that no float reaches
        return math.inf


def as_host_integers(**numbers: object) -> NDArray[np.int64]:
    """Return lists of integers that the host has, int64 `[number of lists, n]`.

    Args:
        numbers: The lists by name, `[n]` each: sequences, or arrays of integers.

    Raises:
        ConfigError: One is no list of integers, or their lengths differ.
    """
    arrays: list[NDArray[np.int64]] = []
    for name, values in numbers.items():
        array = np.asarray(values)
        if array.size == 0:
            array = array.astype(np.int64)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ConfigError(f"{name} must be a list of integers, got {values!r}")
        if arrays and len(array) != len(arrays[0]):
            raise ConfigError(
                f"{name} must be as many as {next(iter(numbers))}, {len(arrays[0])}, "
                f"got {len(array)}"
            )
        arrays.append(array.astype(np.int64))
    return np.stack(arrays)


def as_device(device: torch.device | str) -> torch.device:
    """Return a device that tensors can be made on.

    Args:
        device: The device, or its name.

    Raises:
        BackendUnavailableError: There is no such device here, such as "cuda" without a
            GPU.
        ConfigError: Torch knows no device of this name.
    """
    try:
        named = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"device must be one that torch knows, such as 'cpu', got {device!r}"
        ) from error
    try:
        torch.empty(0, device=named)
    except (RuntimeError, AssertionError, ImportError) as error:
        raise BackendUnavailableError(
            f"device must be one that is here, got {str(named)!r}: {error}"
        ) from error
    return named


def _what(value: object) -> str:
    """Describe a value by its dtype and shape, or by its class."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)}"
    return type(value).__name__

"""What lies in one page of one layer, byte by byte."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Final

from ..errors import ConfigError

DTYPE_BYTES: Final = MappingProxyType(
    {
        "float32": 4,
        "float16": 2,
        "bfloat16": 2,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
        "int8": 1,
        "uint8": 1,
    }
)
"""Bytes of one number, by the name that torch gives its dtype."""

PART_ALIGNMENT: Final = 16
"""Bytes to which parts are aligned: the widest load of a GPU, and of any dtype."""


@dataclass(frozen=True, slots=True)
class PagePart:
    """One array in the page of a layer, such as its K.

    Attributes:
        name: What it holds: "k", "v", "latent", ...
        shape: Its shape; the last dimension is contiguous.
        dtype: The torch name of its dtype.
        offset: Where it begins, in bytes from the begin of the layer's page.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int

    @property
    def size_bytes(self) -> int:
        """Bytes of its numbers."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


def lay_out(arrays: Iterable[tuple[str, tuple[int, ...], str]]) -> tuple[PagePart, ...]:
    """Put arrays into a page one behind the other, each aligned to 16 bytes.

    Args:
        arrays: Name, shape and dtype of each.
    """
    parts: list[PagePart] = []
    offset = 0
    for name, shape, dtype in arrays:
        part = PagePart(name, shape, dtype, offset)
        parts.append(part)
        offset = aligned_bytes(offset + part.size_bytes)
    return tuple(parts)


def aligned_bytes(num_bytes: int) -> int:
    """Round bytes up to where the next part may begin.

    Example:
        >>> aligned_bytes(1), aligned_bytes(32)
        (16, 32)
    """
    return -(-num_bytes // PART_ALIGNMENT) * PART_ALIGNMENT


def check_dtype(name: str, dtype: object) -> str:
    """Return the name of a dtype, or refuse it.

    Args:
        name: What the dtype is called in the message.
        dtype: Its torch name, such as "bfloat16".

    Raises:
        ConfigError: There is no such dtype, or it cannot hold K and V.
    """
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        allowed = ", ".join(DTYPE_BYTES)
        raise ConfigError(f"{name} must be one of {allowed}, got {dtype!r}")
    return dtype

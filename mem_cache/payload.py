"""The packed numbers of a message; a module of its own, so that it can be compiled."""

from __future__ import annotations

from collections.abc import Collection
from struct import Struct
from typing import Final

_LAYOUTS: Final[dict[int, Struct]] = {}
"""How so many numbers are packed, made once for each size of a batch."""


def pack_numbers(numbers: Collection[int]) -> bytes:
    """Return numbers as the bytes of int32, in the byte order of the machine.

    Raises:
        struct.error: One of them is no int32.
    """
    layout = _LAYOUTS.get(len(numbers))
    if layout is None:
        layout = _LAYOUTS[len(numbers)] = Struct(f"{len(numbers)}i")
    return layout.pack(*numbers)

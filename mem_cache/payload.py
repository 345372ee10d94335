"""The packed numbers of a message; a module of its own, so that it can be compiled."""

from __future__ import annotations

from collections.abc import Callable, Collection
from struct import Struct
from typing import Final

_PACKERS: Final[dict[int, Callable[..., bytes]]] = {}
"""What packs so many numbers, made once for each size of a batch."""


def pack_numbers(numbers: Collection[int]) -> bytes:
    """Return numbers as the bytes of int32, in the byte order of the machine.

    Raises:
        struct.error: One of them is no int32.
    """
    pack = _PACKERS.get(len(numbers))
    if pack is None:
        pack = _PACKERS[len(numbers)] = Struct(f"{len(numbers)}i").pack
    return pack(*numbers)

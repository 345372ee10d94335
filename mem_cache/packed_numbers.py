"""A few numbers as the bytes of int32; of many, numpy is faster."""

from __future__ import annotations

from collections.abc import Callable, Collection
from struct import Struct
from typing import Any, Final, TypeAlias

Packed: TypeAlias = bytes | bytearray | memoryview
"""Numbers as the bytes of int32."""

_NUMBER_BYTES: Final = 4

_PACK: Final[dict[int, Callable[..., bytes]]] = {}
_UNPACK: Final[dict[int, Callable[[Packed], tuple[Any, ...]]]] = {}
"""What packs and unpacks so many numbers, made once for each count."""


def pack_numbers(numbers: Collection[int]) -> bytes:
    """Return numbers as the bytes of int32, in the byte order of the machine.

    Raises:
        struct.error: One of them is no int32.
    """
    pack = _PACK.get(len(numbers))
    if pack is None:
        pack = _PACK[len(numbers)] = Struct(f"{len(numbers)}i").pack
    return pack(*numbers)


def unpack_numbers(packed: Packed) -> tuple[int, ...]:
    """Return the numbers that `pack_numbers` packed."""
    count = len(packed) // _NUMBER_BYTES
    unpack = _UNPACK.get(count)
    if unpack is None:
        unpack = _UNPACK[count] = Struct(f"{count}i").unpack
    return unpack(packed)

"""The place sketch: which pages were ever evicted where, in a few bits each."""

from __future__ import annotations

from collections.abc import Hashable
from numbers import Number
from typing import Final, cast
from zlib import adler32, crc32

import numpy as np

MAX_NUM_KEYS: Final = 1 << 20
"""Keys of one generation."""

_NUM_BITS: Final = MAX_NUM_KEYS << 4
_MASK: Final = _NUM_BITS - 1
_NUM_PROBES: Final = 4
_NUM_NEW_KEYS: Final = 1024
_SPREAD: Final = 0x9E3779B1
_KEY_BITS: Final = (1 << 32) - 1
_ALL_BITS: Final = (1 << 64) - 1


class PlaceSketch:
    """A set of keys that forgets none of the newest million, and takes 4 MiB.

    A Bloom filter (Bloom, "Space/Time Trade-offs in Hash Coding with Allowable Errors",
    1970) of two generations. When the young one has `MAX_NUM_KEYS` keys, it becomes the
    old one, and the one before is forgotten. So it may err in both directions: it has
    fewer than 1 in 100 of the keys that were never added; and it has forgotten keys
    that were added more than `MAX_NUM_KEYS` others ago, at the latest twice as many.

    New pages wait until there are so many that numpy sets all their bits, or until
    `flush`: it has those that wait only then. Keys are 32 bits that are the same in
    every process.
    """

    __slots__ = ("_new", "_num_keys", "_old", "_young")

    def __init__(self) -> None:
        """Start without keys; the memory is touched only where bits are set."""
        self._new: list[tuple[int, bytes]] = []
        self._young = bytearray(_NUM_BITS >> 3)
        self._old = b""
        self._num_keys = 0

    def add(self, place: int, page: bytes) -> None:
        """Add a page that follows a place, soon. O(1) amortized."""
        new = self._new
        new.append((place, page))
        if len(new) >= _NUM_NEW_KEYS:
            self.flush()

    def flush(self) -> None:
        """Add all pages that wait, at most `_NUM_NEW_KEYS`."""
        if self._new:
            self._write([_place_key(place, page) for place, page in self._new])
            self._new = []

    def has(self, place: int, page: bytes) -> bool:
        """Tell whether a page that follows a place was added, as far as is known."""
        return self._has(_place_key(place, page))

    def add_namespace(self, namespace: Hashable) -> None:
        """Add a namespace, at once."""
        self._write([namespace_key(namespace)])

    def has_namespace(self, namespace: Hashable) -> bool:
        """Tell whether a namespace was added, as far as is known."""
        return self._has(namespace_key(namespace))

    def _has(self, key: int) -> bool:
        at = key & _MASK
        bit = 1 << (at & 7)
        if self._young[at >> 3] & bit and _has_rest(self._young, key):
            return True
        old = self._old
        return bool(old) and bool(old[at >> 3] & bit) and _has_rest(old, key)

    def _write(self, new: list[int]) -> None:
        """Set the bits of keys."""
        keys = np.array(new, np.int64)
        self._num_keys += len(new)
        bits = np.frombuffer(self._young, np.uint8)
        for i in range(_NUM_PROBES):
            at = (keys + i * ((keys >> 7) | 1)) & _MASK
            np.bitwise_or.at(bits, at >> 3, (1 << (at & 7)).astype(np.uint8))
        if self._num_keys >= MAX_NUM_KEYS:
            self._old = bytes(self._young)
            self._young = bytearray(_NUM_BITS >> 3)
            self._num_keys = 0


def _place_key(place: int, page: bytes) -> int:
    """Return a key for a page that follows a place.

    Pages are told apart by the checksum that is quickest: of 10,000 pages that follow a
    place, it mixes up very few. The place is spread over all bits: as the seed of the
    checksum, neighbours would meet.
    """
    return (adler32(page) + place * _SPREAD) & _KEY_BITS


def _has_rest(bits: bytes | bytearray, key: int) -> bool:
    """Tell whether the bits of a key are set; the first is."""
    step = (key >> 7) | 1
    for i in range(1, _NUM_PROBES):
        at = (key + i * step) & _MASK
        if not bits[at >> 3] & (1 << (at & 7)):
            return False
    return True


def namespace_key(namespace: Hashable) -> int:
    """Return a key that equal namespaces share, and that is the same in every process.

    All namespaces of another kind than text, bytes, numbers, ``None`` and tuples of
    these have one key: what is lost of one of them may be lost of each.
    """
    if isinstance(namespace, str):
        return crc32(b"text" + namespace.encode("utf-8", "surrogatepass"))
    if isinstance(namespace, bytes):
        return crc32(b"bytes" + namespace)
    # numpy's numbers compare to no bool, which compiled code would refuse.
    if isinstance(namespace, Number) and bool(namespace == namespace):
        number = hash(namespace) & _ALL_BITS  # equal ones share it, whatever their kind
        return crc32(number.to_bytes(8, "little"))
    if isinstance(namespace, tuple):
        key = crc32(b"tuple")
        for part in cast(tuple[Hashable, ...], namespace):
            key = crc32(namespace_key(part).to_bytes(4, "little"), key)
        return key
    return crc32(b"none" if namespace is None else b"other")

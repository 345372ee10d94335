"""The place sketch: which pages were ever evicted where, in a few bits each."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import combinations
from numbers import Number
from typing import Any, Final, cast
from zlib import crc32

MIN_NUM_KEYS: Final = 1 << 16
MAX_NUM_KEYS: Final = 1 << 20
"""Fewest and most keys of one generation."""

_BYTES_PER_KEY: Final = 4
_SPREAD: Final = 0x9E3779B1
_ALL_BITS: Final = (1 << 64) - 1

_PATTERNS: Final = bytes(
    sum(1 << bit for bit in bits) for bits in combinations(range(8), 3)
)
"""All bytes with three bits set: a key has those of one of them, in one byte."""

_NUM_PATTERNS: Final = len(_PATTERNS)

_SHIFT: Final = 22
"""The bits of a key below choose its byte, at most, and those above its pattern."""


class PlaceSketch:
    """A set of keys that forgets none of the newest, and takes some bytes for each.

    A Bloom filter (Bloom, "Space/Time Trade-offs in Hash Coding with Allowable Errors",
    1970) of two generations. All bits of a key are in one byte (Putze, Sanders and
    Singler, "Cache-, Hash- and Space-Efficient Bloom Filters", 2007). When the young
    generation has `max_num_keys` keys, it becomes the old one, and the one before is
    forgotten. So it may err in both directions: it has fewer than 1 in 50 of the keys
    that were never added; and it has forgotten keys that were added more than
    `max_num_keys` others ago, at the latest twice as many.

    A generation takes four bytes a key, from its first key on. A key is 32 bits that
    are the same in every process; what chooses its byte does not choose its bits in
    there.
    """

    __slots__ = ("_at_mask", "_num_keys", "_old", "_young", "max_num_keys")

    def __init__(self, num_keys: int) -> None:
        """Start without keys.

        Args:
            num_keys: How many a generation should have; it has a power of two, between
                `MIN_NUM_KEYS` and `MAX_NUM_KEYS`.
        """
        bounded = min(max(num_keys, MIN_NUM_KEYS), MAX_NUM_KEYS)
        self.max_num_keys = 1 << (bounded - 1).bit_length()
        self._at_mask = self.max_num_keys * _BYTES_PER_KEY - 1
        self._young = bytearray()
        self._old = bytearray()
        self._num_keys = 0

    def add(self, key: int) -> None:
        """Add a key: that of a page or of a namespace."""
        if not self._num_keys:
            self._young = bytearray(self._at_mask + 1)
        self._young[key & self._at_mask] |= _PATTERNS[(key >> _SHIFT) % _NUM_PATTERNS]
        self._num_keys += 1
        if self._num_keys == self.max_num_keys:
            self._old = self._young
            self._young = bytearray()
            self._num_keys = 0

    def has(self, key: int) -> bool:
        """Tell whether a key was added, as far as is known."""
        at = key & self._at_mask
        pattern = _PATTERNS[(key >> _SHIFT) % _NUM_PATTERNS]
        young = self._young
        if young and young[at] & pattern == pattern:
            return True
        old = self._old
        return bool(old) and old[at] & pattern == pattern


def page_key(place: int, page: bytes) -> int:
    """Return a key for a page that follows a place.

    The place is spread over all bits: a checksum that starts with one place, and goes
    on with a page, is often that of its neighbours.
    """
    return crc32(page, place * _SPREAD)


def namespace_key(namespace: Hashable) -> int:
    """Return a key that equal namespaces share, and that is the same in every process.

    All namespaces of another kind than text, bytes, numbers, ``None`` and tuples of
    these have one key: what is lost of one of them may be lost of each.
    """
    if isinstance(namespace, str):
        return crc32(b"text" + namespace.encode("utf-8", "surrogatepass"))
    if isinstance(namespace, bytes):
        return crc32(b"bytes" + namespace)
    if isinstance(namespace, Number):
        number: Any = namespace  # of any other type, compiled code would refuse no bool
        if bool(number == number):
            key = hash(number) & _ALL_BITS  # equal ones share it, whatever their kind
            return crc32(key.to_bytes(8, "little"))
    if isinstance(namespace, tuple):
        key = crc32(b"tuple")
        for part in cast(tuple[Hashable, ...], namespace):
            key = crc32(namespace_key(part).to_bytes(4, "little"), key)
        return key
    return crc32(b"none" if namespace is None else b"other")

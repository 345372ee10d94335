"""The place sketch: which pages were ever evicted where, in a few bits each."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import combinations
from numbers import Number
from typing import Any, Final, cast
from zlib import crc32

MAX_NUM_KEYS: Final = 1 << 20
"""Keys of one generation."""

_NUM_BYTES: Final = MAX_NUM_KEYS << 2
_AT_MASK: Final = _NUM_BYTES - 1
_SPREAD: Final = 0x9E3779B1
_ALL_BITS: Final = (1 << 64) - 1

_PATTERNS: Final = bytes(
    sum(1 << bit for bit in bits) for bits in combinations(range(8), 3)
)
"""All bytes with three bits set: a key has those of one of them, in one byte."""

_NUM_PATTERNS: Final = len(_PATTERNS)


class PlaceSketch:
    """A set of keys that forgets none of the newest million, and takes 8 MiB.

    A Bloom filter (Bloom, "Space/Time Trade-offs in Hash Coding with Allowable Errors",
    1970) of two generations. All bits of a key are in one byte (Putze, Sanders and
    Singler, "Cache-, Hash- and Space-Efficient Bloom Filters", 2007). When the young
    generation has `MAX_NUM_KEYS` keys, it becomes the old one, and the one before is
    forgotten. So it may err in both directions: it has fewer than 1 in 50 of the keys
    that were never added; and it has forgotten keys that were added more than
    `MAX_NUM_KEYS` others ago, at the latest twice as many.

    A generation takes memory from its first key on. A key is 32 bits that are the same
    in every process; what chooses its byte does not choose its bits in there.
    """

    __slots__ = ("_num_keys", "_old", "_young")

    def __init__(self) -> None:
        """Start without keys."""
        self._young = bytearray()
        self._old = bytearray()
        self._num_keys = 0

    def add(self, key: int) -> None:
        """Add a key: that of a page or of a namespace."""
        if not self._num_keys:
            self._young = bytearray(_NUM_BYTES)
        self._young[key & _AT_MASK] |= _PATTERNS[key // _NUM_BYTES % _NUM_PATTERNS]
        self._num_keys += 1
        if self._num_keys == MAX_NUM_KEYS:
            self._old = self._young
            self._young = bytearray()
            self._num_keys = 0

    def has(self, key: int) -> bool:
        """Tell whether a key was added, as far as is known."""
        at = key & _AT_MASK
        pattern = _PATTERNS[key // _NUM_BYTES % _NUM_PATTERNS]
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

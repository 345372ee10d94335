"""A dictionary that never grows all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Final, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

MAX_DICT_SIZE: Final = 2_048
"""Most entries of a dictionary that may still grow: as many are moved at a time."""

_NUM_SHARDS: Final = 256


class ShardedDict(Generic[K, V]):
    """Many dictionaries that look like one.

    One with a million entries moves all of them when it has no room left, also where as
    many go as come: a pause of 50 ms. These grow one at a time. The order is not that
    of insertion, but the same in every process.

    Attributes:
        shards: The dictionaries.
    """

    __slots__ = ("_number_of", "_size", "shards")

    def __init__(self, entries: dict[K, V], number_of: Callable[[K], int]) -> None:
        """Take over the entries of a dictionary.

        Args:
            entries: They are copied.
            number_of: Tells a number of a key, the same in every process; what differs
                in its lowest bits is spread.
        """
        self._number_of = number_of
        # A tuple of dictionaries, since the cyclic collector tracks a list for ever.
        self.shards: tuple[dict[K, V], ...] = tuple([{} for _ in range(_NUM_SHARDS)])
        self._size = 0
        for key, value in entries.items():
            self[key] = value

    def get(self, key: K) -> V | None:
        """Return the value of a key, or ``None``."""
        return self.shards[self._number_of(key) % _NUM_SHARDS].get(key)

    def __getitem__(self, key: K) -> V:
        """Return the value of a key."""
        return self.shards[self._number_of(key) % _NUM_SHARDS][key]

    def __setitem__(self, key: K, value: V) -> None:
        """Set the value of a key."""
        shard = self.shards[self._number_of(key) % _NUM_SHARDS]
        self._size -= len(shard)
        shard[key] = value
        self._size += len(shard)

    def __delitem__(self, key: K) -> None:
        """Take out a key."""
        del self.shards[self._number_of(key) % _NUM_SHARDS][key]
        self._size -= 1

    def __contains__(self, key: K) -> bool:
        """Tell whether there is such a key."""
        return key in self.shards[self._number_of(key) % _NUM_SHARDS]

    def __len__(self) -> int:
        """Count the entries. O(1)."""
        return self._size

    def __iter__(self) -> Iterator[K]:
        """Iterate over the keys."""
        return chain.from_iterable(self.shards)

    def values(self) -> Iterator[V]:
        """Iterate over the values."""
        return chain.from_iterable(shard.values() for shard in self.shards)

    def items(self) -> Iterator[tuple[K, V]]:
        """Iterate over the entries."""
        return chain.from_iterable(shard.items() for shard in self.shards)


def dicts_of(entries: dict[K, V] | ShardedDict[K, V]) -> list[dict[K, V]]:
    """Return the dictionaries that hold any entries."""
    if isinstance(entries, dict):
        return [entries] if entries else []
    return [shard for shard in entries.shards if shard]

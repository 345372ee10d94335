"""The packed numbers of a message; a module of its own, so that it can be compiled."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from struct import Struct


def pack_payload(
    head: list[int], new_pages: bytes, forgotten_rows: Collection[int]
) -> bytes:
    """Pack the numbers of a step as `KVCacheInfo` says, but for the page copies.

    Args:
        head: All that comes before the page ids.
        new_pages: Page ids, the bytes of int32.
        forgotten_rows: Rows that were given back.
    """
    payload = _layout(len(head)).pack(*head) + new_pages
    if forgotten_rows:
        payload += _layout(len(forgotten_rows)).pack(*forgotten_rows)
    return payload


@cache
def _layout(count: int) -> Struct:
    """Return the layout of so many numbers, made once for each size of a batch."""
    return Struct(f"{count}i")

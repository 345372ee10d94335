"""Token ids as the cache holds them: int32 in arrays, raw bytes in keys."""

from __future__ import annotations

from collections.abc import Container, Sequence
from marshal import dumps
from sys import byteorder
from typing import Any, Final, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from .errors import TokenError

TOKEN_BYTES: Final = 4
"""Bytes of one token id in a key, and of one page id in a node."""

# Compiled code finds what is final without looking it up.
_ARRAY: Final = np.ndarray
_INT32: Final = np.dtype(np.int32)

_FEW: Final = 256

_ITEM: Final = np.dtype([("kind", "S1"), ("value", "<i4")])
_HEAD_BYTES: Final = 5
"""How `marshal`, version 2, writes an `int` of 32 bits, behind the list's own head."""

_HIGHEST_BYTE: Final = TOKEN_BYTES - 1 if byteorder == "little" else 0

Tokens: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]
"""What a caller may pass for token ids: integers in ``[0, 2**31)``, or virtual."""


def as_tokens(tokens: Tokens, virtual: Container[int] = ()) -> NDArray[np.int32]:
    """Return tokens as an int32 array, or refuse what is not a list of token ids.

    Negative ids are virtual tokens. A prompt embedding that is negative cannot pass for
    tokens.

    Args:
        tokens: See `as_ids`.
        virtual: The negative ids that are allowed.

    Returns:
        int32 `[num_tokens]`; it may share the caller's memory.

    Raises:
        TokenError: `tokens` is anything else.
    """
    ids = as_ids(tokens)
    if has_negative(ids):
        check_virtual(ids, virtual)
    return ids


def as_ids(tokens: Tokens) -> NDArray[np.int32]:
    """Return tokens, virtual ones among them, as an int32 array.

    Args:
        tokens: Integers in ``[-2**31, 2**31)``, flat: a list, a tuple, an
            `array.array`, or an array of any integer type. A list costs some hundred
            times what an int32 array does.

    Returns:
        int32 `[num_tokens]`; the caller's array if it is one already.

    Raises:
        TokenError: `tokens` is anything else.
    """
    if type(tokens) is _ARRAY and tokens.dtype is _INT32:
        array = cast("NDArray[np.int32]", tokens)
    else:
        of_ints = _convert_ints(tokens) if isinstance(tokens, (list, tuple)) else None
        array = _convert(tokens) if of_ints is None else of_ints
    if array.ndim != 1:
        raise TokenError(f"tokens must be flat, got {array.ndim} dimensions")
    return array


def has_negative(tokens: NDArray[np.int32]) -> bool:
    """Tell whether any id is negative; O(tokens), in one pass."""
    if len(tokens) <= _FEW:  # cheaper than to ask numpy
        return not tokens.tobytes()[_HIGHEST_BYTE::TOKEN_BYTES].isascii()
    # argmin is several times cheaper to call than min.
    return bool(tokens[tokens.argmin()] < 0)


def check_virtual(tokens: NDArray[np.int32], virtual: Container[int]) -> None:
    """Refuse negative ids that are not in `virtual`.

    Raises:
        TokenError: There is one.
    """
    for token in np.unique(tokens[tokens < 0]).tolist():
        if token not in virtual:
            raise TokenError(
                f"token ids must be in [0, 2**31), got {token}, "
                "which is no virtual token that is alive"
            )


def _convert_ints(tokens: list[Any] | tuple[Any, ...]) -> NDArray[np.int32] | None:
    """Convert a list or a tuple of nothing but `int`, each an int32; else ``None``.

    What is no exact `int` is left to numpy, which has an opinion on each such type.
    `marshal` finds it out while it copies: to ask for the types takes longer than that.
    The items may be anything, so compiled code must not take them for `int`.
    """
    count = len(tokens)
    if not count or type(tokens[0]) is not int:
        return None
    try:
        raw = dumps(tokens, 2)
    except ValueError:  # something that it cannot write
        return None
    # Invariant: an int32 takes 5 bytes, of which the first is its kind. So if there is
    # such a byte wherever the next item begins, and no other byte, all are int32.
    item_bytes = _ITEM.itemsize
    if len(raw) != _HEAD_BYTES + count * item_bytes:
        return None
    if raw[_HEAD_BYTES::item_bytes].count(b"i") != count:
        return None
    values: NDArray[Any] = np.frombuffer(raw, _ITEM, offset=_HEAD_BYTES)["value"]
    return values.astype(_INT32)


def _convert(tokens: Tokens) -> NDArray[np.int32]:
    if isinstance(tokens, np.ma.MaskedArray):
        raise TokenError("tokens must be a flat list of integers, got a masked array")
    try:
        array: NDArray[Any] = np.asarray(tokens)
    except MemoryError:
        raise
    except Exception as error:  # whatever an array of another library raises
        raise TokenError(f"tokens must be a flat list of integers: {error}") from error
    if array.size == 0:
        return array.astype(_INT32)
    if array.dtype.kind not in "iu":
        # Integers beyond 64 bits arrive as objects; floats and booleans are no ids.
        raise TokenError(
            f"token ids must be integers in [0, 2**31), got {array.dtype} values"
        )
    for bound in (array.min(), array.max()):
        # Negative ones are looked at later, for all spellings alike.
        if not -(2**31) <= bound < 2**31:
            raise TokenError(f"token ids must be in [0, 2**31), got {bound}")
    return array.astype(_INT32)


def as_sequence(tokens: Tokens, virtual: Container[int] = ()) -> Tokens:
    """Return tokens that can be cut, without looking at each of them.

    Args:
        tokens: Token ids.
        virtual: The negative ids that are allowed as well.

    Raises:
        TokenError: `tokens` are no flat sequence.
    """
    # Only what is cut off must be converted: a long prompt is published in parts.
    if isinstance(tokens, list) or (isinstance(tokens, _ARRAY) and tokens.ndim == 1):
        return tokens
    return as_tokens(tokens, virtual)


def part_bytes(
    tokens: Tokens, start: int, stop: int, virtual: Container[int] = ()
) -> bytes:
    """Encode ``tokens[start:stop]`` as the raw bytes of a key.

    Args:
        tokens: Integers in ``[0, 2**31)``.
        start: First token.
        stop: End of the tokens.
        virtual: The negative ids that are allowed as well.

    Raises:
        TokenError: See `as_tokens`; only the part that is encoded is looked at.
    """
    return as_tokens(tokens[start:stop], virtual).tobytes()


def shared_bytes(raw: bytes, offset: int, end: int, key: bytes, page_bytes: int) -> int:
    """Count the bytes of leading whole pages that ``raw[offset:end]`` has of `key`.

    Complexity: O(log pages) comparisons of as many bytes as the key has, together.
    """
    low = 0
    high = min(end - offset, len(key)) // page_bytes
    # Invariant: the first `low` pages are equal, and those behind `high` do not count.
    while low < high:
        middle = (low + high + 1) // 2
        start = low * page_bytes
        if raw.startswith(key[start : middle * page_bytes], offset + start):
            low = middle
        else:
            high = middle - 1
    return low * page_bytes


def first_page(run: bytes, page_bytes: int) -> bytes:
    """Return the first page of a run: the run itself if that is all of it.

    Of compiled code, a slice of all bytes would be a copy, kept a second time.
    """
    return run if len(run) == page_bytes else run[:page_bytes]

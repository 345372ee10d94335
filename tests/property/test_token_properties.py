"""Token ids of every spelling, against the plain way to read them: ask numpy."""

from __future__ import annotations

from array import array
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from radixkv.mem_cache import TokenError
from radixkv.mem_cache.tokens import as_tokens

Wrong: TypeAlias = Any
"""What types would refuse."""

VIRTUAL = frozenset({-1, -5})


class Colour(IntEnum):
    """An `int` that is no exact one."""

    RED = 1


class Index:
    """What can be an index, and is no integer to numpy."""

    def __index__(self) -> int:
        return 3

    def __repr__(self) -> str:
        return "Index()"


def tokens_by_numpy(tokens: Wrong) -> np.ndarray:
    """Read token ids as they are documented, or refuse them."""
    try:
        ids = np.asarray(tokens)
    except (ValueError, OverflowError, TypeError) as error:
        raise TokenError(f"tokens must be a flat list of integers: {error}") from error
    if ids.size:
        if ids.dtype.kind not in "iu":
            raise TokenError(
                f"token ids must be integers in [0, 2**31), got {ids.dtype} values"
            )
        for bound in (ids.min(), ids.max()):
            if not -(2**31) <= bound < 2**31:
                raise TokenError(f"token ids must be in [0, 2**31), got {bound}")
    ids = ids.astype(np.int32)
    if ids.ndim != 1:
        raise TokenError(f"tokens must be flat, got {ids.ndim} dimensions")
    for token in sorted(set(ids[ids < 0].tolist()) - VIRTUAL):
        raise TokenError(
            f"token ids must be in [0, 2**31), got {token}, "
            "which is no virtual token that is alive"
        )
    return ids


def outcome(read: Wrong, tokens: Wrong) -> tuple[str, Any]:
    try:
        ids = read(tokens)
    except TokenError as error:
        return "refused", str(error)
    return str(ids.dtype), ids.tolist()


def read(tokens: Wrong) -> np.ndarray:
    return as_tokens(tokens, VIRTUAL)


EDGES = [0, 1, -1, -5, -6, 255, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**63, 2**64]

ODD: list[Any] = [
    True,
    None,
    1.0,
    float("nan"),
    "i",
    b"",
    b"iiii",
    b"\x69\0\0\0\0i",
    [],
    [1],
    (2,),
    Colour.RED,
    Index(),
    np.int32(4),
    np.int64(-1),
    np.uint64(2**63),
    np.float32(2),
    np.bool_(True),
    np.array(7),
    array("i", [1]),
    1j,
    {},
]

INTS = st.sampled_from(EDGES) | st.integers(0, 2**31 - 1)


@given(
    st.lists(INTS, max_size=40)
    | st.lists(INTS | st.sampled_from(ODD), max_size=6)
    | st.lists(st.lists(INTS, max_size=2), max_size=3),
    st.sampled_from([list, tuple]),
)
@example([True, False], list)
@example([1, True], list)
@example([1, b"", 2], list)
@example([1, b"i\0\0\0\0i\0\0\0\0"], list)
def test_a_list_is_read_as_numpy_reads_it(tokens: list[Any], kind: Wrong) -> None:
    assert outcome(tokens_by_numpy, kind(tokens)) == outcome(read, kind(tokens))


@pytest.mark.parametrize(
    "tokens",
    [*ODD, "12", range(3), array("i", [1, -5, 2]), array("q", [2**31]), bytearray(2)],
    ids=repr,
)
def test_what_is_no_list_is_read_as_numpy_reads_it(tokens: Wrong) -> None:
    assert outcome(tokens_by_numpy, tokens) == outcome(read, tokens)


def test_a_list_in_itself_is_refused() -> None:
    tokens: list[Any] = [1]
    tokens.append(tokens)

    assert outcome(tokens_by_numpy, tokens) == outcome(read, tokens)


def test_what_is_returned_is_an_array_of_its_own() -> None:
    numbers = array("i", [1, 2, 3])
    ids = as_tokens(numbers)
    numbers[0] = 9
    numbers.append(4)

    assert [1, 2, 3] == ids.tolist()

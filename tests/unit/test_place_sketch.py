"""The place sketch: what it errs in, and that it is the same in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Hashable
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from radixkv.mem_cache.place_sketch import (
    MAX_NUM_KEYS,
    MIN_NUM_KEYS,
    PlaceSketch,
    namespace_key,
    page_key,
)


def page_of(number: int) -> bytes:
    return number.to_bytes(4, "little")


def test_it_has_what_was_added_and_hardly_anything_else() -> None:
    """Neighbouring places and pages, which a plain checksum would mix up."""
    sketch = PlaceSketch(MAX_NUM_KEYS)
    for i in range(60_000):
        sketch.add(page_key(2 * i, page_of(i % 300)))

    assert all(sketch.has(page_key(2 * i, page_of(i % 300))) for i in range(60_000))
    assert (
        sum(sketch.has(page_key(2 * i, page_of(300 + i % 300))) for i in range(60_000))
        < 60
    )


@pytest.mark.slow
def test_a_full_sketch_errs_in_less_than_one_of_fifty() -> None:
    sketch = PlaceSketch(MAX_NUM_KEYS)
    num_keys = 2 * MAX_NUM_KEYS - 1
    for i in range(num_keys):
        sketch.add(page_key(2 * i, page_of(i % 1000)))
    num_wrong = sum(sketch.has(page_key(2 * i, page_of(5000))) for i in range(20_000))
    newest = range(num_keys - MAX_NUM_KEYS, num_keys, 7)

    assert all(sketch.has(page_key(2 * i, page_of(i % 1000))) for i in newest)
    assert 0 < num_wrong < 400


def test_the_older_half_is_forgotten_as_a_whole() -> None:
    sketch = PlaceSketch(1)
    page = page_of(1)
    size = sketch.max_num_keys
    for place in range(size):
        sketch.add(page_key(place, page))

    assert all(sketch.has(page_key(place, page)) for place in range(size))
    for place in range(size, 2 * size):
        sketch.add(page_key(place, page))
    assert 0 == sum(sketch.has(page_key(place, page)) for place in range(size)) // 2_000
    assert all(sketch.has(page_key(place, page)) for place in range(size, 2 * size))


@pytest.mark.parametrize(
    ("num_pages", "num_keys"),
    [
        (1, MIN_NUM_KEYS),
        (MIN_NUM_KEYS, MIN_NUM_KEYS),
        (MIN_NUM_KEYS + 1, 2 * MIN_NUM_KEYS),
        (MAX_NUM_KEYS, MAX_NUM_KEYS),
        (10**9, MAX_NUM_KEYS),
    ],
)
def test_it_is_as_large_as_its_cache_within_bounds(
    num_pages: int, num_keys: int
) -> None:
    assert num_keys == PlaceSketch(num_pages).max_num_keys


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (1, True),
        (2, np.int64(2)),
        (0.5, Fraction(1, 2)),
        (3, Decimal(3)),
        ("a", np.str_("a")),
        ((1, "a"), (1.0, "a")),
    ],
)
def test_equal_namespaces_have_one_key(one: Hashable, other: Hashable) -> None:
    assert one == other
    assert namespace_key(one) == namespace_key(other)


def test_other_namespaces_have_other_keys_or_a_common_one() -> None:
    named = [None, 0, 1, -1, 0.25, "a", "b", b"a", (), ("a",), ("a", "b"), "\ud800"]
    other = [frozenset("a"), object(), float("nan"), range(2)]

    assert len(named) == len({namespace_key(name) for name in named})
    assert 1 == len({namespace_key(name) for name in other})
    assert all(0 <= namespace_key(name) < 2**32 for name in named)


@pytest.mark.parametrize("hash_seed", ["0", "1", "random"])
def test_keys_are_the_same_in_every_process(hash_seed: str) -> None:
    names = "('a', b'a', 1, None, ('a', 2.5), frozenset('a'))"
    code = (
        "from radixkv.mem_cache.place_sketch import namespace_key\n"
        f"print(*map(namespace_key, {names}))"
    )
    run = subprocess.run(
        [sys.executable, "-P", "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
    )
    keys = map(namespace_key, ("a", b"a", 1, None, ("a", 2.5), frozenset("a")))

    assert [*map(str, keys)] == run.stdout.split()

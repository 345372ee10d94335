"""Sizes as callers give them, checked once at the border."""

from __future__ import annotations

from collections.abc import Hashable
from numbers import Integral, Real
from types import UnionType
from typing import Any, TypeAlias

import numpy as np

from .errors import ConfigError, LengthError

Integer: TypeAlias = int | np.integer[Any]
"""A count or a size as callers give it."""

Number: TypeAlias = Integer | float | np.floating[Any]
"""A number as callers give it."""

Flag: TypeAlias = bool | np.bool_
"""A yes or no as callers give it."""


def as_size(name: str, value: Integer, minimum: int = 1) -> int:
    """Return a size as a plain int, or refuse it.

    Args:
        name: What the size is called in the message.
        value: The size, any integer type but bool.
        minimum: The least allowed value.

    Raises:
        ConfigError: `value` is no integer in ``[minimum, 2**31)``.
    """
    size = as_integer(name, value)
    if not minimum <= size < 2**31:
        raise ConfigError(f"{name} must be >= {minimum} and < 2**31, got {size}")
    return size


def as_integer(name: str, value: Integer) -> int:
    """Return an integer of any size as a plain int, or refuse it.

    Args:
        name: What the number is called in the message.
        value: The number, any integer type but bool.

    Raises:
        ConfigError: `value` is no integer.
    """
    if type(value) is int:  # as for most: saves a call
        return value
    if not is_integer(value):
        raise ConfigError(f"{name} must be an integer, got {value!r}")
    return int(value)


def as_length(name: str, value: Integer) -> int:
    """Return a length in tokens as a plain int, or refuse it; the sign is not checked.

    Args:
        name: What the length is called in the message.
        value: The length, any integer type but bool.

    Raises:
        LengthError: `value` is no integer.
    """
    if type(value) is int:  # as for most: saves a call
        return value
    if not is_integer(value):
        raise LengthError(f"{name} must be an integer, got {value!r}")
    return int(value)


def as_number(name: str, value: Number) -> float:
    """Return a real number as a plain float, or refuse it; its range is not checked.

    Args:
        name: What the number is called in the message.
        value: The number, any real type but bool. NaN passes.

    Raises:
        ConfigError: `value` is no real number, or too large for a float.
    """
    try:
        if type(value) is not bool and isinstance(value, Real):
            return float(value)
    except OverflowError:
        pass
    raise ConfigError(f"{name} must be a number, got {value!r}")


def is_integer(value: object) -> bool:
    """Tell whether `value` is an integer of any type but bool."""
    return not isinstance(value, bool) and isinstance(value, Integral)


def check_kind(name: str, value: object, kind: type | UnionType) -> None:
    """Refuse an argument of another kind.

    Args:
        name: What the argument is called in the message.
        value: The argument.
        kind: Its class, or several.

    Raises:
        ConfigError: `value` is of no such kind.
    """
    if not isinstance(value, kind):
        expected = getattr(kind, "__name__", kind)
        raise ConfigError(f"{name} must be of kind {expected}, got {value!r}")


def num_pages_for(num_tokens: int, page_size: int) -> int:
    """Return the pages that `num_tokens` tokens fill, the last one partly."""
    return -(-num_tokens // page_size)


def check_hashable(name: str, value: Hashable) -> None:
    """Refuse a namespace or an id that is not hashable.

    Args:
        name: What it is called in the message.
        value: The namespace, or the id.

    Raises:
        ConfigError: It is not.
    """
    try:
        hash(value)
    except TypeError:
        raise ConfigError(f"{name} must be hashable, got {value!r}") from None


def are_equal(left: Hashable, right: Hashable) -> bool:
    """Tell whether two namespaces are the same key of a dictionary."""
    if left is right:
        return True
    one: Any = left  # of any other type, compiled code would refuse what is no bool
    try:
        return hash(left) == hash(right) and bool(one == right)
    except Exception:  # one that cannot be compared is not the same
        return False

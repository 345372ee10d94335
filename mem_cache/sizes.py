"""Sizes as callers give them, checked once at the border."""

from __future__ import annotations

from numbers import Integral

from .errors import ConfigError, LengthError


def as_size(name: str, value: int, minimum: int = 1) -> int:
    """Return a size as a plain int, or refuse it.

    Args:
        name: What the size is called in the message.
        value: The size, any integer type but bool.
        minimum: The least allowed value.

    Raises:
        ConfigError: `value` is no integer in ``[minimum, 2**31)``.
    """
    if type(value) is not int and (
        isinstance(value, bool) or not isinstance(value, Integral)
    ):
        raise ConfigError(f"{name} must be an integer, got {value!r}")
    if not minimum <= value < 2**31:
        raise ConfigError(f"{name} must be >= {minimum} and < 2**31, got {value}")
    return int(value)


def as_length(name: str, value: int) -> int:
    """Return a length in tokens as a plain int, or refuse it; the sign is not checked.

    Args:
        name: What the length is called in the message.
        value: The length, any integer type but bool.

    Raises:
        LengthError: `value` is no integer.
    """
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise LengthError(f"{name} must be an integer, got {value!r}")
    return int(value)


def num_pages_for(num_tokens: int, page_size: int) -> int:
    """Return the pages that `num_tokens` tokens fill, the last one partly."""
    return -(-num_tokens // page_size)

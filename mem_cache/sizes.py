"""Sizes as callers give them, checked once at the border."""

from __future__ import annotations

from numbers import Integral

from .errors import ConfigError


def as_size(name: str, value: int, minimum: int = 1) -> int:
    """Return a size as a plain int, or refuse it.

    Args:
        name: What the size is called in the message.
        value: The size, any integer type but bool.
        minimum: The least allowed value.

    Raises:
        ConfigError: `value` is no integer in ``[minimum, 2**31)``.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ConfigError(f"{name} must be an integer, got {value!r}")
    if not minimum <= value < 2**31:
        raise ConfigError(f"{name} must be >= {minimum} and < 2**31, got {value}")
    return int(value)


def num_pages_for(num_tokens: int, page_size: int) -> int:
    """Return the pages that `num_tokens` tokens fill, the last one partly."""
    return -(-num_tokens // page_size)

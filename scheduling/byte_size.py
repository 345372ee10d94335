"""Bytes as people write them: 80GiB."""

from __future__ import annotations

import re
from decimal import Decimal

from radixkv.mem_cache.errors import ConfigError

_UNITS = {
    "B": 1,
    **{f"{letter}B": 1000**n for n, letter in enumerate("KMGT", 1)},
    **{f"{letter}IB": 1024**n for n, letter in enumerate("KMGT", 1)},
}
_SIZE = re.compile(r"(\d{1,20}(?:\.\d{1,9})?) ?([A-Z]*)", re.ASCII)


def parse_byte_size(name: str, text: str) -> int:
    """Return the bytes that a text names.

    Args:
        name: What the size is called in the message.
        text: A number and a unit: B, KB to TB (powers of 1000), KiB to TiB (of 1024).

    Raises:
        ConfigError: It is something else.

    Example:
        >>> (
        ...     parse_byte_size("gpu-memory", "80GiB"),
        ...     parse_byte_size("gpu-memory", "1.5kb"),
        ... )
        (85899345920, 1500)
    """
    match = _SIZE.fullmatch(text.strip().upper())
    if match is None or match[2] not in _UNITS:
        raise ConfigError(
            f"{name} must be a size with its unit, such as 80GiB, got {text!r}"
        )
    return int(Decimal(match[1]) * _UNITS[match[2]])


def format_byte_size(num_bytes: float) -> str:
    """Write bytes with three digits or more, in powers of 1024.

    Args:
        num_bytes: How many, at least 0.

    Example:
        >>> (
        ...     format_byte_size(131072),
        ...     format_byte_size(85899345920),
        ...     format_byte_size(70),
        ... )
        ('128 KiB', '80 GiB', '70 B')
    """
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while num_bytes >= 1024 and len(units) > 1:
        num_bytes /= 1024
        del units[0]
    return f"{num_bytes:,.5g} {units[0]}"

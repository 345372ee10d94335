"""Sequences and mappings as callers give them, checked once at the border."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import UnionType
from typing import TypeVar

from ..errors import ConfigError
from .kv_cache_spec import KVCacheSpec

_T = TypeVar("_T")


def as_tuple(name: str, values: Sequence[_T]) -> tuple[_T, ...]:
    """Return a sequence as a tuple, or refuse what is none.

    Args:
        name: What the sequence is called in the message.
        values: The sequence; text is none.

    Raises:
        ConfigError: `values` is no sequence.
    """
    if not _is_a(Sequence, values) or _is_a(str | bytes, values):
        raise ConfigError(f"{name} must be a sequence, got {values!r}")
    return tuple(values)


def as_tuple_of(name: str, cls: type[_T], values: Sequence[_T]) -> tuple[_T, ...]:
    """Return a sequence of objects of one class as a tuple, or refuse it.

    Args:
        name: What the sequence is called in the message.
        cls: The class.
        values: The sequence.

    Raises:
        ConfigError: `values` is no sequence, or holds something else.
    """
    checked = as_tuple(name, values)
    for each in checked:
        if not isinstance(each, cls):
            raise ConfigError(f"{name} must hold {cls.__name__}s, got {each!r}")
    return checked


def check_specs(name: str, specs: Mapping[str, KVCacheSpec]) -> None:
    """Refuse what is no mapping from names of layers to their specs.

    Args:
        name: What the mapping is called in the message.
        specs: Spec of each layer by its name.

    Raises:
        ConfigError: It is something else.
    """
    if not _is_a(Mapping, specs):
        raise ConfigError(
            f"{name} must name the spec of each layer, got {type(specs).__name__}"
        )
    for layer, spec in specs.items():
        if not (_is_a(str, layer) and _is_a(KVCacheSpec, spec)):
            raise ConfigError(
                f"{name} must hold specs by layer, got {layer!r}: {spec!r}"
            )


def _is_a(kind: type | UnionType, value: object) -> bool:
    # A type checker believes the annotations; callers need not.
    return isinstance(value, kind)

"""Checks that the parts of a `KVCacheConfig` fit together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from ..errors import ConfigError

if TYPE_CHECKING:
    from .kv_cache_config import KVCacheConfig


def check_partition(config: KVCacheConfig) -> None:
    """Check that each layer is in one group and one tensor, with one page size.

    Args:
        config: The config to check.

    Raises:
        ConfigError: A layer is in none or in two, or a spec has another page size.
    """
    in_groups = _once("group", config.layer_names)
    in_tensors = _once(
        "tensor", (name for tensor in config.tensors for name in tensor.layer_names)
    )
    astray = sorted(in_groups ^ in_tensors)
    if astray:
        raise ConfigError(f"each layer must be in a group and a tensor, got {astray}")
    for group in config.groups:
        for spec in (group.spec, *group.other_specs.values()):
            if spec.page_size != config.page_size:
                raise ConfigError(
                    f"page_size must be that of all specs ({config.page_size}), "
                    f"got {spec.page_size}"
                )


def check_places(config: KVCacheConfig) -> None:
    """Check that no two pages overlap that can be in use at the same time.

    Args:
        config: The config to check; each of its layers has one place.

    Raises:
        ConfigError: Something lies outside of the buffer, or over something else.
    """
    num_slots = config.num_pages + 1  # page 0 comes on top
    places = _places(config, num_slots)
    if config.order == "pages_outermost":
        page_bytes, rest = divmod(config.buffer_bytes, num_slots)
        if rest:
            raise ConfigError(
                f"buffer_bytes must be a multiple of num_pages + 1 ({num_slots}), got "
                f"{config.buffer_bytes}"
            )
        for place in places.values():
            if place.page_stride != page_bytes:
                raise ConfigError(
                    f"page_stride must be {page_bytes}, the share of a page in "
                    f"buffer_bytes, got {place.page_stride}"
                )
        # Pages are apart, so all that can overlap is the layers of one group.
        spans = {n: (p.start, p.start + p.num_bytes) for n, p in places.items()}
        end = page_bytes
    else:
        for name, place in places.items():
            if place.num_bytes > place.page_stride:
                raise ConfigError(f"pages of {name} overlap: page_stride is too small")
        spans = {
            n: (p.start, p.start + num_slots * p.page_stride) for n, p in places.items()
        }
        end = config.buffer_bytes
        # Groups must agree on where each page lies, or one's page 7 is another's 9.
        columns = {(*spans[n], p.page_stride): n for n, p in places.items()}
        _check_apart([(*key[:2], name) for key, name in columns.items()], end)
    for group in config.groups:
        _check_apart([(*spans[name], name) for name in group.layer_names], end)


@dataclass(frozen=True, slots=True)
class _Place:
    """Page 0 of a layer, and how its other pages follow; all in bytes."""

    start: int
    num_bytes: int
    page_stride: int


def _places(config: KVCacheConfig, num_slots: int) -> dict[str, _Place]:
    """Return the place of each layer, once each tensor agrees with its layers."""
    specs = {
        name: group.spec_of(name)
        for group in config.groups
        for name in group.layer_names
    }
    places: dict[str, _Place] = {}
    for tensor in config.tensors:
        names = tensor.layer_names
        types = sorted({specs[name].type_id for name in names})
        if len(types) != 1:
            raise ConfigError(
                f"the layers of a tensor must have one spec, got {types} for {names}"
            )
        num_bytes = specs[names[0]].page_bytes
        expected = len(names) * num_slots * num_bytes
        if tensor.size_bytes != expected:
            raise ConfigError(
                f"size_bytes must be {expected} for {names}, got {tensor.size_bytes}"
            )
        for i, name in enumerate(names):
            start = tensor.offset + i * tensor.layer_stride
            places[name] = _Place(start, num_bytes, tensor.page_stride)
    return places


def _check_apart(spans: Iterable[tuple[int, int, str]], end: int) -> None:
    """Check that spans of bytes (begin, end, layer) are apart and within `end`."""
    ordered = sorted(spans)
    for (_, stop, name), (start, _, other) in pairwise(ordered):
        if start < stop:
            raise ConfigError(f"{name} and {other} overlap at byte {start}")
    for start, stop, name in ordered:
        if start < 0 or stop > end:
            raise ConfigError(f"{name} must lie in bytes 0..{end}, got {start}..{stop}")


def _once(what: str, names: Iterable[str]) -> set[str]:
    counts = Counter(names)
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        raise ConfigError(f"a layer must be in one {what}, got two for {twice}")
    return set(counts)

"""Ties each layer of a model to its part of the cache; for the worker side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError


# Any: a module of torch takes every attribute and declares none, and what a cache is,
# is up to the model.
def bind_kv_cache(layers: Mapping[str, Any], caches: Mapping[str, Any]) -> list[Any]:
    """Bind each layer of a model to its part of the cache, which stays where it is.

    A model's code knows its layers, and a plan knows only their names. Binding joins
    the two: each layer gets its part as its attribute `kv_cache`, and whoever works on
    all layers, such as a kernel that copies pages, gets the same parts in the order of
    the layers. Nothing is copied.

    The index of a layer is the one number in its name: 7 in "model.layers.7.self_attn".
    Two layers with one index would be one layer to such a kernel, so they are refused.
    A model with attention and a state side by side binds its groups one by one.

    Args:
        layers: The layers that have a cache, by the names in the plan.
        caches: The part of each, by the same names.

    Returns:
        The parts in the order of the layers' indexes.

    Raises:
        ConfigError: A name is in one mapping only or has not exactly one number, or two
            layers have the same index. Nothing was bound then.

    Example:
        >>> from types import SimpleNamespace
        >>> first, second = SimpleNamespace(), SimpleNamespace()
        >>> layers = {"layers.1.attn": second, "layers.0.attn": first}
        >>> bind_kv_cache(layers, {"layers.0.attn": "K, V", "layers.1.attn": "k, v"})
        ['K, V', 'k, v']
        >>> first.kv_cache, second.kv_cache
        ('K, V', 'k, v')
    """
    astray = sorted(layers.keys() ^ caches.keys())
    if astray:
        raise ConfigError(f"each layer must have one cache, got one without: {astray}")
    by_index: dict[int, str] = {}
    for name in layers:
        index = _index(name)
        if index in by_index:
            raise ConfigError(
                f"layers must differ in their index, got {index} for both "
                f"{by_index[index]} and {name}"
            )
        by_index[index] = name
    for name, layer in layers.items():
        layer.kv_cache = caches[name]
    return [caches[by_index[index]] for index in sorted(by_index)]


def _index(name: str) -> int:
    numbers = [int(part) for part in name.split(".") if part.isdecimal()]
    if len(numbers) != 1:
        raise ConfigError(
            f"the name of a layer must have one number between dots, got {name!r}"
        )
    return numbers[0]

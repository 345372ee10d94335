"""What the packages export, and that it is documented.

That `__all__` is sorted is a rule of ruff (RUF022); that the reference shows each name
is a check of the docs build (docs/conf.py).
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterator
from types import ModuleType

import pytest

ROOMS = (
    "radixkv.mem_cache",
    "radixkv.mem_cache.testing",
    "radixkv.scheduling",
    "radixkv.scheduling.testing",
    "radixkv.kernels",
)
EXPORTS = [
    (room, name) for room in ROOMS for name in importlib.import_module(room).__all__
]


def is_ours(value: object) -> bool:
    return str(getattr(value, "__module__", "")).startswith("radixkv")


def described(value: object, name: str) -> Iterator[tuple[str, object, str]]:
    """Yield `value` and, if it is a class, its public methods: place, thing, text."""
    if not inspect.isclass(value):
        yield name, value, inspect.getdoc(value) or ""
        return
    # A class is described with its constructor, a method with those it overrides.
    constructor = value.__init__.__doc__ if is_ours(value.__init__) else None
    yield name, value, (value.__doc__ or "") + (constructor or "")
    for member, method in inspect.getmembers(value, inspect.isroutine):
        if member[0] != "_" and is_ours(method):
            overridden = (vars(base).get(member) for base in value.__mro__)
            text = "".join(inspect.getdoc(each) or "" for each in overridden if each)
            yield f"{name}.{member}", method, text


def parameters(value: object) -> list[str]:
    """Return the names that a caller of `value` must know."""
    if not callable(value) or inspect.isabstract(value):
        return []
    if inspect.isclass(value) and not is_ours(value.__init__):
        return []
    return [name for name in inspect.signature(value).parameters if name != "self"]


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_name_of_a_package_is_exported(room: str) -> None:
    module = importlib.import_module(room)

    public = {
        name
        for name, value in vars(module).items()
        if name[0] != "_" and is_ours(value) and not isinstance(value, ModuleType)
    }

    assert set() == public - set(module.__all__)


@pytest.mark.parametrize(("room", "name"), EXPORTS)
def test_no_export_is_named_like_a_module(room: str, name: str) -> None:
    value = getattr(importlib.import_module(room), name)

    assert not isinstance(value, ModuleType)
    assert importlib.util.find_spec(f"{room}.{name}") is None


@pytest.mark.parametrize(("room", "name"), EXPORTS)
def test_every_export_and_its_methods_have_a_docstring(room: str, name: str) -> None:
    export = getattr(importlib.import_module(room), name)

    silent = [place for place, _, text in described(export, name) if not text]

    assert [] == silent


@pytest.mark.parametrize(("room", "name"), EXPORTS)
def test_docstrings_name_the_parameters(room: str, name: str) -> None:
    export = getattr(importlib.import_module(room), name)

    # A lone parameter is what the first sentence is about.
    unnamed = {
        place: missing
        for place, value, text in described(export, name)
        if len(names := parameters(value)) > 1
        and (missing := [name for name in names if name not in text])
    }

    assert {} == unnamed

"""Everything that can be reached from an object, as plain values to compare.

It finds all fields by itself, so that a new one cannot be forgotten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import (
    BuiltinFunctionType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
)

import numpy as np
from sortedcontainers import SortedKeyList, SortedList

ATOMS = (
    *(int, float, str, bytes, bytearray, type(None), np.dtype, np.generic),
    *(type, FunctionType, BuiltinFunctionType, ModuleType, type(...)),
)
"""Of these the value is all there is."""

LISTS = (list, tuple, deque, SortedList, SortedKeyList)


def deep_state(
    root: object, ignored: frozenset[str] = frozenset()
) -> dict[str, object]:
    """Return each value that can be reached from `root`, by the way to it.

    Equal dictionaries, equal states. Objects are equal to themselves only, and each is
    looked into once, on the shortest way to it.

    Args:
        root: Where to start.
        ignored: Fields to pass over, as ``Class.field``.
    """
    state: dict[str, object] = {}
    seen: dict[int, object] = {}
    queue: deque[tuple[str, object]] = deque([("", root)])
    while queue:
        path, value = queue.popleft()
        state[path] = _shallow(value)
        if isinstance(value, ATOMS) or id(value) in seen:
            continue
        seen[id(value)] = value  # kept, so that no id is used twice
        for name, inner in _inside(value):
            if name.lstrip(".") and f"{type(value).__name__}{name}" not in ignored:
                queue.append((path + name, inner))
    return state


def changes(before: dict[str, object], after: dict[str, object]) -> dict[str, object]:
    """Return what differs: both values, by the way to them."""
    return {
        path: (before.get(path, "nothing"), after.get(path, "nothing"))
        for path in [*before, *(after.keys() - before.keys())]
        if path not in after or path not in before or before[path] != after[path]
    }


class _Same:
    """Equal if it is the same object, which lives on meanwhile."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return f"<{type(self.value).__name__} at {id(self.value):#x}>"


def _shallow(value: object) -> object:
    """A value, as far as it can be seen without looking inside."""
    if isinstance(value, ATOMS):
        return type(value), value
    if isinstance(value, memoryview):
        return value.tobytes()
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    if isinstance(value, MethodType):
        return _Same(value.__self__), value.__func__
    if isinstance(value, (set, frozenset)):
        return {_Same(item) for item in value}
    if isinstance(value, (*LISTS, dict)):
        return type(value), len(value)
    return _Same(value)


def _inside(value: object) -> Iterator[tuple[str, object]]:
    """Yield what a value holds, by its name behind that of the value."""
    if isinstance(value, LISTS):
        for i, item in enumerate(value):
            yield f"[{i}]", item
    elif isinstance(value, dict):
        for i, (key, item) in enumerate(value.items()):
            yield f"<{i}>", key
            yield f"[{i}]", item
    elif isinstance(value, (set, frozenset)):
        for i, item in enumerate(sorted(value, key=id)):
            yield f"[{i}]", item
    elif isinstance(value, MethodType):
        yield ".__self__", value.__self__
    elif not isinstance(value, (GeneratorType, np.ndarray, memoryview)):
        for name in _fields(value):
            try:
                yield f".{name}", getattr(value, name)
            except AttributeError:
                yield f".{name}", None


def _fields(value: object) -> list[str]:
    names: dict[str, None] = dict.fromkeys(getattr(value, "__dict__", ()))
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        names.update(dict.fromkeys([slots] if isinstance(slots, str) else slots))
        # What is compiled lists its fields there.
        names.update(dict.fromkeys(vars(kind).get("__mypyc_attrs__", ())))
    return [name for name in names if not name.startswith("__")]

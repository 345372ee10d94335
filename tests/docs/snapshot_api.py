"""Print the public API, one name a line; `make api` stores it in public_api.txt."""

from __future__ import annotations

import enum
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

ROOMS = (
    "radixkv.mem_cache",
    "radixkv.mem_cache.testing",
    "radixkv.scheduling",
    "radixkv.scheduling.testing",
    "radixkv.kernels",
)


class _Verbatim:
    """An annotation that prints as it was written, without quotes."""

    def __init__(self, annotation: object) -> None:
        self.annotation = annotation

    def __repr__(self) -> str:
        return str(self.annotation)


def signature(function: Callable[..., Any]) -> str:
    """Return the signature of `function` as its source has it."""
    found = inspect.signature(function)
    parameters = [
        parameter.replace(annotation=_verbatim(parameter.annotation))
        for parameter in found.parameters.values()
    ]
    returns = _verbatim(found.return_annotation)
    return str(found.replace(parameters=parameters, return_annotation=returns))


def _verbatim(annotation: object) -> object:
    return _Verbatim(annotation) if isinstance(annotation, str) else annotation


def describe_class(name: str, cls: type) -> Iterator[str]:
    """Yield the head of a class, then its public members in order of name."""
    bases = ", ".join(base.__name__ for base in cls.__bases__ if base is not object)
    yield f"class {name}({bases})"
    if issubclass(cls, enum.Enum):
        yield from (f"  {member.name} = {member.value!r}" for member in cls)
        return
    if getattr(cls.__init__, "__module__", "").startswith("radixkv"):
        yield f"  __init__{signature(cls.__init__)}"
    for member, value in sorted(public_members(cls).items()):
        if isinstance(value, classmethod | staticmethod):
            yield f"  {type(value).__name__} {member}{signature(value.__func__)}"
        elif inspect.isfunction(value):
            yield f"  {member}{signature(value)}"
        else:
            yield f"  {member}"


def public_members(cls: type) -> dict[str, object]:
    """Return the public attributes that `cls` has from classes of this project."""
    members: dict[str, object] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("radixkv"):
            members |= dict.fromkeys(inspect.get_annotations(base)) | vars(base)
    return {name: value for name, value in members.items() if name[0] != "_"}


def describe(room: str) -> Iterator[str]:
    """Yield a line for each thing that `room` exports, and for its members."""
    module = importlib.import_module(room)
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value):
            yield from describe_class(f"{room}.{name}", value)
        elif callable(value):
            yield f"def {room}.{name}{signature(value)}"
        else:
            yield f"{room}.{name}"


if __name__ == "__main__":
    for room in ROOMS:
        print("\n".join(describe(room)))

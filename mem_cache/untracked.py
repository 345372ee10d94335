"""Classes whose objects Python's cyclic collector does not look at.

The collector walks all that it tracks, in the middle of whatever runs just then: of a
million nodes, that is a pause of a third of a second. What is not tracked is freed by
its reference count alone, so whoever makes cycles of it must break them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

__all__ = ["untracked"]

if TYPE_CHECKING:  # what compiles the module reads this, and needs no more
    from mypy_extensions import mypyc_attr as untracked
else:

    def untracked(*, acyclic: bool) -> Callable[[type], type]:
        """Return a decorator that makes a class one of untracked records.

        Compiled, that is what `mypyc_attr` does. Interpreted, the class becomes a
        `msgspec.Struct` without a header for the collector; its objects are smaller,
        and a dictionary of them is not tracked either.

        The fields are the annotated attributes. `__init__` takes the first of them, in
        their order, and does nothing but store them, since a struct does that itself.
        The others have defaults, or are set by whoever makes the object. Classes
        derived from a record are records without an `__init__` of their own.

        Args:
            acyclic: ``True``, the word that `mypyc_attr` knows it by.
        """
        return _as_struct if acyclic else lambda kind: kind

    def _as_struct(kind: type) -> type:
        if issubclass(kind, msgspec.Struct):
            return kind  # as what it is derived from
        members: dict[str, Any] = {
            name: value
            for name, value in vars(kind).items()
            if name not in ("__init__", "__dict__", "__weakref__")
        }
        for name in kind.__annotations__:
            members.setdefault(name, None)
        bases = (msgspec.Struct,)
        return type(msgspec.Struct)(kind.__name__, bases, members, gc=False, eq=False)

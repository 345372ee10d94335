"""The border to Triton, whose own types are partial: what kernels are written with.

A kernel is a function that Triton reads, not Python that runs: every name in it means
what Triton makes of it, which no type checker knows. So `tl` and the parameters are
`Any`, and a file of kernels begins with::

    from .language import Pointer, Scalar, constexpr, jit, tl
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

tl: Any = import_module("triton.language")
"""Triton's language."""

if TYPE_CHECKING:
    Pointer: TypeAlias = Any
    Scalar: TypeAlias = Any
    constexpr: TypeAlias = Any
else:
    # Triton looks at annotations, and takes none that are not its own. It knows a
    # constant by the name of its annotation.
    Pointer = Scalar = tl.tensor
    constexpr = tl.constexpr
"""Parameters of kernels: a tensor, a number, and a constant of a compiled variant."""


class Kernel(Protocol):
    """A kernel that can be launched: ``kernel[grid](*arguments)``."""

    def __getitem__(self, grid: tuple[int, ...], /) -> Callable[..., object]:
        """Return what launches so many programs."""
        ...


def jit(**options: object) -> Callable[[Callable[..., None]], Kernel]:
    """Make a kernel of a function, with the options of Triton's own `jit`.

    What changes from step to step is named in `do_not_specialize`, or, if it is a
    pointer, in `do_not_specialize_on_alignment`: Triton would compile anew for a batch
    of 1 or of 16, and for a tensor that begins between multiples of 16 bytes.
    """
    kernel: Callable[[Callable[..., None]], Kernel] = import_module("triton").jit(
        **options
    )
    return kernel


def device_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that kernels call."""
    called: Callable[..., Any] = import_module("triton").jit(function)
    return called

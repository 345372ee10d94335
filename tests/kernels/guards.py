"""Guard values around what an op writes, and garbage around what it reads.

And kernels with small blocks, which need several where others need one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from math import prod
from types import TracebackType
from typing import Any, Final, Self, TypeVar
from unittest.mock import patch

import torch

from radixkv.kernels.triton.language import Kernel

MARGIN: Final = 16
GUARD: Final = 77

T = TypeVar("T")


class Guards:
    """While it is entered, what `torch.empty` makes lies between guard values.

    On leaving, the guards must be intact.
    """

    def __init__(self) -> None:
        self._made: list[torch.Tensor] = []
        self._patch = patch.object(torch, "empty", self._empty)

    def _empty(
        self,
        size: int | tuple[int, ...],
        *,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> torch.Tensor:
        shape = (size,) if isinstance(size, int) else size
        made = torch.full((prod(shape) + 2 * MARGIN,), GUARD, dtype=dtype)
        self._made.append(made)
        return made[MARGIN:-MARGIN].view(shape)

    def __enter__(self) -> Self:
        self._patch.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._patch.stop()
        for made in self._made:
            assert (made[:MARGIN] == GUARD).all()
            assert (made[len(made) - MARGIN :] == GUARD).all()


def both(op: Callable[..., T], *arguments: object, **options: object) -> tuple[T, T]:
    """Return what the reference of an op makes, and what its kernel makes."""
    expected = op(*arguments, **options, backend="reference")
    with Guards():
        return expected, op(*arguments, **options, backend="triton")


@contextmanager
def small_blocks(module_name: str, size: int) -> Iterator[None]:
    """Let the kernels of a module work in blocks of `size`, if they have a choice."""
    module = import_module(f"radixkv.kernels.triton.{module_name}")
    changed: dict[str, Any] = {
        name: _InBlocks(kernel, size)
        for name, kernel in vars(module).items()
        if name.endswith("_kernel")
    }
    if hasattr(module, "BLOCK"):
        changed["BLOCK"] = size
    with patch.multiple(module, **changed):
        yield


class _InBlocks:
    """A kernel that is launched with another size of blocks than its default."""

    def __init__(self, kernel: Kernel, size: int) -> None:
        self._kernel = kernel
        self._size = size

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        return partial(self._kernel[grid], BLOCK=self._size)


def amid_garbage(*parts: Sequence[int]) -> list[torch.Tensor]:
    """Return int32 slices of one tensor, at odd places, with garbage in between."""
    garbage = [2**31 - 1] * 3
    numbers = [*garbage]
    bounds: list[tuple[int, int]] = []
    for part in parts:
        bounds.append((len(numbers), len(numbers) + len(part)))
        numbers += [*part, *garbage]
    packed = torch.tensor(numbers, dtype=torch.int32)
    return [packed[begin:end] for begin, end in bounds]

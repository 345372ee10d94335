"""Where the pages of all layers lie, which one launch must know of all buffers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import gcd
from typing import Final

import torch

from .errors import ConfigError

CHUNK_BYTES: Final = 4096
"""What a program moves of a page of one buffer, or less if that is what is left."""


class PageBuffers:
    """The buffers of a pool, page by page: bytes, whatever their shapes and dtypes.

    A page of a buffer is a block of memory without gaps. Between it and the buffer's
    next page anything may lie, such as the same page of other layers. The bytes of a
    page are those of its buffers, one after another.

    The views say where the buffers are now: buffers that move need others.

    Attributes:
        buffers: Each buffer's bytes, views `[num_pages, page_bytes of the buffer]`.
        page_bytes: Bytes of a page in all buffers.
    """

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        """Look at the buffers.

        Args:
            buffers: K and V of all layers, at least one, each `[num_pages, ...]`, such
                as `[num_pages, page_size, num_kv_heads, head_dim]`, with any stride
                between pages.

        Raises:
            ConfigError: There is no buffer, they live on several devices or have
                different numbers of pages, or a page has gaps.
        """
        for name, values in (
            ("devices", {str(buffer.device) for buffer in buffers}),
            ("numbers of pages", {len(buffer) for buffer in buffers}),
        ):
            if len(values) != 1:
                raise ConfigError(
                    f"page buffers must have one of {name}, got {sorted(values)}"
                )
        self.buffers = tuple(map(_bytes_of_pages, buffers))
        self.page_bytes = sum(buffer.shape[1] for buffer in self.buffers)

    @property
    def num_pages(self) -> int:
        """Pages of each buffer, the hold page included."""
        return len(self.buffers[0])

    @property
    def device(self) -> torch.device:
        """Where the buffers live."""
        return self.buffers[0].device

    @cached_property
    def chunks(self) -> torch.Tensor:
        """The chunks of a page, int64 `[num_chunks, 4]`, on the buffers' device.

        Of each: the address in page 0, the bytes from one page to the next, the bytes
        of a page that come before it in the order of `buffers`, and its own bytes.
        """
        return torch.tensor(self._chunks, dtype=torch.int64, device=self.device)

    @cached_property
    def _chunks(self) -> list[tuple[int, int, int, int]]:
        chunks: list[tuple[int, int, int, int]] = []
        before = 0
        for buffer in self.buffers:
            size = buffer.shape[1]
            for first in range(0, size, CHUNK_BYTES):
                address = buffer.data_ptr() + first
                num_bytes = min(CHUNK_BYTES, size - first)
                chunks.append((address, buffer.stride(0), before + first, num_bytes))
            before += size
        return chunks

    def words(self, alignment: int = 16) -> dict[str, int]:
        """Return how a kernel moves chunks: the constants of its compiled variant.

        Args:
            alignment: What addresses beside the buffers' are multiples of.
        """
        alignment = gcd(alignment, self._alignment)
        word_bytes = min(alignment, 8)
        longest = min(CHUNK_BYTES, max(buffer.shape[1] for buffer in self.buffers))
        return {
            "WORD_BYTES": word_bytes,
            "ALIGNMENT": alignment,
            "BLOCK": 1 << (longest // word_bytes - 1).bit_length(),
        }

    @cached_property
    def _alignment(self) -> int:
        return gcd(16, *(number for chunk in self._chunks for number in chunk))


def _bytes_of_pages(buffer: torch.Tensor) -> torch.Tensor:
    """View a buffer as `[num_pages, bytes a page]`, in the order of its memory.

    Raises:
        ConfigError: A page has gaps.
    """
    numel = 1
    for stride, size in sorted(zip(buffer.stride()[1:], buffer.shape[1:], strict=True)):
        if size > 1 and stride != numel:
            raise ConfigError(
                "a page of a buffer must have no gaps, got strides "
                f"{buffer.stride()} for the shape {tuple(buffer.shape)}"
            )
        numel *= size
    shape, strides = (len(buffer), numel), (buffer.stride(0), 1)
    return buffer.as_strided(shape, strides).view(torch.uint8)

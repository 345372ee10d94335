"""The KV pool: a worker's K and V of every cached token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.kernels import copy_pages, store_kv

from .errors import ConfigError, ForeignPageError
from .sizes import as_size

DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)


class KVPool:
    """K and V buffers of all layers of one worker, updated in place.

    A layer has one buffer for K and one for V, `[(num_pages + 1) * page_size,
    num_kv_heads, head_dim]`; page 0 is the hold page, where padded tokens write. No
    buffer moves, except in `resize`. The pool knows nothing of requests: which slots
    are whose, the engine says, step by step. Besides its page table, writing to these
    buffers is the only side effect of a worker's step.

    Attributes:
        num_pages: Usable pages, ``1..num_pages``.
        page_size: Slots a page.
        num_layers: Layers, each with its K and its V.
        dtype: Dtype of K and V.
        device: Where the buffers live.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        v_head_dim: int | None = None,
    ) -> None:
        """Make the buffers, all zero.

        Args:
            num_pages: Usable pages, at least 1; page 0 comes on top.
            page_size: Slots a page, at least 1.
            num_layers: Layers, at least 1.
            num_kv_heads: Heads of K and of V, at least 1.
            head_dim: Numbers a head of K, at least 1.
            dtype: float32, float16 or bfloat16.
            device: Where the buffers live.
            v_head_dim: Numbers a head of V, if not `head_dim`.

        Raises:
            ConfigError: A size or the dtype is out of range.
        """
        if dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {DTYPES}, got {dtype}")
        self.num_pages = as_size("num_pages", num_pages)
        self.page_size = as_size("page_size", page_size)
        self.num_layers = as_size("num_layers", num_layers)
        self.dtype = dtype
        self.device = torch.device(device)
        heads = as_size("num_kv_heads", num_kv_heads)
        k_dim = as_size("head_dim", head_dim)
        v_dim = k_dim if v_head_dim is None else as_size("v_head_dim", v_head_dim)
        layers = range(self.num_layers)
        self._k = [self._zeros(self.num_pages, heads, k_dim) for _ in layers]
        self._v = [self._zeros(self.num_pages, heads, v_dim) for _ in layers]

    def k_buffer(self, layer: int) -> torch.Tensor:
        """Return a layer's K, `[(num_pages + 1) * page_size, num_kv_heads, head_dim]`.

        Raises:
            ConfigError: There is no such layer.
        """
        return self._k[self._check_layer(layer)]

    def v_buffer(self, layer: int) -> torch.Tensor:
        """Return a layer's V, like its K but with `v_head_dim` numbers a head.

        Raises:
            ConfigError: There is no such layer.
        """
        return self._v[self._check_layer(layer)]

    def store(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Write K and V of tokens to their slots, in the pool's dtype.

        Args:
            layer: Layer, from 0.
            k: K of the tokens, `[num_tokens, num_kv_heads, head_dim]`.
            v: V of the tokens, `[num_tokens, num_kv_heads, v_head_dim]`.
            slots: Slot of each token, int64 `[num_tokens]`.

        Raises:
            ConfigError: There is no such layer.
        """
        store_kv(k, v, self.k_buffer(layer), self.v_buffer(layer), slots)

    def copy_pages(
        self,
        sources: NDArray[np.integer[Any]] | Sequence[int],
        targets: NDArray[np.integer[Any]] | Sequence[int],
    ) -> None:
        """Copy pages to others in all layers, all at a time.

        Apply the copies of a `KVCacheInfo` so before its step, and before a `resize`
        that cuts pages off.

        Args:
            sources: Page to read of each copy, integers `[num_copies]`.
            targets: Page to write of each copy, all different, integers `[num_copies]`.

        Raises:
            ForeignPageError: The pool has no such page.
        """
        pages = torch.tensor(np.array([sources, targets], np.int32))
        if pages.numel() == 0:
            return
        lowest, highest = int(pages.min()), int(pages.max())
        if lowest < 1 or highest > self.num_pages:
            raise ForeignPageError(
                f"page ids must be in 1..{self.num_pages}, got {lowest}..{highest}"
            )
        copy_pages([*self._k, *self._v], *pages, page_size=self.page_size)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, K and V of all layers."""
        slot_bytes = sum(buffer[0].nbytes for buffer in (*self._k, *self._v))
        return self.page_size * slot_bytes

    @property
    def size_bytes(self) -> int:
        """Bytes of all buffers, the hold page included."""
        return sum(buffer.nbytes for buffer in (*self._k, *self._v))

    def resize(self, num_pages: int) -> None:
        """Change the number of usable pages; the pages that stay keep their content.

        This alone moves the buffers. They move one after another, so that memory peaks
        at one buffer above the pool, not at two pools.

        Args:
            num_pages: The new number of usable pages, at least 1.

        Raises:
            ConfigError: `num_pages` is out of range.
        """
        num_pages = as_size("num_pages", num_pages)
        # Should memory run out half-way, every buffer still holds the pages that the
        # pool says it has.
        self.num_pages = min(self.num_pages, num_pages)
        kept = (self.num_pages + 1) * self.page_size
        for buffers in (self._k, self._v):
            for layer, old in enumerate(buffers):
                buffer = self._zeros(num_pages, *old.shape[1:])
                buffer[:kept] = old[:kept]
                buffers[layer] = buffer
        self.num_pages = num_pages

    def _zeros(self, num_pages: int, num_kv_heads: int, head_dim: int) -> torch.Tensor:
        # Zeros, not what lay in memory: a padded request attends to the hold page.
        shape = ((num_pages + 1) * self.page_size, num_kv_heads, head_dim)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def _check_layer(self, layer: int) -> int:
        if not 0 <= layer < self.num_layers:
            raise ConfigError(f"layer must be in 0..{self.num_layers - 1}, got {layer}")
        return layer

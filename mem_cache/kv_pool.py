"""The KV pool: a worker's K and V of every cached token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.kernels import (
    PageBuffers,
    copy_pages,
    gather_pages,
    pick_backend,
    scatter_pages,
)
from radixkv.kernels.backend import Backend
from radixkv.kernels.checks import as_device, as_host_integers, as_numbers

from .errors import ConfigError, ForeignPageError
from .kv_layer import KVLayer
from .kv_layout import page_columns, resized_config
from .planning import (
    BufferOrder,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    make_kv_cache_config,
)
from .sizes import as_size


class KVPool:
    """What all layers of one worker keep: views of one buffer, updated in place.

    A `KVCacheConfig` alone says how to allocate it. Page 0 is the hold page, where
    padded tokens write. The buffer never moves, except in `resize`. The pool knows
    nothing of requests: which slots are whose, the engine says, step by step. Besides
    its page table, writing to this buffer is the only side effect of a worker's step.

    Attributes:
        config: How the buffer is laid out.
        device: Where it lives.
        buffer: All of it, uint8 `[buffer_bytes]`.
        layers: The layers by name, in the order of the config.

    Example:
        >>> pool = KVPool.uniform(
        ...     num_pages=7, page_size=4, num_layers=2, num_kv_heads=2, head_dim=16
        ... )
        >>> pool.k_buffer(1).shape
        torch.Size([8, 4, 2, 16])
        >>> pool.page_bytes, pool.size_bytes
        (2048, 16384)
    """

    def __init__(
        self,
        config: KVCacheConfig,
        *,
        device: torch.device | str = "cpu",
        backend: Backend = "auto",
    ) -> None:
        """Make the buffer, all zero.

        Args:
            config: How to lay it out.
            device: Where it lives.
            backend: Which implementation of the ops; see `pick_backend`.

        Raises:
            BackendUnavailableError: The device is not here, or the backend cannot run
                on it.
            ConfigError: A number would lie across the places of two, or there is no
                such backend or device.
        """
        self.config = config
        self.device = as_device(device)
        pick_backend(backend, self.device)
        self._backend: Backend = backend
        layers = {
            name: KVLayer(name, config.spec_of(name), backend)
            for name in config.layer_names
        }
        self.layers: Mapping[str, KVLayer] = MappingProxyType(layers)
        self._by_index = _by_index(layers)
        self._use(config, self._zeros(config))

    @classmethod
    def uniform(
        cls,
        *,
        num_pages: int,
        page_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        order: BufferOrder = "pages_outermost",
    ) -> Self:
        """Make a pool of layers "layers.0", "layers.1", ... that are all alike.

        Args:
            num_pages: Usable pages, at least 1; page 0 comes on top.
            page_size: Slots a page, at least 1.
            num_layers: Layers, at least 1.
            num_kv_heads: Heads of K and of V, at least 1.
            head_dim: Numbers a head of K, at least 1.
            v_head_dim: Numbers a head of V; 0, as `head_dim`.
            dtype: Dtype of K and V, such as torch.bfloat16 or torch.float8_e4m3fn.
            device: Where the buffer lives.
            order: Which of pages and layers is outermost in the buffer.

        Raises:
            ConfigError: A size, the dtype or the order is out of range.
        """
        spec = FullAttentionSpec(
            page_size=page_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            dtype=str(dtype).removeprefix("torch."),
        )
        names = (f"layers.{i}" for i in range(as_size("num_layers", num_layers)))
        group = KVCacheGroup(layer_names=tuple(names), spec=spec)
        config = make_kv_cache_config([group], num_pages=num_pages, order=order)
        return cls(config, device=device)

    @property
    def num_pages(self) -> int:
        """Usable pages, ``1..num_pages``."""
        return self.config.num_pages

    @property
    def page_size(self) -> int:
        """Slots a page."""
        return self.config.page_size

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all layers together."""
        return self.config.page_bytes

    @property
    def size_bytes(self) -> int:
        """Bytes of the buffer, the hold page included."""
        return self.config.buffer_bytes

    def layer(self, layer: int | str) -> KVLayer:
        """Return a layer.

        Args:
            layer: Its name, or the one number in its name: 7 for
                "model.layers.7.self_attn".

        Raises:
            ConfigError: There is no such layer, or there are several of that number.
        """
        found = self._by_index.get(layer, ())
        if len(found) == 1:
            return found[0]
        names = [each.name for each in found] or list(self.layers)
        what = "the name of one" if found else "one"
        raise ConfigError(f"layer must be {what} of {names}, got {layer!r}")

    def k_buffer(self, layer: int | str) -> torch.Tensor:
        """Return K of a layer, `[num_pages + 1, page_size, num_kv_heads, head_dim]`.

        Args:
            layer: See `layer`.

        Raises:
            ConfigError: There is no such layer, or it keeps a state.
        """
        return self.layer(layer).k

    def v_buffer(self, layer: int | str) -> torch.Tensor:
        """Return V of a layer, like its K but with `v_head_dim` numbers a head.

        Args:
            layer: See `layer`.

        Raises:
            ConfigError: There is no such layer, or it keeps a state.
        """
        return self.layer(layer).v

    def store(
        self,
        layer: int | str,
        k: torch.Tensor,
        v: torch.Tensor | None,
        slots: torch.Tensor,
    ) -> None:
        """Write K and V of tokens to their slots; see `KVLayer.store`.

        Args:
            layer: See `layer`.
            k: K of the tokens, `[num_tokens, num_kv_heads, head_dim]`.
            v: V of the tokens, `[num_tokens, num_kv_heads, v_head_dim]`.
            slots: Slot of each token, int64 or int32 `[num_tokens]`; one outside the
                pool, such as -1, is not written.

        Raises:
            ConfigError: There is no such layer, it keeps no K and V, or a tensor has
                another shape or dtype.
        """
        self.layer(layer).store(k, v, slots)

    def copy_pages(
        self,
        sources: NDArray[np.integer[Any]] | Sequence[int],
        targets: NDArray[np.integer[Any]] | Sequence[int],
    ) -> None:
        """Copy pages to others in all layers, all at a time, in one launch.

        Apply the copies of a `KVCacheInfo` so before its step, and before a `resize`
        that cuts pages off.

        Args:
            sources: Page to read of each copy, integers `[num_copies]`.
            targets: Page to write of each copy, all different, integers `[num_copies]`.

        Raises:
            ConfigError: An id is no integer, a target is named twice, or there are not
                as many of both.
            ForeignPageError: The pool has no such page.
        """
        pages = as_host_integers(sources=sources, targets=targets)
        if pages.size == 0:
            return
        lowest, highest = int(pages.min()), int(pages.max())
        if lowest < 1 or highest > self.num_pages:
            raise ForeignPageError(
                f"page ids must be in 1..{self.num_pages}, got {lowest}..{highest}"
            )
        copy_pages(self._pages, *pages.tolist(), backend=self._backend)

    def gather_pages(self, page_ids: torch.Tensor, staging: torch.Tensor) -> None:
        """Copy pages of all layers into a staging buffer, in one launch.

        Args:
            page_ids: Pages to read, int32 or int64 `[n]`, on the pool's device.
            staging: Where to, uint8 `[n, page_bytes]`; changed in place. The layers of
                a page lie there in the order of their addresses.

        Raises:
            ConfigError: `page_ids` or `staging` has another shape or dtype, or a row of
                `staging` has gaps.
            ForeignPageError: The pool has no such page; only ids that are on the host
                can be checked without waiting.
        """
        self._check_ids(page_ids)
        gather_pages(self._pages, page_ids, staging, backend=self._backend)

    def scatter_pages(self, page_ids: torch.Tensor, staging: torch.Tensor) -> None:
        """Copy pages of all layers from a staging buffer, in one launch.

        Args:
            page_ids: Pages to write, int32 or int64 `[n]`, on the pool's device.
            staging: What `gather_pages` made, uint8 `[n, page_bytes]`.

        Raises:
            ConfigError: As in `gather_pages`.
            ForeignPageError: As in `gather_pages`.
        """
        self._check_ids(page_ids)
        scatter_pages(self._pages, page_ids, staging, backend=self._backend)

    def _check_ids(self, page_ids: torch.Tensor) -> None:
        """Refuse pages that the pool does not have; it has the hold page."""
        (page_ids,) = as_numbers(page_ids=page_ids)
        if page_ids.device.type != "cpu" or len(page_ids) == 0:
            return
        lowest, highest = (int(bound) for bound in page_ids.aminmax())
        if lowest < 0 or highest > self.num_pages:
            raise ForeignPageError(
                f"page ids must be in 0..{self.num_pages}, got {lowest}..{highest}"
            )

    def resize(self, num_pages: int) -> None:
        """Change the number of usable pages; the pages that stay keep their content.

        This alone moves the buffer, and with it all views. The old and the new one live
        side by side for a moment. A device without room for both gives the old one back
        first, and its pages wait on the host meanwhile; views that are held elsewhere
        would keep it alive.

        Args:
            num_pages: The new number of usable pages, at least 1.

        Raises:
            ConfigError: `num_pages` is out of range, or the buffer is laid out
                otherwise than `make_kv_cache_config` does.
            RuntimeError: There is no memory, says torch. Nothing has changed then.
        """
        config = resized_config(self.config, num_pages)
        try:
            buffer = self._zeros(config)
        except torch.OutOfMemoryError:
            buffer = self._zeros_in_place_of_buffer(config)
        kept = 1 + min(self.num_pages, config.num_pages)
        for old, new in zip(
            page_columns(self.config, self.buffer),
            page_columns(config, buffer),
            strict=True,
        ):
            new[:kept] = old[:kept]
        self._use(config, buffer)

    def _zeros_in_place_of_buffer(self, config: KVCacheConfig) -> torch.Tensor:
        """Make a buffer where the pool's was, which is on the host from then on."""
        self._use(self.config, self.buffer.cpu())
        try:
            return self._zeros(config)
        except torch.OutOfMemoryError:
            self._use(self.config, self.buffer.to(self.device))
            raise

    def _zeros(self, config: KVCacheConfig) -> torch.Tensor:
        # Zeros, not what lay in memory: a padded request attends to the hold page.
        return torch.zeros(config.buffer_bytes, dtype=torch.uint8, device=self.device)

    def _use(self, config: KVCacheConfig, buffer: torch.Tensor) -> None:
        self.config = config
        self.buffer = buffer
        for layer in self.layers.values():
            layer.look_at(buffer, config)
        self._pages = PageBuffers(page_columns(config, buffer))


def _by_index(layers: Mapping[str, KVLayer]) -> dict[int | str, list[KVLayer]]:
    """Return the layers by name, and by the number in their names, if they have one."""
    found: dict[int | str, list[KVLayer]] = {
        name: [layer] for name, layer in layers.items()
    }
    for name, layer in layers.items():
        numbers = [int(part) for part in name.split(".") if part.isdecimal()]
        if len(numbers) == 1:
            found.setdefault(numbers[0], []).append(layer)
    return found

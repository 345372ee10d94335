"""How a worker lays its cache out: one buffer, and where in it each layer lies."""

from __future__ import annotations

from math import lcm
from typing import Literal, TypeAlias

import msgspec
from msgspec.structs import force_setattr

from ..errors import ConfigError
from ..sizes import as_integer, as_size
from .kv_cache_spec import KVCacheCapabilities, KVCacheSpec, Rewind
from .layout_checks import check_partition, check_places
from .sequences import as_tuple_of, check_specs
from .spec_types import AnyKVCacheSpec

BufferOrder: TypeAlias = Literal["pages_outermost", "layers_outermost"]
"""Whether all layers of a page lie together, or all pages of a layer."""

ORDERS: tuple[BufferOrder, ...] = ("pages_outermost", "layers_outermost")


class KVCacheTensor(msgspec.Struct, frozen=True, kw_only=True):
    """Where layers of one size lie in the buffer; all numbers are bytes.

    Page ``p`` of the layer ``layer_names[i]`` begins at
    ``offset + i * layer_stride + p * page_stride``; what lies there, the `parts` of the
    layer's spec say: for attention its K, `[page_size, num_kv_heads, head_dim]`, then
    its V.

    Attributes:
        size_bytes: Bytes of all pages of its layers, page 0 included, without gaps.
        layer_names: The layers, in the order of their addresses.
        offset: Where page 0 of the first layer begins.
        layer_stride: From one layer to the next.
        page_stride: From one page to the next.
    """

    size_bytes: int
    layer_names: tuple[str, ...]
    offset: int
    layer_stride: int
    page_stride: int

    def address(self, layer_name: str, page: int) -> int:
        """Return the byte at which a page of a layer begins.

        Args:
            layer_name: One of `layer_names`.
            page: Page id, from 0.

        Raises:
            ValueError: The layer is not one of this tensor.
        """
        layer = self.layer_names.index(layer_name)
        return self.offset + layer * self.layer_stride + page * self.page_stride


class KVCacheGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that keep the same tokens, and so share one page table.

    Attributes:
        layer_names: The layers; none, where all of them are on other workers.
        spec: Spec of each layer that `other_specs` does not name.
        other_specs: Spec by layer, where layers that keep the same tokens differ in
            size: those of a draft model, say.

    Example:
        >>> from radixkv.mem_cache.planning import FullAttentionSpec
        >>> spec = FullAttentionSpec(
        ...     page_size=16, num_kv_heads=8, head_dim=128, dtype="bfloat16"
        ... )
        >>> group = KVCacheGroup(layer_names=("layers.0", "layers.1"), spec=spec)
        >>> group.page_bytes
        131072
    """

    layer_names: tuple[str, ...]
    spec: AnyKVCacheSpec
    other_specs: dict[str, AnyKVCacheSpec] = {}

    def __post_init__(self) -> None:
        """Refuse a layer that is named twice, or has a spec but no place.

        Raises:
            ConfigError: The names contradict each other, or a field is of another type.
        """
        layer_names = as_tuple_of("layer_names", str, self.layer_names)
        force_setattr(self, "layer_names", layer_names)
        as_tuple_of("spec", KVCacheSpec, (self.spec,))
        check_specs("other_specs", self.other_specs)
        names = set(self.layer_names)
        if len(names) < len(self.layer_names):
            raise ConfigError(f"layer_names must differ, got {self.layer_names}")
        unknown = [name for name in self.other_specs if name not in names]
        if unknown:
            raise ConfigError(f"other_specs must be of layer_names, got {unknown}")

    def spec_of(self, layer_name: str) -> AnyKVCacheSpec:
        """Return the spec of one of the layers."""
        return self.other_specs.get(layer_name, self.spec)

    @property
    def page_bytes(self) -> int:
        """Bytes that a page has to hold, all layers together."""
        return sum(self.spec_of(name).page_bytes for name in self.layer_names)


class KVCacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that a worker needs to know to allocate its cache: plain data.

    All groups live in the one buffer and share its pages: a page id belongs to one
    group at a time, so that their tensors may overlap. Page 0 takes padding and comes
    on top of `num_pages`. For example, a model with four layers of which every other
    has a window has two groups, and each page holds two layers, of either the one or
    the other::

        groups   ("layers.1", "layers.3"), full attention
                 ("layers.0", "layers.2"), sliding window
        page 7   | layers.1 | layers.3 |     if the first group took it
                 | layers.0 | layers.2 |     if the second did

    Attributes:
        num_pages: Usable pages, ``1..num_pages``; the same on all workers.
        page_size: Tokens a page.
        buffer_bytes: Bytes of the one buffer.
        tensors: Where the layers lie; each layer in one of them.
        groups: Which layers share a page table; the same order on all workers.
        order: Whether all layers of a page lie together ("pages_outermost"), or all
            pages of a layer ("layers_outermost").
    """

    num_pages: int
    page_size: int
    buffer_bytes: int
    tensors: tuple[KVCacheTensor, ...]
    groups: tuple[KVCacheGroup, ...]
    order: BufferOrder = "pages_outermost"

    def __post_init__(self) -> None:
        """Refuse a config whose parts contradict each other.

        Raises:
            ConfigError: A number is out of range, a layer has no place or two,
                places overlap that are in use together, or a field is of another type.
        """
        as_size("num_pages", self.num_pages)
        as_size("page_size", self.page_size)
        tensors = as_tuple_of("tensors", KVCacheTensor, self.tensors)
        force_setattr(self, "tensors", tensors)
        groups = as_tuple_of("groups", KVCacheGroup, self.groups)
        force_setattr(self, "groups", groups)
        if as_integer("buffer_bytes", self.buffer_bytes) < 0:
            raise ConfigError(f"buffer_bytes must be >= 0, got {self.buffer_bytes}")
        if self.order not in ORDERS:
            raise ConfigError(f"order must be one of {ORDERS}, got {self.order!r}")
        check_partition(self)
        check_places(self)

    @property
    def layer_names(self) -> tuple[str, ...]:
        """All layers, group by group."""
        return tuple(name for group in self.groups for name in group.layer_names)

    def spec_of(self, layer_name: str) -> AnyKVCacheSpec:
        """Return the spec of a layer.

        Raises:
            ConfigError: There is no such layer.
        """
        for group in self.groups:
            if layer_name in group.layer_names:
                return group.spec_of(layer_name)
        raise ConfigError(f"layer must be one of {self.layer_names}, got {layer_name}")

    def tensor_of(self, layer_name: str) -> KVCacheTensor:
        """Return the tensor that a layer lies in.

        Raises:
            ConfigError: There is no such layer.
        """
        for tensor in self.tensors:
            if layer_name in tensor.layer_names:
                return tensor
        raise ConfigError(f"layer must be one of {self.layer_names}, got {layer_name}")

    @property
    def page_bytes(self) -> int:
        """Bytes of the buffer that one page takes."""
        return self.buffer_bytes // (self.num_pages + 1)

    @property
    def capabilities(self) -> KVCacheCapabilities:
        """What all groups can do together."""
        each = [group.spec.capabilities for group in self.groups]
        grains = [one.hit_granularity for one in each if one.hit_granularity]
        reuse = all(one.prefix_reuse for one in each)
        rewinds = {one.rewind for one in each}
        return KVCacheCapabilities(
            prefix_reuse=reuse,
            rewind=next(
                (r for r in (Rewind.NONE, Rewind.STEP) if r in rewinds), Rewind.ANY
            ),
            hit_granularity=lcm(*grains) if reuse else None,
        )

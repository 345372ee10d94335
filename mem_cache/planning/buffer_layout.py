"""Lays the layers of groups out in one buffer, in which the groups share pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, groupby, zip_longest

from ..errors import ConfigError
from ..sizes import as_size
from .kv_cache_config import (
    ORDERS,
    BufferOrder,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheTensor,
)


def make_kv_cache_config(
    groups: Sequence[KVCacheGroup],
    *,
    num_pages: int,
    order: BufferOrder = "pages_outermost",
) -> KVCacheConfig:
    """Lay groups out in one buffer of a given number of pages.

    Args:
        groups: The groups of one worker, at least one; a group may have no layers here.
        num_pages: Usable pages, at least 1; page 0 comes on top.
        order: "pages_outermost": the layers of a page lie together. "layers_outermost":
            the pages of a layer do.

    Raises:
        ConfigError: There is no group, a layer is in two of them, their page sizes
            differ, or an argument is out of range.

    Example:
        >>> from radixkv.mem_cache.planning import FullAttentionSpec
        >>> spec = FullAttentionSpec(
        ...     page_size=16, num_kv_heads=8, head_dim=128, dtype="bfloat16"
        ... )
        >>> group = KVCacheGroup(layer_names=("layers.0", "layers.1"), spec=spec)
        >>> config = make_kv_cache_config([group], num_pages=99)
        >>> config.page_bytes, config.buffer_bytes
        (131072, 13107200)
        >>> config.tensor_of("layers.1").address("layers.1", page=7)
        983040
    """
    num_slots = as_size("num_pages", num_pages) + 1  # page 0 comes on top
    check_order(order)
    if not groups:
        raise ConfigError("groups must hold at least one group, got none")
    place = _pages_outermost if order == "pages_outermost" else _layers_outermost
    return KVCacheConfig(
        num_pages=num_slots - 1,
        page_size=groups[0].spec.page_size,
        buffer_bytes=buffer_page_bytes(groups, order) * num_slots,
        tensors=tuple(place(groups, num_slots)),
        groups=tuple(groups),
        order=order,
    )


def buffer_page_bytes(groups: Sequence[KVCacheGroup], order: BufferOrder) -> int:
    """Return the bytes that a page takes in the buffer, whichever group uses it.

    Args:
        groups: The groups of one worker.
        order: Which of pages and layers is outermost.
    """
    sizes = [_sizes(group) for group in groups]
    return page_bytes_of_sizes(sizes, order)


def page_bytes_of_sizes(sizes: Iterable[Iterable[int]], order: BufferOrder) -> int:
    """Return the bytes that a page takes, given the layers' alone.

    Args:
        sizes: For each group, the bytes of a page of each of its layers.
        order: Which of pages and layers is outermost.

    Example:
        >>> page_bytes_of_sizes([[32, 64], [48, 16]], "pages_outermost")
        96
        >>> page_bytes_of_sizes([[32, 64], [48, 16]], "layers_outermost")
        96
    """
    if order == "pages_outermost":
        return max(map(sum, sizes), default=0)
    return sum(_columns(sizes))


def check_order(order: str) -> None:
    """Refuse an order that is none.

    Raises:
        ConfigError: `order` is not one of the two.
    """
    if order not in ORDERS:
        raise ConfigError(f"order must be one of {', '.join(ORDERS)}, got {order!r}")


def _pages_outermost(
    groups: Sequence[KVCacheGroup], num_slots: int
) -> Iterator[KVCacheTensor]:
    page_stride = buffer_page_bytes(groups, "pages_outermost")
    for group in groups:
        offset = 0
        for spec, names in groupby(group.layer_names, group.spec_of):
            layer_names = tuple(names)
            yield KVCacheTensor(
                size_bytes=len(layer_names) * num_slots * spec.page_bytes,
                layer_names=layer_names,
                offset=offset,
                layer_stride=spec.page_bytes,
                page_stride=page_stride,
            )
            offset += len(layer_names) * spec.page_bytes


def _layers_outermost(
    groups: Sequence[KVCacheGroup], num_slots: int
) -> Iterator[KVCacheTensor]:
    # The i-th layers of all groups share the i-th column of the buffer, and with it the
    # bytes from page to page: else page 7 of one group would lie over another's page 9.
    columns = _columns(map(_sizes, groups))
    starts = list(accumulate(columns, initial=0))
    for group in groups:
        layer_names = _largest_first(group)
        specs = map(group.spec_of, layer_names)
        first = 0
        for (spec, width), run in groupby(zip(specs, columns, strict=False)):
            end = first + len(list(run))
            yield KVCacheTensor(
                size_bytes=(end - first) * num_slots * spec.page_bytes,
                layer_names=tuple(layer_names[first:end]),
                offset=starts[first] * num_slots,
                layer_stride=width * num_slots,
                page_stride=width,
            )
            first = end


def _columns(sizes: Iterable[Iterable[int]]) -> list[int]:
    """Return the bytes of a page in each column: those of the largest layer in it."""
    ordered = (sorted(each, reverse=True) for each in sizes)
    return [max(column) for column in zip_longest(*ordered, fillvalue=0)]


def _sizes(group: KVCacheGroup) -> list[int]:
    return [group.spec_of(name).page_bytes for name in group.layer_names]


def _largest_first(group: KVCacheGroup) -> list[str]:
    # Columns of equal sizes waste least.
    return sorted(
        group.layer_names, key=lambda name: group.spec_of(name).page_bytes, reverse=True
    )

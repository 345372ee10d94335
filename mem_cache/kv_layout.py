"""Where the pages of a pool lie in its buffer, whatever the layers in them."""

from __future__ import annotations

import torch

from .errors import ConfigError
from .planning import KVCacheConfig, make_kv_cache_config


def page_columns(config: KVCacheConfig, buffer: torch.Tensor) -> list[torch.Tensor]:
    """View a buffer as the blocks in which pages follow one another without gaps.

    With pages outermost that is one block, with layers outermost one for each layer, or
    for those that share one. Whatever group a page belongs to, these are its bytes.

    Args:
        config: How the buffer is laid out.
        buffer: uint8 `[buffer_bytes]`.

    Returns:
        In the order of their addresses, uint8 `[num_pages + 1, bytes]` each.
    """
    num_slots = config.num_pages + 1
    places = {(0, config.page_bytes)}
    if config.order == "layers_outermost" and config.tensors:
        places = {
            (tensor.address(name, page=0), tensor.page_stride)
            for tensor in config.tensors
            for name in tensor.layer_names
        }
    return [
        buffer[start : start + num_slots * width].view(num_slots, width)
        for start, width in sorted(places)
    ]


def resized_config(config: KVCacheConfig, num_pages: int) -> KVCacheConfig:
    """Return the config of a buffer with another number of pages.

    Args:
        config: How the buffer is laid out.
        num_pages: Usable pages, at least 1.

    Raises:
        ConfigError: `num_pages` is out of range, or the buffer is laid out otherwise
            than `make_kv_cache_config` does.
    """
    same, other = (
        make_kv_cache_config(config.groups, num_pages=number, order=config.order)
        for number in (config.num_pages, num_pages)
    )
    if same != config:
        raise ConfigError(
            "a pool can be resized if make_kv_cache_config has laid out its "
            f"{same.buffer_bytes} bytes, got {config.buffer_bytes} bytes laid out "
            "otherwise"
        )
    return other

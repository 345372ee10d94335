"""Device operations of the KV cache, each defined by a plain torch reference.

An op has three faces: a `*_reference` in torch, which runs anywhere and defines the
result; a Triton kernel, in `kernels/triton`, which equals it; and a launcher with the
op's plain name, which picks one of them (`backend`, see `pick_backend`).

All tensors of a call live on one device, those of rows and lengths too: a launcher
reads no number on the device, so nothing waits for it. What the host must know, such as
the number of tokens, is an argument. A reference may read: on a GPU it waits.

Every op checks shapes, dtypes and what lives on the host before it writes anything, the
same for kernel and reference, and raises `ConfigError`. Numbers on a device, such as
rows and lengths, it takes as they are: they must fit the page table. Their tensors may
have any stride.

The K or V of a layer is a buffer `[num_pages + 1, page_size, num_kv_heads, head_dim]`,
a view with any strides: in a pool that keeps all layers of a page together, a page is
followed by the page of another layer. Slot ``s`` is ``buffer[s // page_size, s %
page_size]``. Page 0 is the hold page: padded tokens write there.

Importing this package loads neither torch nor Triton; using an op loads torch, and
running its kernel Triton.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .errors import BackendUnavailableError

if TYPE_CHECKING:
    from .attention_decode import paged_attention_decode
    from .attention_extend import paged_attention_extend
    from .attention_indices import KVIndices, block_table, kv_indices
    from .backend import pick_backend
    from .kv_store import store_kv
    from .page_buffers import PageBuffers
    from .page_copy import copy_pages
    from .page_staging import gather_pages, scatter_pages
    from .page_table import apply_page_table_delta
    from .slot_mapping import last_loc, slot_mapping_decode, slot_mapping_extend

__all__ = [
    "BackendUnavailableError",
    "KVIndices",
    "PageBuffers",
    "apply_page_table_delta",
    "block_table",
    "copy_pages",
    "gather_pages",
    "kv_indices",
    "last_loc",
    "paged_attention_decode",
    "paged_attention_extend",
    "pick_backend",
    "scatter_pages",
    "slot_mapping_decode",
    "slot_mapping_extend",
    "store_kv",
]

_MODULES = {
    "KVIndices": "attention_indices",
    "PageBuffers": "page_buffers",
    "apply_page_table_delta": "page_table",
    "block_table": "attention_indices",
    "copy_pages": "page_copy",
    "gather_pages": "page_staging",
    "kv_indices": "attention_indices",
    "last_loc": "slot_mapping",
    "paged_attention_decode": "attention_decode",
    "paged_attention_extend": "attention_extend",
    "pick_backend": "backend",
    "scatter_pages": "page_staging",
    "slot_mapping_decode": "slot_mapping",
    "slot_mapping_extend": "slot_mapping",
    "store_kv": "kv_store",
}
"""Where each name lives; an op is imported when it is first used."""


def __getattr__(name: str) -> object:
    """Import on first use what needs torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)

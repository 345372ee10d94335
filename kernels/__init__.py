"""Device operations of the KV cache, each defined by a plain torch reference.

Small index tensors (rows, starts, stops, page starts and bounds) live on the host, as a
`KVCacheInfo` brings them: reading them never waits for a device. The page table, K, V
and slots live on the device.
"""

from __future__ import annotations

from .attention_decode import paged_attention_decode
from .attention_extend import paged_attention_extend
from .kv_store import store_kv
from .page_copy import copy_pages
from .page_table import apply_page_table_delta
from .slot_mapping import slot_mapping_decode, slot_mapping_extend

__all__ = [
    "apply_page_table_delta",
    "copy_pages",
    "paged_attention_decode",
    "paged_attention_extend",
    "slot_mapping_decode",
    "slot_mapping_extend",
    "store_kv",
]

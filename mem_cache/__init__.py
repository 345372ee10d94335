"""Prefix caches over a paged token-to-KV pool.

The engine side needs no torch. `KVPool` and `PageTable`, the worker side, import
torch when they are first used.
"""

from typing import TYPE_CHECKING

from .allocator import HOLD_PAGE, TokenToKVPoolAllocator
from .chunk_cache import ChunkCache
from .errors import (
    CacheBusyError,
    ConfigError,
    DoubleFreeError,
    ForeignPageError,
    IntegrityError,
    LengthError,
    OutOfContentsError,
    OutOfPagesError,
    PageError,
    PagesInUseError,
    PolicyError,
    QuotaError,
    RadixKVError,
    RequestStateError,
    TokenError,
    WrongThreadError,
)
from .eviction_policies import (
    FIFO,
    FILO,
    LFU,
    LRU,
    MRU,
    SLRU,
    EvictionPolicy,
    Priority,
)
from .hit_report import HitReport
from .kv_cache_info import KVCacheInfo
from .memory_manager import MemoryManager
from .prefix_cache import PrefixCache
from .radix_cache import RadixCache
from .radix_node import RadixNode, RadixRoot
from .request_kv import RequestKV
from .request_table import PADDING_ROW, RequestTable
from .stats import CacheStats, NamespaceStats
from .victims import Victim

if TYPE_CHECKING:
    from .kv_pool import KVPool
    from .page_table import PageTable
    from .shared_counters import CounterValues, SharedCounters
    from .tree_view import TreeView

__all__ = [
    "FIFO",
    "FILO",
    "HOLD_PAGE",
    "LFU",
    "LRU",
    "MRU",
    "PADDING_ROW",
    "SLRU",
    "CacheBusyError",
    "CacheStats",
    "ChunkCache",
    "ConfigError",
    "CounterValues",
    "DoubleFreeError",
    "EvictionPolicy",
    "ForeignPageError",
    "HitReport",
    "IntegrityError",
    "KVCacheInfo",
    "KVPool",
    "LengthError",
    "MemoryManager",
    "NamespaceStats",
    "OutOfContentsError",
    "OutOfPagesError",
    "PageError",
    "PageTable",
    "PagesInUseError",
    "PolicyError",
    "PrefixCache",
    "Priority",
    "QuotaError",
    "RadixCache",
    "RadixKVError",
    "RadixNode",
    "RadixRoot",
    "RequestKV",
    "RequestStateError",
    "RequestTable",
    "SharedCounters",
    "TokenError",
    "TokenToKVPoolAllocator",
    "TreeView",
    "Victim",
    "WrongThreadError",
]


def __getattr__(name: str) -> object:
    """Import on first use what needs torch, rich, or another system than Windows."""
    if name == "KVPool":
        from .kv_pool import KVPool

        return KVPool
    if name == "PageTable":
        from .page_table import PageTable

        return PageTable
    if name in ("CounterValues", "SharedCounters"):
        from . import shared_counters

        return getattr(shared_counters, name)
    if name == "TreeView":
        from .tree_view import TreeView

        return TreeView
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Prefix caches over a paged token-to-KV pool.

The engine side needs no torch. `KVPool` and `PageTable`, the worker side, import
torch when they are first used.
"""

from typing import TYPE_CHECKING

from .allocator import HOLD_PAGE, TokenToKVPoolAllocator
from .chunk_cache import ChunkCache
from .errors import (
    BatchRefusedError,
    CacheBusyError,
    ConfigError,
    DoubleFreeError,
    ForeignPageError,
    IntegrityError,
    KVCacheMemoryError,
    LengthError,
    MissingExtraError,
    NonFiniteLogitsError,
    OutOfContentsError,
    OutOfPagesError,
    PageError,
    PagesInUseError,
    PolicyError,
    PoolSizeError,
    QuotaError,
    RadixKVError,
    RequestStateError,
    SpecConflictError,
    StalledError,
    TokenError,
    UnknownSpecError,
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
from .memory_manager import MemoryManager, PagePool
from .planning import (
    ChunkedLocalAttentionSpec,
    ConfigObject,
    FullAttentionSpec,
    KVCacheCapabilities,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    MLASpec,
    PagePart,
    PlanReport,
    Rewind,
    SlidingWindowSpec,
    bind_kv_cache,
    check_enough_kv_cache_memory,
    group_layers,
    groups_of_worker,
    is_kv_cache_type_uniform,
    longest_len,
    make_kv_cache_config,
    num_pages_of_request,
    plan_kv_cache,
    report_plan,
    specs_from_model_config,
)
from .prefix_cache import PrefixCache
from .radix_cache import RadixCache
from .radix_key import RadixKey
from .radix_node import RadixNode, RadixRoot
from .request_handle import RequestHandle
from .request_kv import RequestKV
from .request_table import PADDING_ROW, RequestTable
from .room_forecast import Obstacle
from .stats import CacheStats, NamespaceStats
from .step_builder import StepBuilder
from .victims import Victim

if TYPE_CHECKING:
    from .device_step import DeviceStep
    from .kv_layer import KVLayer
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
    "BatchRefusedError",
    "CacheBusyError",
    "CacheStats",
    "ChunkCache",
    "ChunkedLocalAttentionSpec",
    "ConfigError",
    "ConfigObject",
    "CounterValues",
    "DeviceStep",
    "DoubleFreeError",
    "EvictionPolicy",
    "ForeignPageError",
    "FullAttentionSpec",
    "HitReport",
    "IntegrityError",
    "KVCacheCapabilities",
    "KVCacheConfig",
    "KVCacheGroup",
    "KVCacheInfo",
    "KVCacheMemoryError",
    "KVCacheSpec",
    "KVCacheTensor",
    "KVLayer",
    "KVPool",
    "LengthError",
    "MLASpec",
    "MambaSpec",
    "MemoryManager",
    "MissingExtraError",
    "NamespaceStats",
    "NonFiniteLogitsError",
    "Obstacle",
    "OutOfContentsError",
    "OutOfPagesError",
    "PageError",
    "PagePart",
    "PagePool",
    "PageTable",
    "PagesInUseError",
    "PlanReport",
    "PolicyError",
    "PoolSizeError",
    "PrefixCache",
    "Priority",
    "QuotaError",
    "RadixCache",
    "RadixKVError",
    "RadixKey",
    "RadixNode",
    "RadixRoot",
    "RequestHandle",
    "RequestKV",
    "RequestStateError",
    "RequestTable",
    "Rewind",
    "SharedCounters",
    "SlidingWindowSpec",
    "SpecConflictError",
    "StalledError",
    "StepBuilder",
    "TokenError",
    "TokenToKVPoolAllocator",
    "TreeView",
    "UnknownSpecError",
    "Victim",
    "WrongThreadError",
    "bind_kv_cache",
    "check_enough_kv_cache_memory",
    "group_layers",
    "groups_of_worker",
    "is_kv_cache_type_uniform",
    "longest_len",
    "make_kv_cache_config",
    "num_pages_of_request",
    "plan_kv_cache",
    "report_plan",
    "specs_from_model_config",
]


def __getattr__(name: str) -> object:
    """Import on first use what needs torch, rich, or another system than Windows."""
    if name == "DeviceStep":
        from .device_step import DeviceStep

        return DeviceStep
    if name == "KVLayer":
        from .kv_layer import KVLayer

        return KVLayer
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

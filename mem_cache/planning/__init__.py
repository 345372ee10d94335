"""What the cache of a model needs, and how workers lay it out: plain data, no torch."""

from .attention_specs import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)
from .bind import bind_kv_cache
from .buffer_layout import make_kv_cache_config
from .grouping import GROUPING_RULES, GroupingRule, group_layers, groups_of_worker
from .kv_cache_config import (
    BufferOrder,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheTensor,
)
from .kv_cache_spec import KVCacheCapabilities, KVCacheSpec, Rewind
from .mamba_spec import MambaSpec
from .mla_spec import MLASpec
from .model_config import ConfigObject
from .model_specs import num_mtp_layers, specs_from_model_config
from .page_part import PagePart
from .plan import plan_kv_cache
from .plan_report import PlanReport, report_plan
from .request_pages import (
    check_enough_kv_cache_memory,
    longest_len,
    num_pages_of_request,
)
from .spec_types import AnyKVCacheSpec, is_kv_cache_type_uniform

__all__ = [
    "GROUPING_RULES",
    "AnyKVCacheSpec",
    "BufferOrder",
    "ChunkedLocalAttentionSpec",
    "ConfigObject",
    "FullAttentionSpec",
    "GroupingRule",
    "KVCacheCapabilities",
    "KVCacheConfig",
    "KVCacheGroup",
    "KVCacheSpec",
    "KVCacheTensor",
    "MLASpec",
    "MambaSpec",
    "PagePart",
    "PlanReport",
    "Rewind",
    "SlidingWindowSpec",
    "bind_kv_cache",
    "check_enough_kv_cache_memory",
    "group_layers",
    "groups_of_worker",
    "is_kv_cache_type_uniform",
    "longest_len",
    "make_kv_cache_config",
    "num_mtp_layers",
    "num_pages_of_request",
    "plan_kv_cache",
    "report_plan",
    "specs_from_model_config",
]

"""The specs that there are, and whether those of a model are alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from .attention_specs import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)
from .kv_cache_spec import KVCacheSpec
from .mamba_spec import MambaSpec
from .mla_spec import MLASpec

AnyKVCacheSpec: TypeAlias = (
    FullAttentionSpec
    | SlidingWindowSpec
    | ChunkedLocalAttentionSpec
    | MLASpec
    | MambaSpec
)
"""The specs that messages carry; msgspec tells them apart by their tag."""


def is_kv_cache_type_uniform(specs: Mapping[str, KVCacheSpec]) -> bool:
    """Tell whether all layers have the same kind of cache, of the same shape.

    Args:
        specs: Spec of each layer by its name.
    """
    return len({spec.type_id for spec in specs.values()}) <= 1

"""Calls that every cache must refuse, whatever state it is in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, cast

import numpy as np

from ..chunk_cache import ChunkCache
from ..errors import (
    ConfigError,
    LengthError,
    RadixKVError,
    RequestStateError,
    TokenError,
)
from ..memory_manager import MemoryManager
from ..request_kv import RequestKV
from .checked_cache import CheckedCache, Live

BadCall: TypeAlias = tuple[type[RadixKVError], Callable[[], object]]
"""The error to expect, and the call."""


def foreign_request() -> RequestKV:
    """Return a running request of another cache."""
    memory = MemoryManager(1, 1, max_num_requests=1, max_context_len=1)
    request = ChunkCache(memory).admit([0])
    assert request is not None
    return request


def bad_calls(checked: CheckedCache) -> list[BadCall]:
    """Return calls that are wrong in themselves."""
    cache = checked.cache
    size = checked.max_len
    return [
        (LengthError, lambda: cache.admit([])),
        (LengthError, lambda: cache.admit([0] * (size + 1))),
        (LengthError, lambda: cache.admit([0], computed_len=2)),
        (TokenError, lambda: cache.admit([0, -1])),
        (TokenError, lambda: cache.admit([0, 2**31])),
        (TokenError, lambda: cache.match_prefix(cast("Any", np.array([0.5])))),
        (ConfigError, lambda: cache.admit([0], namespace=cast("Any", []))),
        (ConfigError, lambda: cache.alloc_for_decode([], 0)),
        (LengthError, lambda: cache.alloc_for_extend([], [1])),
        (LengthError, lambda: cache.evict(-1)),
        (LengthError, lambda: cache.evict_if_needed(-1)),
        (LengthError, lambda: cache.eviction_order(-1)),
        (ConfigError, lambda: cache.resize(0)),
        (RequestStateError, lambda: cache.release(foreign_request())),
    ]


def late_calls(checked: CheckedCache, kv: RequestKV) -> list[BadCall]:
    """Return calls for `kv`, a request that was released."""
    cache = checked.cache
    tokens = [0] * checked.max_len
    running = [live.kv for live in checked.live]
    alive = [kv for kv in running if kv.committed_len < checked.max_len]
    calls: list[Callable[[], object]] = [
        lambda: cache.release(kv),
        lambda: cache.cache_finished_req(kv, tokens),
        lambda: cache.cache_unfinished_req(kv, tokens),
        lambda: cache.commit(kv, kv.committed_len),
        lambda: cache.truncate(kv, kv.protected_len),
        lambda: cache.slots(kv),
        lambda: cache.alloc_for_decode([*alive, kv]),
        lambda: cache.alloc_for_extend([kv], [kv.committed_len + 1]),
    ]
    return [(RequestStateError, call) for call in calls]


def bad_calls_of(checked: CheckedCache, live: Live) -> list[BadCall]:
    """Return calls for `live` with lengths that do not fit it."""
    cache = checked.cache
    kv = live.kv
    start, end, size = kv.committed_len, kv.allocated_len, checked.max_len
    calls: list[BadCall] = [
        (LengthError, lambda: cache.commit(kv, end + 1)),
        (LengthError, lambda: cache.commit(kv, start - 1)),
        (LengthError, lambda: cache.truncate(kv, end + 1)),
        (LengthError, lambda: cache.truncate(kv, kv.protected_len - 1)),
        (LengthError, lambda: cache.alloc_for_extend([kv], [start])),
        (LengthError, lambda: cache.alloc_for_extend([kv], [size + 1])),
        (LengthError, lambda: cache.alloc_for_extend([kv], [])),
        (LengthError, lambda: cache.alloc_for_decode([kv], size - start + 1)),
        (LengthError, lambda: cache.slots(kv, 0, end + 1)),
        (LengthError, lambda: cache.slots(kv, -1)),
    ]
    if start:
        short = live.tokens[: start - 1]
        calls.append((LengthError, lambda: cache.cache_finished_req(kv, short)))
        calls.append((LengthError, lambda: cache.cache_unfinished_req(kv, short)))
    if start < size:
        twice = [kv, kv]
        calls.append((RequestStateError, lambda: cache.alloc_for_decode(twice)))
    return calls

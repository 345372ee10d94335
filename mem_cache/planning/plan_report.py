"""What a planned cache holds, in figures."""

from __future__ import annotations

import msgspec

from .kv_cache_config import KVCacheConfig, KVCacheGroup
from .kv_cache_spec import CHUNKED_PREFILL_SIZE
from .request_pages import longest_len, num_pages_of_request

_LONG_LEN = 2**30  # tokens; longer than any window


class PlanReport(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one worker's cache.

    Attributes:
        num_pages: Usable pages.
        page_size: Tokens a page.
        page_bytes: Bytes of the buffer that one page takes.
        buffer_bytes: Bytes of the buffer, page 0 included.
        num_groups: Groups of layers, each with a page table.
        token_bytes: Bytes that one more token of a long request needs, of the layers
            that keep all tokens.
        request_len: Length of the requests that the figures below are of, in tokens.
        request_bytes: Bytes that one of them takes: its pages.
        num_requests: Requests of that length that fit at a time, sharing nothing.
        longest_len: Tokens of the longest request that fits alone.
        padding_percent: Share of those pages that no layer uses.
        hit_granularity: Tokens of which the length of a hit is a multiple; None without
            reuse.
    """

    num_pages: int
    page_size: int
    page_bytes: int
    buffer_bytes: int
    num_groups: int
    token_bytes: float
    request_len: int
    request_bytes: int
    num_requests: int
    longest_len: int
    padding_percent: float
    hit_granularity: int | None


def report_plan(
    config: KVCacheConfig,
    *,
    request_len: int,
    chunked_prefill_size: int = CHUNKED_PREFILL_SIZE,
) -> PlanReport:
    """Return the figures of a planned cache.

    Args:
        config: The config of one worker.
        request_len: Length of the requests that share it, in tokens, at least 1.
        chunked_prefill_size: Tokens of a request that one step computes at most.

    Raises:
        ConfigError: A length is out of range.

    Example:
        >>> from radixkv.mem_cache.planning import FullAttentionSpec, plan_kv_cache
        >>> spec = FullAttentionSpec(
        ...     page_size=16, num_kv_heads=8, head_dim=128, dtype="bfloat16"
        ... )
        >>> specs = {f"layers.{i}": spec for i in range(32)}
        >>> (config,) = plan_kv_cache([specs], [20 * 2**30], max_len=8192)
        >>> report = report_plan(config, request_len=8192)
        >>> report.token_bytes, report.num_requests, report.padding_percent
        (131072.0, 19, 0.0)
    """

    def pages(group: KVCacheGroup, length: int) -> int:
        return group.spec.max_num_pages(
            length, chunked_prefill_size=chunked_prefill_size
        )

    num_pages = num_pages_of_request(
        config.groups, request_len, chunked_prefill_size=chunked_prefill_size
    )
    page_bytes = config.page_bytes
    used = [(group, _used_bytes(group)) for group in config.groups]
    grown = sum(
        (pages(group, _LONG_LEN + config.page_size) - pages(group, _LONG_LEN)) * num
        for group, num in used
    )
    filled = sum(pages(group, request_len) * num for group, num in used)
    taken = num_pages * page_bytes
    return PlanReport(
        num_pages=config.num_pages,
        page_size=config.page_size,
        page_bytes=page_bytes,
        buffer_bytes=config.buffer_bytes,
        num_groups=len(config.groups),
        token_bytes=grown / config.page_size,
        request_len=request_len,
        request_bytes=taken,
        num_requests=config.num_pages // num_pages,
        longest_len=longest_len(
            config.groups, config.num_pages, chunked_prefill_size=chunked_prefill_size
        ),
        padding_percent=100 * (1 - filled / taken) if taken else 0.0,
        hit_granularity=config.capabilities.hit_granularity,
    )


def _used_bytes(group: KVCacheGroup) -> int:
    """Return the bytes of a page that hold something, gaps for alignment left out."""
    return sum(
        part.size_bytes
        for name in group.layer_names
        for part in group.spec_of(name).parts
    )

"""How many pages a request needs, and whether a worker's memory holds them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from ..errors import ConfigError, KVCacheMemoryError
from ..sizes import as_integer, as_size
from .buffer_layout import buffer_page_bytes, check_order
from .kv_cache_config import BufferOrder, KVCacheGroup
from .kv_cache_spec import CHUNKED_PREFILL_SIZE


def num_pages_of_request(
    groups: Sequence[KVCacheGroup],
    max_len: int,
    *,
    chunked_prefill_size: int = CHUNKED_PREFILL_SIZE,
) -> int:
    """Return the most pages that one request has at a time, of all groups together.

    Args:
        groups: The groups, of any worker: one without layers on a worker takes pages
            there all the same, since page ids are common to all.
        max_len: Longest request, in tokens, at least 1.
        chunked_prefill_size: Tokens of a request that one step computes at most.

    Raises:
        ConfigError: A length is out of range.
    """
    return sum(
        group.spec.max_num_pages(max_len, chunked_prefill_size=chunked_prefill_size)
        for group in groups
    )


def longest_len(
    groups: Sequence[KVCacheGroup],
    num_pages: int,
    *,
    max_len: int = 2**31 - 1,
    chunked_prefill_size: int = CHUNKED_PREFILL_SIZE,
) -> int:
    """Return the tokens of the longest request that fits in a pool alone; 0, if none.

    Args:
        groups: The groups.
        num_pages: Usable pages.
        max_len: Where to stop looking.
        chunked_prefill_size: Tokens of a request that one step computes at most.

    Raises:
        ConfigError: A length is out of range.
    """
    return bisect_right(
        range(1, as_size("max_len", max_len) + 1),
        num_pages,
        key=lambda length: num_pages_of_request(
            groups, length, chunked_prefill_size=chunked_prefill_size
        ),
    )


def check_enough_kv_cache_memory(
    groups: Sequence[KVCacheGroup],
    available_bytes: int,
    *,
    max_len: int,
    chunked_prefill_size: int = CHUNKED_PREFILL_SIZE,
    order: BufferOrder = "pages_outermost",
) -> None:
    """Check that a worker can hold one request of the greatest length, and page 0.

    Args:
        groups: The groups of the worker.
        available_bytes: Bytes that it has for its cache.
        max_len: Longest request, in tokens, at least 1.
        chunked_prefill_size: Tokens of a request that one step computes at most.
        order: Which of pages and layers is outermost in the buffer.

    Raises:
        KVCacheMemoryError: It cannot; the error says which length would fit.
        ConfigError: An argument is out of range.
    """
    available_bytes = as_integer("available_bytes", available_bytes)
    if available_bytes < 0:
        raise ConfigError(f"available_bytes must be >= 0, got {available_bytes}")
    check_order(order)
    page_bytes = buffer_page_bytes(groups, order)
    needed = 1 + num_pages_of_request(
        groups, max_len, chunked_prefill_size=chunked_prefill_size
    )
    if needed * page_bytes <= available_bytes:
        return
    longest = longest_len(
        groups,
        available_bytes // page_bytes - 1,
        max_len=max_len,
        chunked_prefill_size=chunked_prefill_size,
    )
    raise KVCacheMemoryError(needed * page_bytes, available_bytes, max_len, longest)

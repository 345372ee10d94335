"""From the specs and the memory of all workers to the configs that they allocate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..errors import ConfigError, KVCacheMemoryError
from .buffer_layout import buffer_page_bytes, make_kv_cache_config
from .grouping import (
    GroupingRule,
    groups_of_split,
    groups_of_worker,
    split_layers,
)
from .kv_cache_config import BufferOrder, KVCacheConfig
from .kv_cache_spec import CHUNKED_PREFILL_SIZE, KVCacheSpec
from .request_pages import check_enough_kv_cache_memory
from .sequences import as_tuple
from .spec_types import AnyKVCacheSpec

_MOST_PAGES = 2**31 - 1


def plan_kv_cache(
    specs_per_worker: Sequence[Mapping[str, AnyKVCacheSpec]],
    available_bytes_per_worker: Sequence[int],
    *,
    max_len: int,
    chunked_prefill_size: int = CHUNKED_PREFILL_SIZE,
    order: BufferOrder = "pages_outermost",
    rules: Mapping[type[KVCacheSpec], GroupingRule] | None = None,
) -> list[KVCacheConfig]:
    """Plan the cache of all workers: the same page ids and page tables on each.

    Workers that name the same layers are tensor-parallel ranks and must agree on their
    specs; workers that name none in common are stages of a pipeline. Layers are grouped
    for the whole model at once. The worker with room for the fewest pages decides for
    all; the others are laid out for so many pages, not cut off.

    Args:
        specs_per_worker: For each worker, the spec of each of its layers that has a
            cache.
        available_bytes_per_worker: Bytes that each has for it.
        max_len: Longest request, in tokens, at least 1; one of it must fit.
        chunked_prefill_size: Tokens of a request that one step computes at most.
        order: Which of pages and layers is outermost in the buffer.
        rules: The grouping rule of each class of specs; `GROUPING_RULES` if not given.

    Returns:
        The config of each worker.

    Raises:
        KVCacheMemoryError: A worker cannot hold one request of `max_len`; the error
            says which length could be planned.
        SpecConflictError: Two workers differ on a layer, or share only some layers.
        UnknownSpecError: A spec has no rule.
        ConfigError: There is no layer, page sizes differ, something is no spec, or an
            argument is out of range.

    Example:
        >>> from radixkv.mem_cache.planning import FullAttentionSpec
        >>> spec = FullAttentionSpec(
        ...     page_size=16, num_kv_heads=8, head_dim=128, dtype="bfloat16"
        ... )
        >>> specs = {f"layers.{i}": spec for i in range(32)}
        >>> first, second = plan_kv_cache([specs] * 2, [20 * 2**30] * 2, max_len=8192)
        >>> first.num_pages, second == first
        (10239, True)
    """
    workers = as_tuple("specs_per_worker", specs_per_worker)
    memory = as_tuple("available_bytes_per_worker", available_bytes_per_worker)
    if len(workers) != len(memory):
        raise ConfigError(
            "available_bytes_per_worker must have one number a worker, got "
            f"{len(memory)} for {len(workers)} workers"
        )
    splits = split_layers(
        workers, chunked_prefill_size=chunked_prefill_size, order=order, rules=rules
    )
    groups = groups_of_split(splits.best(max_len), workers)
    per_worker = [groups_of_worker(groups, specs) for specs in workers]
    num_pages = _MOST_PAGES
    refusals: list[KVCacheMemoryError] = []
    for own, available_bytes in zip(per_worker, memory, strict=True):
        try:
            check_enough_kv_cache_memory(
                own,
                available_bytes,
                max_len=max_len,
                chunked_prefill_size=chunked_prefill_size,
                order=order,
            )
        except KVCacheMemoryError as error:
            refusals.append(error)
        page_bytes = buffer_page_bytes(own, order)
        if page_bytes:  # a stage without such layers takes any number of pages
            num_pages = min(num_pages, available_bytes // page_bytes - 1)
    if refusals:
        # What fits depends on all workers, and on how layers are grouped then.
        worst = min(refusals, key=lambda error: error.longest_len)
        raise KVCacheMemoryError(
            worst.needed_bytes,
            worst.available_bytes,
            max_len,
            splits.longest_len(memory, max_len),
        )
    return [
        make_kv_cache_config(own, num_pages=num_pages, order=order)
        for own in per_worker
    ]

"""Which layers share a page table, and into how many groups they are split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from ..errors import UnknownSpecError
from .attention_specs import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)
from .buffer_layout import check_order, page_bytes_of_sizes
from .kv_cache_config import BufferOrder, KVCacheGroup
from .kv_cache_spec import CHUNKED_PREFILL_SIZE, KVCacheSpec, Rewind
from .mamba_spec import MambaSpec
from .mla_spec import MLASpec
from .spec_merge import merge_specs
from .spec_types import AnyKVCacheSpec

GroupingRule: TypeAlias = Callable[[Any], Hashable]
"""Says which tokens a layer keeps, given its spec: equal answers, the same tokens."""

GROUPING_RULES: Final[Mapping[type[KVCacheSpec], GroupingRule]] = MappingProxyType(
    {
        FullAttentionSpec: lambda spec: "all tokens",
        MLASpec: lambda spec: "all tokens",
        SlidingWindowSpec: lambda spec: ("a window", spec.window_size),
        ChunkedLocalAttentionSpec: lambda spec: ("a chunk", spec.chunk_size),
        MambaSpec: lambda spec: ("a state", spec.checkpoint_size),
    }
)
"""The rule of each class of specs; add your own classes in a mapping of yours."""

_SPARE_PERCENT: Final = 5
"""Memory that fewer page tables may cost, compared with the best split."""


def group_layers(
    specs_per_worker: Sequence[Mapping[str, AnyKVCacheSpec]],
    *,
    max_len: int,
    chunked_prefill_size: int = CHUNKED_PREFILL_SIZE,
    order: BufferOrder = "pages_outermost",
    rules: Mapping[type[KVCacheSpec], GroupingRule] | None = None,
) -> tuple[KVCacheGroup, ...]:
    """Put the layers of all workers into groups; each group has one page table.

    Layers that keep the same tokens share a group, whatever their sizes. Where there
    are several kinds, those with many layers are split: a page is as large as the
    largest group, and what a smaller one leaves of it is lost. Of the splits that cost
    at most 5 % more memory for a request of `max_len` than the best, the one with the
    fewest groups is taken. Layers are dealt out in turn, so that each stage of a
    pipeline has some of each group.

    Takes O(num_layers ** 2) steps.

    Args:
        specs_per_worker: For each worker, the spec of each of its layers.
        max_len: Longest request, in tokens, at least 1.
        chunked_prefill_size: Tokens of a request that one step computes at most.
        order: Which of pages and layers is outermost in the buffer.
        rules: The grouping rule of each class of specs; `GROUPING_RULES` if not given.

    Raises:
        UnknownSpecError: A spec has no rule.
        SpecConflictError: Two workers differ on a layer, or share only some layers.
        ConfigError: There is no layer, page sizes differ, or a length is out of range.
    """
    specs = merge_specs(specs_per_worker)
    check_order(order)
    buckets = _buckets(specs, rules)
    stages = {frozenset(worker): worker for worker in specs_per_worker}.values()

    def cost(split: Sequence[Sequence[str]]) -> int:
        """Return the bytes of a request of `max_len`, on the worst stage."""
        num_pages = sum(
            specs[names[0]].max_num_pages(
                max_len, chunked_prefill_size=chunked_prefill_size
            )
            for names in split
        )
        return num_pages * max(_page_bytes(split, stage, order) for stage in stages)

    splits = [
        (len(split), cost(split), split) for split in _splits(specs, buckets, order)
    ]
    limit = min(each[1] for each in splits) * (100 + _SPARE_PERCENT)
    affordable = [each for each in splits if each[1] * 100 <= limit]
    _, _, best = min(affordable, key=lambda each: each[:2])
    return tuple(_group(names, specs, specs[names[0]]) for names in best)


def groups_of_worker(
    groups: Sequence[KVCacheGroup], specs: Mapping[str, AnyKVCacheSpec]
) -> tuple[KVCacheGroup, ...]:
    """Return all groups, each with the layers only that a worker has.

    Args:
        groups: The groups of the whole model.
        specs: Spec of each layer of the worker.
    """
    return tuple(
        _group([n for n in group.layer_names if n in specs], specs, group.spec)
        for group in groups
    )


def grouping_rule_of(
    spec: KVCacheSpec, rules: Mapping[type[KVCacheSpec], GroupingRule] | None = None
) -> GroupingRule:
    """Return the rule of a spec: that of its class, or of the next class above it.

    Args:
        spec: The spec.
        rules: The rule of each class of specs; `GROUPING_RULES` if not given.

    Raises:
        UnknownSpecError: There is none.
    """
    rules = GROUPING_RULES if rules is None else rules
    for cls in type(spec).__mro__:
        if cls in rules:
            return rules[cls]
    known = ", ".join(cls.__name__ for cls in rules)
    raise UnknownSpecError(
        f"specs must be of a class with a grouping rule ({known}), got "
        f"{type(spec).__name__}"
    )


def _buckets(
    specs: Mapping[str, AnyKVCacheSpec],
    rules: Mapping[type[KVCacheSpec], GroupingRule] | None,
) -> list[list[str]]:
    """Return the layers that may share a group; first those that keep all tokens."""
    buckets: dict[Hashable, list[str]] = {}
    for name, spec in specs.items():
        kept = grouping_rule_of(spec, rules)(spec)
        buckets.setdefault(kept, []).append(name)
    return sorted(
        buckets.values(),
        key=lambda names: specs[names[0]].capabilities.rewind is not Rewind.ANY,
    )


def _splits(
    specs: Mapping[str, AnyKVCacheSpec],
    buckets: Sequence[Sequence[str]],
    order: BufferOrder,
) -> Iterator[list[Sequence[str]]]:
    """Yield the ways to split buckets into groups that are as alike as possible.

    For every weight that a group can have, each bucket is split as little as it takes
    to stay within that weight.
    """
    # With layers outermost, groups are alike if they have as many layers.
    columns = order == "layers_outermost"
    weights = [
        [1 if columns else specs[name].page_bytes for name in bucket]
        for bucket in buckets
    ]
    # A single bucket is never better split.
    most = [len(bucket) if len(buckets) > 1 else 1 for bucket in buckets]
    heaviest = [
        [max(sum(bucket[i::n]) for i in range(n)) for n in range(1, num + 1)]
        for bucket, num in zip(weights, most, strict=True)
    ]
    limits = sorted({each for bucket in heaviest for each in bucket})
    seen: set[tuple[int, ...]] = set()
    for limit in limits:
        if any(min(bucket) > limit for bucket in heaviest):
            continue
        counts = tuple(
            next(n for n, each in enumerate(bucket, 1) if each <= limit)
            for bucket in heaviest
        )
        if counts not in seen:
            seen.add(counts)
            yield [
                bucket[i::n]
                for bucket, n in zip(buckets, counts, strict=True)
                for i in range(n)
            ]


def _page_bytes(
    split: Sequence[Sequence[str]],
    specs: Mapping[str, AnyKVCacheSpec],
    order: BufferOrder,
) -> int:
    sizes = [[specs[n].page_bytes for n in names if n in specs] for names in split]
    return page_bytes_of_sizes(sizes, order)


def _group(
    names: Sequence[str], specs: Mapping[str, AnyKVCacheSpec], fallback: AnyKVCacheSpec
) -> KVCacheGroup:
    most = Counter(specs[name] for name in names).most_common(1)
    spec = most[0][0] if most else fallback
    others = {name: specs[name] for name in names if specs[name] != spec}
    return KVCacheGroup(layer_names=tuple(names), spec=spec, other_specs=others)

"""Which layers share a page table, and into how many groups they are split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from ..errors import UnknownSpecError
from .attention_specs import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)
from .buffer_layout import check_order
from .kv_cache_config import BufferOrder, KVCacheGroup
from .kv_cache_spec import CHUNKED_PREFILL_SIZE, KVCacheSpec, Rewind
from .layer_splits import LayerSplit, LayerSplits, layer_splits
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
    splits = split_layers(
        specs_per_worker,
        chunked_prefill_size=chunked_prefill_size,
        order=order,
        rules=rules,
    )
    return groups_of_split(splits.best(max_len), specs_per_worker)


def split_layers(
    specs_per_worker: Sequence[Mapping[str, AnyKVCacheSpec]],
    *,
    chunked_prefill_size: int,
    order: BufferOrder,
    rules: Mapping[type[KVCacheSpec], GroupingRule] | None,
) -> LayerSplits:
    """Return the ways to put the layers of all workers into groups.

    Args:
        specs_per_worker: For each worker, the spec of each of its layers.
        chunked_prefill_size: Tokens of a request that one step computes at most.
        order: Which of pages and layers is outermost in the buffer.
        rules: The grouping rule of each class of specs; `GROUPING_RULES` if None.

    Raises:
        UnknownSpecError: A spec has no rule.
        SpecConflictError: Two workers differ on a layer, or share only some layers.
        ConfigError: There is no layer, or page sizes differ.
    """
    specs = merge_specs(specs_per_worker)
    check_order(order)
    return layer_splits(
        specs_per_worker,
        _buckets(specs, rules),
        chunked_prefill_size=chunked_prefill_size,
        order=order,
    )


def groups_of_split(
    split: LayerSplit, specs_per_worker: Sequence[Mapping[str, AnyKVCacheSpec]]
) -> tuple[KVCacheGroup, ...]:
    """Return the groups of a split, each with the layers of all workers.

    Args:
        split: The split.
        specs_per_worker: For each worker, the spec of each of its layers.
    """
    specs = {name: spec for worker in specs_per_worker for name, spec in worker.items()}
    return tuple(_group(names, specs, specs[names[0]]) for names in split.groups)


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


def _group(
    names: Sequence[str], specs: Mapping[str, AnyKVCacheSpec], fallback: AnyKVCacheSpec
) -> KVCacheGroup:
    most = Counter(specs[name] for name in names).most_common(1)
    spec = most[0][0] if most else fallback
    others = {name: specs[name] for name in names if specs[name] != spec}
    return KVCacheGroup(layer_names=tuple(names), spec=spec, other_specs=others)

"""Joins the specs of all workers, and tells the mistakes that this reveals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

from ..errors import ConfigError, SpecConflictError
from .sequences import as_tuple, check_specs
from .spec_types import AnyKVCacheSpec


def merge_specs(
    specs_per_worker: Sequence[Mapping[str, AnyKVCacheSpec]],
) -> dict[str, AnyKVCacheSpec]:
    """Return the specs of the layers of all workers, once each.

    Workers that name the same layers are tensor-parallel ranks of one stage, and must
    agree on every spec. Workers that name none in common are stages of a pipeline, and
    may differ.

    Args:
        specs_per_worker: For each worker, the spec of each of its layers that has a
            cache.

    Raises:
        SpecConflictError: Two workers differ on a layer, or share only some layers.
        ConfigError: No worker has a layer, the page sizes differ, or something is no
            spec.
    """
    for worker, specs in enumerate(as_tuple("specs_per_worker", specs_per_worker)):
        check_specs(f"specs_per_worker[{worker}]", specs)
    stages: dict[frozenset[str], int] = {}
    for worker, specs in enumerate(specs_per_worker):
        first = stages.setdefault(frozenset(specs), worker)
        _check_ranks_agree(first, specs_per_worker[first], worker, specs)
    for (names, worker), (others, other) in combinations(stages.items(), 2):
        _check_stages_apart(names, worker, others, other)
    merged = {name: spec for specs in specs_per_worker for name, spec in specs.items()}
    if not merged:
        raise ConfigError("specs_per_worker must name at least one layer, got none")
    page_sizes = sorted({spec.page_size for spec in merged.values()})
    if len(page_sizes) > 1:
        raise ConfigError(f"page_size must be the same of all specs, got {page_sizes}")
    return merged


def _check_ranks_agree(
    first: int,
    expected: Mapping[str, AnyKVCacheSpec],
    worker: int,
    specs: Mapping[str, AnyKVCacheSpec],
) -> None:
    for name, spec in specs.items():
        if not spec.is_same_type(expected[name]):
            raise SpecConflictError(
                f"ranks must agree on the spec of {name}, got {expected[name].type_id} "
                f"on worker {first} and {spec.type_id} on worker {worker}"
            )


def _check_stages_apart(
    names: frozenset[str], worker: int, others: frozenset[str], other: int
) -> None:
    if names.isdisjoint(others):
        return
    shared, alone = min(names & others), min(names ^ others)
    holder = worker if alone in names else other
    raise SpecConflictError(
        f"workers must have all layers in common, or none: {worker} and {other} both "
        f"have {shared}, but only {holder} has {alone}"
    )

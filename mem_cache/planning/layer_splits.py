"""The ways to put layers into groups, and which of them is taken for a length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ..sizes import as_size
from .buffer_layout import page_bytes_of_sizes
from .kv_cache_config import BufferOrder
from .kv_cache_spec import KVCacheSpec, check_lengths
from .spec_types import AnyKVCacheSpec

_SPARE_PERCENT: Final = 5
"""Memory that fewer page tables may cost, compared with the best split."""


@dataclass(frozen=True, slots=True)
class LayerSplit:
    """One way to put the layers of all workers into groups.

    Attributes:
        groups: The names of the layers of each group.
        num_groups_of: Specs, and how many groups keep the tokens that each keeps.
        page_bytes: Bytes of the buffer that a page takes, on each worker.
    """

    groups: Sequence[Sequence[str]]
    num_groups_of: Sequence[tuple[KVCacheSpec, int]]
    page_bytes: Sequence[int]

    def num_pages(self, length: int, chunked_prefill_size: int) -> int:
        """Return the most pages of a request; never fewer for a longer one."""
        return sum(
            num_groups
            * spec.max_num_pages(length, chunked_prefill_size=chunked_prefill_size)
            for spec, num_groups in self.num_groups_of
        )

    def request_bytes(self, length: int, chunked_prefill_size: int) -> int:
        """Return the most bytes of a request, on the worst worker."""
        return self.num_pages(length, chunked_prefill_size) * max(self.page_bytes)


@dataclass(frozen=True, slots=True)
class LayerSplits:
    """All ways that are worth a try.

    Attributes:
        splits: The ways, at least one.
        chunked_prefill_size: Tokens of a request that one step computes at most.
    """

    splits: Sequence[LayerSplit]
    chunked_prefill_size: int

    def best(self, length: int) -> LayerSplit:
        """Return the split that is taken where the longest request has `length` tokens.

        Of the splits that cost at most 5 % more memory than the best, it is the one
        with the fewest groups.

        Raises:
            ConfigError: A length is out of range.
        """
        check_lengths(length, self.chunked_prefill_size)
        return self.splits[self._best(length)]

    def _best(self, length: int) -> int:
        costs = [
            s.request_bytes(length, self.chunked_prefill_size) for s in self.splits
        ]
        affordable = [
            (len(split.groups), cost, i)
            for i, (split, cost) in enumerate(zip(self.splits, costs, strict=True))
            if _is_affordable(cost, min(costs))
        ]
        return min(affordable)[2]

    def longest_len(self, memory: Sequence[int], max_len: int) -> int:
        """Return the longest request for which a plan succeeds; 0, if none.

        Which split is taken depends on the length, and a longer request may be taken
        apart so much better that it fits where a shorter one does not. So this halves
        the range of lengths, and leaves out a half only if none in it can fit.

        Takes O(num_splits * log(max_len)) steps, more only where two splits cost alike.

        Args:
            memory: Bytes that each worker has.
            max_len: Where to stop looking.

        Raises:
            ConfigError: `max_len` is out of range.
        """
        rooms = [
            min(
                available_bytes // page_bytes
                for available_bytes, page_bytes in zip(
                    memory, split.page_bytes, strict=True
                )
                if page_bytes  # a stage without layers has room for any request
            )
            for split in self.splits
        ]
        return self._longest(rooms, 1, as_size("max_len", max_len))

    def _longest(self, rooms: Sequence[int], first: int, last: int) -> int:
        """Return the longest request in a range that can be planned; 0, if none."""
        if not any(self._may_fit(rooms, first, last)):
            return 0
        if self._fits(self._best(last), rooms, last):
            return last
        if first == last:
            return 0
        middle = (first + last) // 2
        return self._longest(rooms, middle + 1, last) or self._longest(
            rooms, first, middle
        )

    def _fits(self, split: int, rooms: Sequence[int], length: int) -> bool:
        num_pages = self.splits[split].num_pages(length, self.chunked_prefill_size)
        return 1 + num_pages <= rooms[split]  # page 0

    def _may_fit(self, rooms: Sequence[int], first: int, last: int) -> Iterator[bool]:
        """Yield for each split if it may be taken, and fit, anywhere in a range."""
        size = self.chunked_prefill_size
        least = [split.request_bytes(first, size) for split in self.splits]
        most = [split.request_bytes(last, size) for split in self.splits]
        # One of these is affordable at every length of the range, so none with more
        # groups is taken, nor one with as many that costs more.
        sure = [
            (len(split.groups), high)
            for split, high in zip(self.splits, most, strict=True)
            if _is_affordable(high, min(least))
        ]
        for i, split in enumerate(self.splits):
            yield (
                _is_affordable(least[i], min(most))
                and (not sure or (len(split.groups), least[i]) <= min(sure))
                and self._fits(i, rooms, first)
            )


def layer_splits(
    specs_per_worker: Sequence[Mapping[str, AnyKVCacheSpec]],
    buckets: Sequence[Sequence[str]],
    *,
    chunked_prefill_size: int,
    order: BufferOrder,
) -> LayerSplits:
    """Return the ways to split layers into groups that are as alike as possible.

    For every weight that a group can have, each bucket is split as little as it takes
    to stay within that weight.

    Args:
        specs_per_worker: For each worker, the spec of each of its layers.
        buckets: The layers that may share a group, all of which keep the same tokens.
        chunked_prefill_size: Tokens of a request that one step computes at most.
        order: Which of pages and layers is outermost in the buffer.
    """
    specs = {name: spec for worker in specs_per_worker for name, spec in worker.items()}
    splits: list[LayerSplit] = []
    for counts in _counts(specs, buckets, order):
        parts = list(zip(buckets, counts, strict=True))
        groups = [names[i::num] for names, num in parts for i in range(num)]
        splits.append(
            LayerSplit(
                groups=groups,
                num_groups_of=[(specs[names[0]], num) for names, num in parts],
                page_bytes=[
                    _page_bytes(groups, worker, order) for worker in specs_per_worker
                ],
            )
        )
    return LayerSplits(splits, chunked_prefill_size)


def _counts(
    specs: Mapping[str, AnyKVCacheSpec],
    buckets: Sequence[Sequence[str]],
    order: BufferOrder,
) -> Iterator[tuple[int, ...]]:
    """Yield into how many groups each bucket may be split."""
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
            yield counts


def _page_bytes(
    groups: Sequence[Sequence[str]],
    specs: Mapping[str, AnyKVCacheSpec],
    order: BufferOrder,
) -> int:
    sizes = [[specs[n].page_bytes for n in names if n in specs] for names in groups]
    return page_bytes_of_sizes(sizes, order)


def _is_affordable(cost: int, least: int) -> bool:
    return cost * 100 <= least * (100 + _SPARE_PERCENT)

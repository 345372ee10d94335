"""The room that running requests leave for others."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from radixkv.mem_cache import Obstacle, PrefixCache

from .admission_policies import Reservations
from .batch_builder import kv_of
from .request import Request
from .stall import Shortage


class AdmissionRoom:
    """What is set aside for running requests, by namespace; it dies with its step.

    A request fits if what it lacks, together with what all running ones lack up to
    their reserved lengths, is free or can be evicted, each rounded up to whole pages.
    What it finds cached is room for nobody: once it is admitted, that is protected.
    """

    def __init__(
        self,
        cache: PrefixCache,
        reservations: Reservations,
        running: Iterable[Request],
    ) -> None:
        """Count what the running requests lack. O(running requests)."""
        self._cache = cache
        self._reservations = reservations
        page_size = cache.page_size
        reserved_len = reservations.reserved_len
        sizes: dict[Hashable, int] = {}
        for request in running:  # as `take` does it, at half the cost
            num_pages = -(-reserved_len(request) // page_size)
            num_pages -= kv_of(request).num_pages
            if num_pages > 0:
                namespace = request.namespace
                sizes[namespace] = sizes.get(namespace, 0) + num_pages * page_size
        self._sizes = sizes
        self._total_size = sum(sizes.values())

    def take(self, request: Request) -> None:
        """Set room aside for a request that runs from now on."""
        size = self._lacking_size(request)
        self._sizes[request.namespace] = self._sizes.get(request.namespace, 0) + size
        self._total_size += size

    def obstacle(
        self, request: Request, cached_len: int, without: Sequence[Request] = ()
    ) -> Obstacle | None:
        """Tell what keeps a waiting request from being admitted; ``None`` if nothing.

        Args:
            request: It waits.
            cached_len: Its leading tokens that are cached, whole pages.
            without: Running requests to reckon with as if they had been retracted.

        Complexity: O(1) where there are too few pages in any case; else see
        `PrefixCache.admission_obstacle`.
        """
        cache = self._cache
        sizes = self._sizes
        reserved_len = self._reservations.reserved_len(request)
        if without:
            sizes = dict(sizes)
            for other in without:
                size = self._lacking_size(other)
                sizes[other.namespace] = sizes.get(other.namespace, 0) - size
        else:
            size = self._whole_pages(reserved_len) - cached_len + self._total_size
            if size > cache.available_size + cache.evictable_size:
                return Obstacle.PAGES
        return cache.admission_obstacle(
            request.key,
            reserved_len,
            reserved_sizes=sizes,
            released=[kv_of(other) for other in without],
        )

    def shortage(self, request: Request, cached_len: int) -> Shortage:
        """Return the numbers by which a waiting request does not fit."""
        cache = self._cache
        reserved_len = self._reservations.reserved_len(request)
        return Shortage(
            needed_size=self._whole_pages(reserved_len),
            cached_size=cached_len,
            reserved_size=self._total_size,
            available_size=cache.available_size,
            evictable_size=cache.evictable_size,
            protected_size=cache.protected_size,
            held_size=cache.held_size,
        )

    def _lacking_size(self, request: Request) -> int:
        """Return what a running request lacks up to its reserved length."""
        size = self._whole_pages(self._reservations.reserved_len(request))
        return max(0, size - kv_of(request).num_pages * self._cache.page_size)

    def _whole_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self._cache.page_size) * self._cache.page_size

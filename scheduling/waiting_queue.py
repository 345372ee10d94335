"""The requests that wait, and what the cache has of them."""

from __future__ import annotations

from collections.abc import Container, Iterator

from sortedcontainers import SortedDict

from radixkv.mem_cache import PrefixCache

from .request import Request


class WaitingQueue:
    """The requests without a part of the cache, in the order of arrival.

    Who comes back after a retraction takes its old place.

    Attributes:
        num_computed_tokens: Tokens that the scheduler has computed so far.
    """

    def __init__(self, cache: PrefixCache, max_overtakes: int) -> None:
        """Start without requests.

        Args:
            cache: Where their prefixes may be cached.
            max_overtakes: See `SchedulerLimits`.
        """
        self._cache = cache
        self._max_overtakes = max_overtakes
        self._requests: SortedDict[int, Request] = SortedDict()
        self._overtaken: SortedDict[int, Request] = SortedDict()
        self.num_computed_tokens = 0

    def __iter__(self) -> Iterator[Request]:
        """Iterate in the order of arrival."""
        return iter(self._requests.values())

    def __len__(self) -> int:
        """Count the requests."""
        return len(self._requests)

    def add(self, request: Request) -> None:
        """Queue a request at the place of its arrival. O(log n)."""
        request.match_version = -1  # its tokens may have become more
        self._requests[request.arrival] = request
        if request.num_overtakes >= self._max_overtakes:
            self._overtaken[request.arrival] = request

    def remove(self, request: Request) -> None:
        """Take a request out, unless an interrupted step has done so. O(log n)."""
        self._requests.pop(request.arrival, None)
        self._overtaken.pop(request.arrival, None)

    @property
    def page_size(self) -> int:
        """Tokens of a page of the cache."""
        return self._cache.page_size

    @property
    def overtaken(self) -> Iterator[Request]:
        """Those that nobody may overtake any more, in the order of arrival."""
        return iter(self._overtaken.values())

    def cached_len(self, request: Request) -> int:
        """Tell how many leading tokens of a request are cached, in whole pages.

        The cache is asked again only if it has changed.

        Complexity: O(1), or one look-up of the cached tokens.
        """
        cache = self._cache
        version = cache.version
        if request.match_version != version:
            request.match_len = cache.match_prefix(request.key)
            request.match_version = version
        return request.match_len

    def count_overtakes(
        self,
        request: Request,
        patient: Container[Request],
        least_priority: int | None = None,
    ) -> None:
        """Take note that a request was admitted before those that are older.

        Args:
            request: It waits no more.
            patient: Those that wait for no room of its kind: nobody overtakes them.
            least_priority: Nor those of a lower priority, if this is not ``None``.

        Complexity: O(older requests).
        """
        requests = self._requests
        for arrival in requests.irange(None, request.arrival, (True, False)):
            older = requests[arrival]
            is_lower = least_priority is not None and older.priority < least_priority
            if not is_lower and older not in patient:
                older.num_overtakes += 1
                if older.num_overtakes == self._max_overtakes:
                    self._overtaken[arrival] = older

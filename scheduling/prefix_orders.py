"""Orders that bring requests together which share a cached prefix.

Where nothing is cached, as in a `ChunkCache`, they are the order of arrival.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeAlias

from radixkv.mem_cache.tokens import TOKEN_BYTES, shared_bytes

from .base import QueueView
from .request import Request

_Branch: TypeAlias = tuple[int, int, list[Request]]
"""Requests in order; before them their number, negative, and the first arrival.

Branches are compared by these two, and no two have the same arrival.
"""


class LongestPrefixMatch:
    """Who has the longest cached prefix goes first, as long as it is cached.

    After Zheng et al., "SGLang: Efficient Execution of Structured Language Model
    Programs" (2023, arXiv:2312.07104): for requests that are all known, this visits
    their common tree depth first, and computes nothing twice. Different from it: a
    match is remembered until the cache changes, so that no queue is too long for it.
    """

    def order(self, queue: QueueView) -> Iterable[Request]:
        """Sort by the cached tokens. O(n log n), and a look-up a request at most."""
        # sorted() keeps equals in the order of arrival, in reverse as well.
        return sorted(queue, key=queue.cached_len, reverse=True)


class DFSWeight:
    """Walk down the shared cached prefixes, where the most requests wait first.

    The cached prefixes of the waiting requests form a tree that branches where two of
    them part. The walk goes depth first: at each branching, into the branch below which
    the most requests wait, of equals the one with the oldest; who waits at the
    branching itself comes after all that go further. So those who share a prefix follow
    each other, and what many wait for is used first.

    After the order of the same name in SGLang (Zheng et al., 2023, arXiv:2312.07104).
    Different from it: only the prefixes of those who wait are looked at, so it costs
    the same however much is cached.
    """

    def order(self, queue: QueueView) -> Iterable[Request]:
        """Sort by place in the tree.

        Complexity: O(n log n) comparisons of cached prefixes, each with one `memcmp`,
        and a look-up a request at most.
        """
        groups: dict[tuple[Hashable, bytes], list[Request]] = {}
        uncached: list[Request] = []
        for request in queue:
            if queue.cached_len(request):
                page = request.tokens[: queue.page_size].tobytes()
                groups.setdefault((request.namespace, page), []).append(request)
            else:
                uncached.append(request)
        branches = [_walk(requests, queue) for requests in groups.values()]
        # The groups are in the order of their oldest requests, and equals stay so.
        branches.sort(key=len, reverse=True)
        return [*chain.from_iterable(branches), *uncached]


@dataclass(slots=True, eq=False)
class _Prefix:
    """A cached prefix at which requests wait or part.

    Attributes:
        stop: Its length, in bytes.
        requests: Those whose cached prefix it is, in the order of arrival.
        branches: Those who go further.
    """

    stop: int
    requests: list[Request] = field(default_factory=list[Request])
    branches: list[_Branch] = field(default_factory=list[_Branch])

    def walk(self) -> _Branch:
        """Put all of them into order."""
        self.branches.sort()
        order = [request for branch in self.branches for request in branch[2]]
        order += self.requests
        arrivals = [arrival for _, arrival, _ in self.branches]
        arrivals += [request.arrival for request in self.requests[:1]]
        return -len(order), min(arrivals), order


def _walk(requests: list[Request], queue: QueueView) -> list[Request]:
    """Put requests into order that share the first page of their cached prefixes."""
    if len(requests) == 1:
        return requests
    # Long prefixes differ late, so what all have in common is compared once.
    start = _shared_len(requests, queue)
    prefixes = [
        (request.tokens[start : queue.cached_len(request)].tobytes(), request)
        for request in requests
    ]
    prefixes.sort(key=lambda pair: pair[0])
    # The way down to the last prefix: in the sorted list, each comes right before those
    # that continue it.
    path = [_Prefix(0)]
    last = b""
    for prefix, request in prefixes:
        shared = len(last)
        if not prefix.startswith(last):
            page_bytes = queue.page_size * TOKEN_BYTES
            shared = shared_bytes(prefix, 0, len(prefix), last, page_bytes)
        _leave(path, shared)
        if path[-1].stop < len(prefix):
            path.append(_Prefix(len(prefix)))
        path[-1].requests.append(request)
        last = prefix
    _leave(path, 0)
    return path[0].walk()[2]


def _shared_len(requests: list[Request], queue: QueueView) -> int:
    """Return how many cached tokens all have in common, in whole pages."""
    tokens = requests[0].tokens
    stop = queue.cached_len(requests[0])
    for request in requests:
        stop = min(stop, queue.cached_len(request))
        differs = tokens[:stop] != request.tokens[:stop]
        first = int(differs.argmax())
        if differs[first]:
            stop = first
    return stop // queue.page_size * queue.page_size


def _leave(path: list[_Prefix], stop: int) -> None:
    """Go back up to where a path has `stop` bytes; nobody comes below it any more."""
    while path[-1].stop > stop:
        branch = path.pop().walk()
        if path[-1].stop < stop:
            path.append(_Prefix(stop))
        path[-1].branches.append(branch)

"""The prefixes that running requests are computing: who waits need not compute them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import numpy as np

from radixkv.mem_cache import PrefixCache

from .request import Request


class PrefixesInFlight:
    """Prompts of which not all whole pages are published yet; it dies with its step.

    Pages are found by their place and content, so that a look-up costs the same however
    many prompts there are.
    """

    def __init__(self, cache: PrefixCache, requests: Iterable[Request]) -> None:
        """Take the running requests that still compute or publish their prompts."""
        self._cache = cache
        self._requests = list(requests)
        self._by_page: dict[int, dict[tuple[Hashable, bytes], list[Request]]] = {}

    def add(self, request: Request) -> None:
        """Take note that a request has begun to compute its prompt."""
        self._requests.append(request)
        for start in self._by_page:
            self._add_page(start, request)

    def leader_of(self, request: Request, cached_len: int) -> Request | None:
        """Find who is computing the first page that a request lacks, and all before it.

        Waiting for it costs no more steps than computing the page oneself, and may
        bring the pages behind it as well.

        Args:
            request: It waits.
            cached_len: Its leading tokens that are cached, whole pages.

        Complexity: O(1) expected, and one comparison of the tokens up to the page.
        """
        stop = cached_len + self._cache.page_size
        if stop >= request.num_tokens:  # one token at least is its own to compute
            return None
        tokens = request.tokens[:stop]
        page = (request.namespace, tokens[cached_len:].tobytes())
        for leader in self._pages(cached_len).get(page, ()):
            if np.array_equal(tokens, leader.tokens[:stop]):
                return leader
        return None

    def _pages(self, start: int) -> dict[tuple[Hashable, bytes], list[Request]]:
        if start not in self._by_page:
            self._by_page[start] = {}
            for request in self._requests:
                self._add_page(start, request)
        return self._by_page[start]

    def _add_page(self, start: int, request: Request) -> None:
        stop = start + self._cache.page_size
        if stop <= request.prefill_len:  # only whole pages are published
            page = (request.namespace, request.tokens[start:stop].tobytes())
            self._by_page[start].setdefault(page, []).append(request)

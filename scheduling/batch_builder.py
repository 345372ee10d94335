"""The batch in the making."""

from __future__ import annotations

from collections.abc import Mapping

from radixkv.mem_cache import PrefixCache, RequestKV

from .batch import Batch, BatchEntry
from .request import Request


class BatchBuilder:
    """Collects what one step computes, and gives it slots; it dies with its step.

    Attributes:
        entries: What was added so far.
        num_tokens: Tokens that the step computes so far.
    """

    def __init__(self, cache: PrefixCache) -> None:
        """Start an empty batch on a cache."""
        self._cache = cache
        self._step = cache.begin_step()
        self.entries: list[BatchEntry] = []
        self.num_tokens = 0

    def decode(
        self, requests: list[Request], drafts: Mapping[Request, tuple[int, ...]]
    ) -> None:
        """Add the next token of each request, and its drafts; or raise, add nothing.

        Args:
            requests: Running requests whose tokens are all scheduled but the newest.
            drafts: For the positions that follow the newest token of some of them.
        """
        kvs = [kv_of(request) for request in requests]
        if drafts:
            # One call for all: if it is refused, then nobody has pages for drafts.
            lens = [r.scheduled_len + 1 + len(drafts.get(r, ())) for r in requests]
            self._step.extend(kvs, lens)
        else:
            self._step.decode(kvs)
        entries = self.entries
        for request in requests:
            own = drafts.get(request, ())
            num_tokens = 1 + len(own)
            start = request.scheduled_len
            stop = start + num_tokens
            entries.append(BatchEntry(request, start, stop, num_tokens, own))
            request.scheduled_len = stop
            request.num_pending += 1
            request.num_in_flight += 1
            self.num_tokens += num_tokens

    def extend(self, request: Request, num_tokens: int) -> None:
        """Add the next tokens of a prompt, at most its rest; or raise and add none."""
        start = request.scheduled_len
        stop = start + num_tokens
        self._step.extend([kv_of(request)], [stop])
        is_last = stop == request.num_tokens
        self.entries.append(BatchEntry(request, start, stop, int(is_last)))
        request.scheduled_len = stop
        request.num_pending += is_last
        request.num_in_flight += 1
        self.num_tokens += num_tokens

    def recall(self) -> None:
        """Take note that no worker will hear of the batch."""
        for entry in self.entries:
            entry.request.num_in_flight -= 1
        self._step.recall()

    def batch(self) -> Batch | None:
        """Return what was added, if anything."""
        if not self.entries:
            self._step.recall()
            return None
        return Batch(tuple(self.entries), self._step.message(), self._cache)


def kv_of(request: Request) -> RequestKV:
    """Return the part of the cache that a running request holds."""
    assert request.kv is not None
    return request.kv

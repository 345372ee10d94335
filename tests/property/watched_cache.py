"""A cache whose worker sees at low cost whether anything is wrong.

There is no oracle here, which could not keep up with a soak. Instead, the four sizes
add up after every operation; whatever a request reads is the KV of its own tokens,
namespace and epoch; and now and then everything is recounted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from radixkv.mem_cache import (
    KVCacheInfo,
    OutOfPagesError,
    QuotaError,
    RadixCache,
    RequestKV,
    TokenError,
)
from radixkv.mem_cache.testing import LabelWorker


@dataclass(eq=False)
class Run:
    """A running request.

    Attributes:
        kv: Its handle.
        tokens: Its final tokens.
        namespace: Whose it is.
        epoch: In which epoch of the namespace it began.
        prompt_len: How many of the tokens are prompt.
    """

    kv: RequestKV
    tokens: list[int]
    namespace: Hashable
    epoch: int
    prompt_len: int


class WatchedCache:
    """A cache, its running requests, and the worker that they compute on.

    Attributes:
        cache: The cache.
        worker: Hears every message, and writes a label into every slot.
        page_size: Tokens a page.
        max_len: Longest request, in tokens.
        runs: The running requests.
        epochs: How many epochs of each namespace have ended.
        events: What has happened, and how often.
    """

    def __init__(
        self,
        cache: RadixCache,
        *,
        max_num_pages: int,
        namespaces: Sequence[Hashable],
        retention_share: float,
    ) -> None:
        """Watch an empty cache.

        Args:
            cache: The cache.
            max_num_pages: Most pages that it will ever have.
            namespaces: All that it will ever serve.
            retention_share: The option of the cache.
        """
        memory = cache.memory
        self.cache = cache
        self.page_size = cache.page_size
        self.max_len = memory.max_context_len
        self.worker = LabelWorker(
            max_num_pages=max_num_pages,
            page_size=cache.page_size,
            num_rows=memory.max_num_requests,
            num_columns=-(-self.max_len // cache.page_size),
        )
        self.runs: list[Run] = []
        self.epochs: dict[Hashable, int] = dict.fromkeys(namespaces, 0)
        self.events: Counter[str] = Counter()
        self._retention_share = retention_share

    def step(
        self, batch: list[Run], lens: list[int], alloc: Callable[[], KVCacheInfo]
    ) -> bool:
        """Let the worker run a step, unless there is no room; whether it ran."""
        before = self.sizes()
        try:
            info = alloc()
        except OutOfPagesError as error:
            kind = "quota" if isinstance(error, QuotaError) else "out of pages"
            self.events[kind] += 1
            assert before == self.sizes()
            return False
        self.worker.receive(info)
        idle = set(range(len(self.worker.table))) - {
            run.kv.req_pool_idx for run in self.runs
        }
        assert not self.worker.table[list(idle)].any()
        for run, stop in zip(batch, lens, strict=True):
            seen = self.worker.slots(run.kv.req_pool_idx, 0, stop)
            assert np.array_equal(seen, self.cache.slots(run.kv, 0, stop))
        self.check_content(batch)
        for run, stop in zip(batch, lens, strict=True):
            kv = run.kv
            labels = self.labels_of(run, self.drafts_of(run, stop))
            self.worker.compute(kv.req_pool_idx, kv.committed_len, stop, labels)
        self.check_content(batch)
        return True

    def drafts_of(self, run: Run, stop: int) -> list[int]:
        """The tokens that are tried behind the final ones of `run`, up to `stop`."""
        num_drafts = max(0, stop - len(run.tokens))
        return [position % 2 for position in range(num_drafts)]

    def sizes(self) -> tuple[int, int, int, int]:
        cache = self.cache
        return (
            cache.available_size,
            cache.evictable_size,
            cache.protected_size,
            cache.held_size,
        )

    def spare_size(self, namespace: Hashable) -> int:
        """How far a namespace is above its floor."""
        stats = self.cache.namespace_stats(namespace)
        return stats.used_size - stats.floor_size

    def free_pages(self) -> list[int]:
        pages: list[int] = self.cache.memory.allocator.free_pages().tolist()
        return pages

    # The checks -------------------------------------------------------------

    def check_law(self) -> None:
        sizes = self.sizes()
        assert min(sizes) >= 0
        assert sum(sizes) == self.cache.total_size

    def labels_of(self, run: Run, drafts: Sequence[int] = ()) -> list[int]:
        name = (run.namespace, run.epoch)
        return self.worker.labels_of(name, [*run.tokens, *drafts])

    def labels_now(self) -> NDArray[np.int64]:
        """What the slots hold, once the copies are made that are on their way."""
        pending = self.cache.memory.page_copies.pending
        return self.worker.labels_after(pending) if pending else self.worker.labels

    def check_content(self, runs: list[Run]) -> None:
        """Every computed position has the KV of exactly its prefix."""
        labels = self.labels_now()
        for run in runs:
            slots = self.cache.slots(run.kv, 0, run.kv.committed_len)
            assert labels[slots].tolist() == self.labels_of(run)[: len(slots)]

    def check_published(self, run: Run, before: int) -> None:
        """What was computed is cached, unless its epoch is over."""
        self.events["published"] += 1
        whole = run.kv.committed_len // self.page_size * self.page_size
        if run.epoch != self.epochs[run.namespace]:
            whole = 0
        try:
            after = self.cache.match_prefix(run.tokens, run.namespace)
        except TokenError:
            assert min(run.tokens) < 0  # nothing of that content is cached
            after = self.cache.match_prefix(run.tokens[:whole], run.namespace)
        assert after >= whole
        assert run.epoch == self.epochs[run.namespace] or after <= before

    def check_report(self, run: Run) -> None:
        """Every token is counted once."""
        report = run.kv.hit_report
        if report is not None:
            parts = (
                report.granted_len,
                report.num_recomputed_tokens,
                report.num_evicted_tokens,
                report.num_quota_tokens,
                report.num_unpublished_tokens,
                report.num_other_epoch_tokens,
                report.num_other_namespace_tokens,
                report.num_cold_tokens,
                report.num_forgotten_tokens,
                report.num_unaligned_tokens,
            )
            assert min(parts) >= 0
            assert sum(parts) == report.num_tokens == len(run.tokens)
            assert report.granted_len == run.kv.committed_len

    def check_retained(self) -> None:
        most = int(self._retention_share * self.cache.memory.num_pages) * self.page_size
        assert 0 <= self.cache.retained_size <= most

    def check_everything(self) -> None:
        self.cache.check_integrity()
        self.check_content(self.runs)
        labels = self.labels_now().reshape(-1, self.page_size)
        tree = self.cache._tree
        for node in tree.nodes():
            root = node.root
            if not root.is_stale:
                path = [node]
                while path[-1].parent is not root:
                    path.append(path[-1].parent)
                raw = b"".join([above.key for above in reversed(path)])
                tokens = np.frombuffer(raw, np.int32).tolist()
                name = (root.namespace, self.epochs[root.namespace])
                expected = self.worker.labels_of(name, tokens)
                pages = np.frombuffer(node.pages, np.int32)
                found = labels[pages].reshape(-1).tolist()
                assert found == expected[-len(found) :]

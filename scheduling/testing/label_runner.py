"""A runner without a model that knows whose K and V every slot holds."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from types import SimpleNamespace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from radixkv.mem_cache import KVCacheInfo, PrefixCache
from radixkv.mem_cache.sizes import check_kind
from radixkv.mem_cache.testing import LabelWorker

from ..batch import Batch, BatchEntry
from ..null_runner import NullRunner
from ..request import Request, RequestStatus
from ..sampling_params import SamplingParams


def serial_output(
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    vocab_size: int = 3,
    eos_token_ids: Collection[int] = (2,),
) -> list[int]:
    """Generate as `NullRunner` does, without any scheduler: token after token, alone.

    Args:
        prompt: Token ids, at least one.
        params: Where the output ends; how it is sampled does not matter.
        vocab_size: Tokens that the runner samples from.
        eos_token_ids: Tokens that end an output, unless `params` ignore them.

    Returns:
        The output tokens, which a scheduler must generate as well, whatever it mixes.

    Example:
        >>> serial_output([0, 1], SamplingParams(3, ignore_eos=True))
        [1, 2, 2]
    """
    runner = NullRunner(vocab_size)
    tokens = list(prompt)
    while len(tokens) - len(prompt) < params.max_new_tokens:
        entry = BatchEntry(Request("alone", tokens), 0, len(tokens), 1)
        batch = cast(Batch, SimpleNamespace(entries=[entry]))
        tokens += runner.run(batch).tolist()
        if stops_at(tokens[-1], params, eos_token_ids):
            break
    return tokens[len(prompt) :]


def stops_at(
    token: int, params: SamplingParams, eos_token_ids: Collection[int]
) -> bool:
    """Tell whether a request stops with `token`."""
    is_eos = token in eos_token_ids and not params.ignore_eos
    return is_eos or token in params.stop_token_ids


class LabelRunner:
    """Writes labels where a model would write K and V, and checks what it would read.

    Its page table comes from the messages alone, as on a real worker. A label stands
    for a namespace and all tokens up to a position, see `LabelWorker`; so whoever
    attends to K and V of another prefix, or to none, is found at once. It samples as
    `NullRunner` does.

    Attributes:
        worker: Gets the messages, and has a label in every slot.

    Example:
        >>> from radixkv.mem_cache import MemoryManager, RadixCache
        >>> from radixkv.scheduling import Engine, Request, Scheduler
        >>> memory = MemoryManager(8, 4, max_num_requests=2, max_context_len=32)
        >>> cache = RadixCache(memory)
        >>> engine = Engine(Scheduler(cache), LabelRunner(cache, 100), on_error="raise")
        >>> requests = [Request(i, [1, 2, 3, 4, i], SamplingParams(2)) for i in (5, 6)]
        >>> [request.num_output_tokens for request in engine.generate(requests)]
        [2, 2]
    """

    def __init__(
        self,
        cache: PrefixCache,
        vocab_size: int,
        *,
        overlap: bool = False,
        max_num_pages: int | None = None,
    ) -> None:
        """Make a worker of a cache's size.

        Args:
            cache: Whose messages it gets, all of them.
            vocab_size: Tokens that it samples from.
            overlap: Whether a step runs after the next has been scheduled. By then, a
                row may list the tree's copies of its pages, or the places where a
                shrinking pool moves them. The worker uses the old ones once more; the
                next message tells it, and brings the content along. So the cache's own
                view of the slots is not compared with the worker's.
            max_num_pages: Most pages that the cache will ever be resized to; ``None``
                for as many as there are.

        Raises:
            ConfigError: `cache` is none, or `vocab_size` is out of range.
        """
        check_kind("cache", cache, PrefixCache)
        memory = cache.memory
        self._cache = cache
        self._overlap = overlap
        self._null = NullRunner(vocab_size)
        self.worker = LabelWorker(
            max_num_pages=max(memory.num_pages, max_num_pages or 0),
            page_size=memory.page_size,
            num_rows=memory.max_num_requests,
            num_columns=-(-memory.max_context_len // memory.page_size),
        )

    def run(self, batch: Batch) -> NDArray[np.int32]:
        """Compute one step, as `ModelRunner.run`, and check what it reads and writes.

        Raises:
            AssertionError: A position would attend to K and V that are not those of its
                own prefix, or the cache and the worker disagree about a slot.
        """
        info = self.worker.receive(batch.kv_cache_info)
        rows = info.rows.tolist()
        pairs = list(zip(batch.entries, rows, strict=True))
        # Who ended meanwhile may depend on a step that failed, as who waits again does.
        alive = [
            (entry, row)
            for entry, row in pairs
            if entry.request.status is RequestStatus.RUNNING
        ]
        for entry, row in alive:
            # What another request of this step computes is not there yet.
            self._check_entry(entry, row, entry.start)
        for entry, row in pairs:
            self.worker.compute(row, entry.start, entry.stop, self._labels(entry))
        for entry, row in alive:
            self._check_entry(entry, row, entry.stop)
        if not self._overlap:
            self._check_slots(batch, info)
        return self._null.run(batch)

    def check(self, requests: Iterable[Request], in_flight: Sequence[Batch]) -> None:
        """Check, between two steps, that what requests have computed is theirs.

        Args:
            requests: Any; only those that run are looked at.
            in_flight: The batches that are not done, the oldest first.

        Raises:
            AssertionError: A slot holds K and V of another prefix, or none.
        """
        labels_by_slot = self.worker.labels_after(self._copies(in_flight))
        for request in requests:
            kv = request.kv
            if kv is None or request.status is not RequestStatus.RUNNING:
                continue  # of the others, a step may have failed
            # What steps in flight compute is not there yet, though it may be committed.
            starts = [
                entry.start
                for batch in in_flight
                for entry in batch.entries
                if entry.request is request
            ]
            computed_len = min([kv.committed_len, *starts])
            tokens = request.tokens[:computed_len].tolist()
            _check_labels(
                request,
                self.worker.labels_of(request.namespace, tokens),
                self._cache.slots(kv, 0, computed_len),
                labels_by_slot,
            )

    def _copies(self, in_flight: Sequence[Batch]) -> dict[int, int]:
        """Return the page copies of the messages in flight, and of the next one."""
        messages = [batch.kv_cache_info.copies for batch in in_flight]
        copies: dict[int, int] = {}
        for message in [*messages, self._cache.memory.page_copies.pending]:
            copies |= {
                target: copies.get(page, page) for target, page in message.items()
            }
        return copies

    def _labels(self, entry: BatchEntry) -> list[int]:
        tokens = entry.tokens.tolist()
        return self.worker.labels_of(entry.request.namespace, tokens)

    def _check_entry(self, entry: BatchEntry, row: int, stop: int) -> None:
        _check_labels(
            entry.request,
            self._labels(entry)[:stop],
            self.worker.slots(row, 0, stop),
            self.worker.labels,
        )

    def _check_slots(self, batch: Batch, info: KVCacheInfo) -> None:
        """Check that the cache's own view of the slots is the worker's."""
        written: list[int] = []
        for entry, row in zip(batch.entries, info.rows.tolist(), strict=True):
            request = entry.request
            assert request.kv is not None, f"{request!r} is computed, and has no pages"
            own_row = request.kv.req_pool_idx
            assert own_row == row, f"{request!r} has row {own_row}, not {row}"
            slots = self.worker.slots(row, 0, entry.stop).tolist()
            own_slots = batch.cache.slots(request.kv, 0, entry.stop).tolist()
            assert own_slots == slots, (
                f"{request!r} has the slots {own_slots}, the worker was told {slots}"
            )
            written += slots[entry.start :]
        loc = batch.out_cache_loc().tolist()
        assert written == loc, f"out_cache_loc() is {loc}, the worker writes {written}"
        assert len(written) == len(set(written)), f"a slot is written twice: {written}"


def _check_labels(
    request: Request,
    expected: list[int],
    slots: NDArray[np.int64],
    labels_by_slot: NDArray[np.int64],
) -> None:
    """Compare the labels of the first positions with what their slots hold."""
    found: list[int] = labels_by_slot[slots].tolist()
    if expected == found:
        return
    position = next(i for i, label in enumerate(expected) if label != found[i])
    what = "those of another prefix" if found[position] else "nothing"
    raise AssertionError(
        f"{request!r}: slot {slots[position]} must hold K and V of its position "
        f"{position}, but holds {what}"
    )

"""A step that is packed once says what its parts say when merged.

Only its page copies may be others: what was admitted last is copied at once, and what
was evicted meanwhile is not. `SchedulerMachine` looks at the content of every page.
"""

from __future__ import annotations

from contextlib import suppress
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from radixkv.mem_cache import (
    KVCacheInfo,
    MemoryManager,
    OutOfPagesError,
    PagesInUseError,
    RadixCache,
    RequestKV,
)

FIELDS = (
    *("rows", "starts", "stops", "page_starts", "page_indptr"),
    *("new_pages", "forgotten_rows"),
)


class Life:
    """A cache, and requests whose steps it makes in one way or in the other."""

    def __init__(self, page_size: int, *, is_built: bool) -> None:
        memory = MemoryManager(
            24, page_size, max_num_requests=5, max_context_len=9 * page_size
        )
        self.cache = RadixCache(memory, partial_pages=True)
        self.is_built = is_built
        self.page_size = page_size
        self.running: list[tuple[RequestKV, list[int]]] = []

    def step(self, random: Random) -> KVCacheInfo | None:
        """Decode some requests, then admit and extend others one by one."""
        cache = self.cache
        for kv, tokens in [*self.running]:
            if random.random() < 0.3:
                self.end(kv, tokens, random)
        if random.random() < 0.2:
            with suppress(PagesInUseError):
                cache.resize(random.randint(20, 26))
        step = cache.begin_step() if self.is_built else None
        infos: list[KVCacheInfo] = []
        added: list[tuple[RequestKV, int]] = []

        def add(kvs: list[RequestKV], lens: list[int]) -> None:
            try:
                if step is not None:
                    step.extend(kvs, lens)
                else:
                    infos.append(cache.alloc_for_extend(kvs, lens))
            except OutOfPagesError:
                return
            added.extend(zip(kvs, lens, strict=True))

        ready = [
            (kv, tokens)
            for kv, tokens in self.running
            if random.random() < 0.7 and len(tokens) < 9 * self.page_size
        ]
        if ready:
            for _, tokens in ready:
                tokens.append(random.randint(0, 1))
            add([kv for kv, _ in ready], [kv.committed_len + 1 for kv, _ in ready])
        for _ in range(random.randint(0, 3)):
            size = random.randint(1, 5 * self.page_size)
            tokens = [random.randint(0, 1) for _ in range(size)]
            kv = cache.admit(tokens)
            if kv is not None:
                self.running.append((kv, tokens))
                add([kv], [len(tokens)])
        if not added:
            if step is not None:
                step.recall()
            return None
        info = step.message() if step is not None else KVCacheInfo.merge(infos)
        for kv, new_len in added:
            cache.commit(kv, new_len)
        cache.check_integrity()
        return info

    def end(self, kv: RequestKV, tokens: list[int], random: Random) -> None:
        self.running.remove((kv, tokens))
        if random.random() < 0.8:
            self.cache.cache_finished_req(kv, tokens)
        else:
            self.cache.release(kv)


@given(page_size=st.sampled_from([1, 2, 3]), seed=st.integers(0, 2**32 - 1))
def test_a_step_that_is_packed_once_equals_its_parts_merged(
    page_size: int, seed: int
) -> None:
    built = Life(page_size, is_built=True)
    merged = Life(page_size, is_built=False)
    for number in range(20):
        one, other = (life.step(Random(seed + number)) for life in (built, merged))
        if one is None or other is None:
            assert one is other is None
            continue
        for field in FIELDS:
            assert getattr(one, field).tolist() == getattr(other, field).tolist()


def test_such_lives_meet_all_that_a_message_can_say() -> None:
    seen: dict[str, int] = dict.fromkeys(["decodes", "copies", "forgotten", "pages"], 0)
    for seed in range(40):
        life = Life(2, is_built=True)
        for number in range(20):
            info = life.step(Random(1000 * seed + number))
            if info is not None:
                seen["decodes"] += int((info.stops - info.starts == 1).sum())
                seen["copies"] += info.num_copies
                seen["forgotten"] += len(info.forgotten_rows)
                seen["pages"] += info.num_new_pages

    assert min(seen.values()) > 50

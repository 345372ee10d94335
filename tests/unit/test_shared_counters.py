"""The shared counters: what a cache writes, other processes read, always whole."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.mem_cache import (
    ChunkCache,
    ConfigError,
    CounterValues,
    IntegrityError,
    MemoryManager,
    PrefixCache,
    RadixCache,
    RadixKVError,
    RequestKV,
    SharedCounters,
    shared_counters,
)

from .driver import Wrong, admit, insert, make_memory, run, span

MakeCache = Callable[[MemoryManager, SharedCounters], PrefixCache]
NAME = f"test-{os.getpid()}"

READER = """
import sys
from radixkv.mem_cache import SharedCounters

with SharedCounters.attach(sys.argv[1]) as counters:
    print("ready", flush=True)
    num_reads, seen = 0, {}
    while (values := counters.read()).total_size != 4:
        free, evictable = values.available_size, values.evictable_size
        protected, held = values.protected_size, values.held_size
        assert free + evictable + protected + held == values.total_size, values
        num_reads += 1
        seen[values] = None
    print(num_reads, len(seen), flush=True)
"""


def radix(memory: MemoryManager, counters: SharedCounters) -> PrefixCache:
    return RadixCache(memory, counters=counters)


def chunk(memory: MemoryManager, counters: SharedCounters) -> PrefixCache:
    return ChunkCache(memory, counters=counters)


@pytest.fixture
def counters() -> Iterator[SharedCounters]:
    with SharedCounters.create() as made:
        yield made


def sizes(cache: PrefixCache) -> CounterValues:
    return CounterValues(
        cache.available_size,
        cache.evictable_size,
        cache.protected_size,
        cache.held_size,
        cache.total_size,
    )


def path_of(name: str) -> Path:
    return Path("/dev/shm") / f"radixkv-{name}"


KINDS = [
    *("admit", "extend", "extend", "decode", "commit", "truncate"),
    *("publish", "finish", "release", "evict", "evict_if_needed"),
    *("resize", "reset", "bump_epoch", "check"),
]
Call = tuple[str, int, int]
calls = st.tuples(
    st.sampled_from(KINDS),
    st.integers(0, 5),
    st.integers(-1, 20),
)


def make_call(cache: PrefixCache, running: list[RequestKV], call: Call) -> None:
    """Make a call that may be refused."""
    kind, number, amount = call
    if kind == "admit" or not running:
        request = cache.admit([number % 2] * max(0, amount))
        if request is not None:
            running.append(request)
        return
    request = running[number % len(running)]
    tokens = [number % 2] * 64
    if kind == "extend":
        cache.alloc_for_extend([request], [request.committed_len + amount])
        cache.commit(request, request.allocated_len)
    elif kind == "decode":
        cache.alloc_for_decode(running, amount)
    elif kind == "commit":
        cache.commit(request, request.committed_len + amount)
    elif kind == "truncate":
        cache.truncate(request, request.allocated_len - amount)
    elif kind == "publish":
        cache.cache_unfinished_req(request, tokens)
    elif kind in ("finish", "release"):
        if amount % 3:
            running.remove(request)  # else the next call for it comes too late
        if kind == "finish":
            cache.cache_finished_req(request, tokens)
        else:
            cache.release(request)
    elif kind == "evict":
        cache.evict(amount)
    elif kind == "evict_if_needed":
        cache.evict_if_needed(4 * amount)
    elif kind == "resize":
        cache.resize(amount)
    elif kind == "reset":
        cache.reset()
    elif kind == "bump_epoch":
        cache.bump_epoch(None)
    else:
        cache.check_integrity()


@pytest.mark.parametrize("make_cache", [radix, chunk])
@given(st.sampled_from([1, 2, 3, 16]), st.lists(calls, max_size=40))
def test_s4_12_the_counters_equal_the_cache_after_every_call(
    make_cache: MakeCache, page_size: int, calls: list[Call]
) -> None:
    with SharedCounters.create() as counters:
        memory = make_memory(12, page_size, max_num_requests=3)
        cache = make_cache(memory, counters)
        running: list[RequestKV] = []
        with SharedCounters.attach(counters.name) as reader:
            assert sizes(cache) == reader.read()
            for call in calls:
                with suppress(RadixKVError):
                    make_call(cache, running, call)
                assert sizes(cache) == reader.read()


def test_s4_12_another_process_sees_the_law_hold_at_any_time(
    counters: SharedCounters,
) -> None:
    cache = RadixCache(make_memory(12, 4), counters=counters)
    command = [sys.executable, "-c", READER, counters.name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for i in range(600):
            insert(cache, [*span(1, 10), *[i] * 12])
        cache.resize(1)  # the reader stops at this size
        report = process.stdout.read().split()

    num_reads, num_states = map(int, report)
    assert process.returncode == 0
    assert num_reads > num_states > 1


def test_a_reader_that_ends_leaves_the_counters_alone(counters: SharedCounters) -> None:
    code = f"from radixkv.mem_cache import SharedCounters as S; S.attach({NAME!r})"
    with SharedCounters.create(NAME) as named:
        result = subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True
        )

        assert result.stderr == ""
        with SharedCounters.attach(NAME) as reader:
            assert reader.read() == named.read()


def test_values_are_those_that_were_written_last(counters: SharedCounters) -> None:
    for i in range(30):
        counters.write(i, 2, 3, 4, i + 9)

        assert CounterValues(i, 2, 3, 4, i + 9) == counters.read()


@pytest.mark.parametrize("name", [None, NAME], ids=["picked", "given"])
def test_nothing_is_left_behind(name: str | None) -> None:
    with SharedCounters.create(name) as made:
        with SharedCounters.attach(made.name) as reader:
            pass
        assert path_of(made.name).exists()
        reader.close()

    assert not path_of(made.name).exists()
    made.close()
    made.unlink()


def test_names_that_are_picked_differ() -> None:
    with SharedCounters.create() as one, SharedCounters.create() as other:
        assert one.name != other.name


def test_a_name_has_one_living_writer() -> None:
    with SharedCounters.create(NAME) as made:
        made.write(1, 2, 3, 4, 10)
        with pytest.raises(ConfigError, match="no living writer"):
            SharedCounters.create(NAME)

        assert (1, 2, 3, 4, 10) == astuple(made.read())


def test_what_a_dead_writer_left_is_taken_over_with_its_readers() -> None:
    dead = SharedCounters.create(NAME)
    dead.write(1, 2, 3, 4, 10)
    dead.close()
    with (
        SharedCounters.attach(NAME) as reader,
        SharedCounters.create(NAME) as heir,
    ):
        assert (0, 0, 0, 0, 0) == astuple(reader.read())
        heir.write(4, 3, 2, 1, 10)
        assert (4, 3, 2, 1, 10) == astuple(reader.read())


@pytest.mark.parametrize("name", ["", "a/b", "../x", "nul\0"])
def test_a_name_that_is_no_file_name_is_refused(name: str) -> None:
    for open_it in (SharedCounters.create, SharedCounters.attach):
        with pytest.raises(ConfigError, match="must be a file name"):
            open_it(name)


def test_what_nobody_made_cannot_be_attached() -> None:
    with pytest.raises(ConfigError, match="no shared counters are called"):
        SharedCounters.attach(NAME)


def test_a_file_of_somebody_else_cannot_be_attached() -> None:
    path = path_of(NAME)
    path.write_bytes(b"something else entirely")
    try:
        with pytest.raises(ConfigError, match="no shared counters are called"):
            SharedCounters.attach(NAME)
    finally:
        path.unlink()


SLOTS_AT = 16
SLOT_BYTES = 56


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(lambda block: b"\1" * SLOT_BYTES, id="other bytes"),
        pytest.param(lambda block: block[:8] + b"\1" + block[9:56], id="one byte"),
        pytest.param(
            lambda block: block[SLOT_BYTES : 2 * SLOT_BYTES], id="other state"
        ),
    ],
)
def test_a_block_that_somebody_overwrote_is_noticed(
    counters: SharedCounters, content: Callable[[bytes], bytes]
) -> None:
    for i in range(8):
        counters.write(i, 0, 0, 0, i)
    path = path_of(counters.name)
    number = int.from_bytes(path.read_bytes()[8:16], sys.byteorder)
    at = SLOTS_AT + number % 8 * SLOT_BYTES
    other = path.read_bytes()[at:] + path.read_bytes()[SLOTS_AT:at]
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content(other))

    with pytest.raises(IntegrityError, match="no sound state"):
        counters.read()


def test_while_a_state_is_written_the_one_before_is_read(
    counters: SharedCounters, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters.write(1, 2, 3, 4, 10)
    seen: list[CounterValues] = []

    def look_meanwhile(state: bytes) -> int:
        monkeypatch.setattr(shared_counters, "crc32", crc32)
        seen.append(counters.read())
        return crc32(state)

    monkeypatch.setattr(shared_counters, "crc32", look_meanwhile)
    counters.write(4, 3, 2, 1, 10)

    assert [CounterValues(1, 2, 3, 4, 10)] == seen
    assert CounterValues(4, 3, 2, 1, 10) == counters.read()


def test_a_state_that_is_half_written_is_not_seen(counters: SharedCounters) -> None:
    counters.write(1, 2, 3, 4, 10)
    path = path_of(counters.name)
    before = path.read_bytes()
    counters.write(4, 3, 2, 1, 10)
    after = path.read_bytes()
    changed = [i for i, (x, y) in enumerate(zip(before, after, strict=True)) if x != y]

    # A writer that died in the middle: its number, at the beginning, comes last.
    assert min(changed) == 8
    with path.open("r+b") as file:
        file.seek(8)
        file.write(before[8:9])
    assert (1, 2, 3, 4, 10) == astuple(counters.read())


def test_a_closed_block_cannot_be_read(counters: SharedCounters) -> None:
    counters.close()

    with pytest.raises(ConfigError, match="got closed ones"):
        counters.read()


def test_a_cache_goes_on_when_its_counters_are_closed(counters: SharedCounters) -> None:
    cache = RadixCache(make_memory(), counters=counters)
    with SharedCounters.attach(counters.name) as reader:
        before = reader.read()
        counters.close()
        insert(cache, span(1, 8))

        assert before == reader.read()
    assert cache.match_prefix(span(1, 8)) == 8


@pytest.mark.parametrize("make_cache", [radix, chunk])
def test_a_cache_refuses_counters_that_are_not_its_own_to_write(
    make_cache: MakeCache, counters: SharedCounters
) -> None:
    memory = make_memory()
    with (
        SharedCounters.attach(counters.name) as reader,
        pytest.raises(ConfigError, match="must come from create"),
    ):
        make_cache(memory, reader)

    make_cache(memory, counters)  # the memory is free still


def test_a_second_cache_on_one_memory_writes_nothing(counters: SharedCounters) -> None:
    memory = make_memory()
    RadixCache(memory)
    before = counters.read()
    with pytest.raises(ConfigError, match="must belong to one cache"):
        RadixCache(memory, counters=counters)

    assert before == counters.read()


def test_a_commit_writes_nothing_since_no_size_changes(
    counters: SharedCounters,
) -> None:
    cache = RadixCache(make_memory(), counters=counters)
    request = admit(cache, span(1, 8))
    cache.alloc_for_extend([request], [8])
    counters.write(0, 0, 0, 0, 0)
    cache.commit(request, 8)

    assert (0, 0, 0, 0, 0) == astuple(counters.read())


def test_a_reader_writes_nothing(counters: SharedCounters) -> None:
    with SharedCounters.attach(counters.name) as reader:
        with pytest.raises(ConfigError, match="attached"):
            reader.write(1, 1, 1, 1, 4)

        assert (0, 0, 0, 0, 0) == astuple(counters.read())


def test_values_cannot_be_changed(counters: SharedCounters) -> None:
    values: Wrong = counters.read()

    with pytest.raises(AttributeError):
        values.total_size = 1


def test_the_sizes_of_the_running_and_the_cached_are_told_apart(
    counters: SharedCounters,
) -> None:
    cache = RadixCache(make_memory(), counters=counters)
    insert(cache, span(1, 12))
    run(cache, [*span(1, 8), *span(50, 54)])

    assert (44, 4, 8, 8, 64) == astuple(counters.read())


@pytest.mark.parametrize("name", ["x" * 300, "\ud800"])
def test_a_name_that_no_file_can_have_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="name must be that of a file"):
        SharedCounters.create(name)
    with pytest.raises(ConfigError, match="no shared counters are called"):
        SharedCounters.attach(name)


def test_a_folder_or_half_a_block_cannot_be_attached() -> None:
    with SharedCounters.create() as whole:
        path = next(Path("/dev/shm").glob(f"*{whole.name}"))
        folder, half = (
            path.with_name(f"{path.name}-d"),
            path.with_name(f"{path.name}-h"),
        )
        folder.mkdir()
        half.write_bytes(path.read_bytes()[:8])
        try:
            for name in (f"{whole.name}-d", f"{whole.name}-h"):
                with pytest.raises(ConfigError, match="no shared counters are called"):
                    SharedCounters.attach(name)
        finally:
            folder.rmdir()
            half.unlink()


def test_counters_belong_to_one_cache() -> None:
    with SharedCounters.create() as counters:
        RadixCache(make_memory(), counters=counters)
        memory = make_memory()
        with pytest.raises(ConfigError, match="one cache, got a second one"):
            RadixCache(memory, counters=counters)

        RadixCache(memory)  # nobody has it


def test_closed_counters_are_refused() -> None:
    counters = SharedCounters.create()
    counters.close()
    with pytest.raises(ConfigError, match="must be open"):
        RadixCache(make_memory(), counters=counters)
    counters.unlink()

"""What may be recalled: the newest message that was made, or the newest ones merged."""

from __future__ import annotations

import copy

import msgspec
import pytest

from radixkv.mem_cache import (
    KVCacheInfo,
    OutOfPagesError,
    RadixCache,
    RequestKV,
    RequestStateError,
)
from radixkv.mem_cache.sent_messages import MAX_NUM_MESSAGES

from .driver import Wrong, admit, law, make_cache, make_memory, run, span


def make(num_requests: int = 3) -> tuple[RadixCache, list[RequestKV]]:
    cache = RadixCache(make_memory(), debug=True)
    requests = [admit(cache, [first, first + 1]) for first in range(num_requests)]
    return cache, requests


def test_only_the_newest_message_may_be_recalled_then_the_one_before() -> None:
    cache, requests = make()
    first, second, third = [cache.alloc_for_extend([r], [2]) for r in requests]

    for older in (first, second):
        with pytest.raises(RequestStateError, match="newest message"):
            cache.recall(older)
    for info in (third, second, first):
        cache.recall(info)
        with pytest.raises(RequestStateError):
            cache.recall(info)


@pytest.mark.parametrize("wrong", [None, 1, b"", "message", KVCacheInfo(0, 0, b"")])
def test_what_is_no_message_of_this_cache_is_refused(wrong: Wrong) -> None:
    """The cache is in debug mode, so it compares its state with the one before."""
    cache, requests = make()
    with pytest.raises(RequestStateError):
        cache.recall(wrong)
    cache.alloc_for_extend(requests, [2, 2, 2])

    with pytest.raises(RequestStateError):
        cache.recall(wrong)


def test_a_message_of_another_cache_is_refused() -> None:
    cache, requests = make()
    cache.alloc_for_extend(requests, [2, 2, 2])
    other, others = make()
    other.release(others[0])
    foreign = other.alloc_for_extend(others[1:], [2, 2])

    with pytest.raises(RequestStateError):
        cache.recall(foreign)


def test_the_newest_ones_may_be_recalled_as_one_that_was_merged() -> None:
    cache, requests = make()
    infos = [cache.alloc_for_extend([r], [2]) for r in requests]

    with pytest.raises(RequestStateError):
        cache.recall(KVCacheInfo.merge(infos[:2]))
    cache.recall(KVCacheInfo.merge(infos[1:]))
    cache.recall(infos[0])


def test_messages_without_requests_are_among_those_that_were_merged() -> None:
    cache, requests = make()
    cache.release(requests[0])
    infos = [
        cache.alloc_for_extend([], []),
        cache.alloc_for_extend([requests[1]], [2]),
        cache.alloc_for_extend([], []),
    ]
    cache.recall(KVCacheInfo.merge(infos))

    assert [1] == cache.alloc_for_extend([], []).forgotten_rows.tolist()


@pytest.mark.parametrize("same", [copy.copy, copy.deepcopy])
def test_an_equal_message_is_that_message(same: Wrong) -> None:
    cache, requests = make()
    cache.recall(same(cache.alloc_for_extend(requests, [2, 2, 2])))
    info = cache.alloc_for_extend([], [])
    cache.recall(msgspec.msgpack.decode(msgspec.msgpack.encode(info), type=KVCacheInfo))


def test_after_a_reset_there_is_nothing_to_recall() -> None:
    cache, requests = make()
    info = cache.alloc_for_extend(requests, [2, 2, 2])
    for request in requests:
        cache.release(request)
    cache.reset()

    with pytest.raises(RequestStateError):
        cache.recall(info)


def test_a_step_of_more_messages_than_are_remembered_is_believed() -> None:
    cache = make_cache(num_pages=8)
    request = admit(cache, span(1, 3))
    infos = []
    for _ in range(MAX_NUM_MESSAGES + 2):
        infos.append(cache.alloc_for_extend([request], [3]))
    cache.release(request)

    with pytest.raises(RequestStateError):
        cache.recall(infos[0] if infos[0] != infos[-1] else KVCacheInfo(0, 0, b""))
    cache.recall(KVCacheInfo.merge(infos))


@pytest.mark.parametrize("gives_up", [False, True])
def test_the_first_of_two_allocations_stands_or_is_recalled(gives_up: bool) -> None:
    cache = RadixCache(make_memory(4), debug=True)
    running, long = run(cache, span(1, 4)), admit(cache, span(50, 69))
    message = cache.alloc_for_decode([running])
    with pytest.raises(OutOfPagesError):
        cache.alloc_for_extend([long], [20])
    cache.release(long)

    assert [running.req_pool_idx] == message.rows.tolist()
    if not gives_up:
        cache.commit(running, 5)
        cache.cache_finished_req(running, span(1, 5))
        assert (12, 4, 0, 0) == law(cache)
        return
    cache.recall(message)
    cache.release(running)
    assert (16, 0, 0, 0) == law(cache)
    assert {1, 2} == {*cache.alloc_for_extend([], []).forgotten_rows.tolist()}

"""The step builder: one message a step, whoever was added when."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread

import pytest

from radixkv.mem_cache import (
    ConfigError,
    KVCacheInfo,
    LengthError,
    OutOfPagesError,
    PrefixCache,
    RadixCache,
    RequestKV,
    RequestStateError,
    StepBuilder,
    WrongThreadError,
)

from .deep_state import changes, deep_state
from .driver import Wrong, admit, compute, law, make_cache, make_memory, run, span


def make(num_pages: int = 16) -> tuple[RadixCache, list[RequestKV]]:
    """A cache in debug mode, and three requests, of which one has computed all."""
    cache = RadixCache(make_memory(num_pages), debug=True)
    return cache, [
        run(cache, span(1, 4)),
        admit(cache, span(11, 16)),
        admit(cache, span(21, 29)),
    ]


def test_decodes_and_chunks_are_one_message() -> None:
    cache, (decoding, second, third) = make()
    step = cache.begin_step()
    step.decode([decoding])
    step.extend([second, third], [6, 5])
    info = step.message()

    assert [1, 2, 3] == info.rows.tolist()
    assert [4, 0, 0] == info.starts.tolist()
    assert [5, 6, 5] == info.stops.tolist()
    assert [1, 0, 0] == info.page_starts.tolist()
    assert [0, 1, 3, 5] == info.page_indptr.tolist()
    for request, stop in ((decoding, 5), (second, 6), (third, 5)):
        cache.commit(request, stop)
    cache.check_integrity()


def test_an_empty_step_tells_of_rows_that_were_given_back() -> None:
    cache, (first, *_) = make()
    cache.release(first)
    step = cache.begin_step()
    assert [] == step.message().forgotten_rows.tolist()
    step = cache.begin_step()
    step.extend([], [])

    assert [1] == step.message().forgotten_rows.tolist()


def test_whoever_is_refused_leaves_the_step_as_it_is() -> None:
    cache, (decoding, second, third) = make(4)
    step = cache.begin_step()
    step.decode([decoding])
    with pytest.raises(OutOfPagesError):
        step.extend([third], [9])
    with pytest.raises(LengthError):
        step.extend([third], [0])
    with pytest.raises(ConfigError):
        step.decode([third], 0)
    step.extend([second], [4])
    info = step.message()

    assert [1, 2] == info.rows.tolist()
    assert (4, 0, 0, 12) == law(cache)


@pytest.mark.parametrize(
    "call",
    [
        lambda cache, kv: cache.alloc_for_extend([kv], [6]),
        lambda cache, kv: cache.alloc_for_decode([kv]),
        lambda cache, kv: cache.begin_step(),
    ],
)
def test_there_is_no_other_message_before_that_of_a_step(
    call: Callable[[PrefixCache, RequestKV], object],
) -> None:
    cache = make_cache()
    decoding, second = run(cache, span(1, 4)), admit(cache, span(11, 16))
    step = cache.begin_step()
    call(cache, second)  # nobody is in the step yet
    step = cache.begin_step()
    step.decode([decoding])
    before = deep_state(cache)
    with pytest.raises(RequestStateError, match="must be packed or recalled before"):
        call(cache, second)

    assert not changes(before, deep_state(cache))
    step.message()
    call(cache, second)


def test_a_step_names_each_request_once() -> None:
    cache, (decoding, second, third) = make()
    step = cache.begin_step()
    step.decode([decoding])
    for add in (
        lambda: step.decode([decoding]),
        lambda: step.extend([second, decoding], [6, 6]),
        lambda: step.extend([second, second], [6, 6]),
    ):
        with pytest.raises(RequestStateError, match="name each request once"):
            add()
    step.extend([second, third], [6, 9])

    assert 3 == step.message().num_reqs


def test_nobody_in_a_step_is_given_back_before_others_are_added() -> None:
    cache, (decoding, second, third) = make()
    step = cache.begin_step()
    step.extend([second], [6])
    cache.release(second)
    with pytest.raises(RequestStateError, match="given back within the step"):
        step.extend([third], [9])
    step.recall()
    cache.release(third)

    rows = cache.alloc_for_decode([decoding]).forgotten_rows.tolist()
    assert [2, 3] == rows


def test_a_reset_ends_the_step_too() -> None:
    cache, requests = make()
    cache.release(requests.pop())
    step = cache.begin_step()
    step.decode(requests[:1])
    for request in requests:
        cache.release(request)
    cache.reset()

    assert not step.is_open
    assert [3, 1, 2] == cache.alloc_for_extend([], []).forgotten_rows.tolist()


@pytest.mark.parametrize("end", [StepBuilder.message, StepBuilder.recall])
def test_a_step_ends_once(end: Callable[[StepBuilder], object]) -> None:
    cache, (decoding, *_) = make()
    step = cache.begin_step()
    assert step.is_open
    end(step)
    assert not step.is_open

    for call in (
        step.message,
        step.recall,
        lambda: step.decode([decoding]),
        lambda: step.extend([decoding], [5]),
    ):
        with pytest.raises(RequestStateError, match="has its message, or was recalled"):
            call()
    assert repr(step) == "StepBuilder(0 rows, 0 pages, ended)"


def test_what_a_recalled_step_would_have_told_the_next_one_tells() -> None:
    cache, (decoding, second, third) = make()
    cache.release(third)
    step = cache.begin_step()
    step.decode([decoding])
    step.extend([second], [6])
    step.recall()
    for request in (decoding, second):
        cache.release(request)
    last = admit(cache, span(31, 33))
    info = cache.alloc_for_extend([last], [3])

    assert [3, 1, 2] == info.forgotten_rows.tolist()
    cache.commit(last, 3)
    cache.check_integrity()


def test_the_message_of_a_step_may_be_recalled() -> None:
    cache, (decoding, second, _) = make()
    step = cache.begin_step()
    step.decode([decoding])
    step.extend([second], [6])
    info = step.message()
    cache.recall(info)

    with pytest.raises(RequestStateError):
        cache.recall(info)


def test_partial_pages_are_copied_once_a_step() -> None:
    """The second request begins inside a page; the first was added to the step."""
    cache = RadixCache(make_memory(), partial_pages=True, debug=True)
    cache.cache_finished_req(run(cache, span(1, 8)), span(1, 8))
    decoding = run(cache, span(50, 53))
    step = cache.begin_step()
    step.decode([decoding])
    request = admit(cache, [*span(1, 6), 99])
    assert 6 == request.committed_len
    step.extend([request], [7])
    info = step.message()

    assert 1 == info.num_copies
    page = cache.slots(request, 4, 5)[0] // 4
    assert [page] == info.copy_targets.tolist()


def test_another_thread_is_refused() -> None:
    cache, (decoding, *_) = make()
    step = cache.begin_step()
    errors: list[type[BaseException]] = []
    calls: list[Callable[[], object]] = [
        lambda: step.decode([decoding]),
        lambda: step.extend([decoding], [5]),
        step.message,
        step.recall,
    ]

    def attempt() -> None:
        for call in calls:
            try:
                call()
            except WrongThreadError as error:
                errors.append(type(error))

    thread = Thread(target=attempt)
    thread.start()
    thread.join()

    assert [WrongThreadError] * 4 == errors
    assert step.is_open


@pytest.mark.parametrize("wrong", [None, 5, [5], ["request"]])
def test_what_is_no_batch_is_refused(wrong: Wrong) -> None:
    cache = make_cache()
    compute(cache, admit(cache, [1]), 1)
    step = cache.begin_step()
    for add in (lambda: step.decode(wrong), lambda: step.extend(wrong, [2])):
        with pytest.raises(RequestStateError):
            add()

    assert step.message() == KVCacheInfo.pack([], [], [], [], [0], b"")

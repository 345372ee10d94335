"""The radix key: what it takes, how it grows, and that it is made into bytes once."""

from __future__ import annotations

import copy
import pickle
from array import array

import numpy as np
import pytest

from radixkv.mem_cache import (
    ConfigError,
    MemoryManager,
    RadixCache,
    RadixKey,
    TokenError,
)

from .driver import Wrong, compute, make_cache, make_chunk_cache


def repickle(key: RadixKey) -> RadixKey:
    copied: RadixKey = pickle.loads(pickle.dumps(key))
    return copied


IDS = [5, 6, 7, 8, 9, 10, 11, 12, 13]


def test_a_key_is_its_own_whatever_becomes_of_the_array() -> None:
    ids = np.array(IDS, np.int32)
    key = RadixKey(ids)
    ids[0] = 99

    assert IDS == key.tokens.tolist()


def test_what_a_key_shows_can_only_be_read() -> None:
    key = RadixKey(IDS)
    assert np.shares_memory(key.tokens, np.frombuffer(key.raw, np.int32))
    for _ in range(2):
        with pytest.raises(ValueError, match="read-only"):
            key.tokens[0] = 1
        key.append(14)


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, repickle])
def test_a_copy_of_a_key_grows_on_its_own(clone: Wrong) -> None:
    key = RadixKey([1, 2, 3], "tenant")
    key.append(4)
    other = clone(key)
    key.append(5)
    other.append(6)

    assert "tenant" == other.namespace
    assert [1, 2, 3, 4, 5] == key.tokens.tolist()
    assert [1, 2, 3, 4, 6] == other.tokens.tolist()


def test_a_key_of_another_namespace_is_not_published() -> None:
    cache = make_cache()
    request = cache.admit(IDS, namespace="tenant")
    assert request is not None
    compute(cache, request, 9)
    for call in (cache.cache_unfinished_req, cache.cache_finished_req):
        for key in (RadixKey(IDS, "other"), RadixKey(IDS)):
            with pytest.raises(ConfigError, match="namespace 'tenant' needs a key"):
                call(request, key)
    cache.cache_finished_req(request, RadixKey(IDS, "".join(["ten", "ant"])))

    assert 8 == cache.match_prefix(IDS, "tenant")


def test_a_masked_array_is_refused() -> None:
    ma: Wrong = np.ma
    masked = ma.array([1, 2, 3], mask=[0, 1, 0], dtype=np.int32)
    with pytest.raises(TokenError, match="got a masked array"):
        RadixKey(masked)


class Broken:
    """An array of a device that has failed."""

    def __array__(self, *args: object, **kwargs: object) -> np.ndarray:
        raise RuntimeError("device failed")


def test_an_array_that_cannot_be_read_is_refused() -> None:
    broken: Wrong = Broken()
    with pytest.raises(TokenError, match="device failed"):
        make_cache().match_prefix(broken)


@pytest.mark.parametrize(
    "tokens",
    [IDS, tuple(IDS), array("i", IDS), np.array(IDS, np.uint16), np.array(IDS)],
)
def test_all_spellings_give_one_key(tokens: Wrong) -> None:
    key = RadixKey(tokens)

    assert IDS == key.tokens.tolist()
    assert np.array(IDS, np.int32).tobytes() == key.raw


@pytest.mark.parametrize("tokens", [[1.5], [2**31], [[1]], "ab", [True], [None], 3])
def test_what_is_no_flat_list_of_ids_is_refused(tokens: Wrong) -> None:
    with pytest.raises(TokenError):
        RadixKey(tokens)
    key = RadixKey(IDS)
    with pytest.raises(TokenError):
        key.extend(tokens)

    assert IDS == key.tokens.tolist()


@pytest.mark.parametrize("token", [-1, 2**31, 2**80])
def test_no_other_token_is_appended(token: int) -> None:
    key = RadixKey(IDS)
    with pytest.raises(TokenError, match=f"got {token}"):
        key.append(token)

    assert IDS == key.tokens.tolist()


@pytest.mark.parametrize("token", [1.5, "a", None, True, np.float32(2)])
def test_no_other_thing_is_appended(token: Wrong) -> None:
    key = RadixKey(IDS)
    with pytest.raises(TokenError, match="must be integers"):
        key.append(token)

    assert IDS == key.tokens.tolist()


def test_a_namespace_that_has_no_hash_is_refused() -> None:
    unhashable: Wrong = ["tenant"]
    with pytest.raises(ConfigError, match="namespace must be hashable"):
        RadixKey(IDS, unhashable)


def test_a_namespace_is_given_once() -> None:
    cache = make_cache()
    key = RadixKey(IDS, "tenant")
    for call in (cache.match_prefix, cache.retain):
        with pytest.raises(ConfigError, match="a key has its namespace, 'tenant'"):
            call(key, "tenant")
    with pytest.raises(ConfigError, match="got 'other' too"):
        cache.admit(key, namespace="other")
    with pytest.raises(ConfigError, match="got 'other' too"):
        cache.admission_obstacle(key, 20, namespace="other")


def test_views_stay_as_they_are_when_a_key_grows() -> None:
    key = RadixKey([1, 2])
    before = key.tokens
    for token in range(3, 200):
        key.append(token)
    key.extend(range(200, 400))

    assert [1, 2] == before.tolist()
    assert [*range(1, 400)] == key.tokens.tolist()


def test_the_bytes_of_a_prompt_are_made_once_in_all_calls_of_its_life() -> None:
    cache = make_cache(100, page_size=4, max_context_len=300)
    key = RadixKey(np.arange(201, dtype=np.int32))
    raw = key.raw
    assert 0 == cache.match_prefix(key)
    assert cache.admission_obstacle(key, 210) is None
    request = cache.admit(key)
    assert request is not None
    assert request.awaited is raw
    compute(cache, request, 201)
    cache.cache_unfinished_req(request, key)
    key.extend([7, 8, 9])
    compute(cache, request, 204)
    cache.cache_finished_req(request, key)

    assert 200 * 4 == len(raw) - 4
    assert 204 == cache.match_prefix(key)


def test_nothing_may_be_added_and_to_nothing_too() -> None:
    key = RadixKey([])
    key.extend([])
    assert b"" == key.raw
    key.extend([1])
    key.extend(())
    key.append(2)

    assert [1, 2] == key.tokens.tolist()
    assert np.array([1, 2], np.int32).tobytes() == key.raw


def test_a_part_is_cut_from_the_bytes_that_are_there_or_made_alone() -> None:
    key = RadixKey(IDS)
    raw = key.raw
    key.append(14)
    key.append(15)

    assert (raw, 8, 16) == key.part(2, 4)
    assert key.part(0, 9)[0] is raw
    assert (np.array([13, 14], np.int32).tobytes(), 0, 8) == key.part(8, 10)


def test_a_virtual_token_must_be_alive_at_each_call() -> None:
    cache = make_cache(16, page_size=1)
    token = cache.intern(b"an image, told by its digest")
    key = RadixKey([1, token, token, 2])
    assert key.has_virtual
    request = cache.admit(key)
    assert request is not None
    compute(cache, request, 4)
    cache.cache_finished_req(request, key)
    assert 4 == cache.match_prefix(key)
    cache.evict(16)

    for call in (cache.match_prefix, cache.admit, cache.retain):
        with pytest.raises(TokenError, match="no virtual token that is alive"):
            call(key)
    cache.check_integrity()


def test_a_key_that_grows_by_a_virtual_token_has_one() -> None:
    key = RadixKey(IDS)
    assert not key.has_virtual
    key.extend([1, -3])

    assert key.has_virtual


def test_a_publication_refuses_a_virtual_token_that_is_not_alive() -> None:
    cache = make_cache(16, page_size=1)
    request = cache.admit([1, 2, 3])
    assert request is not None
    compute(cache, request, 3)
    with pytest.raises(TokenError, match="no virtual token that is alive"):
        cache.cache_unfinished_req(request, RadixKey([1, -5, 3]))

    assert 0 == request.protected_len


def test_a_chunk_cache_takes_keys_too() -> None:
    cache = make_chunk_cache()
    key = RadixKey(IDS, "tenant")
    request = cache.admit(key)
    assert request is not None
    assert request.namespace == "tenant"
    compute(cache, request, 9)
    cache.cache_finished_req(request, key)

    assert 0 == cache.match_prefix(key)


@pytest.mark.parametrize("first_goes_first", [True, False])
def test_one_key_may_run_in_two_epochs_at_a_time(first_goes_first: bool) -> None:
    cache = make_cache()
    key = RadixKey(IDS)
    requests = [cache.admit(key)]
    cache.bump_epoch(None)
    requests.append(cache.admit(key))
    for request in requests if first_goes_first else requests[::-1]:
        assert request is not None
        cache.release(request)
    again = cache.admit(key)
    assert again is not None
    report = again.hit_report

    assert report is not None
    assert 0 == report.num_unpublished_tokens
    cache.check_integrity()


def test_what_lacks_memory_is_no_wrong_token() -> None:
    class Large:
        def __array__(self, *args: object, **kwargs: object) -> np.ndarray:
            raise MemoryError

    large: Wrong = Large()
    with pytest.raises(MemoryError):
        RadixKey(large)


def test_debug_mode_names_a_key_in_its_calls() -> None:
    memory = MemoryManager(4, 4, max_num_requests=2, max_context_len=16)
    cache = RadixCache(memory, debug=True)
    key = RadixKey(IDS, "tenant")
    request = cache.admit(key)
    assert request is not None
    with pytest.raises(ConfigError):
        cache.admit(key, namespace="other")
    cache.release(request)

    assert repr(key) == "RadixKey(9 tokens, namespace='tenant')"

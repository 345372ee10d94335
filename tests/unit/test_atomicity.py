"""A refused call changes nothing: every method, every way to fail, every field.

The methods come from the classes, and the ways to fail from their docstrings: what has
no case in `refused_calls` fails. The fields are found by `deep_state`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from threading import Thread

import pytest

from radixkv.mem_cache import ChunkCache, PrefixCache, RadixCache, WrongThreadError

from .deep_state import changes, deep_state
from .driver import Wrong, docstring_of
from .refused_calls import CALLS, CASES, KINDS, RADIX, Case, Scene, make_scene

IGNORED = frozenset(
    {
        # How far a walk has come that eviction asked for; what comes next is the same.
        "StaleFirst._next",
        # What a clock said when it failed, for the message.
        "SteadyClock._failure",
    }
)


def methods_of(kind: type[PrefixCache]) -> Iterator[str]:
    for name in dir(kind):
        if name[0] != "_" and callable(getattr(kind, name)):
            yield name


def errors_of(kind: type[PrefixCache], method: str) -> set[str]:
    """The errors that the docstring of a method names, or that of its base class."""
    found: set[str] = set()
    for base in kind.__mro__:
        if method in vars(base):
            _, _, raises = docstring_of(base, method).partition("Raises:\n")
            raises, _, _ = raises.partition("\n\n")
            found.update(re.findall(r"^ +(\w+Error):", raises, re.M))
    return found


UNREACHABLE = {
    ("ChunkCache", "alloc_for_extend", "QuotaError"): "it has no quotas",
    ("ChunkCache", "alloc_for_decode", "QuotaError"): "it has no quotas",
    ("ChunkCache", "alloc_for_extend", "PolicyError"): "it evicts nothing",
    ("ChunkCache", "alloc_for_decode", "PolicyError"): "it evicts nothing",
    ("ChunkCache", "evict", "PolicyError"): "it evicts nothing",
    ("ChunkCache", "evict_if_needed", "PolicyError"): "it evicts nothing",
    ("ChunkCache", "eviction_order", "PolicyError"): "it evicts nothing",
    ("ChunkCache", "resize", "PolicyError"): "it evicts nothing",
}


@pytest.mark.parametrize("cache", [RadixCache, ChunkCache])
def test_every_method_and_every_error_of_its_docstring_has_a_case(
    cache: type[PrefixCache],
) -> None:
    kinds = {"chunk"} if cache is ChunkCache else set(RADIX)
    tried = {
        (case.method, case.error.__name__) for case in CASES if kinds & {*case.kinds}
    }
    missing = [
        (cache.__name__, method, error)
        for method in methods_of(cache)
        for error in sorted(errors_of(cache, method))
        if (method, error) not in tried
    ]

    assert {key for key in UNREACHABLE if key[0] == cache.__name__} == {*missing}
    assert {"admit", "evict"} <= {*methods_of(cache)}


def test_every_method_that_may_change_a_cache_is_called_from_another_thread() -> None:
    pure = {
        *("admission_obstacle", "check_integrity", "eviction_order"),
        *("match_prefix", "max_request_size", "namespace_stats", "slots", "stats"),
    }

    assert {*methods_of(RadixCache)} - pure == CALLS.keys()


def test_the_full_scene_has_everything_in_use() -> None:
    cache = make_scene("full").cache

    assert cache.memory.page_copies.pending
    assert cache.retained_size
    assert cache._output_marks._marked
    assert cache._virtual.users
    assert cache._explainer._ghosts.num_pages
    assert cache._explainer._in_flight._keys
    assert cache.namespace_stats("tenant").held_size
    assert {root.is_stale for root in cache._tree.roots} == {False, True}
    assert len(cache._tree.on_published) > 3


def check_refused(scene: Scene, call: Callable[[], object], error: type[Wrong]) -> None:
    before = deep_state(scene.cache, IGNORED)
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    assert not changes(before, deep_state(scene.cache, IGNORED))


@pytest.mark.parametrize(
    ("kind", "case"),
    [pytest.param(kind, case) for case in CASES for kind in case.kinds],
    ids=lambda value: str(value),
)
def test_a_refused_call_changes_nothing(kind: str, case: Case) -> None:
    scene = make_scene(kind)
    case.prepare(scene)

    check_refused(scene, lambda: case.call(scene, *case.arguments), case.error)


@pytest.mark.parametrize("kind", KINDS)
def test_debug_mode_finds_no_refused_call_that_changed_something(kind: str) -> None:
    for case in CASES:
        if kind in case.kinds:
            scene = make_scene(kind, debug=True)
            case.prepare(scene)
            with pytest.raises(case.error) as caught:
                case.call(scene, *case.arguments)
            assert type(caught.value) is case.error


@pytest.mark.parametrize("kind", KINDS)
def test_an_admission_without_a_row_changes_nothing(kind: str) -> None:
    scene = make_scene(kind)
    while scene.cache.admit([500]) is not None:
        pass
    scene.cache.stats()
    before = deep_state(scene.cache, IGNORED)

    assert scene.cache.admit(scene.of[scene.busy], namespace="new") is None
    assert not changes(before, deep_state(scene.cache, IGNORED))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", CALLS)
def test_a_call_from_another_thread_changes_nothing(method: str, kind: str) -> None:
    scene = make_scene(kind)
    if not hasattr(scene.cache, method):
        return
    errors: list[Exception] = []

    def attempt() -> None:
        try:
            CALLS[method](scene)
        except Exception as error:
            errors.append(error)

    def call_elsewhere() -> None:
        thread = Thread(target=attempt)
        thread.start()
        thread.join()
        raise errors[0]

    check_refused(scene, call_elsewhere, WrongThreadError)

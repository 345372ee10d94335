"""A cache with `debug=True`: checked after every call, and the last calls are told."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from radixkv.mem_cache import (
    PADDING_ROW,
    ChunkCache,
    IntegrityError,
    LengthError,
    MemoryManager,
    PolicyError,
    PrefixCache,
    RadixCache,
    RadixNode,
    RequestHandle,
    RequestKV,
)
from radixkv.mem_cache.debug_log import NUM_OPERATIONS
from radixkv.mem_cache.sizes import Integer

from .driver import Wrong, admit, insert, make_memory, run, span

MODULES = Path(__file__).parents[2] / "mem_cache"
PURE = {
    "admission_obstacle",
    "eviction_order",
    "match_prefix",
    "max_request_size",
    "namespace_stats",
    "slots",
    "stats",
}
"""Methods that change nothing, so that nobody has to see them."""


def make_debug_cache(**sizes: int) -> RadixCache:
    return RadixCache(make_memory(**sizes), debug=True)


def public_methods(module: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the public methods of the cache in a module."""
    tree = ast.parse((MODULES / f"{module}.py").read_text())
    for kind in tree.body:
        if isinstance(kind, ast.ClassDef) and kind.name.endswith("Cache"):
            for method in kind.body:
                if isinstance(method, ast.FunctionDef) and has_own_body(method):
                    yield f"{kind.name}.{method.name}", method


def has_own_body(method: ast.FunctionDef) -> bool:
    decorators = {ast.unparse(decorator) for decorator in method.decorator_list}
    return method.name[0] != "_" and not decorators & {"property", "abstractmethod"}


METHODS = {
    name: method
    for module in ("prefix_cache", "radix_cache", "chunk_cache")
    for name, method in public_methods(module)
    if method.name not in PURE
}


def test_the_methods_are_found() -> None:
    assert {"PrefixCache.admit", "PrefixCache.cache_unfinished_req"} <= METHODS.keys()


@pytest.mark.parametrize("name", METHODS)
def test_a_watch_sees_every_method_that_may_change_a_cache(name: str) -> None:
    method = METHODS[name]
    has_text = ast.get_docstring(method) is not None
    first = ast.unparse(method.body[has_text])
    _, *by_place = [argument.arg for argument in method.args.args]
    by_name = [f"{argument.arg}={argument.arg}" for argument in method.args.kwonlyargs]
    arguments = ", ".join([f"self.{method.name}", *by_place, *by_name])

    # It must pass through the watch, or be listed as one that changes nothing.
    assert re.fullmatch(
        r"if self\.watch is not None( and self\.watch\.log is not None)?:\n"
        r"    return self\.watch\.call\(" + re.escape(arguments) + r"\)",
        first,
    )


def calls_of(error: pytest.ExceptionInfo[IntegrityError]) -> list[str]:
    """The calls in a report, without their numbers."""
    _, title, calls = str(error.value).partition("the last calls, ")
    assert title, str(error.value)
    return [line.partition(" ")[2] for line in calls.splitlines()[1:]]


Call = Callable[[PrefixCache, RequestKV], object]
CALLS: dict[str, Call] = {
    "admit": lambda cache, request: cache.admit([1]),
    "intern": lambda cache, request: cache.intern(b"0123456789abcdef"),
    "alloc_for_extend": lambda cache, request: cache.alloc_for_extend([request], [9]),
    "alloc_for_decode": lambda cache, request: cache.alloc_for_decode([request]),
    "commit": lambda cache, request: cache.commit(request, 8),
    "truncate": lambda cache, request: cache.truncate(request, 8),
    "cache_unfinished_req": lambda cache, request: cache.cache_unfinished_req(
        request, span(1, 8)
    ),
    "cache_finished_req": lambda cache, request: cache.cache_finished_req(
        request, span(1, 8)
    ),
    "release": lambda cache, request: cache.release(request),
    "evict": lambda cache, request: cache.evict(1),
    "evict_if_needed": lambda cache, request: cache.evict_if_needed(1),
    "bump_epoch": lambda cache, request: cache.bump_epoch(None),
    "resize": lambda cache, request: cache.resize(15),
    "reset, refused": lambda cache, request: cache.reset(),
    "commit, refused": lambda cache, request: cache.commit(request, 9),
    "resize, refused": lambda cache, request: cache.resize(0),
}


@pytest.mark.parametrize("kind", [RadixCache, ChunkCache])
@pytest.mark.parametrize("name", CALLS)
def test_a_fault_is_found_after_the_call_and_the_calls_before_are_told(
    kind: type[RadixCache | ChunkCache], name: str
) -> None:
    cache = kind(make_memory(), debug=True)
    request = run(cache, span(1, 8))
    cache.memory.request_table.rows[PADDING_ROW] += b"\1\0\0\0"
    with pytest.raises(IntegrityError, match="the padding row lists") as caught:
        CALLS[name](cache, request)

    method = name.partition(",")[0]
    calls = calls_of(caught)
    kinds = [call.partition("(")[0] for call in calls]
    assert ["admit", "alloc_for_extend", "commit", method] == kinds


def row(committed_len: int, allocated_len: int) -> str:
    return f"row 1 (protected 0, committed {committed_len}, allocated {allocated_len})"


def test_a_call_is_told_with_its_arguments_its_result_and_the_sizes() -> None:
    cache = make_debug_cache()
    tokens = np.arange(10)
    request = cache.admit(tokens, namespace="a", priority=2)
    assert request is not None
    cache.alloc_for_extend([request], [10])
    cache.commit(request, 10)
    with pytest.raises(LengthError):
        cache.commit(request, 9)
    cache.cache_finished_req(request, tokens)
    cache.evict(1)
    cache.memory.allocator.alloc(1)
    with pytest.raises(IntegrityError) as caught:
        cache.bump_epoch(None)

    start = "64 free, 0 evictable, 0 protected, 0 held"
    held = "52 free, 0 evictable, 0 protected, 12 held"
    admitted, *calls = calls_of(caught)
    assert admitted.startswith("admit([0, 1, 2, 3, 4, 5, ... 10 in all], namespace='a'")
    assert admitted.endswith(f" -> {row(0, 0)} | {start}")
    assert [
        f"alloc_for_extend([{row(0, 0)}], [10]) -> 1 rows, 3 new pages | {held}",
        f"commit({row(0, 10)}, 10) | {held}",
        f"commit({row(10, 10)}, 9) raised LengthError: new_len must be in 10..10, "
        f"got 9 | {held}",
        f"cache_finished_req({row(10, 10)}, [0, 1, 2, 3, 4, 5, ... 10 in all], "
        "prompt_len=None) | 56 free, 8 evictable, 0 protected, 0 held",
        "evict(1) -> 4 | 60 free, 4 evictable, 0 protected, 0 held",
        "bump_epoch(None) | 56 free, 4 evictable, 0 protected, 0 held",
    ] == calls


def test_only_the_last_calls_are_kept() -> None:
    cache = make_debug_cache()
    for i in range(NUM_OPERATIONS + 9):
        cache.evict(i)
    cache.memory.allocator.alloc(1)
    with pytest.raises(IntegrityError) as caught:
        cache.evict(0)

    calls = str(caught.value).splitlines()[-NUM_OPERATIONS - 1 :]
    assert (
        "the last calls, the newest at the end, and the sizes after each:" == calls[0]
    )
    assert calls[1].startswith("#11 evict(10) -> 0 | ")
    assert calls[-1].startswith("#74 evict(0) -> 0 | ")


def test_the_callers_own_check_tells_the_calls_as_well() -> None:
    cache = make_debug_cache()
    cache.evict(1)
    cache.memory.allocator.alloc(1)
    with pytest.raises(IntegrityError, match="page 1 has no owner") as caught:
        cache.check_integrity()

    kinds = [call.partition(" |")[0] for call in calls_of(caught)]
    assert ["evict(1) -> 0", "check_integrity() found a fault"] == kinds


def test_without_debug_a_report_has_no_calls() -> None:
    cache = RadixCache(make_memory())
    cache.evict(1)
    cache.memory.allocator.alloc(1)
    with pytest.raises(IntegrityError) as caught:
        cache.check_integrity()

    assert "the last calls" not in str(caught.value)
    assert cache.watch is None


class Sloppy(RadixCache):
    """A cache that changes something before it refuses a call."""

    def __init__(self, memory: MemoryManager, change: Call, **options: Wrong) -> None:
        super().__init__(memory, debug=True, **options)
        self.change = change

    def truncate(self, request: RequestHandle, new_len: Integer) -> None:
        if self.watch is not None:
            return self.watch.call(self.truncate, request, new_len)
        self.change(self, self._check(request))
        raise LengthError("refused")


def set_in(owner: Callable[[Wrong, RequestKV], Wrong], name: str) -> Call:
    """Set an attribute to something else that the integrity check lets through."""

    def change(cache: Wrong, request: RequestKV) -> None:
        value = getattr(owner(cache, request), name)
        setattr(owner(cache, request), name, value + 1 if value is not None else 1)

    return change


def the_request(cache: Wrong, request: RequestKV) -> Wrong:
    return request


def the_node(cache: Wrong, request: RequestKV) -> Wrong:
    return next(iter(cache._tree.nodes()))


def swap_free_pages(cache: Wrong, request: RequestKV) -> None:
    one, other = cache.memory.allocator.alloc(2)
    cache.memory.allocator.free([one])
    cache.memory.allocator.free([other])


def swap_free_rows(cache: Wrong, request: RequestKV) -> None:
    one, other = (cache.memory.request_table.alloc() for _ in range(2))
    cache.memory.request_table.free(one)
    cache.memory.request_table.free(other)


def swap_row(cache: Wrong, request: RequestKV) -> None:
    row = request.pages
    row[8:16] = row[12:16] + row[8:12]


def swap_victims(cache: Wrong, request: RequestKV) -> None:
    index = cache._tree.index
    victim = index.first()
    index.protect(victim)
    index.release(victim)


def retain_first_page(cache: Wrong, request: RequestKV) -> None:
    cache.retain(span(1, 4))


def bound_namespace(cache: Wrong, request: RequestKV) -> None:
    cache.set_quota(None, floor_size=4)


def forget_prompt(cache: Wrong, request: RequestKV) -> None:
    cache._explainer.end(request)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda cache, request: cache.resize(17), "capacity, free list, statistics"),
        (swap_free_pages, "free list"),
        (swap_free_rows, "free rows"),
        (swap_row, "rows"),
        (
            lambda cache, request: cache.evict(1),
            "free list, nodes, order of eviction, ghosts, statistics",
        ),
        (
            lambda cache, request: cache.admit([9], namespace="b"),
            "free rows, requests, namespaces, nodes, ghosts, statistics",
        ),
        (lambda cache, request: cache.bump_epoch("empty"), None),
        (lambda cache, request: cache.bump_epoch(None), "namespaces"),
        (set_in(the_request, "priority"), "requests"),
        (set_in(the_request, "num_known_pages"), "requests"),
        (set_in(the_node, "num_hits"), "nodes"),
        (set_in(the_node, "created"), "nodes"),
        (set_in(the_node, "last_use"), "nodes"),
        (set_in(the_node, "priority"), "nodes"),
        (swap_victims, "order of eviction"),
        (lambda cache, request: cache.intern(b"x" * 16), "contents, statistics"),
        (retain_first_page, "grants"),
        (bound_namespace, "quotas"),
        (forget_prompt, "prompts in flight"),
    ],
)
def test_a_refused_call_that_changed_something_is_found(
    change: Call, parts: str | None
) -> None:
    cache = Sloppy(make_memory(), change)
    insert(cache, [*span(1, 4), *span(60, 63)])
    insert(cache, [*span(1, 4), *span(70, 77)])
    request = run(cache, [*span(1, 4), *span(50, 60)])
    request.num_known_pages -= 1
    with pytest.raises(LengthError if parts is None else IntegrityError) as caught:
        cache.truncate(request, 4)

    if parts is not None:
        first, *_ = str(caught.value).splitlines()
        assert f"truncate was refused, but changed: {parts}" == first
        cause = caught.value.__context__
        assert isinstance(cause, LengthError)


def test_marks_of_outputs_are_compared_as_well() -> None:
    def forget_marks(cache: Wrong, request: RequestKV) -> None:
        cache._output_marks._marked.clear()

    cache = Sloppy(make_memory(), forget_marks, outputs_first=True)
    request = run(cache, span(1, 12))
    cache.cache_unfinished_req(request, span(1, 12), prompt_len=4)

    with pytest.raises(IntegrityError, match=r"but changed: output marks\n"):
        cache.truncate(request, 12)


def test_no_row_is_told_and_changes_nothing() -> None:
    cache = make_debug_cache(max_num_requests=1)
    admit(cache, [1])

    assert cache.admit([2]) is None
    cache.memory.allocator.alloc(1)
    with pytest.raises(IntegrityError) as caught:
        cache.admit([3])
    assert calls_of(caught)[-1].startswith("admit([3], namespace=None")
    assert ") | 60 free" in calls_of(caught)[-1]


def test_no_row_is_no_excuse_for_a_change() -> None:
    class Sloppier(RadixCache):
        def admit(self, tokens: Wrong, **options: Wrong) -> RequestKV | None:
            if self.watch is not None:
                return self.watch.call(self.admit, tokens, **options)
            return None if super().evict(1) else super().admit(tokens, **options)

    cache = Sloppier(make_memory(), debug=True)
    insert(cache, span(1, 4))
    with pytest.raises(IntegrityError, match="admit was refused, but changed: free li"):
        cache.admit([2])


def test_a_call_inside_a_call_is_not_told_by_itself() -> None:
    cache = make_debug_cache()
    insert(cache, span(1, 8))  # finishing publishes
    cache.memory.allocator.alloc(1)
    with pytest.raises(IntegrityError) as caught:
        cache.evict(0)

    kinds = [call.partition("(")[0] for call in calls_of(caught)]
    assert "cache_finished_req" in kinds
    assert "cache_unfinished_req" not in kinds


class Unshowable:
    """A namespace without a representation."""

    def __repr__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    "tokens", [list(range(10**6)), np.arange(10**6), tuple(range(10**6))]
)
def test_long_arguments_are_told_in_short(tokens: Sequence[int]) -> None:
    cache = make_debug_cache(max_context_len=2**20)
    admit(cache, tokens, "x" * 10**6)  # type: ignore[arg-type]
    admit(cache, [1], Unshowable())
    cache.memory.allocator.alloc(1)
    with pytest.raises(IntegrityError) as caught:
        cache.evict(0)

    assert len(str(caught.value)) < 2000
    assert "admit([0, 1, 2, 3, 4, 5, ... 1000000 in all]" in str(caught.value)


@pytest.mark.parametrize("tokens", [np.array(5), np.zeros((2, 2)), {1}, 7, [[1], [2]]])
def test_arguments_of_any_kind_are_told(tokens: Wrong) -> None:
    with pytest.raises(ValueError, match="token"):
        make_debug_cache().admit(tokens)


def test_errors_that_are_no_refusal_pass_as_well() -> None:
    class Odd:
        def __hash__(self) -> int:
            return 1

        def __eq__(self, other: object) -> bool:
            raise RuntimeError("not comparable")

    cache = make_debug_cache()
    insert(cache, span(1, 4), namespace=Odd())
    with pytest.raises(RuntimeError, match="not comparable"):
        cache.admit(span(1, 4), namespace=Odd())

    cache.check_integrity()


def test_a_policy_that_failed_is_no_fault_of_the_cache() -> None:
    class Fails:
        def key(self, node: RadixNode) -> int:
            raise KeyError

    cache = RadixCache(make_memory(), Fails(), debug=True)
    insert(cache, span(1, 4))
    cache.bump_epoch(None)
    insert(cache, span(1, 4))
    for call in (cache.evict, cache.evict_if_needed):
        with pytest.raises(PolicyError):
            call(64)


def test_a_policy_that_fails_when_a_grant_ends_is_no_fault_of_the_cache() -> None:
    class Moody:
        fails = False

        def key(self, node: RadixNode) -> int:
            if self.fails:
                raise KeyError
            return node.num_hits

    now = 0.0
    policy = Moody()
    cache = RadixCache(make_memory(), policy, clock=lambda: now, debug=True)
    insert(cache, span(1, 8))
    cache.retain(span(1, 8), ttl=1.0)
    now, policy.fails = 2.0, True

    with pytest.raises(PolicyError):
        cache.evict(4)


def slots_of(kind: Wrong) -> Sequence[str]:
    """The names of all attributes, whether the class is compiled or not."""
    return kind.__slots__ if hasattr(kind, "__slots__") else kind.__mypyc_attrs__


def test_slots_of_nodes_and_requests_are_all_compared() -> None:
    """By their names, so that a new attribute is not forgotten."""
    seen = (MODULES / "cache_state.py").read_text()
    nodes = {name for name in slots_of(RadixNode) if f"node.{name}," not in seen}
    requests = {name for name in slots_of(RequestKV) if f"kv.{name}," not in seen}

    # These follow from the others.
    assert {"children", "newer", "older", "place", "root"} == nodes
    assert {"awaited", "owner", "pages", "quota"} == requests

"""What every eviction policy must do: checks for a policy of your own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky

from ..errors import PolicyError
from ..eviction_policies import EvictionPolicy
from ..memory_manager import MemoryManager
from ..radix_cache import RadixCache
from ..radix_node import RadixNode
from ..request_kv import RequestKV
from .strategies import page_kinds, spell

_NUM_PAGES = 24
_NUM_ROWS = 3
_MAX_NUM_PAGES = 6


class _Visit(NamedTuple):
    """A request that begins with some pages of the one before it.

    Attributes:
        num_kept: Pages that it shares with the one before it.
        kinds: The pages behind them.
        priority: Its priority.
        how: Whether it is published, and whether it finishes or is aborted.
    """

    num_kept: int
    kinds: list[int]
    priority: int
    how: str


_visits = st.lists(
    st.builds(
        _Visit,
        st.integers(0, 3),
        page_kinds(_MAX_NUM_PAGES - 3),
        st.integers(0, 2),
        st.sampled_from(["finish", "finish", "publish", "run", "abort"]),
    ),
    min_size=1,
    max_size=12,
)


def check_policy(
    make_policy: Callable[[], EvictionPolicy], *, max_examples: int = 100
) -> None:
    """Check that a policy keeps the promises of `EvictionPolicy`.

    It serves random traces with a cache of its own for each, and checks that

    * keys equal themselves and compare with all others, one way only;
    * the key of a leaf stays the same until the leaf is used again, whatever happens to
      its neighbours, and when pages are cut off its tail;
    * asking for a key changes nothing in the node;
    * the same trace gives the same order of eviction, with a fresh policy each time;
    * no method fails, and the cache stays sound and can be emptied.

    Args:
        make_policy: Makes a fresh policy, as the class itself does.
        max_examples: Traces to try.

    Raises:
        AssertionError: A promise is broken; Hypothesis adds the smallest trace that
            shows it.

    Example:
        >>> from radixkv.mem_cache import LFU
        >>> check_policy(LFU, max_examples=5)
    """

    # The same traces each time: a policy passes, or it does not.
    @settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        database=None,
        report_multiple_bugs=False,
    )
    @given(_visits, st.sampled_from([1, 2, 4]))
    def check(visits: list[_Visit], page_size: int) -> None:
        one, other = (_order(make_policy(), visits, page_size) for _ in range(2))
        assert one == other, (
            "the same trace must give the same order of eviction, with a fresh policy "
            f"each time; got {one}, then {other}"
        )

    try:
        check()
    except Flaky as error:
        raise AssertionError(
            f"a policy must do the same in every run, got\n{error}"
        ) from error


def _order(
    policy: EvictionPolicy, visits: list[_Visit], page_size: int
) -> list[list[int]]:
    """Serve a trace; returns the pages in the order of eviction after each step."""
    try:
        return _Life(policy, page_size).serve(visits)
    except PolicyError as error:
        if isinstance(error.__cause__, AssertionError):
            raise error.__cause__ from None  # a promise is broken
        raise AssertionError(f"no method may fail: {error}") from error.__cause__


class _Life:
    """Serves one trace, and looks at all evictable leaves after each step."""

    def __init__(self, policy: EvictionPolicy, page_size: int) -> None:
        self._policy = _CheckedPolicy(policy)
        self._page_size = page_size
        memory = MemoryManager(
            _NUM_PAGES,
            page_size,
            max_num_requests=_NUM_ROWS,
            max_context_len=(_MAX_NUM_PAGES + 1) * page_size,
        )
        self._cache = RadixCache(memory, self._policy)
        self._running: list[tuple[RequestKV, list[int]]] = []
        self._orders: list[list[int]] = []

    def serve(self, visits: list[_Visit]) -> list[list[int]]:
        """Return what would go, page by page, after each step."""
        before: list[int] = []
        for visit in visits:
            before = self._tokens(visit, before)
            if len(self._running) == _NUM_ROWS:
                self._finish()
            self._visit(before, visit)
            self._look()
        while self._running:
            self._finish()
            self._look()
        while self._cache.evict(1):
            self._look()
        cached = self._cache.evictable_size
        assert not cached, f"all must be evictable in the end, got {cached} tokens left"
        return self._orders

    def _tokens(self, visit: _Visit, before: list[int]) -> list[int]:
        kept = before[: visit.num_kept * self._page_size]
        return [*kept, *spell(self._page_size, visit.kinds)] or [0]

    def _visit(self, tokens: list[int], visit: _Visit) -> None:
        # The last token is computed only, so that all pages can be hits.
        request = self._cache.admit([*tokens, 0], priority=visit.priority)
        assert request is not None
        self._cache.alloc_for_extend([request], [len(tokens) + 1])
        self._cache.commit(request, len(tokens) + 1)
        if visit.how == "abort":
            self._cache.release(request)
            return
        self._running.append((request, [*tokens, 0]))
        if visit.how == "finish":
            self._finish()
        elif visit.how == "publish":
            self._cache.cache_unfinished_req(request, [*tokens, 0])

    def _finish(self) -> None:
        request, tokens = self._running.pop(0)
        self._cache.cache_finished_req(request, tokens)

    def _look(self) -> None:
        self._policy.check_leaves()
        self._orders.append(
            [victim.page for victim in self._cache.eviction_order(_NUM_PAGES)]
        )
        self._cache.check_integrity()


class _CheckedPolicy:
    """Passes all questions on, and remembers the answers."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._keys: dict[RadixNode, Any] = {}
        # The cache asks which of these methods there are.
        for name in ("used", "published", "evicted"):
            with suppress(AttributeError):
                setattr(self, name, getattr(policy, name))

    def __repr__(self) -> str:
        return repr(self._policy)

    def key(self, node: RadixNode) -> Any:  # noqa: ANN401 - whatever compares
        before = _facts(node)
        key = self._ask(node)
        assert _facts(node) == before, f"{self!r}: key must not change {node!r}"
        assert _equal(key, key), f"{self!r}: a key must equal itself, got {key!r}"
        for other in self._keys.values():
            ways = [bool(key < other), bool(other < key), _equal(key, other)]
            assert sum(ways) == 1, (
                f"{self!r}: of two keys one must be less, or both equal, "
                f"got {key!r} and {other!r}"
            )
        self._keys[node] = key
        return key

    def _ask(self, node: RadixNode) -> Any:  # noqa: ANN401 - whatever compares
        try:
            return self._policy.key(node)
        except Exception as error:
            raise AssertionError(f"{self!r}: key must not fail: {error!r}") from error

    def check_leaves(self) -> None:
        """Ask for the keys of all evictable leaves again."""
        for node, key in list(self._keys.items()):
            if not node.pages or node.lock_ref or node.children:
                del self._keys[node]
                continue
            again = self._ask(node)
            assert _equal(again, key), (
                f"{self!r}: the key of a leaf must stay the same until its next use, "
                f"got {key!r}, then {again!r}"
            )


def _equal(one: Any, other: Any) -> bool:  # noqa: ANN401 - whatever compares
    return bool(one == other)


def _facts(node: RadixNode) -> tuple[object, ...]:
    return (
        *(node.key, node.pages, node.parent, node.root, list(node.children.items())),
        *(node.lock_ref, node.num_hits, node.created, node.last_use, node.priority),
    )

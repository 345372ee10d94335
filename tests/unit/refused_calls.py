"""Calls that a cache must refuse: of every method, and in every way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from radixkv.mem_cache import (
    CacheBusyError,
    ChunkCache,
    ConfigError,
    IntegrityError,
    KVCacheInfo,
    LengthError,
    MemoryManager,
    OutOfContentsError,
    OutOfPagesError,
    PagesInUseError,
    PolicyError,
    PoolSizeError,
    PrefixCache,
    QuotaError,
    RadixCache,
    RadixKey,
    RadixNode,
    RequestKV,
    RequestStateError,
    TokenError,
)

from .driver import Wrong, admit, compute, insert, make_cache, run, span

KINDS = ("full", "plain", "chunk")
"""A cache with everything in use, one with prefixes only, and one without these."""

RADIX = ("full", "plain")

IMAGE, SOUND, VIDEO, TEXT = b"i" * 16, b"s" * 16, b"v" * 16, b"t" * 16


class Moody:
    """A policy that fails when it is told to.

    Attributes:
        fails: Whether it does now.
    """

    def __init__(self) -> None:
        self.fails = False

    def key(self, node: RadixNode) -> int:
        if self.fails:
            raise KeyError
        return node.num_hits


class Odd:
    """A namespace that is like no other, and says so."""

    def __repr__(self) -> str:
        return "Odd()"

    def __hash__(self) -> int:
        return hash("tenant")

    def __eq__(self, other: object) -> bool:
        raise ZeroDivisionError


@dataclass
class Scene:
    """A cache in the middle of its work.

    Attributes:
        cache: The cache.
        policy: What it evicts by, where it has such a thing.
        old: Has computed 11 tokens, in an epoch that is over if there are any.
        busy: Has computed 11 of its 14 tokens, and has a slot for one more.
        tenant: Has computed 9 tokens in the namespace "tenant".
        blocker: Has computed 12 tokens; uses up pages.
        fresh: Was admitted with a hit, and has no pages of its own.
        gone: Was released.
        of: What they were admitted with.
    """

    cache: Wrong
    policy: Moody
    old: RequestKV
    busy: RequestKV
    tenant: RequestKV
    blocker: RequestKV
    fresh: RequestKV
    gone: RequestKV
    of: dict[RequestKV, list[int]] = field(default_factory=dict)

    def num_used_pages(self) -> int:
        used: int = self.cache.total_size - self.cache.available_size
        return used // 4


def make_scene(kind: str, *, debug: bool = False) -> Scene:
    memory = MemoryManager(28, 4, max_num_requests=6, max_context_len=64)
    policy = Moody()
    cache: PrefixCache
    if kind == "chunk":
        cache = ChunkCache(memory, max_num_contents=3, debug=debug)
    elif kind == "plain":
        cache = RadixCache(memory, policy, max_num_contents=3, debug=debug)
    else:
        cache = RadixCache(
            memory,
            policy,
            retention_share=0.5,
            clock=lambda: 5.0,
            outputs_first=True,
            partial_pages=True,
            max_num_contents=3,
            debug=debug,
        )
    prompt = [*span(1, 4), cache.intern(IMAGE), *span(6, 14)]
    answer = run(cache, prompt)
    cache.cache_finished_req(answer, prompt, prompt_len=6)
    insert(cache, span(20, 31), "tenant")
    insert(cache, span(40, 47), "tenant")
    insert(cache, span(40, 47), "old")
    old = run(cache, span(40, 50), "old")
    if isinstance(cache, RadixCache) and kind == "full":
        use_everything(cache, prompt)
    gone = run(cache, span(70, 75))
    blocker = run(cache, span(60, 71))
    mixed = [*span(1, 4), cache.intern(IMAGE), 7, *span(90, 97)]
    busy = admit(cache, mixed)
    compute(cache, busy, 11)
    cache.alloc_for_decode([busy])
    tenant = run(cache, span(20, 28), "tenant")
    fresh = admit(cache, [*span(1, 4), 200, 201])
    cache.release(gone)
    if kind == "full":
        cache.resize(20)
    cache.stats()  # counts what was not counted yet
    of = {old: span(40, 50), busy: mixed, tenant: span(20, 28), gone: span(70, 75)}
    return Scene(cache, policy, old, busy, tenant, blocker, fresh, gone, of)


def use_everything(cache: RadixCache, prompt: list[int]) -> None:
    cache.set_quota("tenant", floor_size=8, ceiling_size=32)
    cache.set_quota("idle", floor_size=4)
    cache.retain(prompt, priority=2, ttl=9.0)
    cache.retain(span(20, 31), "tenant")
    insert(cache, span(100, 111))
    cache.evict(8)
    cache.bump_epoch("old")
    insert(cache, span(40, 47), "old")


# What must happen before -----------------------------------------------------


def use_all_contents(scene: Scene) -> None:
    admit(scene.cache, [scene.cache.intern(SOUND), scene.cache.intern(VIDEO)])


def forget_content(scene: Scene) -> None:
    """Claims are dropped where there is no room, the oldest first."""
    scene.of[scene.gone] = [scene.cache.intern(SOUND)]
    scene.cache.intern(VIDEO)
    scene.cache.intern(TEXT)


def break_policy(scene: Scene) -> None:
    """It fails when a leaf becomes evictable, so the next eviction is refused."""
    scene.policy.fails = True
    insert(scene.cache, span(900, 903))


def lose_a_page(scene: Scene) -> None:
    scene.cache.evict(4)
    scene.cache.memory.allocator.alloc(1)


class FixedPool:
    """Has twenty pages."""

    num_pages = 20


POOL = FixedPool()


def join_a_pool(scene: Scene) -> None:
    scene.cache.memory.join(POOL)


def raise_a_floor(scene: Scene) -> None:
    scene.cache.set_quota("idle", floor_size=7 * 4)


def nothing(scene: Scene) -> None:
    pass


# The calls ------------------------------------------------------------------

Call: TypeAlias = Callable[..., object]


@dataclass(frozen=True)
class Case:
    """A call that must fail.

    Attributes:
        method: Of which method.
        error: How.
        call: The call, given the scene and the arguments.
        arguments: What is wrong with it, if not the scene.
        kinds: The caches in which it fails.
        prepare: What must happen before.
    """

    method: str
    error: type[BaseException]
    call: Call
    arguments: tuple[Wrong, ...] = ()
    kinds: tuple[str, ...] = KINDS
    prepare: Call = nothing

    def __str__(self) -> str:
        shown = ", ".join(map(repr, self.arguments)) or self.prepare.__name__
        return f"{self.method}-{self.error.__name__}-{shown[:30]}"


CASES: list[Case] = []


def refuse(
    method: str,
    error: type[BaseException],
    call: Call,
    values: Sequence[Wrong] = (),
    *,
    kinds: tuple[str, ...] = KINDS,
    prepare: Call = nothing,
) -> None:
    """Add a case, or one for each of some values."""
    if values:
        CASES.extend(Case(method, error, call, (x,), kinds, prepare) for x in values)
    else:
        CASES.append(Case(method, error, call, (), kinds, prepare))


CALLS: dict[str, Call] = {
    "admit": lambda s: s.cache.admit([1]),
    "alloc_for_decode": lambda s: s.cache.alloc_for_decode([s.busy]),
    "alloc_for_extend": lambda s: s.cache.alloc_for_extend([s.busy], [14]),
    "begin_step": lambda s: s.cache.begin_step(),
    "bump_epoch": lambda s: s.cache.bump_epoch(None),
    "cache_finished_req": lambda s: s.cache.cache_finished_req(s.busy, s.of[s.busy]),
    "cache_unfinished_req": lambda s: s.cache.cache_unfinished_req(
        s.busy, s.of[s.busy]
    ),
    "commit": lambda s: s.cache.commit(s.busy, 12),
    "evict": lambda s: s.cache.evict(4),
    "evict_if_needed": lambda s: s.cache.evict_if_needed(96),
    "intern": lambda s: s.cache.intern(IMAGE),
    "recall": lambda s: s.cache.recall(s.cache.alloc_for_decode([])),
    "release": lambda s: s.cache.release(s.busy),
    "reset": lambda s: s.cache.reset(),
    "resize": lambda s: s.cache.resize(40),
    "retain": lambda s: s.cache.retain(span(20, 31), "tenant"),
    "set_quota": lambda s: s.cache.set_quota(None, floor_size=4),
    "truncate": lambda s: s.cache.truncate(s.busy, 11),
}
"""A call of each method that may change a cache."""

# Tokens, namespaces, requests and sizes that are none ------------------------

for _method, _call in {
    "admit": lambda s, tokens: s.cache.admit(tokens),
    "admission_obstacle": lambda s, tokens: s.cache.admission_obstacle(tokens, 9),
    "match_prefix": lambda s, tokens: s.cache.match_prefix(tokens),
    "retain": lambda s, tokens: s.cache.retain(tokens),
}.items():
    refuse(
        _method,
        TokenError,
        _call,
        [[0, -77], [2**31], [0.5], [[1], [2]], 7, ["a"], [True], [-(2**31)]],
        kinds=RADIX if _method == "retain" else KINDS,
    )

for _method, _call in {
    "admit": lambda s, name: s.cache.admit([1, 2], namespace=name),
    "admission_obstacle": lambda s, name: s.cache.admission_obstacle(
        [1, 2], 9, namespace=name
    ),
    "match_prefix": lambda s, name: s.cache.match_prefix([1, 2], name),
    "bump_epoch": lambda s, name: s.cache.bump_epoch(name),
    "max_request_size": lambda s, name: s.cache.max_request_size(name),
    "retain": lambda s, name: s.cache.retain([1, 2], name),
    "set_quota": lambda s, name: s.cache.set_quota(name, floor_size=1),
    "namespace_stats": lambda s, name: s.cache.namespace_stats(name),
}.items():
    _kinds = RADIX if _method in ("retain", "set_quota", "namespace_stats") else KINDS
    refuse(_method, ConfigError, _call, [[], {}, ([],)], kinds=_kinds)
    # What the caller's own code raises passes through.
    _kinds = ("full",) if _method == "max_request_size" else RADIX
    refuse(_method, ZeroDivisionError, _call, [Odd()], kinds=_kinds)

for _method, _call in {
    "alloc_for_extend": lambda s, kv: s.cache.alloc_for_extend([s.busy, kv], [14, 60]),
    "alloc_for_decode": lambda s, kv: s.cache.alloc_for_decode([s.busy, kv]),
    "commit": lambda s, kv: s.cache.commit(kv, 1),
    "truncate": lambda s, kv: s.cache.truncate(kv, 1),
    "cache_unfinished_req": lambda s, kv: s.cache.cache_unfinished_req(kv, [1] * 64),
    "cache_finished_req": lambda s, kv: s.cache.cache_finished_req(kv, [1] * 64),
    "release": lambda s, kv: s.cache.release(kv),
    "slots": lambda s, kv: s.cache.slots(kv),
    "admission_obstacle": lambda s, kv: s.cache.admission_obstacle(
        [1, 2], 9, released=[s.busy, kv]
    ),
}.items():
    refuse(
        _method,
        RequestStateError,
        _call,
        [None, 5, "request", admit(make_cache(), [1])],
    )
    refuse(_method, RequestStateError, lambda s, call=_call: call(s, s.gone))

for _method, _call in {
    "commit": lambda s, n: s.cache.commit(s.busy, n),
    "truncate": lambda s, n: s.cache.truncate(s.busy, n),
    "alloc_for_extend": lambda s, n: s.cache.alloc_for_extend([s.busy], [n]),
    "evict": lambda s, n: s.cache.evict(n),
    "evict_if_needed": lambda s, n: s.cache.evict_if_needed(n),
    "eviction_order": lambda s, n: s.cache.eviction_order(n),
    "slots": lambda s, n: s.cache.slots(s.busy, n),
    "admission_obstacle": lambda s, n: s.cache.admission_obstacle([1, 2], n),
}.items():
    refuse(_method, LengthError, _call, [-1, 1.5, "1", None, True])


for _method in ("cache_unfinished_req", "cache_finished_req"):
    refuse(
        _method,
        ConfigError,
        lambda s, key, method=_method: getattr(s.cache, method)(s.busy, key),
        [RadixKey([1] * 64, "another"), RadixKey([1] * 64, 7)],
    )


def begin_step_of_one(s: Scene) -> None:
    s.cache.begin_step().extend([s.busy], [14])


for _method in ("alloc_for_decode", "alloc_for_extend", "begin_step"):
    refuse(_method, RequestStateError, CALLS[_method], prepare=begin_step_of_one)

refuse(
    "recall",
    RequestStateError,
    lambda s, info: s.cache.recall(info),
    [None, 5, b"message", KVCacheInfo(0, 0, b""), KVCacheInfo(9, 0, b"")],
)

# What may be in the way of a request ------------------------------------------

refuse(
    "admission_obstacle",
    LengthError,
    lambda s, args: s.cache.admission_obstacle(*args),
    [([], 9), ([1] * 10, 9), ([1], 65)],
)
refuse(
    "admission_obstacle",
    LengthError,
    lambda s, n: s.cache.admission_obstacle([1], 9, reserved_sizes={"tenant": n}),
    [-1, 1.5, "1", None, True],
)
refuse(
    "admission_obstacle",
    ConfigError,
    lambda s, sizes: s.cache.admission_obstacle([1], 9, reserved_sizes=sizes),
    [5, [1], "tenant"],
)
refuse(
    "admission_obstacle",
    RequestStateError,
    lambda s, released: s.cache.admission_obstacle([1], 9, released=released),
    [5, None],
)
refuse(
    "admission_obstacle",
    RequestStateError,
    lambda s: s.cache.admission_obstacle([1], 9, released=[s.busy, s.busy]),
)

# A request's life ------------------------------------------------------------

refuse("admit", LengthError, lambda s, tokens: s.cache.admit(tokens), [[], [1] * 65])
refuse(
    "admit",
    LengthError,
    lambda s, n: s.cache.admit([1, 2, 3], computed_len=n),
    [-1, 4, 1.5, None, True],
)
refuse(
    "admit",
    ConfigError,
    lambda s, priority: s.cache.admit([1], priority=priority),
    [None, 1.5, "high", True],
)
refuse(
    "admit",
    TokenError,
    lambda s: s.cache.admit(s.of[s.gone]),
    prepare=forget_content,
)
refuse(
    "intern",
    ConfigError,
    lambda s, digest: s.cache.intern(digest),
    ["x" * 16, b"x" * 15, b"x" * 65, [0] * 16, None],
)
refuse(
    "intern",
    OutOfContentsError,
    lambda s: s.cache.intern(TEXT),
    prepare=use_all_contents,
)
refuse(
    "alloc_for_extend",
    OutOfPagesError,
    lambda s: s.cache.alloc_for_extend([s.fresh, s.busy, s.old], [64, 64, 64]),
)
refuse(
    "alloc_for_decode",
    OutOfPagesError,
    lambda s: s.cache.alloc_for_decode([s.fresh, s.busy, s.blocker], 40),
)
refuse(
    "alloc_for_extend",
    OutOfPagesError,
    lambda s: s.cache.alloc_for_extend([s.tenant, s.blocker, s.old], [20, 64, 64]),
)
for _batch in ([1, 0], [0, 1]):  # the others' part is counted before or after
    refuse(
        "alloc_for_extend",
        QuotaError,
        lambda s, first, then: s.cache.alloc_for_extend(
            [[s.tenant, s.busy][first], [s.tenant, s.busy][then]],
            [[33, 14][first], [33, 14][then]],
        ),
        kinds=("full",),
    )
    CASES[-1] = replace(CASES[-1], arguments=tuple(_batch))
refuse(
    "alloc_for_decode",
    QuotaError,
    lambda s: s.cache.alloc_for_decode([s.busy, s.tenant], 30),
    kinds=("full",),
)
for _method, _call in {
    "alloc_for_extend": lambda s: s.cache.alloc_for_extend(
        [s.tenant, s.blocker], [13, 13 + s.cache.available_size]
    ),
    "alloc_for_decode": lambda s: s.cache.alloc_for_decode(
        [s.blocker], 4 + s.cache.available_size
    ),
    "evict": lambda s: s.cache.evict(4),
    "evict_if_needed": lambda s: s.cache.evict_if_needed(96),
    "eviction_order": lambda s: s.cache.eviction_order(1),
    "resize": lambda s: s.cache.resize(s.num_used_pages() - 1),
}.items():
    refuse(_method, PolicyError, _call, kinds=RADIX, prepare=break_policy)
refuse(
    "alloc_for_extend",
    LengthError,
    lambda s, lens: s.cache.alloc_for_extend([s.fresh, s.busy], lens),
    [[6], [6, 14, 13], [6, 11], [6, 65], [0, 14], None, [6, "14"]],
)
refuse(
    "alloc_for_extend",
    RequestStateError,
    lambda s: s.cache.alloc_for_extend([s.busy, s.old, s.busy], [14, 12, 14]),
)
refuse(
    "alloc_for_decode",
    RequestStateError,
    lambda s: s.cache.alloc_for_decode([s.old, s.old]),
)
for _method, _call in {
    "alloc_for_extend": lambda s, batch: s.cache.alloc_for_extend(batch, []),
    "alloc_for_decode": lambda s, batch: s.cache.alloc_for_decode(batch),
}.items():
    refuse(_method, RequestStateError, _call, [None, 5])
refuse(
    "alloc_for_decode",
    ConfigError,
    lambda s, n: s.cache.alloc_for_decode([s.busy], n),
    [0, -1, 2**31, 1.5, "1", None, True],
)
refuse(
    "alloc_for_decode",
    LengthError,
    lambda s: s.cache.alloc_for_decode([s.fresh, s.busy], 54),
)
refuse(
    "commit", LengthError, lambda s, n: s.cache.commit(s.busy, n), [0, 10, 13, 2**40]
)
refuse(
    "truncate",
    LengthError,
    lambda s, n: s.cache.truncate(s.busy, n),
    [3, 13, 2**40],
    kinds=RADIX,
)
refuse(
    "truncate", LengthError, lambda s, n: s.cache.truncate(s.busy, n), [13], kinds=KINDS
)
refuse(
    "slots",
    LengthError,
    lambda s, ends: s.cache.slots(s.busy, *ends),
    [(0, 13), (5, 4), (-1, 3), (0, "3"), (0, 1.5)],
)
for _method, _call in {
    "cache_unfinished_req": lambda s, *a, **k: s.cache.cache_unfinished_req(*a, **k),
    "cache_finished_req": lambda s, *a, **k: s.cache.cache_finished_req(*a, **k),
}.items():
    refuse(
        _method,
        LengthError,
        lambda s, n, call=_call: call(s, s.busy, s.of[s.busy][:n]),
        [0, 10],
    )
    refuse(
        _method,
        LengthError,
        lambda s, n, call=_call: call(s, s.busy, s.of[s.busy], prompt_len=n),
        [-1, 15, 1.5, "1", True],
    )
    refuse(
        _method,
        TokenError,
        lambda s, tokens, call=_call: call(s, s.busy, tokens),
        [(0.5,) * 20, 7, "tokens", [[1]] * 3 + ["a"] * 20],
        kinds=RADIX,
    )
    refuse(
        _method,
        TokenError,
        lambda s, token, call=_call: call(s, s.busy, [*s.of[s.busy][:6], token] * 2),
        [-7, 2**31, 0.5, "a", None],
        kinds=RADIX,
    )
    refuse(
        _method,
        TokenError,
        lambda s, tokens, call=_call: call(s, s.busy, tokens),
        [(0.5,) * 20, 7],
        kinds=("chunk",),
    )

# The whole cache -------------------------------------------------------------

refuse("reset", CacheBusyError, lambda s: s.cache.reset())
refuse(
    "resize",
    ConfigError,
    lambda s, n: s.cache.resize(n),
    [0, -1, 2**31, 1.5, "1", None, True],
)
refuse("resize", PoolSizeError, lambda s: s.cache.resize(999), prepare=join_a_pool)
refuse("resize", PagesInUseError, lambda s: s.cache.resize(4))
refuse(
    "resize",
    ConfigError,
    lambda s: s.cache.resize(8),
    kinds=("full",),
    prepare=raise_a_floor,
)
refuse(
    "retain",
    ConfigError,
    lambda s, priority: s.cache.retain([1, 2, 3, 4], priority=priority),
    [0, -1, 2**31, 1.5, "1", None, True],
    kinds=RADIX,
)
refuse(
    "retain",
    ConfigError,
    lambda s, ttl: s.cache.retain([1, 2, 3, 4], ttl=ttl),
    [0, -1, float("nan"), "1", True, 10**400],
    kinds=RADIX,
)
refuse(
    "retain",
    ConfigError,
    lambda s: s.cache.retain([1, 2, 3, 4], ttl=1.0),
    kinds=("plain",),  # it has no clock
)
for _sizes in [
    *((-1, None), (1.5, None), ("1", None), (None, None), (True, None), (2**31, None)),
    *((0, -1), (0, 1.5), (0, "1"), (0, True), (0, 2**31)),
    *((8, 4), (1, 3), (4 * 41, None)),
]:
    for _name in ("tenant", "new"):
        refuse(
            "set_quota",
            ConfigError,
            lambda s, name, floor, ceiling: s.cache.set_quota(
                name, floor_size=floor, ceiling_size=ceiling
            ),
            kinds=RADIX,
        )
        CASES[-1] = replace(CASES[-1], arguments=(_name, *_sizes))
refuse(
    "check_integrity",
    IntegrityError,
    lambda s: s.cache.check_integrity(),
    prepare=lose_a_page,
)

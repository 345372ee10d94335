"""Floors and ceilings hold whatever happens, and evict whom they should."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.mem_cache.testing import CacheOracle, CheckedCache

from .quota_model import CheckedQuotas, make_cache
from .test_random_lives import RandomLife

NAMESPACES: list[Hashable] = ["a", "b", None, ("c", 1)]
POLICIES = ["lru", "keyed lru", "lfu", "priority"]
NUM_STEPS = 24


class QuotaLife(RandomLife):
    """A random life of a few namespaces, whose quotas change now and then."""

    checked: CheckedQuotas

    def step(self) -> None:
        chance = self.random.random()
        if chance < 0.1:
            self.set_quota()
        elif chance < 0.4:
            self.serve()
        elif chance < 0.5:
            self.extend_all()
        else:
            super().step()
            return
        self.checked.check()

    def serve(self) -> None:
        """Take one prompt from its admission to its end, if there is room."""
        checked = self.checked
        running = len(checked.live)
        self.admit()
        if len(checked.live) > running:
            live = checked.live[-1]
            checked.extend([live], [len(live.tokens)])
            checked.commit(live, live.computed_len)
            checked.finish(live)

    def extend_all(self) -> None:
        """Extend requests of several namespaces together."""
        checked = self.checked
        batch = [x for x in checked.live if x.kv.committed_len < len(x.tokens)]
        checked.extend(batch, [x.kv.committed_len + 1 for x in batch])

    def namespace(self) -> Hashable:
        return self.random.choice(self.checked.namespaces)

    def set_quota(self) -> None:
        most = self.checked.cache.total_size
        floor = self.random.choice([0, 0, self.random.randint(0, most // 2)])
        ceiling = self.random.choice([None, self.random.randint(0, most)])
        self.checked.set_quota(self.namespace(), floor, ceiling)

    def admit(self) -> None:
        checked, random = self.checked, self.random
        known = [text for _, text in checked.texts]
        tokens = self.text()
        if known and random.random() < 0.7:
            start = random.choice(known)
            cut = random.choice([len(start), random.randint(0, len(start))])
            tokens = [*start[:cut], *(tokens if random.random() < 0.5 else [])]
        longest = max(1, checked.cache.total_size // random.choice([2, 3, 4]))
        checked.admit(
            tokens[:longest] or [0], self.namespace(), random.choice([0, 0, 1, 2])
        )

    def bump(self) -> None:
        self.checked.bump_epoch(self.namespace())


@pytest.mark.parametrize("policy", ["lru", "lfu", "priority"])
@given(
    num_pages=st.integers(4, 16),
    page_size=st.sampled_from([1, 2, 3, 16]),
    num_rows=st.integers(2, 5),
    num_namespaces=st.integers(2, 4),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_busy_cache_with_quotas_equals_the_oracle(
    policy: str,
    num_pages: int,
    page_size: int,
    num_rows: int,
    num_namespaces: int,
    seed: int,
) -> None:
    checked = CheckedQuotas(
        policy,
        num_pages,
        page_size,
        num_rows,
        20 * page_size,
        NAMESPACES[:num_namespaces],
    )
    life = QuotaLife(checked, Random(seed))
    for _ in range(NUM_STEPS):
        life.step()
    checked.drain()
    checked.check()


@dataclass(frozen=True)
class Share:
    """What a namespace has and wants in a mixed batch, in pages."""

    num_cached: int
    floor: int
    ceiling: int | None
    num_new: int


shares = st.builds(
    Share,
    num_cached=st.integers(0, 4),
    floor=st.integers(0, 4),
    ceiling=st.none() | st.integers(1, 6),
    num_new=st.integers(0, 4),
)


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@given(
    wanted=st.lists(shares, min_size=2, max_size=4),
    num_free=st.integers(0, 4),
    page_size=st.sampled_from([1, 2, 3, 16]),
    order=st.randoms(use_true_random=False),
)
def test_a_mixed_batch_is_served_or_refused_as_a_whole(
    policy: str, wanted: list[Share], num_free: int, page_size: int, order: Random
) -> None:
    """Who is at its floor, above its ceiling or both takes part in one allocation."""
    num_pages = sum(share.num_cached for share in wanted) + num_free + 1
    names = NAMESPACES[: len(wanted)]
    checked = CheckedQuotas(
        policy, num_pages, page_size, len(names), 4 * page_size, names
    )
    todo = [i for i, share in enumerate(wanted) for _ in range(share.num_cached)]
    order.shuffle(todo)
    for number, i in enumerate(todo):
        serve(checked, [number] * page_size, names[i])
    for name, share in zip(names, wanted, strict=True):
        ceiling = None if share.ceiling is None else share.ceiling * page_size
        checked.set_quota(name, share.floor * page_size, ceiling)
    asking = [(names[i], x.num_new) for i, x in enumerate(wanted) if x.num_new]
    for name, num_new in asking:
        checked.admit([99] * (num_new * page_size), name)
    checked.extend(checked.live, [len(live.tokens) for live in checked.live])
    checked.check()
    checked.drain()


def serve(checked: CheckedCache, tokens: list[int], namespace: Hashable) -> None:
    """Take a prompt from its admission to its end; it must fit."""
    live = checked.admit(tokens, namespace)
    assert live is not None
    checked.extend([live], [len(tokens)])
    checked.commit(live, live.computed_len)
    checked.finish(live)


visits = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), min_size=1, max_size=8),
        st.integers(0, 2),
        st.sampled_from(NAMESPACES),
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.parametrize("policy", POLICIES)
@given(visits=visits, page_size=st.sampled_from([1, 2]), data=st.data())
def test_without_floors_pages_go_in_the_order_without_quotas(
    policy: str,
    visits: list[tuple[list[int], int, Hashable]],
    page_size: int,
    data: st.DataObject,
) -> None:
    """Quotas come and go in between; each page has the same place in both orders."""
    args = (policy, 40, page_size, 2, 40 * page_size)
    plain = CheckedCache(make_cache(*args), CacheOracle(40, page_size, 2, policy))
    split = CheckedQuotas(*args, NAMESPACES)
    bounds = st.none() | st.integers(160 * page_size, 200 * page_size)
    for letters, priority, namespace in visits:
        split.set_quota(data.draw(st.sampled_from(NAMESPACES)), 0, data.draw(bounds))
        tokens = [letter for letter in letters for _ in range(page_size)]
        for checked in (plain, split):
            live = checked.admit(tokens, namespace, priority)
            assert live is not None
            checked.extend([live], [len(tokens)])
            checked.commit(live, live.computed_len)
            checked.finish(live)
        assert places(plain) == places(split)
    while plain.cache.evictable_size:
        plain.evict(1)
        split.evict(1)
        assert places(plain) == places(split)


def places(checked: CheckedCache) -> list[tuple[Hashable, int]]:
    """Every evictable page in the order of eviction."""
    victims = checked.cache.eviction_order(40)
    return [(victim.namespace, victim.prefix_len) for victim in victims]

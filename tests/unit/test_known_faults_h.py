"""Known faults, group H: what makes two prefixes the same.

Adapters that are reloaded are in test_epochs, contents in test_virtual_tokens, and
spellings of tokens in test_tokens.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Hashable
from itertools import permutations

import pytest

from radixkv.mem_cache import (
    ConfigError,
    KVPool,
    MemoryManager,
    RadixCache,
)

from .driver import insert, law, make_cache, span

LIFE = """
from radixkv.mem_cache import MemoryManager, RadixCache

cache = RadixCache(MemoryManager(8, 4, max_num_requests=2, max_context_len=32))
request = cache.admit(range(1, 17))
print(cache.alloc_for_extend([request], [16]).payload.hex())
cache.commit(request, 16)
cache.cache_finished_req(request, range(1, 17))
for root in cache._tree.roots:
    for node in cache._tree.nodes_of(root):
        print(root.namespace, node.key.hex(), node.pages.hex())
print(cache.match_prefix(range(1, 17)), cache.eviction_order(8))
"""


@pytest.mark.parametrize("hash_seed", ["0", "1", "random"])
def test_b67_what_identifies_a_page_is_the_same_in_every_process(
    hash_seed: str,
) -> None:
    """Its tokens themselves, in namespace ``None``; nothing is hashed."""
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-P", "-c", LIFE]
    run = subprocess.run(
        command, check=True, capture_output=True, text=True, env=environment
    )
    _, node, found = run.stdout.splitlines()

    key = b"".join(token.to_bytes(4, sys.byteorder) for token in span(1, 16))
    pages = b"".join(page.to_bytes(4, sys.byteorder) for page in span(1, 4))
    assert node == f"None {key.hex()} {pages.hex()}"
    assert found.startswith("16 [Victim(namespace=None, prefix_len=12, page=4)")


def test_b160_a_hit_is_whole_pages_of_the_cache_that_is_asked() -> None:
    hits = []
    for page_size in (8, 4):
        cache = make_cache(64 // page_size, page_size)
        insert(cache, span(1, 8))
        first = [*span(1, 4), *span(9, 13)]
        hits.append((cache.match_prefix(first), cache.match_prefix(span(1, 9))))

    assert hits == [(0, 8), (4, 8)]


def test_b160_parts_with_other_page_sizes_are_not_put_together() -> None:
    pool = KVPool.uniform(
        num_pages=4, page_size=8, num_layers=1, num_kv_heads=1, head_dim=1
    )

    with pytest.raises(ConfigError, match=r"\(4, 4\), got \(4, 8\)"):
        MemoryManager(4, 4, max_num_requests=1, max_context_len=8, kv_pool=pool)
    # A tree cannot be given another size than its allocator has: there is no option.
    memory = MemoryManager(4, 8, max_num_requests=1, max_context_len=8)
    assert RadixCache(memory).page_size == memory.allocator.page_size == 8


class Crowded:
    """A namespace whose hash is that of all others of its kind."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Crowded) and self.name == other.name

    def __hash__(self) -> int:
        return 7


NEARLY_EQUAL: dict[str, list[Hashable]] = {
    "empty": [None, "", "None", (), (None,), 0, b""],
    "filled": ["a", ("a",), ("a", None), (None, "a"), ("a", ""), ("", "a"), b"a", "a "],
    "cut": [("a", "b"), ("ab",), "ab", ("b", "a"), ("a", ("b",)), frozenset("ab")],
    "numbered": [
        ("adapter", 1),
        ("adapter", 2),
        ("adapter", "1"),
        ("adapter", 12),
        "adapter1",
    ],
    "crowded": [Crowded("a"), Crowded("b"), Crowded("ab")],
}


@pytest.mark.parametrize("namespaces", NEARLY_EQUAL.values(), ids=NEARLY_EQUAL)
@pytest.mark.parametrize("page_size", [1, 3])
def test_nearly_equal_namespaces_share_nothing(
    namespaces: list[Hashable], page_size: int
) -> None:
    """Fields that are swapped, moved, cut off or glued together."""
    cache = make_cache(8, page_size)
    for owner, other in permutations(namespaces, 2):
        insert(cache, span(1, 6), owner)
        assert cache.match_prefix(span(1, 6), owner) == 6
        assert cache.match_prefix(span(1, 6), other) == 0
        cache.evict(cache.total_size)

    assert law(cache) == (8 * page_size, 0, 0, 0)


@pytest.mark.parametrize("page_size", [1, 2, 3])
def test_nearly_equal_tokens_share_what_is_equal_and_no_more(page_size: int) -> None:
    texts = [
        [1, 2, 3, 4, 5, 6],
        [1, 2, 3, 4, 6, 5],
        [2, 1, 3, 4, 5, 6],
        [1, 23, 4, 5, 6, 7],
        [12, 3, 4, 5, 6, 1],
        [1, 2, 3, 4, 5],
        [1, 2, 3, 4, 5, 6 + 2**16],
        [1 + 2**24, 2, 3, 4, 5, 6],
        [258, 3, 4, 5, 6, 1],
    ]
    for one, other in permutations(texts, 2):
        cache = make_cache(8, page_size)
        insert(cache, one)
        shared = 0
        while [*one, -1][shared] == [*other, -2][shared]:
            shared += 1

        assert cache.match_prefix(other) == shared // page_size * page_size


def test_equal_namespaces_are_one_however_they_were_made() -> None:
    cache = make_cache()
    insert(cache, span(1, 4), Crowded("a"))
    insert(cache, span(1, 4), ("adapter", 1))

    assert cache.match_prefix(span(1, 4), Crowded("a")) == 4
    assert cache.match_prefix(span(1, 4), ("adapter", 1.0)) == 4

"""The whole state of a cache as text, the same in every process."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from radixkv.mem_cache import RadixCache, RadixNode, RequestKV
from radixkv.mem_cache.cache_state import cache_state


def dump(cache: RadixCache, namespaces: Sequence[Hashable]) -> str:
    """Return one line for each thing that `cache_state` tells of, and the statistics.

    That is the tree in its order, pages, rows, the free list, the order of eviction,
    requests with their hit reports, quotas, grants, marks, contents and ghosts.

    Args:
        cache: What to look at.
        namespaces: Whose statistics to tell.
    """
    # First, as that counts what was not counted yet.
    lines = [str(cache.stats()), str(cache.eviction_order(10**6))]
    lines += [str(cache.namespace_stats(name)) for name in namespaces]
    names: dict[RadixNode, str] = {}
    for node in (*cache._tree.roots, *cache._tree.nodes()):
        names[node] = f"node {len(names)}"
    state = cache_state(cache.memory, cache._tree, cache._running, cache._rooms)
    for part, value in state.items():
        lines.append(f"{part}:")
        items = value if isinstance(value, list) else [value]
        lines += [f"  {_show(item, names)}" for item in items]
    return "\n".join(lines)


def _show(value: object, names: dict[RadixNode, str]) -> str:
    """Show a value without addresses and without the order of sets."""
    if isinstance(value, RadixNode):
        return names[value]
    if isinstance(value, RequestKV):
        return f"row {value.req_pool_idx}"
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(_show(item, names) for item in value))}}}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(_show(item, names) for item in value)})"
    text = repr(value)
    assert " at 0x" not in text
    return text

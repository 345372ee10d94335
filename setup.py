"""The optional build: with RADIXKV_COMPILE set, mypyc compiles the hot modules.

The source stays the only one; what is compiled does the same, faster. It takes mypy, a
C compiler and two minutes; `make compiled` does it in a folder of its own.
"""

import os

from setuptools import Extension, setup

HOT = [
    "allocator",
    "chunk_cache",
    "eviction",
    "explainer",
    "ghost_index",
    "hit_counters",
    "in_flight",
    "memory_manager",
    "page_copies",
    "packed_numbers",
    "prefix_cache",
    "quota_index",
    "radix_cache",
    "radix_node",
    "radix_tree",
    "request_kv",
    "request_table",
    "retention_index",
    "root_directory",
    "running_requests",
    "sizes",
    "stale_first",
    "tokens",
    "virtual_tokens",
]
"""What every request goes through.

Compiled functions refuse arguments of another type than they name with a bare
`TypeError`. So what callers reach names wide types, such as `Integer` for `int`, and
says itself what it refuses.
"""


def extensions() -> list[Extension]:
    """Return what is to be compiled: nothing, unless it is asked for."""
    if not os.environ.get("RADIXKV_COMPILE"):
        return []
    from mypyc.build import mypycify

    return mypycify([f"src/radixkv/mem_cache/{name}.py" for name in HOT])


setup(ext_modules=extensions())

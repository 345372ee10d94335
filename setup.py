"""The optional build: with RADIXKV_COMPILE set, mypyc compiles the hot modules.

The source stays the only one; what is compiled does the same, faster. It takes mypy, a
C compiler and two minutes; `make compiled` does it in a folder of its own.
"""

import os

from setuptools import Extension, setup

HOT = [
    "eviction",
    "explainer",
    "ghost_index",
    "hit_counters",
    "in_flight",
    "payload",
    "quota_index",
    "radix_node",
    "radix_tree",
    "request_kv",
    "retention_index",
    "root_directory",
    "running_requests",
    "stale_first",
    "tokens",
]
"""What works inside of a cache.

Compiled functions refuse arguments of another type with a bare `TypeError`, so what
callers reach stays as it is: it takes any integer, and says what it refuses.
"""


def extensions() -> list[Extension]:
    """Return what is to be compiled: nothing, unless it is asked for."""
    if not os.environ.get("RADIXKV_COMPILE"):
        return []
    from mypyc.build import mypycify

    return mypycify([f"src/radixkv/mem_cache/{name}.py" for name in HOT])


setup(ext_modules=extensions())

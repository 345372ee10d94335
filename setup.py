"""The optional build: with RADIXKV_COMPILE set, mypyc compiles the hot modules.

The source stays the only one; what is compiled does the same, faster. It takes mypy, a
C compiler and a minute or two; `make compiled` does it in a folder of its own.
"""

import os
import sys

from setuptools import Extension, setup

HOT = [
    "allocator",
    "chunk_cache",
    "eviction",
    "explainer",
    "ghost_index",
    "hit_counters",
    "in_flight",
    "page_copies",
    "packed_numbers",
    "place_sketch",
    "prefix_cache",
    "quota_index",
    "radix_cache",
    "radix_key",
    "radix_node",
    "radix_tree",
    "request_kv",
    "request_table",
    "retention_index",
    "root_directory",
    "running_requests",
    "sharded_dict",
    "sizes",
    "stale_first",
    "step_builder",
    "tokens",
    "virtual_tokens",
]
"""What every request goes through.

Compiled functions refuse arguments of another type than they name with a bare
`TypeError`. So what callers reach names wide types, such as `Integer` for `int`, and
says itself what it refuses.
"""


NEEDED = [
    "msgspec",
    "mypy>=1.18",
    "numpy",
    "sortedcontainers",
    "sortedcontainers-stubs",
]
"""What mypyc must see to know the types; where a build is isolated, pip brings it."""


def extensions() -> list[Extension]:
    """Return what is to be compiled: nothing but for a wheel, if it is asked for."""
    if "bdist_wheel" not in sys.argv or not os.environ.get("RADIXKV_COMPILE"):
        return []
    from mypyc.build import mypycify

    paths = [f"src/radixkv/mem_cache/{name}.py" for name in HOT]
    # What is not hot may import what a build has no need of, such as torch.
    return mypycify(["--ignore-missing-imports", "--follow-imports=silent", *paths])


setup(
    ext_modules=extensions(),
    setup_requires=NEEDED if os.environ.get("RADIXKV_COMPILE") else [],
)

"""The optional build: mypyc compiles the engine side when RADIXKV_COMPILE is set.

The source stays the only one; what is compiled behaves the same, faster.
"""

import os
from pathlib import Path

from setuptools import setup

SOURCE = Path("src/radixkv/mem_cache")

INTERPRETED = {
    "__init__",  # imports the worker side on use
    "hit_report",  # msgspec makes these classes
    "kv_cache_info",
    "kv_pool",  # the worker side needs torch, and gains nothing
    "page_table",
}


def extensions() -> list[object]:
    """Return what is to be compiled: nothing, unless it is asked for."""
    if not os.environ.get("RADIXKV_COMPILE"):
        return []
    from mypyc.build import mypycify

    modules = sorted(SOURCE.glob("*.py"))
    return mypycify([str(path) for path in modules if path.stem not in INTERPRETED])


setup(ext_modules=extensions())

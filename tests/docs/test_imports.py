"""What an import costs: the engine side starts without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"numpy", "torch", "transformers", "typer"}


def loaded_by(statement: str) -> set[str]:
    """Return which heavy packages a fresh interpreter has after `statement`."""
    code = f"import sys; {statement}; print(*{HEAVY} & set(sys.modules))"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    return set(result.stdout.split())


@pytest.mark.parametrize(
    ("statement", "allowed"),
    [
        ("import radixkv", set()),
        ("import radixkv.mem_cache", {"numpy"}),
        ("from radixkv.mem_cache import MemoryManager, RadixCache", {"numpy"}),
        ("import radixkv.scheduling", {"numpy"}),
        ("from radixkv.mem_cache import KVPool", {"numpy", "torch"}),
    ],
)
def test_an_import_loads_only_what_it_needs(statement: str, allowed: set[str]) -> None:
    loaded = loaded_by(statement)

    assert allowed == loaded

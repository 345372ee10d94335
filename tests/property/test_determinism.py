"""The same operations give the same result, in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys

sys.path.insert(0, sys.argv[1])

from property.soak_life import NAMESPACES, POLICIES, Chance, Life
from property.state_dump import dump

for number, policy in enumerate(POLICIES):
    life = Life([2, 1, 3, 16][number % 4], policy, Chance([number]), has_all=number > 0)
    for step in range(300):
        life.operate()
        if step % 20 == 0:
            print(f"{policy}, step {step}")
            print(dump(life.cache, NAMESPACES))
            print(life.worker.table.tolist(), life.worker.labels.tolist())
    print(sorted(life.events.items()))
"""


def run_with(hash_seed: str) -> list[str]:
    """Live the lives in a process of their own; returns what they printed."""
    run = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT, str(Path(__file__).parents[1])],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
    )
    return run.stdout.splitlines()


def test_hash_seeds_change_nothing() -> None:
    """B28, with policies, quotas, grants, marks, contents, epochs and moves at once."""
    first, second = run_with("0"), run_with("1")

    # Line by line, so that a failure shows where they part.
    for number, (one, other) in enumerate(zip(first, second, strict=False)):
        assert one == other, f"line {number}"
    assert len(first) == len(second) > 5_000
    for part in ("grants", "contents", "output marks", "quotas", "ghosts"):
        assert f"{part}:" in first

"""The public API changes on purpose only (S0.6)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_s0_6_public_api_equals_its_snapshot() -> None:
    command = [sys.executable, str(HERE / "snapshot_api.py")]

    actual = subprocess.run(command, check=True, capture_output=True, text=True).stdout

    expected = (HERE / "public_api.txt").read_text()
    assert expected == actual, (
        "if the change is meant: `make api`, and a changelog line"
    )

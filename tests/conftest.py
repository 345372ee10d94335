"""Hypothesis profiles; `pytest --hypothesis-profile=NAME` picks another than dev.

Besides, kernels run in Triton's interpreter, on the CPU, unless a test compiles them:
that happens in a process of its own, see `kernels/aot.py`.
"""

from __future__ import annotations

import os

from hypothesis import Phase, settings

# Triton reads it when a kernel, or Triton itself, is imported.
os.environ["TRITON_INTERPRET"] = "1"

# No deadline: a slow machine must not fail a test.
settings.register_profile("dev", max_examples=50, deadline=None)
settings.register_profile(
    "ci", max_examples=100, deadline=None, derandomize=True, print_blob=True
)
settings.register_profile("nightly", max_examples=5_000, deadline=None, print_blob=True)
# Many short runs, each of which has to fail or not, and need not say why.
settings.register_profile(
    "mutants",
    max_examples=10,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
)
settings.load_profile("dev")

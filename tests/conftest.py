"""Hypothesis profiles; `pytest --hypothesis-profile=NAME` picks another than dev."""

from __future__ import annotations

from hypothesis import settings

# No deadline: a slow machine must not fail a test.
settings.register_profile("dev", max_examples=50, deadline=None)
settings.register_profile(
    "ci", max_examples=300, deadline=None, derandomize=True, print_blob=True
)
settings.register_profile("nightly", max_examples=5_000, deadline=None, print_blob=True)
settings.load_profile("dev")

"""Where there is no Triton, its kernels are not tested."""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("triton") is None:  # there are builds for Linux only
    collect_ignore_glob = ["test_triton_*.py"]
    collect_ignore = ["test_backend.py", "test_device_step.py", "test_step_costs.py"]

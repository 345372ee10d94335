"""Which implementation runs where, and what is said where none can."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from radixkv.kernels import BackendUnavailableError, backend, last_loc, pick_backend
from radixkv.mem_cache import ConfigError, RadixKVError

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


@pytest.mark.parametrize("installed", [False, True])
def test_auto_is_triton_on_a_gpu_if_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    monkeypatch.setattr(backend, "has_triton", lambda: installed)

    assert pick_backend("auto", GPU) == ("triton" if installed else "reference")
    assert pick_backend("auto", CPU) == "reference"
    assert pick_backend("reference", GPU) == pick_backend("reference", CPU)


def test_triton_runs_on_the_cpu_in_its_interpreter_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert pick_backend("triton", CPU) == "triton"

    monkeypatch.setattr(backend, "is_interpreted", lambda: False)

    assert pick_backend("triton", GPU) == "triton"
    with pytest.raises(BackendUnavailableError, match="on a GPU, got device 'cpu'"):
        pick_backend("triton", CPU)


def test_triton_that_is_not_installed_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backend, "has_triton", lambda: False)

    with pytest.raises(BackendUnavailableError, match="which is not installed"):
        pick_backend("triton", GPU)


def test_a_backend_that_does_not_exist_is_refused_with_the_choices() -> None:
    unknown: Any = "cuda"
    numbers = torch.zeros(1, dtype=torch.int32)

    with pytest.raises(ConfigError, match=r"'triton', 'reference'\), got 'cuda'"):
        last_loc(numbers[None], numbers, numbers, page_size=1, backend=unknown)


def test_an_unavailable_backend_is_an_error_of_the_library() -> None:
    assert issubclass(BackendUnavailableError, RadixKVError)
    assert issubclass(BackendUnavailableError, RuntimeError)


def test_only_a_kernel_that_runs_imports_triton() -> None:
    code = """if True:
        import sys
        import radixkv.kernels
        before = "torch" in sys.modules
        from radixkv.kernels import *
        import torch
        numbers = torch.zeros(1, dtype=torch.int32)
        last_loc(numbers[None], numbers, numbers, page_size=1)
        middle = "triton" in sys.modules
        last_loc(numbers[None], numbers, numbers, page_size=1, backend="triton")
        print(before, middle, "triton" in sys.modules)
    """
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
    )

    assert b"False False True" == result.stdout.strip()

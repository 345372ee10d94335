"""The kernels of slots and pages, compiled for GPUs that need not be there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from radixkv import kernels

from .aot import TARGETS, Compiled, compile_ahead
from .launches_pages import AGAIN, LAUNCHES

SOURCES = Path(kernels.__file__).parent / "triton"


@pytest.fixture(scope="module")
def compiled() -> list[Compiled]:
    """Compile all launches once: it takes some seconds."""
    return compile_ahead("launches_pages")


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles(compiled: list[Compiled], target: str) -> None:
    modules = [p for p in SOURCES.glob("*.py") if not p.stem.startswith("attention_")]
    modules.append(SOURCES / "attention_indices.py")
    text = "".join(path.read_text() for path in modules)
    expected = set(re.findall(r"^def (\w+_kernel)\(", text, re.MULTILINE))

    kernels = {each.kernel for each in compiled if each.target == target}

    assert expected
    assert expected == kernels


def test_no_kernel_recompiles_with_the_batch_or_with_where_slices_begin(
    compiled: list[Compiled],
) -> None:
    again = [each for each in compiled if each.launch.endswith(AGAIN)]

    assert [] == again
    assert sum(name.endswith(AGAIN) for name in LAUNCHES) == len(LAUNCHES) // 2


def test_a_launch_compiles_one_variant_of_each_of_its_kernels(
    compiled: list[Compiled],
) -> None:
    variants = [(each.launch, each.kernel, each.target) for each in compiled]

    # Gathering and scattering are two directions of one kernel.
    twice = {each for each in variants if variants.count(each) > 1}
    assert {"stage_pages_kernel"} == {kernel for _, kernel, _ in twice}


def test_nothing_is_spilled(compiled: list[Compiled]) -> None:
    assert {0} == {each.spilled_bytes for each in compiled}


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("launch", ["store to bfloat16", "copy", "stage"])
def test_what_moves_kv_moves_16_bytes_at_a_time(
    compiled: list[Compiled], launch: str, target: str
) -> None:
    widths = {
        each.access_bytes
        for each in compiled
        if (each.launch, each.target) == (launch, target)
    }

    assert {16} == widths

"""The kernels of paged attention, compiled for GPUs: what they take, and how often."""

from __future__ import annotations

import pytest

from .aot import TARGETS, Compiled, compile_ahead
from .launches_attention import AGAIN, OPS, SHAPES, SHARED_BYTES

ALL_SHARED_BYTES = {**SHARED_BYTES, "gfx942": 64 * 1024}
"""What a program may have of each target's shared memory."""


@pytest.fixture(scope="module")
def compiled() -> list[Compiled]:
    """Compile all launches once: it takes half a minute."""
    return compile_ahead("launches_attention")


def test_every_kernel_compiles_for_every_target_and_once(
    compiled: list[Compiled],
) -> None:
    variants = sorted((each.target, each.launch, each.kernel) for each in compiled)

    kernels = {"extend": ["extend"], "decode": ["decode", "reduce"]}
    expected = [
        (target, f"{op} {shape}", f"attention_{kernel}_kernel")
        for target in TARGETS
        for op in OPS
        for shape in SHAPES
        for kernel in kernels[op]
    ]
    assert sorted(expected) == variants


def test_no_kernel_recompiles_with_the_batch_or_with_where_slices_begin(
    compiled: list[Compiled],
) -> None:
    assert [] == [each for each in compiled if AGAIN in each.launch]


def test_shared_memory_suffices(compiled: list[Compiled]) -> None:
    for each in compiled:
        assert each.shared_bytes <= ALL_SHARED_BYTES[each.target], each


def test_hardly_anything_is_spilled(compiled: list[Compiled]) -> None:
    for each in compiled:
        assert each.spilled_bytes <= 128, each


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_k_and_v_are_read_16_bytes_at_a_time(
    compiled: list[Compiled], target: str
) -> None:
    widths = {each.access_bytes for each in compiled if each.target == target}

    assert {16} == widths

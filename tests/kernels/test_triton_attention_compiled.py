"""The kernels of paged attention, compiled for GPUs: what they take, and how often."""

from __future__ import annotations

import pytest

from .aot import TARGETS, Compiled, compile_ahead
from .launches_attention import AGAIN, OPS, REPEATED, SHAPES, SHARED_BYTES

ALL_SHARED_BYTES = {**SHARED_BYTES, "gfx942": 64 * 1024}
"""What a program may have of each target's shared memory."""


ALL_SHAPES = dict.fromkeys(TARGETS, tuple(SHAPES))

UNLIKE_SHAPES = ALL_SHAPES | {
    "sm_86": ("256 plain",),
    "sm_89": ("64 of float8",),
    "sm_120": ("128", "mla"),
}
"""One target a set of instructions has all shapes, and 99 KiB have each size of tiles.

The three have the same shared memory, hence the same tiles, and the matrix instructions
of sm_80; sm_89 converts float8 as no GPU before it. "256" has the tiles of "256 plain".
"""


@pytest.fixture(
    scope="module",
    params=[UNLIKE_SHAPES, pytest.param(ALL_SHAPES, marks=pytest.mark.slow)],
    ids=["unlike shapes", "all shapes"],
)
def shapes(request: pytest.FixtureRequest) -> dict[str, tuple[str, ...]]:
    """What to compile for each target."""
    return request.param


@pytest.fixture(scope="module")
def compiled(shapes: dict[str, tuple[str, ...]]) -> list[Compiled]:
    """Compile all launches once: it takes a second or two a kernel and target."""
    targets_of: dict[tuple[str, ...], list[str]] = {}
    for target, some in shapes.items():
        targets_of.setdefault(some, []).append(target)
    return [
        each
        for some, targets in targets_of.items()
        for each in compile_ahead(
            "launches_attention", *launches_of(some), targets=targets
        )
    ]


def launches_of(shapes: tuple[str, ...]) -> list[str]:
    """Name the launches of some shapes; the repeated one brings its repetitions."""
    names = [f"{op} {shape}" for shape in shapes for op in OPS]
    if REPEATED in shapes:
        names += [f"{op} {AGAIN}" for op in OPS]
    return names


def test_every_kernel_compiles_for_every_target_and_once(
    compiled: list[Compiled], shapes: dict[str, tuple[str, ...]]
) -> None:
    variants = sorted((each.target, each.launch, each.kernel) for each in compiled)

    kernels = {"extend": ["extend"], "decode": ["decode", "reduce"]}
    expected = [
        (target, f"{op} {shape}", f"attention_{kernel}_kernel")
        for target in TARGETS
        for op in OPS
        for shape in shapes[target]
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

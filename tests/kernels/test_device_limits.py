"""Programs are made for what the GPU of a launch has (B172)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixkv.kernels.attention_options import AttentionOptions
from radixkv.kernels.attention_tiling import (
    EXTEND_TILINGS,
    KernelInputs,
    fit_shared_memory,
    kernel_inputs,
    shared_bytes_of,
)
from radixkv.kernels.device_limits import DeviceLimits, device_limits
from radixkv.kernels.errors import BackendUnavailableError, ConfigError


def inputs_of(head_dim: int) -> KernelInputs:
    buffer = torch.zeros(2, 16, 1, head_dim, dtype=torch.bfloat16)
    return kernel_inputs(
        torch.zeros(1, 2, head_dim, dtype=torch.bfloat16),
        buffer,
        buffer,
        torch.zeros(2, 4, dtype=torch.int32),
        AttentionOptions(page_size=16, scale=0.1),
    )


@given(
    head_dim=st.sampled_from([16, 64, 128, 256]),
    shared_kib=st.integers(1, 256),
)
def test_b172_a_program_fits_or_is_refused(head_dim: int, shared_kib: int) -> None:
    inputs = inputs_of(head_dim)
    best = next(x for dim, x in EXTEND_TILINGS.items() if head_dim <= dim)
    shared_bytes = shared_kib * 1024

    try:
        tiling = fit_shared_memory(best, inputs, shared_bytes)
    except ConfigError:
        # Not even 16 queries and 16 keys have room.
        assert head_dim * 16 * 2 * 2 > shared_bytes // 4
    else:
        assert shared_bytes_of(tiling, inputs) <= shared_bytes
        is_enough = shared_bytes_of(best, inputs) <= shared_bytes
        assert is_enough == (tiling == best)


def test_b172_heads_of_256_fit_a_gpu_for_desktops() -> None:
    inputs = inputs_of(256)

    tiling = fit_shared_memory(EXTEND_TILINGS[256], inputs, 101_376)

    assert shared_bytes_of(tiling, inputs) <= 101_376
    assert tiling.block_m == EXTEND_TILINGS[256].block_m


def test_b172_bfloat16_is_refused_where_there_are_no_instructions_for_it() -> None:
    turing = DeviceLimits(shared_bytes=64 * 1024, capability=(7, 5))

    with pytest.raises(BackendUnavailableError, match=r"capability >= 8\.0, got 7\.5"):
        turing.check_dtypes(torch.float16, torch.bfloat16)


@pytest.mark.parametrize("capability", [None, (8, 0), (12, 0)])
def test_b172_bfloat16_is_taken_elsewhere(capability: tuple[int, int] | None) -> None:
    assert DeviceLimits(capability=capability).check_dtypes(torch.bfloat16) is None


def test_a_cpu_has_no_limits() -> None:
    assert DeviceLimits() == device_limits(torch.device("cpu"))

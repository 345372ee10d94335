"""What paged attention launches: without a look at the device, and in which sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixkv.kernels import (
    attention_decode,
    attention_tiling,
    paged_attention_decode,
    paged_attention_extend,
)
from radixkv.kernels.attention_options import AttentionOptions
from radixkv.kernels.attention_tiling import decode_tiling, extend_tiling, kernel_inputs
from radixkv.kernels.triton import attention_decode as decode_kernels
from radixkv.kernels.triton import attention_extend as extend_kernels

Launch = tuple[str, tuple[int, ...], dict[str, Any]]
"""The name of a kernel, its grid and its constants."""


class Recorder:
    """Takes the place of a kernel, and launches nothing."""

    def __init__(self, name: str, launches: list[Launch]) -> None:
        self.name = name
        self.launches = launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:  # noqa: ANN401
        return lambda *_, **constants: self.launches.append(
            (self.name, grid, constants)
        )


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Return a list of what is launched from now on, on a GPU of 100 processors."""
    launches: list[Launch] = []
    for module in (decode_kernels, extend_kernels):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Recorder(name, launches))
    monkeypatch.setattr(attention_decode, "num_processors", lambda _: 100)
    return launches


def decode_arguments(num_reqs: int) -> dict[str, Any]:
    """Return tensors without any number in them: an op that reads one fails."""
    kv = torch.empty(9, 16, 8, 64, device="meta")
    numbers = torch.empty(num_reqs, dtype=torch.int32, device="meta")
    return {
        "q": torch.empty(num_reqs, 32, 64, device="meta"),
        "k_buffer": kv,
        "v_buffer": kv,
        "page_table": torch.empty(9, 4096, dtype=torch.int32, device="meta"),
        "rows": numbers,
        "stops": numbers,
        "page_size": 16,
        "scale": 1.0,
        "backend": "triton",
    }


def extend_arguments(
    num_tokens: int, num_reqs: int, num_heads: int = 32
) -> dict[str, Any]:
    arguments = decode_arguments(num_reqs)
    q = torch.empty(num_tokens, num_heads, 64, device="meta")
    return arguments | {"q": q, "starts": arguments["rows"]}


@pytest.mark.parametrize("num_reqs", [1, 7, 256])
def test_decode_is_two_launches_and_no_look_at_the_device(
    launches: list[Launch], num_reqs: int
) -> None:
    arguments = decode_arguments(num_reqs)

    out = paged_attention_decode(**arguments)

    assert arguments["q"].shape == out.shape
    names = [name for name, _, _ in launches]
    assert ["attention_decode_kernel", "attention_reduce_kernel"] == names


@pytest.mark.parametrize(("num_tokens", "num_reqs"), [(1, 1), (9, 3), (5000, 40)])
def test_extend_is_one_launch_and_no_look_at_the_device(
    launches: list[Launch], num_tokens: int, num_reqs: int
) -> None:
    arguments = extend_arguments(num_tokens, num_reqs)

    out = paged_attention_extend(**arguments)

    assert arguments["q"].shape == out.shape
    assert ["attention_extend_kernel"] == [name for name, _, _ in launches]


def test_an_empty_batch_launches_nothing(launches: list[Launch]) -> None:
    paged_attention_decode(**decode_arguments(0))
    paged_attention_extend(**extend_arguments(0, 0))

    assert [] == launches


@given(
    lengths=st.lists(st.integers(0, 300), max_size=8),
    padding=st.integers(0, 300),
    group_size=st.integers(1, 8),
)
def test_there_are_enough_blocks_for_any_lengths(
    lengths: list[int], padding: int, group_size: int
) -> None:
    launches: list[Launch] = []
    num_tokens = sum(lengths) + padding
    arguments = extend_arguments(num_tokens, len(lengths), 8 * group_size)
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder("extend", launches)
        patch.setattr(extend_kernels, "attention_extend_kernel", recorder)

        paged_attention_extend(**arguments)

    for _, grid, constants in launches:
        block_m = constants["BLOCK_M"]
        needed = sum(-(-n * group_size // block_m) for n in (*lengths, padding))
        assert needed <= grid[0] <= needed + len(lengths) + 1
    assert len(launches) == (num_tokens > 0)


@pytest.mark.parametrize(
    ("num_reqs", "options", "num_splits"),
    [
        (1, {}, 50),  # 8 heads of K and V: 400 programs
        (4, {}, 12),
        (256, {}, 8),  # 65,536 positions, and 8,192 a part
        (1, {"max_stop": 1000}, 4),  # 256 a part
        (1, {"max_stop": 100}, 1),
        (1, {"max_stop": 0}, 1),
        (1, {"window": 512}, 2),
        (256, {"max_stop": 8192}, 1),
        (256, {"num_splits": 3}, 3),
    ],
)
def test_decode_makes_as_many_parts_as_keep_the_device_busy(
    launches: list[Launch], num_reqs: int, options: dict[str, Any], num_splits: int
) -> None:
    paged_attention_decode(**decode_arguments(num_reqs), **options)

    assert (num_reqs, 8, num_splits) == launches[0][1]


def test_few_tokens_a_request_make_small_programs(launches: list[Launch]) -> None:
    paged_attention_extend(**extend_arguments(40, 10), max_new_len=4)

    assert [((40 * 4 + 11 * 15) // 16, 8)] == [grid for _, grid, _ in launches]


@given(
    dims=st.tuples(st.integers(1, 576), st.integers(1, 512)),
    group_size=st.integers(1, 128),
    dtype=st.sampled_from(attention_tiling.DTYPES),
    is_amd=st.booleans(),
)
def test_programs_cover_every_head(
    dims: tuple[int, int], group_size: int, dtype: torch.dtype, is_amd: bool
) -> None:
    q = torch.empty(1, group_size, dims[0], dtype=dtype, device="meta")
    k, v = (torch.empty(2, 16, 1, dim, dtype=dtype, device="meta") for dim in dims)
    table = torch.empty(1, 1, dtype=torch.int32, device="meta")

    inputs = kernel_inputs(q, k, v, table, AttentionOptions(16, 1.0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_tiling, "is_amd", lambda: is_amd)
        tilings = [decode_tiling(inputs), extend_tiling(inputs, None)]

    main, rest, block_dv = (
        inputs.constants[name] for name in ("DIM_MAIN", "DIM_REST", "BLOCK_DV")
    )
    sizes = {main, rest, block_dv}
    sizes |= {size for each in tilings for size in (each.block_m, each.block_n)}
    # Powers of two that matrix units take; there may be no rest.
    assert sizes <= {0, 16, 32, 64, 128, 256, 512}
    assert dims[0] <= main + rest < max(17, 2 * dims[0])
    assert dims[1] <= block_dv < max(17, 2 * dims[1])
    assert tilings[0].block_m <= max(16, 2 * group_size)

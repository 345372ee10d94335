"""Messages that contradict themselves or the page table, and who is told so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from radixkv.kernels import BackendUnavailableError
from radixkv.mem_cache import (
    ConfigError,
    ForeignPageError,
    KVCacheInfo,
    KVPool,
    LengthError,
    PageTable,
    RadixKVError,
    RequestStateError,
)
from radixkv.scheduling import TransformersRunner

FIELDS: dict[str, Any] = {
    "rows": [1, 3],
    "starts": [0, 4],
    "stops": [5, 6],
    "page_starts": [0, 1],
    "page_indptr": [0, 2, 3],
    "new_pages": np.array([3, 4, 7], np.int32).tobytes(),
    "forgotten_rows": [2],
}


def make_info(**changes: Any) -> KVCacheInfo:  # noqa: ANN401
    """Make a message that fits a table of 3 rows and 4 columns, but for changes."""
    return KVCacheInfo.pack(**(FIELDS | changes))


def make_table() -> PageTable:
    table = PageTable(max_num_requests=3, max_pages_per_request=4)
    table.table[:] = 1 + torch.arange(16).view(4, 4)
    return table


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"starts": [0]}, "starts must be 2 for 2 rows, got 1"),
        ({"stops": [5, 6, 7]}, "stops must be 2 for 2 rows, got 3"),
        ({"page_starts": []}, "page_starts must be 2 for 2 rows, got 0"),
        ({"page_indptr": [0, 3]}, "page_indptr must be 3 for 2 rows, got 2"),
        ({"stops": [5, 2**40]}, "stops must be integers in .*1099511627776"),
        ({"rows": [1, -(2**31) - 1]}, "rows must be integers in"),
        ({"starts": [0, 4.5]}, r"starts must be integers in .*4\.5"),
        ({"forgotten_rows": [2**31]}, "forgotten_rows must be integers in"),
        ({"new_pages": [3, 4, 7]}, "new_pages must be the bytes of int32"),
        ({"new_pages": bytes(24)}, "new_pages must be the 12 bytes .* got 24"),
        ({"new_pages": bytes(11)}, "new_pages must be the 12 bytes .* got 11"),
    ],
)
def test_numbers_that_no_message_holds_are_refused_with_their_field(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_info(**changes)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"rows": [1, 4]}, RequestStateError, r"rows must be in 0\.\.3, got .1, 4"),
        ({"rows": [-1, 3]}, RequestStateError, r"rows must be in 0\.\.3, got .-1"),
        ({"rows": [3, 3]}, RequestStateError, "rows must be all different, got .3, 3"),
        ({"rows": [1, 0]}, RequestStateError, "padding row, must have no pages"),
        ({"forgotten_rows": [4]}, RequestStateError, "forgotten_rows must be in 1"),
        ({"forgotten_rows": [-2]}, RequestStateError, "forgotten_rows must be in 1"),
        ({"forgotten_rows": [0]}, RequestStateError, "forgotten_rows must be in 1"),
        ({"page_starts": [-1, 1]}, LengthError, r"page_starts must be in 0\.\.4"),
        ({"page_starts": [0, 2**31 - 1]}, LengthError, "page_starts must be in"),
        ({"page_starts": [0, 4]}, LengthError, "must have <= 4 pages, got 5"),
        ({"page_indptr": [1, 2, 3]}, LengthError, "page_indptr must rise from 0"),
        ({"page_indptr": [0, 4, 3]}, LengthError, "page_indptr must rise from 0"),
        ({"starts": [-1, 4]}, LengthError, "starts must be >= 0 and <= stops"),
        ({"starts": [0, 7]}, LengthError, "starts must be >= 0 and <= stops"),
        (
            {"new_pages": np.array([3, 0, 7], np.int32).tobytes()},
            ForeignPageError,
            "new pages must be >= 1, got 0",
        ),
    ],
)
def test_a_message_that_the_table_does_not_fit_is_refused_and_changes_nothing(
    changes: dict[str, object], error: type[RadixKVError], message: str
) -> None:
    table = make_table()
    before = table.table.clone()

    with pytest.raises(error, match=message):
        table.apply(make_info(**changes))

    assert torch.equal(before, table.table)


def test_padded_requests_share_the_padding_row() -> None:
    table = make_table()

    step = table.apply(
        make_info(
            rows=[0, 1, 0],
            starts=[0, 4, 0],
            stops=[1, 5, 1],
            page_starts=[0, 0, 0],
            page_indptr=[0, 0, 2, 2],
            new_pages=np.array([3, 4], np.int32).tobytes(),
        )
    )

    assert [0, 1, 0] == step.rows.tolist()
    assert [3, 4, 7, 8] == table.table[1].tolist()


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (KVCacheInfo(1, 2, bytes(28)), "payload must be >= 32 bytes"),
        (KVCacheInfo(1, 2, bytes(33)), "a multiple of 4, .* got 33"),
        (KVCacheInfo(1, 2, bytes(32), 1), "payload must be >= 40 bytes"),
        (KVCacheInfo(-1, 0, bytes(4)), "num_reqs, .* must be >= 0, got .-1"),
    ],
)
def test_a_truncated_payload_is_refused(info: KVCacheInfo, message: str) -> None:
    table = make_table()
    before = table.table.clone()

    with pytest.raises(ConfigError, match=message):
        table.apply(info)

    assert torch.equal(before, table.table)


@pytest.mark.parametrize("extra", [np.zeros(2), np.zeros((2, 2), np.int32)])
def test_numbers_beside_a_message_are_a_list_of_int32(extra: Any) -> None:  # noqa: ANN401
    table = make_table()
    before = table.table.clone()

    with pytest.raises(ConfigError, match=r"extra must be int32 \[n\], got"):
        table.apply(make_info(), extra)

    assert torch.equal(before, table.table)


def test_a_step_refuses_a_size_for_which_its_requests_are_too_long() -> None:
    step = make_table().apply(make_info())

    for op in (step.slot_mapping, step.last_loc, step.kv_indices, step.block_table):
        with pytest.raises(LengthError, match=r"must have <= 4 tokens, .* got 6"):
            op(page_size=1)
        with pytest.raises(ConfigError, match="page_size must be >= 1"):
            op(page_size=0)


def test_what_is_not_there_is_refused_when_a_pool_or_table_is_made() -> None:
    sizes: dict[str, Any] = {"max_num_requests": 1, "max_pages_per_request": 1}
    config = KVPool.uniform(
        num_pages=2, page_size=2, num_layers=1, num_kv_heads=1, head_dim=2
    ).config
    refused: list[tuple[dict[str, Any], type[RadixKVError], str]] = [
        ({"backend": "foo"}, ConfigError, "backend must be one of .*, got 'foo'"),
        ({"device": "foo"}, ConfigError, "device must be one that torch knows"),
        ({"device": "hpu"}, BackendUnavailableError, "device must be one that is here"),
    ]
    for options, error, message in refused:
        with pytest.raises(error, match=message):
            KVPool(config, **options)
        with pytest.raises(error, match=message):
            PageTable(**sizes, **options)


def test_a_layout_that_does_not_exist_is_refused() -> None:
    pool = KVPool.uniform(
        num_pages=2, page_size=2, num_layers=1, num_kv_heads=1, head_dim=2
    )
    layout: Any = "foo"

    with pytest.raises(ConfigError, match=r"layout must be one of \('NHD', 'HND'\)"):
        pool.layer(0).kv(layout)


@pytest.mark.parametrize("attention", ["flashinfer", None, object()])
def test_a_runner_takes_what_makes_attention_and_nothing_else(attention: Any) -> None:  # noqa: ANN401
    with pytest.raises(ConfigError, match=r"must make an AttentionBackend .*, got"):
        TransformersRunner(
            torch.nn.Identity(),
            num_pages=4,
            page_size=2,
            max_num_requests=1,
            max_context_len=4,
            attention=attention,
        )

"""What a step costs: one upload, one launch an op, and no wait for the device.

The tensors are fake: they say that they are on a GPU, and have no content. Whatever has
to read one fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch._subclasses.fake_tensor import FakeTensorMode

from radixkv.kernels import PageBuffers, copy_pages, gather_pages, store_kv
from radixkv.mem_cache import KVCacheInfo, PageTable

PAGE_SIZE = 16
NUM_LAYERS = 3


@dataclass
class Costs:
    """What was done on the device since this was made."""

    num_uploads: int = 0
    launches: list[str] = field(default_factory=list)


@dataclass
class Launches:
    """A kernel that only counts."""

    name: str
    costs: Costs

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(0 < size < 2**31 for size in grid)
        return lambda *args, **kwargs: self.costs.launches.append(self.name)


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Costs]:
    """Count what a GPU would do; there is none."""
    counted = Costs()

    def upload(numbers: NDArray[np.int32], device: torch.device) -> torch.Tensor:
        counted.num_uploads += 1
        return torch.empty(len(numbers), dtype=torch.int32, device=device)

    for name in (
        "attention_indices",
        "kv_store",
        "page_table",
        "pages",
        "slot_mapping",
    ):
        module = import_module(f"radixkv.kernels.triton.{name}")
        for kernel in [each for each in vars(module) if each.endswith("_kernel")]:
            monkeypatch.setattr(module, kernel, Launches(kernel, counted))
    for name in ("kernels.page_copy", "mem_cache.page_table"):
        monkeypatch.setattr(import_module(f"radixkv.{name}"), "upload", upload)
    monkeypatch.setattr("radixkv.kernels.backend.has_triton", lambda: True)
    with FakeTensorMode():
        yield counted


def make_info(lengths: list[int]) -> KVCacheInfo:
    """Make a message with new pages for every second request, and rows to forget."""
    starts = [7 * i for i in range(len(lengths))]
    ends = np.cumsum([0, *(i % 2 for i in range(len(lengths)))])
    return KVCacheInfo.pack(
        rows=range(1, len(lengths) + 1),
        starts=starts,
        stops=[a + b for a, b in zip(starts, lengths, strict=True)],
        page_starts=[0] * len(lengths),
        page_indptr=ends.tolist(),
        new_pages=np.arange(1, ends[-1] + 1, dtype=np.int32).tobytes(),
        forgotten_rows=[300, 301],
    )


def run_step(info: KVCacheInfo) -> None:
    """Do what a worker does, but for the model and its attention."""
    table = PageTable(max_num_requests=512, max_pages_per_request=256, device="cuda")
    step = table.apply(info)
    slots = step.slot_mapping(page_size=PAGE_SIZE)
    step.last_loc(page_size=PAGE_SIZE)
    step.kv_indices(page_size=PAGE_SIZE)
    step.block_table(page_size=PAGE_SIZE)
    pool = torch.empty(NUM_LAYERS, 2, 9, PAGE_SIZE, 4, 64, device="cuda")
    k = torch.empty(len(slots), 4, 64, device="cuda")
    for k_buffer, v_buffer in pool:
        store_kv(k, k, k_buffer, v_buffer, slots)


# A fake tensor is everywhere, so that all its addresses are aligned.
pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer")


@pytest.mark.parametrize("num_reqs", [1, 2, 33, 256])
@pytest.mark.parametrize(
    ("length", "mapping"),
    [
        (lambda i: 1, "slot_mapping_decode_kernel"),
        (lambda i: 3, "slot_mapping_decode_kernel"),
        (lambda i: i % 40 + (i == 0), "slot_mapping_extend_kernel"),
    ],
)
def test_a_step_is_one_upload_and_one_launch_an_op(
    costs: Costs, num_reqs: int, length: Callable[[int], int], mapping: str
) -> None:
    lengths = [length(i) for i in range(num_reqs)]

    run_step(make_info(lengths))

    assert 1 == costs.num_uploads
    is_even = len(set(lengths)) == 1
    assert [
        "page_table_delta_kernel",
        "slot_mapping_decode_kernel" if is_even else mapping,
        "slot_mapping_decode_kernel",  # last_loc
        "kv_indices_kernel",
        "block_table_kernel",
        *["aligned_kernel"] * NUM_LAYERS,
    ] == costs.launches


@pytest.mark.parametrize("num_pages", [1, 2, 100])
def test_page_copies_are_one_upload_and_one_launch(
    costs: Costs, num_pages: int
) -> None:
    pages = PageBuffers(list(torch.empty(160, 256, 4096, device="cuda")))
    targets = range(1, num_pages + 1)

    copy_pages(pages, [*targets[1:], 0], targets)

    assert (1, ["copy_pages_kernel"]) == (costs.num_uploads, costs.launches)


@pytest.mark.parametrize("num_pages", [1, 2, 100])
def test_gathering_pages_of_all_layers_is_one_launch(
    costs: Costs, num_pages: int
) -> None:
    pages = PageBuffers(list(torch.empty(160, 256, 4096, device="cuda")))
    page_ids = torch.empty(num_pages, dtype=torch.int64, device="cuda")
    staging = torch.empty(num_pages, pages.page_bytes, dtype=torch.uint8, device="cuda")

    gather_pages(pages, page_ids, staging)

    assert (0, ["stage_pages_kernel"]) == (costs.num_uploads, costs.launches)


def test_a_reference_reads_what_is_on_the_device(costs: Costs) -> None:
    # So the tensors of these tests do catch a wait for the device.
    table = PageTable(
        max_num_requests=512,
        max_pages_per_request=256,
        device="cuda",
        backend="reference",
    )

    with pytest.raises(Exception, match="not supported for tensor subclasses"):
        table.apply(make_info([1, 2]))

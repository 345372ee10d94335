"""The kernels that store K and V and move pages, interpreted, against references."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from radixkv.kernels import (
    PageBuffers,
    copy_pages,
    gather_pages,
    scatter_pages,
    store_kv,
)
from radixkv.kernels.backend import Backend

from .guards import GUARD

BACKENDS: tuple[Backend, ...] = ("reference", "triton")
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
NUM_PAGES = 4


@dataclass(frozen=True)
class Layout:
    """A pool of K and V of some layers, in one buffer.

    Attributes:
        page_size: Slots a page.
        num_heads: Heads of K and of V.
        dims: Numbers a head of K, and of V.
        dtype: Dtype of K and V.
        num_layers: Layers.
        pages_outermost: Whether a page of all layers lies together, or a layer.
        heads_first: Whether a page has its heads one after another (HND), or its slots.
        gap: Numbers between two pages of a layer that are nobody's.
        margin: Numbers before and behind the pool; 64 are a multiple of 16 bytes.
    """

    page_size: int
    num_heads: int = 1
    dims: tuple[int, int] = (4, 4)
    dtype: torch.dtype = torch.float32
    num_layers: int = 1
    pages_outermost: bool = True
    heads_first: bool = False
    gap: int = 0
    margin: int = 64

    def make(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the storage, full of guards, and views of it: K and V by layer."""
        sizes = [
            self.page_size * self.num_heads * dim + self.gap
            for _ in range(self.num_layers)
            for dim in self.dims
        ]
        numel = NUM_PAGES * sum(sizes) + 2 * self.margin
        storage = torch.full((numel,), GUARD, dtype=torch.float32).to(self.dtype)
        views: list[torch.Tensor] = []
        before = self.margin
        for i, size in enumerate(sizes):
            dim = self.dims[i % 2]
            inside = [self.num_heads * dim, dim, 1]
            if self.heads_first:
                inside = [dim, self.page_size * dim, 1]
            stride = sum(sizes) if self.pages_outermost else size
            shape = (NUM_PAGES, self.page_size, self.num_heads, dim)
            views.append(storage.as_strided(shape, (stride, *inside), before))
            before += size if self.pages_outermost else NUM_PAGES * size
        return storage, views


def layouts(*v_dims: int) -> st.SearchStrategy[Layout]:
    return st.builds(
        Layout,
        page_size=st.sampled_from([1, 3, 16]),
        num_heads=st.integers(1, 3),
        dims=st.tuples(st.sampled_from([1, 4, 6, 16]), st.sampled_from(v_dims)),
        dtype=st.sampled_from(DTYPES),
        num_layers=st.integers(1, 3),
        pages_outermost=st.booleans(),
        heads_first=st.booleans(),
        gap=st.sampled_from([0, 1, 16]),
        margin=st.sampled_from([1, 64]),
    )


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View numbers as bytes, so that NaN equals NaN and zero not minus zero."""
    return tensor.contiguous().view(torch.uint8)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def filled(layout: Layout, seed: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Make a pool in which every page has content of its own."""
    storage, views = layout.make()
    for i, view in enumerate(views):
        numbers = randn(*view.shape, seed=seed + i).to(layout.dtype)
        as_stored(view).copy_(as_stored(numbers))
    return storage, views


def as_stored(tensor: torch.Tensor) -> torch.Tensor:
    is_fp8 = tensor.dtype == torch.float8_e4m3fn
    return tensor.view(torch.uint8) if is_fp8 else tensor


@given(
    layout=layouts(0, 2, 8, 16),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    strides=st.sampled_from(["as they are", "heads first", "every second"]),
    scales=st.tuples(*[st.sampled_from([1.0, 0.37, 3.0])] * 2),
    data=st.data(),
)
def test_store_equals_the_reference(
    layout: Layout,
    dtype: torch.dtype,
    strides: str,
    scales: tuple[float, float],
    data: st.DataObject,
) -> None:
    last = NUM_PAGES * layout.page_size - 1
    slots = data.draw(st.lists(st.integers(0, last), unique=True, max_size=5))
    k, v = (
        200 * randn(len(slots), layout.num_heads, dim, seed=dim) for dim in layout.dims
    )
    if torch.bfloat16 in (dtype, layout.dtype):
        # Exactly what bfloat16 has: to it, the interpreter cuts off, a GPU rounds.
        k, v = k.bfloat16(), v.bfloat16()
    k, v = k.to(dtype), v.to(dtype)
    if strides == "heads first":
        # As attention layers hold them: [num_heads, num_tokens, head_dim].
        k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (k, v))
    elif strides == "every second":
        k, v = (x.repeat_interleave(2, dim=2)[..., ::2] for x in (k, v))
    layer = data.draw(st.integers(0, layout.num_layers - 1))

    expected, storage = (
        stored(layout, k, v, slots, backend, layer=layer, scales=scales)
        for backend in BACKENDS
    )

    assert torch.equal(expected, storage)


def stored(
    layout: Layout,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: list[int],
    backend: Backend,
    *,
    layer: int = 0,
    scales: tuple[float, float] = (1.0, 1.0),
) -> torch.Tensor:
    """Return the bytes of a pool in which K and V were stored, guards included."""
    storage, views = layout.make()
    store_kv(
        k,
        v,
        views[2 * layer],
        views[2 * layer + 1],
        torch.tensor(slots, dtype=torch.int64),
        k_scale=scales[0],
        v_scale=scales[1],
        backend=backend,
    )
    return as_bytes(storage)


@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
@pytest.mark.parametrize("dims", [(150, 64), (160, 96)])
def test_store_takes_heads_of_several_blocks(
    page_size: int, dims: tuple[int, int]
) -> None:
    # 1,200 numbers a token and more, of which a block holds 1,024.
    layout = Layout(page_size, num_heads=8, dims=dims, dtype=torch.bfloat16)
    k, v = (randn(3, 8, dim).bfloat16() for dim in dims)
    slots = [page_size, page_size - 1, 3 * page_size]

    expected, storage = (stored(layout, k, v, slots, each) for each in BACKENDS)

    assert torch.equal(expected, storage)


# numpy, which the interpreter computes with, warns of infinity and NaN.
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_store_rounds_every_float16_to_the_nearest_of_fp8() -> None:
    bits = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    numbers = bits.view(64, 2, 512)
    expected = bits.float().clamp(-448, 448).to(torch.float8_e4m3fn).float()
    k_buffer, v_buffer = torch.zeros(2, 64, 1, 2, 512).to(torch.float8_e4m3fn)

    store_kv(numbers, numbers, k_buffer, v_buffer, torch.arange(64), backend="triton")

    for buffer in (k_buffer, v_buffer):
        stored = buffer.float().flatten()
        assert torch.equal(expected.isnan(), stored.isnan())
        assert torch.equal(expected.nan_to_num(), stored.nan_to_num())
        assert torch.equal(
            expected.signbit() | bits.isnan(), stored.signbit() | bits.isnan()
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_scale_may_be_a_whole_number(backend: Backend) -> None:
    buffer = torch.zeros(2, 1, 1, 16, dtype=torch.float8_e4m3fn)
    k = torch.full((1, 1, 16), 6.0)

    store_kv(
        k, k, buffer, buffer, torch.tensor([1]), k_scale=2, v_scale=2, backend=backend
    )

    assert buffer[1].float().unique().tolist() == [3.0]


def test_s4_15_padded_tokens_write_to_the_hold_page_only() -> None:
    layout = Layout(2, dims=(2, 2))
    k, v = randn(5, 1, 2), randn(5, 1, 2, seed=1)
    storage, (k_buffer, v_buffer) = layout.make()
    slots = torch.tensor([0, 5, 0, 3, 0])

    store_kv(k, v, k_buffer, v_buffer, slots, backend="triton")

    for x, buffer in ((k, k_buffer), (v, v_buffer)):
        assert torch.equal(x[1], buffer[2, 1])
        assert torch.equal(x[3], buffer[1, 1])
        assert (buffer[0, 0] != GUARD).all()
        assert (buffer[[0, 1, 2, 3, 3], [1, 0, 0, 0, 1]] == GUARD).all()
    assert (storage[: layout.margin] == GUARD).all()
    assert (storage[-layout.margin :] == GUARD).all()


@given(
    layout=layouts(2, 8, 16),
    copies=st.dictionaries(*[st.integers(0, NUM_PAGES - 1)] * 2),
    seed=st.integers(0, 99),
)
@example(Layout(16, num_layers=2, dims=(16, 16)), {1: 2, 2: 3, 3: 1, 0: 2}, 0)
@example(Layout(16, num_layers=2, dims=(16, 16)), {}, 0)
def test_copy_equals_the_reference(
    layout: Layout, copies: dict[int, int], seed: int
) -> None:
    (expected, reference), (storage, views) = (filled(layout, seed) for _ in "ab")
    arguments = list(copies.values()), list(copies)

    copy_pages(PageBuffers(reference), *arguments, backend="reference")
    copy_pages(PageBuffers(views), *arguments, backend="triton")

    assert torch.equal(as_bytes(expected), as_bytes(storage))


page_ids = st.lists(st.integers(0, NUM_PAGES - 1), max_size=6)


@given(
    layout=layouts(2, 8, 16),
    ids=page_ids,
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
@example(Layout(64, num_heads=8, dims=(40, 16)), [3, 1], torch.int32)
def test_gather_equals_the_reference(
    layout: Layout, ids: list[int], dtype: torch.dtype
) -> None:
    storage, views = filled(layout, 0)
    before, pages = storage.clone(), PageBuffers(views)
    around = torch.full((len(ids) + 2, pages.page_bytes + 3), GUARD, dtype=torch.uint8)
    expected = around.clone()
    indices = torch.tensor(ids, dtype=dtype)

    gather_pages(pages, indices, expected[1:-1, 1:-2], backend="reference")
    gather_pages(pages, indices, around[1:-1, 1:-2], backend="triton")

    assert torch.equal(expected, around)
    assert torch.equal(as_bytes(before), as_bytes(storage))


@given(
    layout=layouts(2, 8, 16),
    ids=st.lists(st.integers(0, 3), unique=True),
    offset=st.integers(0, 9),
)
@example(Layout(64, num_heads=8, dims=(40, 16)), [3, 1], 0)
def test_scatter_equals_the_reference(
    layout: Layout, ids: list[int], offset: int
) -> None:
    (expected, reference), (storage, views) = (filled(layout, 0) for _ in "ab")
    pages = PageBuffers(views)
    around = torch.arange(offset + (len(ids) + 1) * pages.page_bytes) % 251
    staging = around.to(torch.uint8)[offset : offset + len(ids) * pages.page_bytes]
    staging = staging.view(len(ids), pages.page_bytes)
    indices = torch.tensor(ids, dtype=torch.int64)

    scatter_pages(PageBuffers(reference), indices, staging, backend="reference")
    scatter_pages(pages, indices, staging, backend="triton")

    assert torch.equal(as_bytes(expected), as_bytes(storage))


@pytest.mark.parametrize("page", [2**15 - 1, 2**15])
def test_b131_pages_are_addressed_past_2_31_elements(page: int) -> None:
    # 65,536 elements from one page to the next, of which a page has only 64: page
    # 32,768 begins at element 2**31. The system provides only what is touched.
    storage = torch.empty(2**31 + 2**17, dtype=torch.int8)
    buffer = storage.as_strided((2**15 + 1, 16, 1, 4), (2**16, 4, 4, 1))
    pages = PageBuffers([buffer])
    k = torch.arange(64.0).view(16, 1, 4)
    slots = 16 * page + torch.arange(16)

    store_kv(k, k, buffer, buffer, slots, backend="triton")
    copy_pages(pages, [page], [page - 7], backend="triton")
    staging = torch.zeros(1, 64, dtype=torch.uint8)
    gather_pages(pages, torch.tensor([page - 7]), staging, backend="triton")
    scatter_pages(pages, torch.tensor([page - 9]), staging, backend="triton")

    for place in (page, page - 7, page - 9):
        assert torch.equal(k.to(torch.int8), buffer[place])


def test_padding_of_a_transfer_goes_to_the_hold_page() -> None:
    layout = Layout(2, num_layers=2)
    storage, views = layout.make()
    pages = PageBuffers(views)
    staging = torch.zeros(4, pages.page_bytes, dtype=torch.uint8)

    scatter_pages(pages, torch.tensor([0, 2, 0, 0]), staging, backend="triton")

    for view in views:
        assert not view[[0, 2]].any()
        assert (view[[1, 3]] == GUARD).all()
    assert (storage[: layout.margin] == GUARD).all()
    assert (storage[-layout.margin :] == GUARD).all()

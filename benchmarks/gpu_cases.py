"""What `gpu_test.py` runs: each op of the library at a size that engines have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from radixkv.kernels import (
    PageBuffers,
    apply_page_table_delta,
    block_table,
    copy_pages,
    gather_pages,
    kv_indices,
    last_loc,
    paged_attention_decode,
    paged_attention_extend,
    scatter_pages,
    slot_mapping_decode,
    slot_mapping_extend,
    store_kv,
)
from radixkv.kernels.backend import Backend
from radixkv.mem_cache import KVPool
from radixkv.mem_cache.kv_layout import page_columns

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Sizes:
    """How large everything is; small ones serve to test the cases themselves.

    Attributes:
        device: Where it runs.
        dtype: Dtype of queries, K and V.
        num_reqs: Requests of a batch.
        context_len: Tokens of each, a multiple of `page_size`.
        new_len: Of these, tokens that a step of extend computes.
        num_layers: Layers of the pool.
    """

    device: torch.device
    dtype: torch.dtype = torch.bfloat16
    num_reqs: int = 32
    context_len: int = 4096
    new_len: int = 256
    page_size: int = 16
    num_layers: int = 4
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    latent_dim: int = 512
    rope_dim: int = 64

    @property
    def pages_per_request(self) -> int:
        """Pages of each request."""
        return self.context_len // self.page_size

    @property
    def num_pages(self) -> int:
        """Pages of all requests."""
        return self.num_reqs * self.pages_per_request


@dataclass(frozen=True)
class Case:
    """One op at one size.

    Attributes:
        op: The name of the op.
        what: What it does here.
        run: Runs an implementation of it, and returns what that makes.
        num_bytes: Bytes that any implementation has to read and write.
        changed: What the op changes in place.
        baseline: What else there is to compute the same thing, if there is.
        tolerance: Error that is allowed, as a part of the largest number; 0, if
            implementations must agree to the bit.
    """

    op: str
    what: str
    run: Callable[[Backend], Tensors]
    num_bytes: int
    changed: Tensors = ()
    baseline: Callable[[], object] | None = None
    tolerance: float = 0.0


@dataclass
class Scene:
    """A pool full of random numbers, and requests that use all of it.

    Attributes:
        sizes: How large it is.
        pool: K and V of `num_layers` layers.
        page_table: Pages of each request, in no order.
        rows: Row of each request.
        starts: Where a step of extend begins.
        stops: Where each request ends.
    """

    sizes: Sizes
    pool: KVPool = field(init=False)

    def __post_init__(self) -> None:
        """Draw everything from a fixed seed."""
        sizes = self.sizes
        self.random = torch.Generator(sizes.device).manual_seed(0)
        self.pool = self.make_pool(sizes.dtype)
        pages = np.random.Generator(np.random.Philox(0)).permutation(sizes.num_pages)
        table = torch.zeros(
            sizes.num_reqs + 1, sizes.pages_per_request, dtype=torch.int32
        )
        table[1:] = torch.tensor(pages + 1).view(sizes.num_reqs, -1)
        self.page_table = table.to(sizes.device)
        self.rows = self.numbers(range(1, sizes.num_reqs + 1))
        self.stops = self.numbers([sizes.context_len] * sizes.num_reqs)
        self.starts = self.stops - sizes.new_len

    def numbers(self, values: Any) -> torch.Tensor:  # noqa: ANN401 - of integers
        """Return integers, int32, on the device."""
        return torch.tensor([*values], dtype=torch.int32, device=self.sizes.device)

    def randn(self, *shape: int) -> torch.Tensor:
        """Return normal numbers of this shape, on the device."""
        sizes = self.sizes
        return torch.randn(
            shape, generator=self.random, dtype=sizes.dtype, device=sizes.device
        )

    def make_pool(self, dtype: torch.dtype) -> KVPool:
        """Return a pool for all requests, full of normal numbers."""
        sizes = self.sizes
        pool = KVPool.uniform(
            num_pages=sizes.num_pages,
            page_size=sizes.page_size,
            num_layers=sizes.num_layers,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            dtype=dtype,
            device=sizes.device,
        )
        for layer in pool.layers.values():
            layer.k.copy_(self.randn(*layer.k.shape))
            layer.v.copy_(self.randn(*layer.v.shape))
        return pool

    def slots(self) -> torch.Tensor:
        """Return the slots of a step of extend."""
        return slot_mapping_extend(
            self.page_table,
            self.rows,
            self.starts,
            self.stops,
            page_size=self.sizes.page_size,
            num_tokens=self.sizes.num_reqs * self.sizes.new_len,
            backend="reference",
        )


def all_cases(sizes: Sizes) -> Iterator[Case]:
    """Yield all cases; what one changes, the others do not read."""
    scene = Scene(sizes)
    yield from table_cases(scene)
    yield from store_cases(scene)
    yield from page_cases(scene)
    yield from decode_cases(scene)
    yield from extend_cases(scene)
    yield latent_case(scene)


def table_cases(scene: Scene) -> Iterator[Case]:
    """Yield the ops on page tables and slots."""
    sizes, page_size = scene.sizes, scene.sizes.page_size
    table, rows, starts, stops = (
        scene.page_table,
        scene.rows,
        scene.starts,
        scene.stops,
    )
    own, count = table.clone(), sizes.num_reqs
    pages = scene.numbers(range(count, 0, -1))
    nothing, bounds = pages[:0], scene.numbers(range(count + 1))

    def delta(backend: Backend) -> Tensors:
        columns = torch.zeros_like(rows)
        apply_page_table_delta(
            own, rows, columns, bounds, pages, nothing, backend=backend
        )
        return ()

    yield Case(
        "page-table delta", f"{count} requests, a page each", delta, 24 * count, (own,)
    )
    num_tokens = count * sizes.new_len
    yield Case(
        "slot mapping",
        f"extend, {count} x {sizes.new_len} tokens",
        lambda backend: (
            slot_mapping_extend(
                table,
                rows,
                starts,
                stops,
                page_size=page_size,
                num_tokens=num_tokens,
                backend=backend,
            ),
        ),
        8 * num_tokens,
    )
    for what, op in (("decode", slot_mapping_decode), ("last_loc", last_loc)):
        yield Case(
            "slot mapping",
            f"{what}, {count} requests",
            lambda backend, op=op: (
                op(table, rows, starts, page_size=page_size, backend=backend),
            ),
            20 * count,
        )
    yield Case(
        "kv_indices",
        f"{count} x {sizes.pages_per_request} pages",
        lambda backend: _fields(
            kv_indices(
                table,
                rows,
                stops,
                page_size=page_size,
                num_pages=sizes.num_pages,
                backend=backend,
            )
        ),
        8 * sizes.num_pages,
    )
    yield Case(
        "block_table",
        f"{count} x {sizes.pages_per_request} pages",
        lambda backend: (
            block_table(
                table,
                rows,
                stops,
                page_size=page_size,
                width=sizes.pages_per_request,
                backend=backend,
            ),
        ),
        8 * sizes.num_pages,
    )


def _fields(indices: Any) -> Tensors:  # noqa: ANN401 - a KVIndices
    return indices.kv_indptr, indices.kv_indices, indices.last_page_len


def store_cases(scene: Scene) -> Iterator[Case]:
    """Yield the op that stores K and V, in the model's dtype and in float8."""
    sizes, slots = scene.sizes, scene.slots()
    shape = (len(slots), sizes.num_kv_heads, sizes.head_dim)
    k, v = scene.randn(*shape), scene.randn(*shape)
    for dtype in (sizes.dtype, torch.float8_e4m3fn):
        pool = KVPool.uniform(
            num_pages=sizes.num_pages,
            page_size=sizes.page_size,
            num_layers=1,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            dtype=dtype,
            device=sizes.device,
        )
        layer = pool.layer(0)

        def store(backend: Backend, layer: Any = layer) -> Tensors:  # noqa: ANN401
            store_kv(
                k, v, layer.k, layer.v, slots, k_scale=0.5, v_scale=2.0, backend=backend
            )
            return ()

        yield Case(
            "store_kv",
            f"{len(slots)} tokens to {_name(dtype)}",
            store,
            2 * k.numel() * (sizes.dtype.itemsize + dtype.itemsize) + slots.nbytes,
            (pool.buffer,),
        )


def page_cases(scene: Scene) -> Iterator[Case]:
    """Yield the ops on whole pages of all layers."""
    pool, count = scene.pool, scene.sizes.num_pages // 2
    pages = PageBuffers(page_columns(pool.config, pool.buffer))
    ids = scene.page_table[1:].flatten()[:count]
    others = scene.page_table[1:].flatten()[count : 2 * count]
    staging = torch.zeros(
        count, pool.page_bytes, dtype=torch.uint8, device=scene.sizes.device
    )
    num_bytes = 2 * staging.nbytes
    what = f"{count} pages of {pool.page_bytes // 1024} KiB"

    def gather(backend: Backend) -> Tensors:
        gather_pages(pages, ids, staging, backend=backend)
        return ()

    yield Case("gather_pages", what, gather, num_bytes, (staging,))
    filled = pages.buffers[0].index_select(0, ids)

    def scatter(backend: Backend) -> Tensors:
        scatter_pages(pages, others, filled, backend=backend)
        return ()

    yield Case("scatter_pages", what, scatter, num_bytes, (pool.buffer,))
    sources, targets = ids.tolist(), others.tolist()

    def copy(backend: Backend) -> Tensors:
        copy_pages(pages, sources, targets, backend=backend)
        return ()

    yield Case("copy_pages", what, copy, num_bytes, (pool.buffer,))


def decode_cases(scene: Scene) -> Iterator[Case]:
    """Yield attention for decode: plain, with a window, with a soft cap, float8."""
    sizes = scene.sizes
    q = scene.randn(sizes.num_reqs, sizes.num_q_heads, sizes.head_dim)
    window = sizes.context_len // 4
    variants: list[tuple[str, dict[str, Any], torch.dtype]] = [
        ("", {}, sizes.dtype),
        (f", window {window}", {"window": window}, sizes.dtype),
        (", soft cap 30", {"softcap": 30.0}, sizes.dtype),
        (", float8", {"k_scale": 0.5, "v_scale": 0.5}, torch.float8_e4m3fn),
    ]
    for what, options, dtype in variants:
        pool = scene.pool if dtype == sizes.dtype else scene.make_pool(dtype)
        layer = pool.layer(0)
        attend = partial(
            paged_attention_decode,
            q,
            layer.k,
            layer.v,
            scene.page_table,
            scene.rows,
            scene.stops,
            page_size=sizes.page_size,
            scale=sizes.head_dim**-0.5,
            **options,
        )
        seen = options.get("window", sizes.context_len)
        per_token = 2 * sizes.num_kv_heads * sizes.head_dim * dtype.itemsize
        yield Case(
            "attention, decode",
            f"{sizes.num_reqs} x {sizes.context_len} tokens{what}",
            lambda backend, attend=attend: (attend(backend=backend),),
            sizes.num_reqs * seen * per_token + 2 * q.nbytes,
            baseline=None if what else sdpa(scene, q[:, None], is_causal=False),
            tolerance=0.02,
        )


def extend_cases(scene: Scene) -> Iterator[Case]:
    """Yield attention for extend: over a prefix, and of whole prompts."""
    sizes = scene.sizes
    layer = scene.pool.layer(0)
    for what, starts, new_len in (
        ("behind a prefix", scene.starts, sizes.new_len),
        ("without a prefix", torch.zeros_like(scene.stops), sizes.context_len),
    ):
        count = min(sizes.num_reqs, max(1, 8 * sizes.new_len // new_len))
        q = scene.randn(count * new_len, sizes.num_q_heads, sizes.head_dim)
        attend = partial(
            paged_attention_extend,
            q,
            layer.k,
            layer.v,
            scene.page_table,
            scene.rows[:count],
            starts[:count],
            scene.stops[:count],
            page_size=sizes.page_size,
            scale=sizes.head_dim**-0.5,
        )
        kv_bytes = 2 * sizes.num_kv_heads * sizes.head_dim * sizes.dtype.itemsize
        yield Case(
            "attention, extend",
            f"{count} x {new_len} tokens {what}",
            lambda backend, attend=attend: (attend(backend=backend),),
            count * sizes.context_len * kv_bytes + 2 * q.nbytes,
            baseline=sdpa(scene, q.unflatten(0, (count, new_len)), is_causal=True),
            tolerance=0.02,
        )


def latent_case(scene: Scene) -> Case:
    """Return attention for decode over latent vectors, with heads of 576 and 512."""
    sizes = scene.sizes
    width = sizes.latent_dim + sizes.rope_dim
    vectors = scene.randn(sizes.num_pages + 1, sizes.page_size, 1, width)
    q = scene.randn(sizes.num_reqs, sizes.num_q_heads, width)
    attend = partial(
        paged_attention_decode,
        q,
        vectors,
        vectors[..., : sizes.latent_dim],
        scene.page_table,
        scene.rows,
        scene.stops,
        page_size=sizes.page_size,
        scale=width**-0.5,
    )
    return Case(
        "attention, decode",
        f"{sizes.num_reqs} x {sizes.context_len} tokens, MLA",
        lambda backend: (attend(backend=backend),),
        vectors[1:].nbytes + 2 * q.nbytes,
        tolerance=0.02,
    )


def sdpa(scene: Scene, q: torch.Tensor, *, is_causal: bool) -> Callable[[], object]:
    """Return torch's attention over K and V that were gathered before.

    Args:
        scene: Whose first layer.
        q: Queries, `[num_reqs, new_len, num_q_heads, head_dim]`.
        is_causal: Whether the last queries see more than the first.
    """
    sizes, layer = scene.sizes, scene.pool.layer(0)
    pages = scene.page_table[1 : len(q) + 1]
    k, v = (
        x[pages].flatten(1, 2).transpose(1, 2).contiguous() for x in (layer.k, layer.v)
    )
    q = q.transpose(1, 2).contiguous()
    mask = None
    if is_causal and q.shape[2] < sizes.context_len:
        mask = torch.ones(
            q.shape[2], sizes.context_len, dtype=torch.bool, device=sizes.device
        ).tril(sizes.context_len - q.shape[2])
    return lambda: scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=is_causal and mask is None,
        enable_gqa=True,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

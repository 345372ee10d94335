"""Random batches for attention, and the definition of attention, position by position.

What no query may see is NaN: one that is read, even with a weight of zero, shows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from radixkv.kernels import paged_attention_decode, paged_attention_extend

LAYOUTS = ("slots", "pages", "heads", "strided")
"""How K and V lie: by slot, by page, by page and head, pages among other things."""


@dataclass(frozen=True)
class Case:
    """The shapes of a batch; requests are pairs of a prefix and new tokens."""

    page_size: int
    requests: tuple[tuple[int, int], ...]
    num_kv_heads: int = 1
    group_size: int = 1
    head_dim: int = 4
    v_head_dim: int = 4
    spare_pages: int = 0
    window: int | None = None
    softcap: float | None = None
    layout: str = "pages"
    v_is_in_k: bool = False
    seed: int = 0


@dataclass
class Batch:
    """The arguments of an op."""

    q: torch.Tensor
    k_buffer: torch.Tensor
    v_buffer: torch.Tensor
    page_table: torch.Tensor
    rows: torch.Tensor
    starts: torch.Tensor
    stops: torch.Tensor
    page_size: int
    window: int | None = None
    softcap: float | None = None
    scale: float = 0.7
    k_scale: float = 1.0
    v_scale: float = 1.0

    def extend(self, **more: Any) -> torch.Tensor:  # noqa: ANN401
        return paged_attention_extend(
            self.q,
            self.k_buffer,
            self.v_buffer,
            self.page_table,
            self.rows,
            self.starts,
            self.stops,
            **self._options() | more,
        )

    def decode(self, **more: Any) -> torch.Tensor:  # noqa: ANN401
        return paged_attention_decode(
            self.q,
            self.k_buffer,
            self.v_buffer,
            self.page_table,
            self.rows,
            self.stops,
            **self._options() | more,
        )

    def _options(self) -> dict[str, Any]:
        names = "page_size", "scale", "window", "softcap", "k_scale", "v_scale"
        return {name: getattr(self, name) for name in names}

    def expected(self) -> NDArray[np.float64]:
        """Attend by the definition, in float64."""
        q = self.q.double().numpy()
        k = self.k_scale * by_slot(self.k_buffer)
        v = self.v_scale * by_slot(self.v_buffer)
        table = self.page_table.numpy()
        group_size = q.shape[1] // k.shape[1]
        out = np.zeros((*q.shape[:2], v.shape[2]))
        i = 0
        for row, start, stop in zip(self.rows, self.starts, self.stops, strict=True):
            for position in range(int(start), int(stop)):
                slots = [
                    int(table[int(row), p // self.page_size]) * self.page_size
                    + p % self.page_size
                    for p in range(position + 1)
                ]
                if self.window is not None:
                    slots = slots[-self.window :]
                for head in range(q.shape[1]):
                    kv_head = head // group_size
                    scores = [
                        self._cap(self.scale * (q[i, head] @ k[s, kv_head]))
                        for s in slots
                    ]
                    weights = [math.exp(score - max(scores)) for score in scores]
                    for weight, slot in zip(weights, slots, strict=True):
                        out[i, head] += weight / sum(weights) * v[slot, kv_head]
                i += 1
        return out

    def _cap(self, score: float) -> float:
        if self.softcap is None:
            return score
        return self.softcap * math.tanh(score / self.softcap)


def by_slot(buffer: torch.Tensor) -> NDArray[np.float64]:
    """Return K or V as float64, `[num_slots, num_kv_heads, dim]`."""
    slots = buffer if buffer.dim() == 3 else buffer.flatten(0, 1)
    return slots.float().double().numpy()


def make_batch(
    case: Case,
    *,
    q_dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype = torch.float32,
) -> Batch:
    """Scatter the pages of a batch."""
    rng = np.random.default_rng(case.seed)
    stops = [prefix + new for prefix, new in case.requests]
    counts = [-(-stop // case.page_size) for stop in stops]
    num_pages = sum(counts) + case.spare_pages
    pages = rng.permutation(np.arange(1, num_pages + 1, dtype=np.int32))
    rows = rng.permutation(np.arange(1, len(stops) + 1, dtype=np.int32))
    table = np.zeros((len(stops) + 1, max(counts, default=0) + 1), dtype=np.int32)
    num_slots = (num_pages + 1) * case.page_size
    k = np.full((num_slots, case.num_kv_heads, case.head_dim), np.nan)
    v = np.full((num_slots, case.num_kv_heads, case.v_head_dim), np.nan)
    used = 0
    for row, (prefix, _), stop, count in zip(
        rows, case.requests, stops, counts, strict=True
    ):
        table[row, :count] = pages[used : used + count]
        used += count
        lowest = max(0, prefix - case.window + 1) if case.window else 0
        for p in range(lowest, stop):
            page = int(table[row, p // case.page_size])
            slot = page * case.page_size + p % case.page_size
            k[slot] = rng.standard_normal(k.shape[1:])
            v[slot] = rng.standard_normal(v.shape[1:])
        # Pages that have left the window are the hold page, as others have them now.
        table[row, : lowest // case.page_size] = 0
    num_q_heads = case.num_kv_heads * case.group_size
    num_tokens = sum(new for _, new in case.requests)
    q = rng.standard_normal((num_tokens, num_q_heads, case.head_dim))
    k_buffer = lay_out(torch.tensor(k).to(kv_dtype), case)
    v_buffer = k_buffer[..., : case.v_head_dim]
    if not case.v_is_in_k:
        v_buffer = lay_out(torch.tensor(v).to(kv_dtype), case)
    return Batch(
        q=torch.tensor(q).to(q_dtype),
        k_buffer=k_buffer,
        v_buffer=v_buffer,
        page_table=torch.tensor(table),
        rows=torch.tensor(rows),
        starts=torch.tensor([prefix for prefix, _ in case.requests]).int(),
        stops=torch.tensor(stops).int(),
        page_size=case.page_size,
        window=case.window,
        softcap=case.softcap,
    )


def lay_out(slots: torch.Tensor, case: Case) -> torch.Tensor:
    """Put K or V, `[num_slots, num_kv_heads, dim]`, into a layout."""
    if case.layout == "slots":
        return slots
    pages = slots.unflatten(0, (-1, case.page_size))
    if case.layout == "heads":
        return pages.transpose(1, 2).contiguous().transpose(1, 2)
    if case.layout == "strided":
        # What lies between are other layers, and their garbage.
        around = torch.full((len(pages), pages[0].numel() + 48), torch.nan)
        inside = around.to(pages.dtype)[:, 32:-16].view(pages.shape)
        inside.copy_(pages)
        return inside
    return pages


def cases(
    new_tokens: st.SearchStrategy[int], *, longest: int = 20, most: int = 3
) -> st.SearchStrategy[Case]:
    """Draw batches of at most so many requests and heads of K and V."""
    request = st.tuples(st.integers(0, longest), new_tokens)
    requests = st.lists(request, max_size=most)
    dims = st.sampled_from([1, 4, 8])
    return st.builds(
        Case,
        page_size=st.sampled_from([1, 2, 3, 16]),
        requests=requests.map(tuple),
        num_kv_heads=st.integers(1, most),
        group_size=st.integers(1, 3),
        head_dim=dims,
        v_head_dim=dims,
        spare_pages=st.integers(0, 2),
        window=st.none() | st.integers(1, 2 * longest),
        softcap=st.none() | st.sampled_from([0.5, 3.0]),
        layout=st.sampled_from(LAYOUTS),
        seed=st.integers(0, 999),
    )

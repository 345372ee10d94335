"""Attention over gathered K and V: for layers that no paged kernel can read for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from radixkv.mem_cache import KVCacheInfo
from radixkv.mem_cache.device_step import DeviceStep
from radixkv.mem_cache.kv_layer import KVLayer

from .mask_rules import MaskRule


@dataclass(frozen=True, slots=True)
class _Part:
    """One request of a step: its queries and its columns among those of all."""

    start: int
    stop: int
    queries: slice
    columns: slice


def gather_kv(
    layer: KVLayer, step: DeviceStep, page_size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of the contexts of a step's requests, one after another.

    Args:
        layer: What holds them.
        step: Whose contexts.
        page_size: Slots a page.
        dtype: What they are returned in.

    Returns:
        `[1, num_kv_heads, num_columns, head_dim]` and the same of V.
    """
    table, info = step.page_table, step.info
    stops = info.stops.tolist()
    pages = [
        table[row, : -(-stop // page_size)]
        for row, stop in zip(info.rows.tolist(), stops, strict=True)
    ]

    def gathered(buffer: torch.Tensor, scale: float) -> torch.Tensor:
        parts = [
            buffer[of_request].flatten(0, 1)[:stop]
            for of_request, stop in zip(pages, stops, strict=True)
        ]
        kept = torch.cat(parts).to(dtype)
        return (kept if scale == 1 else kept * scale).transpose(0, 1)[None]

    return gathered(layer.k, layer.k_scale), gathered(layer.v, layer.v_scale)


def gathered_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    info: KVCacheInfo,
    *,
    scale: float,
    mask: MaskRule | torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attend request by request, each to its own columns.

    Args:
        query: `[1, num_q_heads, num_tokens, head_dim]`.
        key: `[1, num_kv_heads, num_columns, head_dim]`, as `gather_kv` returns it.
        value: `[1, num_kv_heads, num_columns, v_head_dim]`.
        info: Whose queries and columns they are.
        scale: Factor on the scores.
        mask: What a query sees; or what is added to the scores,
            `[1, 1 or num_q_heads, num_tokens, num_columns]`, to what is causal.
        softcap: Bound of the scores; none if not given.

    Returns:
        `[1, num_tokens, num_q_heads, v_head_dim]`.
    """
    num_groups = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(num_groups, dim=1)
    value = value.repeat_interleave(num_groups, dim=1)
    attended: list[torch.Tensor] = []
    for part in _parts(info):
        q = query[:, :, part.queries].float()
        scores = q @ key[:, :, part.columns].float().transpose(2, 3) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        device = query.device
        rows = torch.arange(part.start, part.stop, device=device)[:, None]
        columns = torch.arange(part.stop, device=device)[None]
        if isinstance(mask, MaskRule):
            seen = mask.function(0, 0, rows, columns)
        else:
            seen = columns <= rows
        if isinstance(mask, torch.Tensor):
            scores = scores + mask[:, :, part.queries, part.columns]
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        attended.append(weights.to(value.dtype) @ value[:, :, part.columns])
    return torch.cat(attended, dim=2).transpose(1, 2).contiguous()


def _parts(info: KVCacheInfo) -> Iterator[_Part]:
    first, behind = 0, 0
    for start, stop in zip(info.starts.tolist(), info.stops.tolist(), strict=True):
        last = first + stop - start
        yield _Part(start, stop, slice(first, last), slice(behind, behind + stop))
        first, behind = last, behind + stop

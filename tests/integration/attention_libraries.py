"""Stand-ins for FlashInfer and flash-attn, which need a GPU.

They have the names, parameters and conventions that the libraries publish, and compute
with torch, request by request, from nothing but what they are given.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch.nn.functional import softmax


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    window_left: int,
    softcap: float,
) -> torch.Tensor:
    """Attend from the last ``len(q)`` positions, each to itself and what is before."""
    group_size = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group_size, 1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q.float(), k) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    positions = torch.arange(len(k) - len(q), len(k))[:, None]
    others = torch.arange(len(k))
    unseen = others > positions
    if window_left >= 0:
        unseen |= others < positions - window_left
    scores = scores.masked_fill(unseen, float("-inf"))
    return torch.einsum("hts,shd->thd", softmax(scores, -1), v).to(q.dtype)


def gather(pages: torch.Tensor, page_ids: torch.Tensor, length: int) -> torch.Tensor:
    """Return the tokens in some pages, `[length, num_heads, dim]`."""
    return pages[page_ids.long()].flatten(0, 1)[:length]


@dataclass
class Wrapper:
    """What both wrappers of FlashInfer have in common."""

    float_workspace_buffer: torch.Tensor
    kv_layout: str = "NHD"
    use_tensor_cores: bool = False
    num_plans: int = 0
    planned: dict[str, Any] = field(default_factory=dict)

    def _plan(
        self,
        qo_indptr: torch.Tensor,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        sizes: tuple[int, int, int, int],
        options: dict[str, Any],
    ) -> None:
        num_qo_heads, num_kv_heads, head_dim, page_size = sizes
        # Its plans read these on the host: on a device it would wait for them.
        assert indptr.device.type == last_page_len.device.type == "cpu"
        assert {torch.int32} == {
            x.dtype for x in (qo_indptr, indptr, indices, last_page_len)
        }
        assert len(qo_indptr) == len(indptr) == len(last_page_len) + 1
        assert len(indices) == indptr[-1]
        assert num_qo_heads % num_kv_heads == 0
        self.num_plans += 1
        self.planned = {
            "qo_indptr": qo_indptr.tolist(),
            "indptr": indptr.tolist(),
            "indices": indices,
            "last_page_len": last_page_len.tolist(),
            "q_shape": (num_qo_heads, head_dim),
            "kv_shape": (page_size, num_kv_heads, head_dim),
            **options,
        }

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        *,
        k_scale: float | None = None,
        v_scale: float | None = None,
    ) -> torch.Tensor:
        plan = self.planned
        k_pages, v_pages = paged_kv_cache
        assert plan["q_shape"] == q.shape[1:]
        assert plan["kv_shape"] == k_pages.shape[1:]
        assert plan["q_data_type"] == q.dtype
        assert plan["kv_data_type"] == k_pages.dtype
        assert plan["qo_indptr"][-1] == len(q)
        attended: list[torch.Tensor] = []
        for i, last in enumerate(plan["last_page_len"]):
            first, end = plan["indptr"][i : i + 2]
            length = (end - first - 1) * k_pages.shape[1] + last
            k, v = (
                gather(x, plan["indices"][first:end], length).float()
                for x in (k_pages, v_pages)
            )
            begin, stop = plan["qo_indptr"][i : i + 2]
            attended.append(
                attend(
                    q[begin:stop],
                    k * (k_scale or 1),
                    v * (v_scale or 1),
                    scale=plan["sm_scale"],
                    window_left=plan["window_left"],
                    softcap=plan["logits_soft_cap"] or 0,
                )
            )
        return torch.cat(attended)


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        head_dim_vo: int | None = None,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        assert causal
        self._plan(
            qo_indptr,
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            (num_qo_heads, num_kv_heads, head_dim_qk, page_size),
            {
                "head_dim_vo": head_dim_vo,
                "sm_scale": sm_scale,
                "window_left": window_left,
                "logits_soft_cap": logits_soft_cap,
                "q_data_type": q_data_type,
                "kv_data_type": kv_data_type,
            },
        )


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        sm_scale: float | None = None,
    ) -> None:
        self._plan(
            torch.arange(len(last_page_len) + 1, dtype=torch.int32),
            indptr,
            indices,
            last_page_len,
            (num_qo_heads, num_kv_heads, head_dim, page_size),
            {
                "sm_scale": sm_scale,
                "window_left": window_left,
                "logits_soft_cap": logits_soft_cap,
                "q_data_type": q_data_type,
                "kv_data_type": kv_data_type,
            },
        )


def make_flashinfer() -> tuple[ModuleType, list[Wrapper]]:
    """Return the module, and the wrappers that it makes, as it makes them."""
    module, made = ModuleType("flashinfer"), []
    for cls in (
        BatchPrefillWithPagedKVCacheWrapper,
        BatchDecodeWithPagedKVCacheWrapper,
    ):

        def make(
            *args: Any,  # noqa: ANN401 - what the class takes
            cls: type[Wrapper] = cls,
            **kwargs: Any,  # noqa: ANN401
        ) -> Wrapper:
            made.append(cls(*args, **kwargs))
            return made[-1]

        setattr(module, cls.__name__, make)
    return module, made


def make_flash_attn() -> tuple[ModuleType, list[str]]:
    """Return the module, and the names of the functions that were called."""
    module, called = ModuleType("flash_attn"), []

    def flash_attn_with_kvcache(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        cache_seqlens: torch.Tensor,
        block_table: torch.Tensor,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
    ) -> torch.Tensor:
        called.append("flash_attn_with_kvcache")
        batch_size, seqlen_q = q.shape[:2]
        bounds = torch.arange(batch_size + 1, dtype=torch.int32)
        attended = attend_by_table(
            q.flatten(0, 1),
            k_cache,
            v_cache,
            bounds * seqlen_q,
            cache_seqlens,
            block_table=block_table,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
        )
        return attended.view(q.shape)

    def flash_attn_varlen_func(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        *,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        block_table: torch.Tensor,
    ) -> torch.Tensor:
        called.append("flash_attn_varlen_func")
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert max_seqlen_q == cu_seqlens_q.diff().max()
        assert max_seqlen_k == cu_seqlens_k.diff().max()
        return attend_by_table(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k.diff(),
            block_table=block_table,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
        )

    module.__dict__["flash_attn_with_kvcache"] = flash_attn_with_kvcache
    module.__dict__["flash_attn_varlen_func"] = flash_attn_varlen_func
    return module, called


def attend_by_table(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    q_indptr: torch.Tensor,
    lengths: torch.Tensor,
    *,
    block_table: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
) -> torch.Tensor:
    assert causal
    assert k_pages.shape[1] % 256 == 0
    assert k_pages.stride(-1) == v_pages.stride(-1) == 1
    assert block_table.dtype == torch.int32
    assert window_size[1] in (-1, 0)
    assert softmax_scale is not None
    return torch.cat(
        [
            attend(
                q[q_indptr[i] : q_indptr[i + 1]],
                gather(k_pages, block_table[i], length),
                gather(v_pages, block_table[i], length),
                scale=softmax_scale,
                window_left=window_size[0],
                softcap=softcap,
            )
            for i, length in enumerate(lengths.tolist())
        ]
    )

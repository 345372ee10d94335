"""Attention by FlashInfer (Ye et al., 2025, arXiv:2501.01005), over a pool's pages."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.mem_cache import KVPool
from radixkv.mem_cache.device_step import DeviceStep
from radixkv.mem_cache.kv_layer import KVLayer

from .attention_backends import import_library, longest_new_len

_WORKSPACE_BYTES = 128 * 2**20
"""What FlashInfer advises."""

_LARGE_GROUP = 4
"""Heads that share K and V, from which on tensor cores pay for decode."""


class _Variant(NamedTuple):
    """What FlashInfer plans for; layers that agree on it share a plan."""

    is_decode: bool
    scale: float
    window: int | None
    softcap: float | None
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype


class FlashInferAttention:
    """Lets FlashInfer attend, a plan a step for each kind of layers.

    It reads K and V where they are, whatever the order of the buffer. What it plans
    with comes from the message, so no step waits for the device.
    """

    can_capture = False

    def __init__(
        self, pool: KVPool, *, workspace_bytes: int = _WORKSPACE_BYTES
    ) -> None:
        """Attend to a pool.

        Args:
            pool: Where K and V live.
            workspace_bytes: Memory for partial results, on the pool's device.

        Raises:
            BackendUnavailableError: FlashInfer is not installed.
        """
        self._library: Any = import_library("flashinfer", "flashinfer-python")
        self._pool = pool
        self._workspace = torch.zeros(
            workspace_bytes, dtype=torch.uint8, device=pool.device
        )
        self._wrappers: dict[_Variant, Any] = {}
        self._planned: set[_Variant] = set()
        self._is_decode = False

    def begin_step(self, step: DeviceStep) -> None:
        """Take a step; see `AttentionBackend`."""
        info, page_size = step.info, self._pool.page_size
        self._is_decode = longest_new_len(step) == 1
        self._q_indptr = _indptr(info.stops - info.starts)
        self._kv_indptr = _indptr(-(-info.stops // page_size))
        self._kv_indices = step.kv_indices(page_size=page_size).kv_indices
        self._last_page_len = torch.tensor((info.stops - 1) % page_size + 1)
        self._planned.clear()

    def attend(
        self,
        q: torch.Tensor,
        layer: KVLayer,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Attend to the context of each request; see `AttentionBackend`.

        Args:
            q: Queries, `[num_tokens, num_q_heads, head_dim]`.
            layer: K and V.
            scale: Factor on the scores.
            window: Positions that a query sees; all if not given.
            softcap: Bound of the scores; none if not given.
        """
        k, v = layer.k, layer.v
        variant = _Variant(
            self._is_decode,
            scale,
            window,
            softcap,
            q.shape[1],
            k.shape[2],
            k.shape[3],
            v.shape[3],
            q.dtype,
            k.dtype,
        )
        if variant not in self._planned:
            self._plan(variant)
            self._planned.add(variant)
        attended: torch.Tensor = self._wrappers[variant].run(
            q, (k, v), k_scale=layer.k_scale, v_scale=layer.v_scale
        )
        return attended

    def _plan(self, variant: _Variant) -> None:
        if variant not in self._wrappers:
            self._wrappers[variant] = self._make_wrapper(variant)
        # Its plans read bounds on the host, and pages on the device.
        pages = self._kv_indptr, self._kv_indices, self._last_page_len
        heads = variant.num_q_heads, variant.num_kv_heads, variant.head_dim
        options: dict[str, Any] = {
            "sm_scale": variant.scale,
            "window_left": -1 if variant.window is None else variant.window - 1,
            "logits_soft_cap": variant.softcap,
            "q_data_type": variant.q_dtype,
            "kv_data_type": variant.kv_dtype,
        }
        wrapper = self._wrappers[variant]
        if variant.is_decode:
            wrapper.plan(*pages, *heads, self._pool.page_size, **options)
        else:
            wrapper.plan(
                self._q_indptr,
                *pages,
                *heads,
                self._pool.page_size,
                head_dim_vo=variant.v_head_dim,
                causal=True,
                **options,
            )

    def _make_wrapper(self, variant: _Variant) -> Any:  # noqa: ANN401 - untyped
        if not variant.is_decode:
            return self._library.BatchPrefillWithPagedKVCacheWrapper(
                self._workspace, kv_layout="NHD"
            )
        group_size = variant.num_q_heads // variant.num_kv_heads
        return self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            kv_layout="NHD",
            use_tensor_cores=group_size >= _LARGE_GROUP,
        )


def _indptr(lengths: NDArray[np.int32]) -> torch.Tensor:
    """Return the bounds of runs of these lengths, int32 `[n + 1]`, on the host."""
    bounds = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=bounds[1:])
    return torch.tensor(bounds)

"""Attention by FlashAttention-2 (Dao, 2023, arXiv:2307.08691), over a pool's pages."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.nn.functional import pad

from radixkv.mem_cache import KVPool
from radixkv.mem_cache.device_step import DeviceStep
from radixkv.mem_cache.errors import ConfigError
from radixkv.mem_cache.kv_layer import KVLayer

from .attention_backends import import_library

PAGE_GRANULARITY: Final = 256
"""Slots of which FlashAttention-2 wants a page to have a multiple."""

_DTYPES: Final = (torch.float16, torch.bfloat16)


class FlashAttention:
    """Lets the package flash-attn attend, by block table.

    It reads K and V where they are, whatever the order of the buffer. Its pages have a
    multiple of 256 slots.
    """

    can_capture = False

    def __init__(self, pool: KVPool) -> None:
        """Attend to a pool.

        Args:
            pool: Where K and V live.

        Raises:
            BackendUnavailableError: The package is not installed.
            ConfigError: It takes no such pages, or no such K and V.
        """
        self._library: Any = import_library("flash_attn", "flash-attn")
        if pool.page_size % PAGE_GRANULARITY:
            raise ConfigError(
                f"FlashAttention needs a page_size that is a multiple of "
                f"{PAGE_GRANULARITY}, got {pool.page_size}"
            )
        for layer in pool.layers.values():
            if layer.k.dtype not in _DTYPES:
                raise ConfigError(
                    f"FlashAttention needs K and V in one of {_DTYPES}, got "
                    f"{layer.name} in {layer.k.dtype}"
                )
        self._pool = pool
        self._step: DeviceStep | None = None

    def begin_step(self, step: DeviceStep) -> None:
        """Take a step; see `AttentionBackend`."""
        self._step = step
        self._block_table = step.block_table(page_size=self._pool.page_size)
        lengths = step.info.stops - step.info.starts
        self._max_new_len = int(lengths.max(initial=0))
        self._is_even = bool((lengths == self._max_new_len).all())
        self._max_len = int(step.info.stops.max(initial=0))
        if not self._is_even:
            self._new_indptr = _indptr(step.stops - step.starts)
            self._indptr = _indptr(step.stops)

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
        step = self._step
        assert step is not None
        options: dict[str, Any] = {
            "block_table": self._block_table,
            "softmax_scale": scale,
            "causal": True,
            "window_size": (-1, -1) if window is None else (window - 1, 0),
            "softcap": softcap or 0.0,
        }
        attended: torch.Tensor
        if self._is_even:  # a decode step, with or without drafts
            attended = self._library.flash_attn_with_kvcache(
                q.view(-1, self._max_new_len, *q.shape[1:]),
                layer.k,
                layer.v,
                cache_seqlens=step.stops,
                **options,
            )
            return attended.flatten(0, 1)
        attended = self._library.flash_attn_varlen_func(
            q,
            layer.k,
            layer.v,
            self._new_indptr,
            self._indptr,
            self._max_new_len,
            self._max_len,
            **options,
        )
        return attended


def _indptr(lengths: torch.Tensor) -> torch.Tensor:
    """Return the bounds of runs of these lengths, int32 `[n + 1]`, on their device."""
    return pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))

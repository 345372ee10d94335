"""Who computes attention over the pages of a pool: the library's kernels, or others."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Protocol, TypeAlias

import torch

from radixkv.kernels import paged_attention_decode, paged_attention_extend
from radixkv.mem_cache import KVPool
from radixkv.mem_cache.device_step import DeviceStep
from radixkv.mem_cache.errors import BackendUnavailableError
from radixkv.mem_cache.kv_layer import KVLayer


class AttentionBackend(Protocol):
    """Attends from the tokens of a step to what the pool holds of their requests.

    One object serves one runner, step by step: `begin_step`, then `attend` in each
    layer, in any order of layers.

    Attributes:
        can_capture: Whether a decode step can be captured as a CUDA graph: it makes the
            same launches whatever the numbers on the device, and looks at none of those
            of the message but how many requests there are.
    """

    @property
    def can_capture(self) -> bool:
        """Whether a decode step can be captured as a CUDA graph."""
        ...

    def begin_step(self, step: DeviceStep) -> None:
        """Take a step, of which each request computes a token at least.

        Args:
            step: Its numbers, on the device and in the message.
        """
        ...

    def attend(
        self,
        q: torch.Tensor,
        layer: KVLayer,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Attend from the positions ``[start, stop)`` of each request to its context.

        A position sees itself and what comes before it, as in `paged_attention_extend`.

        Args:
            q: Queries, request after request, `[num_tokens, num_q_heads, head_dim]`.
            layer: K and V, those of the step's tokens too, with their scales.
            scale: Factor on the scores.
            window: Positions that a query sees, its own included; all if not given.
            softcap: Bound of the scores; none if not given.

        Returns:
            `[num_tokens, num_q_heads, v_head_dim]`.
        """
        ...


AttentionFactory: TypeAlias = Callable[[KVPool], AttentionBackend]
"""Makes the backend of a runner, given its pool: the class itself, mostly."""


class PagedAttention:
    """The library's own kernels: Triton on a GPU, their references elsewhere."""

    can_capture = True

    def __init__(self, pool: KVPool) -> None:
        """Attend to a pool.

        Args:
            pool: Where K and V live.
        """
        self._pool = pool
        self._step: DeviceStep | None = None
        self._max_new_len = 0

    def begin_step(self, step: DeviceStep) -> None:
        """Take a step; see `AttentionBackend`."""
        self._step = step
        self._max_new_len = longest_new_len(step)

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
        if self._max_new_len == 1:
            return paged_attention_decode(
                q,
                layer.k,
                layer.v,
                step.page_table,
                step.rows,
                step.stops,
                page_size=self._pool.page_size,
                scale=scale,
                window=window,
                softcap=softcap,
                k_scale=layer.k_scale,
                v_scale=layer.v_scale,
                backend=step.backend,
            )
        return paged_attention_extend(
            q,
            layer.k,
            layer.v,
            step.page_table,
            step.rows,
            step.starts,
            step.stops,
            page_size=self._pool.page_size,
            scale=scale,
            window=window,
            softcap=softcap,
            k_scale=layer.k_scale,
            v_scale=layer.v_scale,
            max_new_len=self._max_new_len,
            backend=step.backend,
        )


def longest_new_len(step: DeviceStep) -> int:
    """Return the most tokens that a request of a step computes; 1 for a decode step."""
    return int((step.info.stops - step.info.starts).max(initial=0))


def import_library(module: str, package: str) -> ModuleType:
    """Import a library that computes attention, and that nothing else here needs.

    Args:
        module: The name to import it by.
        package: The name to install it by.

    Raises:
        BackendUnavailableError: It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise BackendUnavailableError(
            f"this attention needs the package {package}, which cannot be imported "
            f"({error}); PagedAttention works without"
        ) from error

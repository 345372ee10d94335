"""What paged attention does with its scores, and what it takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .checks import check_count, check_factor
from .errors import ConfigError


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """The options that both ops of paged attention share.

    Attributes:
        page_size: Slots a page.
        scale: Factor on the scores, usually ``head_dim ** -0.5``.
        window: Positions that a query sees, its own included; None for all.
        softcap: Scores are ``softcap * tanh(score / softcap)``; None for as they are.
        k_scale: Factor on what is stored as K, as of a float8 pool.
        v_scale: Factor on what is stored as V.
    """

    page_size: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what has no meaning.

        Raises:
            ConfigError: A size or factor is out of range.
        """
        check_count("page_size", self.page_size, minimum=1)
        check_factor("scale", self.scale)
        if self.window is not None:
            check_count("window", self.window, minimum=1)
        if self.softcap is not None:
            check_factor("softcap", self.softcap, is_divisor=True)
        check_factor("k_scale", self.k_scale)
        check_factor("v_scale", self.v_scale)


def as_pages(buffer: torch.Tensor, page_size: int) -> torch.Tensor:
    """View a buffer by page, `[num_pages + 1, page_size, num_kv_heads, head_dim]`.

    Args:
        buffer: By page already, or by slot, `[num_slots, num_kv_heads, head_dim]`; with
            any strides.
        page_size: Slots a page.

    Raises:
        ConfigError: The buffer has pages of another size.
    """
    if buffer.dim() == 3 and len(buffer) % page_size == 0:
        return buffer.view(-1, page_size, *buffer.shape[1:])
    if buffer.dim() != 4 or buffer.shape[1] != page_size:
        raise ConfigError(
            f"K and V must be [num_pages + 1, {page_size}, num_kv_heads, head_dim], or "
            f"by slot, with page_size {page_size}, got {list(buffer.shape)}"
        )
    return buffer


def check_shapes(q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor) -> None:
    """Refuse queries that K and V do not fit.

    Args:
        q: Queries, `[num_tokens, num_q_heads, head_dim]`.
        k_pages: A layer's K, `[num_pages + 1, page_size, num_kv_heads, head_dim]`.
        v_pages: A layer's V, `[num_pages + 1, page_size, num_kv_heads, v_head_dim]`.

    Raises:
        ConfigError: The heads of one are no multiple of the other's, or the dims of a
            head differ.
    """
    if q.dim() != 3:
        raise ConfigError(
            "q must be [num_tokens, num_q_heads, head_dim], got a tensor of shape "
            f"{list(q.shape)}"
        )
    num_q_heads, head_dim = q.shape[1:]
    num_kv_heads = k_pages.shape[2]
    if num_q_heads % num_kv_heads or k_pages.shape[3] != head_dim:
        raise ConfigError(
            f"K must have a divisor of {num_q_heads} heads, of {head_dim} numbers, as "
            f"q has, got {num_kv_heads} heads of {k_pages.shape[3]}"
        )
    if v_pages.shape[:3] != k_pages.shape[:3]:
        raise ConfigError(
            f"V must have the pages and heads of K, {list(k_pages.shape[:3])}, got "
            f"{list(v_pages.shape[:3])}"
        )

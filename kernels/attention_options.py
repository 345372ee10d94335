"""What paged attention does with its scores, and what it takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .checks import FLOAT32_TINY, check_count, check_factor
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

    Every factor, and what kernels make of them together, is in the range of float32.
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
            ConfigError: A size or factor is out of range, or factors are together.
        """
        check_count("page_size", self.page_size, minimum=1)
        check_factor("scale", self.scale)
        if self.window is not None:
            check_count("window", self.window, minimum=1)
        if self.softcap is not None:
            check_factor("softcap", self.softcap, is_divisor=True)
            # Scores are in units of log2, in which a cap is larger.
            check_factor("softcap * log2(e)", float(self.softcap) * math.log2(math.e))
        check_factor("k_scale", self.k_scale)
        check_factor("v_scale", self.v_scale)
        if self.softcap is None:
            name, unit = "scale * k_scale * log2(e)", math.log2(math.e)
        else:
            name, unit = "scale * k_scale / softcap", 1.0
        factor = self.score_factor * unit
        check_factor(name, factor)
        if 0 < abs(factor) < FLOAT32_TINY:
            raise ConfigError(
                f"{name} must be 0, or of a size from {FLOAT32_TINY:.6g} on, below "
                f"which float32 loses digits, and finite, got {factor!r}"
            )

    @property
    def score_factor(self) -> float:
        """What ``k @ q`` is multiplied with: a score, or of how many caps it is.

        As floats, in which the product of any two factors is one too: numpy's numbers
        may be narrower.
        """
        factor = float(self.scale) * float(self.k_scale)
        return factor if self.softcap is None else factor / float(self.softcap)


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

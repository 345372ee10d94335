"""How the next tokens of a request are chosen, and when it ends."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Real
from typing import Self

from radixkv.mem_cache.errors import ConfigError
from radixkv.mem_cache.sizes import as_size, is_integer


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling options of one request; the defaults are greedy decoding.

    Attributes:
        max_new_tokens: Output tokens after which the request ends, at least 1.
        temperature: Divisor of the logits; 0 means greedy.
        top_k: Keep only the `top_k` likeliest tokens; 0 keeps all.
        top_p: Keep the likeliest tokens that together have this probability, in
            `(0, 1]`; 1 keeps all.
        seed: Key of the random numbers, in `[0, 2**64)`. A token depends on it and on
            its position, never on the batch. ``None`` for one that the scheduler makes
            of the number of the request's arrival: others get others, and whoever
            queues the same requests again gets the same tokens. `Request.seed` and
            `RequestUsage.seed` tell it.
        stop_token_ids: Tokens that end the request, besides the model's own.
        ignore_eos: Go on after the model's end-of-sequence token.

    Raises:
        ConfigError: A value is out of range.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        as_size("max_new_tokens", self.max_new_tokens)
        if not (_is_a(Real, self.temperature) and 0 <= self.temperature < math.inf):
            raise ConfigError(
                f"temperature must be a finite number >= 0, got {self.temperature!r}"
            )
        as_size("top_k", self.top_k, 0)
        if not (_is_a(Real, self.top_p) and 0 < self.top_p <= 1):
            raise ConfigError(f"top_p must be a number in (0, 1], got {self.top_p!r}")
        seed = self.seed
        if seed is not None and not (is_integer(seed) and 0 <= seed < 2**64):
            raise ConfigError(f"seed must be an integer in [0, 2**64), got {seed!r}")
        if not _is_a(tuple, self.stop_token_ids):
            raise ConfigError(
                f"stop_token_ids must be a tuple, got {self.stop_token_ids!r}"
            )
        for token in self.stop_token_ids:
            as_size("each of stop_token_ids", token, 0)
        if self.ignore_eos not in (True, False):
            raise ConfigError(
                f"ignore_eos must be True or False, got {self.ignore_eos!r}"
            )

    def with_seed(self, number: int) -> Self:
        """Return the same with a seed made of a number, if one is needed.

        Equal numbers give equal seeds in every process, and no two give the same: it is
        a step of SplitMix64 (Steele, Lea and Flood, 2014), which is a bijection.

        Args:
            number: In `[0, 2**64)`.

        Example:
            >>> SamplingParams(temperature=1.0).with_seed(0).seed
            16294208416658607535
            >>> SamplingParams(temperature=1.0, seed=7).with_seed(0).seed
            7
        """
        if self.seed is not None or self.is_greedy:
            return self
        return replace(self, seed=_mix(number))

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0


def _mix(number: int) -> int:
    """Return another 64-bit number for each, far from those of its neighbours."""
    mask = 2**64 - 1
    mixed = (number + 1) * 0x9E3779B97F4A7C15 & mask
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & mask
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & mask
    return mixed ^ mixed >> 31


def _is_a(kind: type, value: object) -> bool:
    # A bool is a number to Python; here, True as a temperature is a mistake.
    return isinstance(value, kind) and not isinstance(value, bool)

"""How the next tokens of a request are chosen, and when it ends."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

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
            its position, never on the batch.
        stop_token_ids: Tokens that end the request, besides the model's own.
        ignore_eos: Go on after the model's end-of-sequence token.

    Raises:
        ConfigError: A value is out of range.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
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
        if not (is_integer(self.seed) and 0 <= self.seed < 2**64):
            raise ConfigError(
                f"seed must be an integer in [0, 2**64), got {self.seed!r}"
            )
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

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0


def _is_a(kind: type, value: object) -> bool:
    # A bool is a number to Python; here, True as a temperature is a mistake.
    return isinstance(value, kind) and not isinstance(value, bool)

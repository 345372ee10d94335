"""The limits of a scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from radixkv.mem_cache.errors import ConfigError
from radixkv.mem_cache.sizes import as_size


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """How much a scheduler may do at a time, and how long it may put a request off.

    Attributes:
        max_running_requests: Requests that run at a time, at least 1.
        max_batched_tokens: Tokens that a step computes at most; at least
            `max_running_requests`, so that no decode waits for another.
        chunked_prefill_size: Prompt tokens of one request that a step computes at most,
            at least 1. Longer prompts are computed in chunks, so that decodes, and the
            prompts of others, go on meanwhile.
        max_overtakes: Later requests that may be admitted before a request, at least 0.
            Who was overtaken so often goes next, and nobody before it. With 0, requests
            are admitted in the order of arrival, whatever the policy. Nobody counts as
            overtaken by other namespaces while its own is at its ceiling, nor by a
            higher priority if the scheduler preempts.
        max_deferrals: Steps that a request may wait for a prefix that another one is
            computing, at least 0; with 0, it computes it once more.

    Raises:
        ConfigError: A value is out of range.
    """

    max_running_requests: int = 256
    max_batched_tokens: int = 8192
    chunked_prefill_size: int = 2048
    max_overtakes: int = 256
    max_deferrals: int = 256

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        as_size("max_running_requests", self.max_running_requests)
        as_size("max_batched_tokens", self.max_batched_tokens)
        as_size("chunked_prefill_size", self.chunked_prefill_size)
        as_size("max_overtakes", self.max_overtakes, 0)
        as_size("max_deferrals", self.max_deferrals, 0)
        if self.max_batched_tokens < self.max_running_requests:
            raise ConfigError(
                "max_batched_tokens must be >= max_running_requests "
                f"({self.max_running_requests}), got {self.max_batched_tokens}"
            )

"""What a request has cost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestUsage:
    """What a request has cost so far; for the bill and for the client's last message.

    Attributes:
        num_prompt_tokens: Tokens of the prompt.
        num_cached_tokens: Prompt tokens that the cache had when the request first ran.
        num_computed_tokens: Positions whose K and V were computed for it, those that
            were computed again after a retraction included.
        num_output_tokens: Tokens generated.
        num_draft_tokens: Draft tokens that were verified for it.
        num_accepted_tokens: Those of them that became output.
        num_retractions: How often its pages were taken back.
        num_requeues: How often it was queued again because its step had failed.
        seed: What it samples with, to get the same tokens again; ``None`` if it does
            not sample.
        queue_s: Seconds from its submission until it first ran; ``None`` before.
        first_token_s: Seconds from its submission to its first token; ``None`` before.
        total_s: Seconds from its submission to its end; ``None`` before.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_retractions: int
    num_requeues: int
    seed: int | None
    queue_s: float | None
    first_token_s: float | None
    total_s: float | None

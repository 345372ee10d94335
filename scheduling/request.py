"""One request on its way through the scheduler."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from radixkv.mem_cache.errors import (
    LengthError,
    RequestStateError,
    TokenError,
)
from radixkv.mem_cache.radix_key import RadixKey
from radixkv.mem_cache.sizes import as_integer, as_size, check_hashable, check_kind
from radixkv.mem_cache.tokens import Tokens

from .sampling_params import SamplingParams
from .usage import RequestUsage

if TYPE_CHECKING:
    from radixkv.mem_cache.request_kv import RequestKV


class RequestStatus(StrEnum):
    """Where a request is."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    """It sampled an end-of-sequence or stop token."""
    LENGTH = "length"
    """It has `max_new_tokens` output tokens."""
    ABORT = "abort"
    """Its caller took it back."""
    REFUSED = "refused"
    """The cache cannot hold it any more, not even alone."""
    ERROR = "error"
    """It could not be computed; its `error` says why."""


class Request:
    """A prompt, its options, and what became of it.

    The scheduler writes the attributes; everybody else reads them.

    Attributes:
        request_id: The caller's name for the request.
        sampling_params: How its tokens are chosen. The scheduler gives those who sample
            without a seed one of their own.
        key: Its tokens, prompt and output, in its namespace.
        priority: Higher goes first, where a policy looks at it.
        kv: Its part of the KV cache while it runs.
        status: Where it is.
        finish_reason: Why it ended, once it has.
        error: What went wrong, if that is why it ended.
        max_kv_len: Positions that it needs K and V of at its longest. The newest token
            needs none: it is never fed back.
        num_cached_tokens: Prompt tokens that the cache had when it first ran.
        num_computed_tokens: Positions computed for it, those computed again included.
        num_draft_tokens: Draft tokens that were verified for it.
        num_accepted_tokens: Those of them that became output.
        num_retractions: How often its pages were taken back.
        num_requeues: How often it was queued again because its step had failed.
        num_failures: How often its step failed since it had its last token.
        failed_len: Tokens that it had when its step failed last.
        retracted_len: Tokens that had K and V when its pages were taken back; the most
            so far.
        reserves_all: Whether room is set aside for all that it can need, whatever the
            admission policy says.
        arrival: Its number in the order of submission; -1 before.
        arrived_at: Tokens that the scheduler had computed when it was submitted.
        num_overtakes: Later requests that were admitted while it waited.
        num_deferrals: Steps that it waited for a prefix that another one computes.
        admitted_len: Positions that it did not have to compute when it was admitted.
        prefill_len: Tokens that it had when it was admitted.
        scheduled_len: Positions that are computed, or will be by steps in flight.
        num_pending: Tokens that steps in flight will sample at least: 0 or 1.
        num_in_flight: Steps in flight that compute it.
        match_len: What `PrefixCache.match_prefix` said last, while it waits.
        match_version: The cache's `version` then; -1 if it was not asked.
        arrived_s: When it was submitted, by the scheduler's clock; so the next three.
        admitted_s: When it was first admitted.
        first_token_s: When it had its first token.
        finished_s: When it ended.
    """

    __slots__ = (
        "_num_prompt_tokens",
        "admitted_len",
        "admitted_s",
        "arrival",
        "arrived_at",
        "arrived_s",
        "error",
        "failed_len",
        "finish_reason",
        "finished_s",
        "first_token_s",
        "key",
        "kv",
        "match_len",
        "match_version",
        "max_kv_len",
        "num_accepted_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_deferrals",
        "num_draft_tokens",
        "num_failures",
        "num_in_flight",
        "num_overtakes",
        "num_pending",
        "num_requeues",
        "num_retractions",
        "prefill_len",
        "priority",
        "request_id",
        "reserves_all",
        "retracted_len",
        "sampling_params",
        "scheduled_len",
        "status",
    )

    def __init__(
        self,
        request_id: Hashable,
        prompt: Tokens,
        sampling_params: SamplingParams | None = None,
        *,
        namespace: Hashable = None,
        priority: int = 0,
    ) -> None:
        """Copy the prompt.

        Args:
            request_id: The caller's name for the request.
            prompt: Token ids in `[0, 2**31)`, `[num_prompt_tokens]`, at least one.
            sampling_params: How its tokens are chosen; greedy if not given.
            namespace: Shares cached prefixes only within this namespace.
            priority: Higher goes first, where a policy looks at it.

        Raises:
            TokenError: The prompt is not a flat sequence of such integers.
            LengthError: The prompt is empty.
            ConfigError: `namespace` or `request_id` is not hashable, `priority` is no
                integer, or `sampling_params` are none.
        """
        key = RadixKey(prompt, namespace)
        if key.has_virtual:
            raise TokenError(
                "token ids of a Request must be in [0, 2**31), it takes no virtual "
                f"tokens; got {key.tokens.min()}"
            )
        if not len(key):
            raise LengthError("a prompt must have >= 1 tokens, got 0")
        check_hashable("request_id", request_id)
        self.request_id = request_id
        check_kind("sampling_params", sampling_params, SamplingParams | None)
        self.sampling_params = sampling_params or SamplingParams()
        self.key = key
        self.priority = as_integer("priority", priority)
        self.kv: RequestKV | None = None
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.error: BaseException | None = None
        self.max_kv_len = len(key) + self.sampling_params.max_new_tokens - 1
        self.num_cached_tokens = 0
        self.num_computed_tokens = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.num_retractions = 0
        self.num_requeues = 0
        self.num_failures = 0
        self.failed_len = 0
        self.retracted_len = 0
        self.reserves_all = False
        self.arrival = -1
        self.arrived_at = 0
        self.num_overtakes = 0
        self.num_deferrals = 0
        self.admitted_len = 0
        self.prefill_len = 0
        self.scheduled_len = 0
        self.num_pending = 0
        self.num_in_flight = 0
        self.match_len = 0
        self.match_version = -1
        self.arrived_s: float | None = None
        self.admitted_s: float | None = None
        self.first_token_s: float | None = None
        self.finished_s: float | None = None
        self._num_prompt_tokens = len(key)

    def __repr__(self) -> str:
        """Name the request and its length."""
        return f"Request({self.request_id!r}, {self.num_tokens} tokens, {self.status})"

    @property
    def namespace(self) -> Hashable:
        """Shares cached prefixes only with requests of the same namespace."""
        return self.key.namespace

    @property
    def prompt_tokens(self) -> NDArray[np.int32]:
        """The prompt, a view of int32 `[num_prompt_tokens]`."""
        return self.key.tokens[: self._num_prompt_tokens]

    @property
    def output_tokens(self) -> list[int]:
        """The tokens after the prompt, a new list."""
        output: list[int] = self.tokens[self._num_prompt_tokens :].tolist()
        return output

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Prompt and output, a view of int32 `[num_tokens]` made in O(1)."""
        return self.key.tokens

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens in the prompt."""
        return self._num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens after the prompt."""
        return len(self.key) - self._num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens in prompt and output."""
        return len(self.key)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens in prompt and output that have no K and V; all while it waits."""
        return len(self.key) - (self.kv.committed_len if self.kv else 0)

    @property
    def seed(self) -> int | None:
        """The seed that it samples with; ``None`` before it has one, or needs none."""
        return self.sampling_params.seed

    @property
    def usage(self) -> RequestUsage:
        """What it has cost so far."""
        return RequestUsage(
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_computed_tokens=self.num_computed_tokens,
            num_output_tokens=self.num_output_tokens,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            num_retractions=self.num_retractions,
            num_requeues=self.num_requeues,
            seed=self.seed,
            queue_s=self._since_arrival(self.admitted_s),
            first_token_s=self._since_arrival(self.first_token_s),
            total_s=self._since_arrival(self.finished_s),
        )

    def fan_out(self, num_samples: int) -> list[Request]:
        """Make several requests of this one, which share its prompt's pages.

        They differ in their ids, ``(request_id, i)``, and in their seeds, which count
        up from this one's if it has one. Queue them instead of this one: the first
        computes the prompt, the others wait for it, hold no pages meanwhile, and
        compute no more than what is behind its last whole page.

        Args:
            num_samples: How many, at least 1.

        Raises:
            ConfigError: `num_samples` is below 1.
            RequestStateError: The request is not new.
        """
        num_samples = as_size("num_samples", num_samples)
        if self.arrival >= 0 or self.num_output_tokens:
            raise RequestStateError(f"only a new request can fan out, got {self!r}")
        params = self.sampling_params
        seed = params.seed
        return [
            Request(
                (self.request_id, i),
                self.tokens,
                replace(params, seed=None if seed is None else (seed + i) % 2**64),
                namespace=self.namespace,
                priority=self.priority,
            )
            for i in range(num_samples)
        ]

    def _since_arrival(self, time_s: float | None) -> float | None:
        if time_s is None or self.arrived_s is None:
            return None
        return time_s - self.arrived_s

    def append(self, token: int) -> None:
        """Add one output token; earlier views stay as they are. O(1) amortized.

        Raises:
            TokenError: `token` is not in `[0, 2**31)`.
        """
        self.key.append(token)

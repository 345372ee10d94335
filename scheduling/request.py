"""One request on its way through the scheduler."""

from __future__ import annotations

from collections.abc import Hashable
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from radixkv.mem_cache.errors import LengthError, TokenError
from radixkv.mem_cache.prefix_cache import check_hashable
from radixkv.mem_cache.sizes import as_integer
from radixkv.mem_cache.tokens import Tokens, as_tokens

from .sampling_params import SamplingParams

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


class Request:
    """A prompt, its options, and what became of it.

    The scheduler writes the attributes; everybody else reads them.

    Attributes:
        request_id: The caller's name for the request.
        sampling_params: How its tokens are chosen.
        namespace: Shares cached prefixes only with requests of the same namespace.
        priority: Higher goes first, where a policy looks at it.
        kv: Its part of the KV cache while it runs.
        status: Where it is.
        finish_reason: Why it ended, once it has.
        num_cached_tokens: Prompt tokens that the cache had when it first ran.
        num_computed_tokens: Tokens computed for it, those computed again included.
        num_retractions: How often its pages were taken back.
        retracted_len: Tokens that had K and V when they were; the most so far.
    """

    __slots__ = (
        "_buffer",
        "_num_prompt_tokens",
        "_num_tokens",
        "finish_reason",
        "kv",
        "namespace",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_retractions",
        "priority",
        "request_id",
        "retracted_len",
        "sampling_params",
        "status",
    )

    def __init__(
        self,
        request_id: str | int,
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
            ConfigError: `namespace` or `request_id` is not hashable, or `priority` is
                no integer.
        """
        tokens = as_tokens(prompt)
        if not len(tokens):
            raise LengthError("a prompt must have >= 1 tokens, got 0")
        check_hashable("namespace", namespace)
        check_hashable("request_id", request_id)
        self.request_id = request_id
        self.sampling_params = sampling_params or SamplingParams()
        self.namespace = namespace
        self.priority = as_integer("priority", priority)
        self.kv: RequestKV | None = None
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.num_cached_tokens = 0
        self.num_computed_tokens = 0
        self.num_retractions = 0
        self.retracted_len = 0
        self._buffer = np.array(tokens, np.int32)
        self._num_prompt_tokens = self._num_tokens = len(tokens)

    def __repr__(self) -> str:
        """Name the request and its length."""
        return f"Request({self.request_id!r}, {self._num_tokens} tokens, {self.status})"

    @property
    def prompt_tokens(self) -> NDArray[np.int32]:
        """The prompt, a view of int32 `[num_prompt_tokens]`."""
        return self._buffer[: self._num_prompt_tokens]

    @property
    def output_tokens(self) -> list[int]:
        """The tokens after the prompt, a new list."""
        output: list[int] = self.tokens[self._num_prompt_tokens :].tolist()
        return output

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Prompt and output, a view of int32 `[num_tokens]` made in O(1)."""
        return self._buffer[: self._num_tokens]

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens in the prompt."""
        return self._num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens after the prompt."""
        return self._num_tokens - self._num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens in prompt and output."""
        return self._num_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens in prompt and output that have no K and V; all while it waits."""
        return self._num_tokens - (self.kv.committed_len if self.kv else 0)

    def append(self, token: int) -> None:
        """Add one output token; earlier views stay as they are. O(1) amortized.

        Raises:
            TokenError: `token` is not in `[0, 2**31)`.
        """
        if not 0 <= token < 2**31:
            raise TokenError(f"token ids must be in [0, 2**31), got {token}")
        if self._num_tokens == len(self._buffer):
            # A new array, not resize(): views of the old one are still in use.
            grown = np.empty(2 * self._num_tokens, np.int32)
            grown[: self._num_tokens] = self._buffer
            self._buffer = grown
        self._buffer[self._num_tokens] = token
        self._num_tokens += 1

"""How much memory is set aside for requests that run."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from radixkv.mem_cache.errors import ConfigError, PolicyError
from radixkv.mem_cache.sizes import as_number, as_size, is_integer

from .base import AdmissionPolicy
from .request import Request


class WorstCase:
    """Set aside all that a request can need: whoever is admitted can finish.

    What running requests lack at their longest, in whole pages, never exceeds what is
    free or can be evicted. Each step takes as much from one side as from the other, and
    each end only adds room. So no request ever has to be retracted, as long as the pool
    is not shrunk, no quota is changed, and nobody else takes pages.
    """

    def reserved_len(self, request: Request) -> int:
        """Return the most that the request can need."""
        return request.max_kv_len

    def on_step(self) -> None:
        """Do nothing: there is nothing to learn."""

    def on_retraction(self, running: Collection[Request]) -> None:
        """Do nothing: there is nothing to learn."""


class Estimate:
    """Set aside a share of what a request can still generate, and learn which.

    Most requests end long before `max_new_tokens`. The share, SGLang's new-token ratio,
    falls step by step from an optimist's to a gambler's; each retraction raises it to
    what the running requests have turned out to need. Retraction is the net.

    Attributes:
        new_token_ratio: The share of the tokens still allowed that is set aside.
    """

    def __init__(
        self,
        *,
        initial_ratio: float = 0.7,
        min_ratio: float = 0.1,
        decay_steps: int = 600,
        max_new_tokens: int = 4096,
        margin_steps: int = 20,
    ) -> None:
        """Set where the share starts, where it ends, and how fast it gets there.

        Args:
            initial_ratio: The share at first, in `(0, 1]`.
            min_ratio: The least share, in `[0, initial_ratio]`.
            decay_steps: Steps without a retraction from one to the other, at least 1.
            max_new_tokens: Output tokens of a request that are reckoned with at most,
                at least 1.
            margin_steps: Decode steps for which the share must do after a retraction,
                at least 1.

        Raises:
            ConfigError: A value is no number, or out of range.
        """
        initial_ratio = as_number("initial_ratio", initial_ratio)
        min_ratio = as_number("min_ratio", min_ratio)
        if not 0 <= min_ratio <= initial_ratio <= 1 or initial_ratio == 0:
            raise ConfigError(
                "need 0 <= min_ratio <= initial_ratio <= 1 and initial_ratio > 0, got "
                f"min_ratio {min_ratio} and initial_ratio {initial_ratio}"
            )
        self.new_token_ratio = initial_ratio
        self._min_ratio = min_ratio
        self._decay = (initial_ratio - min_ratio) / as_size("decay_steps", decay_steps)
        self._max_new_tokens = as_size("max_new_tokens", max_new_tokens)
        self._margin_steps = as_size("margin_steps", margin_steps)

    def reserved_len(self, request: Request) -> int:
        """Return the tokens it has, one more, and a share of those it may still get."""
        num_tokens = request.num_tokens
        rest = min(request.max_kv_len - num_tokens, self._max_new_tokens)
        return num_tokens + 1 + int(rest * self.new_token_ratio)

    def on_step(self) -> None:
        """Set a little less aside from now on."""
        self.new_token_ratio = max(self._min_ratio, self.new_token_ratio - self._decay)

    def on_retraction(self, running: Collection[Request]) -> None:
        """Set as much aside as those who go on have turned out to need, or more."""
        num_output = sum(request.num_output_tokens for request in running)
        allowed = sum(request.sampling_params.max_new_tokens for request in running)
        margin = self._margin_steps * len(running)
        learned = min(1.0, (num_output + margin) / (allowed + 1))
        self.new_token_ratio = max(self.new_token_ratio, learned)


ADMISSION_POLICIES: Final[dict[str, type[WorstCase] | type[Estimate]]] = {
    "estimate": Estimate,
    "worst-case": WorstCase,
}


def as_admission_policy(policy: str | AdmissionPolicy) -> AdmissionPolicy:
    """Return the policy of a name, or the caller's own.

    Raises:
        ConfigError: There is no such name, or the object lacks a method.
    """
    if isinstance(policy, str):
        if policy not in ADMISSION_POLICIES:
            raise ConfigError(
                f"admission must be one of {sorted(ADMISSION_POLICIES)} or an "
                f"AdmissionPolicy, got {policy!r}"
            )
        return ADMISSION_POLICIES[policy]()
    methods = ("reserved_len", "on_step", "on_retraction")
    if isinstance(policy, type) or not all(
        callable(getattr(policy, method, None)) for method in methods
    ):
        raise ConfigError(
            f"admission must be an object with the methods {', '.join(methods)}, got "
            f"{policy!r}"
        )
    return policy


class Reservations:
    """Asks an admission policy, and goes on if it fails in the middle of a step.

    A request of which the policy has no good answer has all set aside that it can need,
    so the step is a safe one; `check` tells of it before the next.
    """

    def __init__(self, policy: AdmissionPolicy) -> None:
        """Ask this policy."""
        self._policy = policy
        self._proves = type(policy) is WorstCase
        self._failure: PolicyError | None = None

    def check(self) -> None:
        """Tell once of what failed since the last call.

        Raises:
            PolicyError: The policy failed, or returned what is no length.
        """
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def reserved_len(self, request: Request) -> int:
        """Return the length up to which room is set aside for a request, in tokens.

        Never more than it can need, nor less than the tokens that it has already.
        """
        longest = request.max_kv_len
        if request.reserves_all or self._proves:
            return longest
        try:
            length = self._policy.reserved_len(request)
        except Exception as error:  # whatever the caller's code raises
            self._fail(f"failed: {error!r}", error)
            return longest
        if type(length) is not int:  # saves a call a request
            if not is_integer(length):
                self._fail(f"must return a length in tokens, got {length!r}")
                return longest
            length = int(length)
        return min(max(length, request.num_tokens), longest)

    def on_step(self) -> None:
        """Tell the policy that a step was scheduled without a retraction."""
        self._tell(self._policy.on_step)

    def on_retraction(self, running: Collection[Request]) -> None:
        """Tell the policy that a request was retracted."""
        self._tell(lambda: self._policy.on_retraction(running))

    def _tell(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # whatever the caller's code raises
            self._fail(f"failed: {error!r}", error)

    def _fail(self, what: str, cause: Exception | None = None) -> None:
        failure = PolicyError(f"{self._policy!r} {what}")
        failure.__cause__ = cause
        self._failure = self._failure or failure

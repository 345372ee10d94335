"""What the scheduler needs from others."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from radixkv.mem_cache import PagePool

from .batch import Batch
from .request import Request

INVALID_TOKEN: Final = -1
"""What a runner returns where there is no next token: the logits are not finite."""


class ModelRunner(Protocol):
    """Computes the steps of a batch scheduler."""

    def run(self, batch: Batch) -> NDArray[np.int32]:
        """Compute one step and sample.

        The batches of one cache arrive in the order in which they were made, each once.
        A runner applies the message of a batch before anything that may fail, since
        later messages build on it. It leaves the cache alone: it may be at work in
        another thread than the cache's owner.

        Args:
            batch: What to compute.

        Raises:
            BatchRefusedError: It has not applied the message, and nothing else.

        Returns:
            The next token behind each of the last `num_samples` positions of each
            entry, in batch order, int32 `[num_samples]`. An entry with drafts has one
            more than these: what the model would have said instead of each draft, and
            what follows the last. `INVALID_TOKEN` where the model says nothing, because
            a logit is NaN or positive infinity, or all are negative infinity: the
            request ends with a `NonFiniteLogitsError`, and the others go on.
        """
        ...


class PooledRunner(ModelRunner, Protocol):
    """A runner that shows the pool in which it keeps K and V.

    `Engine` tells the cache of it, which cannot grow beyond it then.

    Attributes:
        pool: How many pages there are, such as a `KVPool`.
    """

    pool: PagePool


class QueueView(Protocol):
    """What a scheduling policy may know of the requests that wait."""

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the requests in the order of arrival."""
        ...

    def __len__(self) -> int:
        """Count the requests."""
        ...

    def cached_len(self, request: Request) -> int:
        """Tell how many leading tokens of a request are cached, in whole pages.

        Costs nothing until the cache changes.
        """
        ...

    @property
    def page_size(self) -> int:
        """Tokens of a page; prefixes are shared in whole pages."""
        ...

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that the scheduler has computed so far, a clock that no machine has.

        `Request.arrived_at` is its reading at a request's arrival.
        """
        ...


class SchedulingPolicy(Protocol):
    """The order in which waiting requests are considered for admission.

    It is asked before anything is scheduled: if it fails, or returns what it must not,
    the step is refused with a `PolicyError`, and no request is harmed.

    Example:
        >>> class ShortestPromptFirst:
        ...     def order(self, queue):
        ...         return sorted(queue, key=lambda request: request.num_prompt_tokens)
    """

    def order(self, queue: QueueView) -> Iterable[Request]:
        """Put the waiting requests into order; called when some may be admitted.

        Args:
            queue: The requests that wait, in the order of arrival.

        Returns:
            All or some of them, each once, the first to be admitted first. Who is left
            out waits on.
        """
        ...


class AdmissionPolicy(Protocol):
    """How much memory the scheduler sets aside for a request that runs.

    If it fails in the middle of a step, all that the request can need is set aside, the
    step goes on, and the next one is refused once with a `PolicyError`.

    Example:
        >>> class NextTokenOnly:
        ...     def reserved_len(self, request):
        ...         return request.num_tokens + 1
        ...
        ...     def on_step(self):
        ...         pass
        ...
        ...     def on_retraction(self, running):
        ...         pass
    """

    def reserved_len(self, request: Request) -> int:
        """Tell the length up to which room is set aside for a request, in tokens.

        It is not asked for those that came back after a retraction: for them, all that
        they can need is set aside.

        Args:
            request: It runs, or is about to.

        Returns:
            A length that is taken as at least `Request.num_tokens`, and at most
            `Request.max_kv_len`, which is the most that it can need.
        """
        ...

    def on_step(self) -> None:
        """Take note that a step was scheduled without a retraction."""
        ...

    def on_retraction(self, running: Collection[Request]) -> None:
        """Take note that a request was retracted; `running` are those that go on."""
        ...


class RetractionPolicy(Protocol):
    """Whose pages are taken back when there are too few for all.

    If it fails, or its keys do not compare, the step is refused with a `PolicyError`,
    and no request is harmed.

    Example:
        >>> class LeastOutputFirst:
        ...     def key(self, request):
        ...         return request.priority, request.num_output_tokens
    """

    def key(self, request: Request) -> Any:  # noqa: ANN401 - what can be compared
        """Return what running requests are compared by; the lowest goes first.

        The oldest of the highest priority is never asked for its pages while another
        has some: so it ends, and then the next.
        """
        ...


class Drafter(Protocol):
    """Guesses the next tokens of requests, for one step to verify them all at once."""

    def propose(self, request: Request, max_tokens: int) -> tuple[int, ...]:
        """Guess how a request goes on behind its newest token.

        Args:
            request: A running request; all its tokens are known.
            max_tokens: Most tokens that are of use, at least 1.

        Returns:
            At most `max_tokens` token ids; empty for no idea. A wrong guess costs time
            and changes nothing else.
        """
        ...

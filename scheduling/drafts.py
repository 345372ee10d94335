"""Draft tokens: which requests get how many guesses in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from radixkv.mem_cache.errors import ConfigError, PolicyError, TokenError
from radixkv.mem_cache.tokens import as_tokens

from .base import Drafter
from .request import Request


class Drafts:
    """Asks a drafter, and keeps within what a step and a request allow."""

    def __init__(
        self, drafter: Drafter, max_draft_tokens: int, vocab_size: int | None
    ) -> None:
        """Join a drafter and its limits.

        Args:
            drafter: Guesses tokens.
            max_draft_tokens: Guesses a request and step at most, at least 1.
            vocab_size: Tokens that the model knows, if there is a bound.

        Raises:
            ConfigError: `drafter` has no `propose`, or is a class.
        """
        if isinstance(drafter, type) or not hasattr(drafter, "propose"):
            raise ConfigError(f"drafter must be an object with propose, got {drafter}")
        self._drafter = drafter
        self._max_draft_tokens = max_draft_tokens
        self._vocab_size = 2**31 if vocab_size is None else vocab_size

    def propose(
        self, requests: Sequence[Request], budget: int
    ) -> dict[Request, tuple[int, ...]]:
        """Guess how requests go on; changes nothing.

        Args:
            requests: Running requests whose tokens are all known; the first are asked
                first.
            budget: Guesses that the step has room for.

        Returns:
            The guesses for those for which there are any.

        Raises:
            PolicyError: The drafter failed.
            TokenError: The drafter returned what are no tokens of the model.
        """
        drafts: dict[Request, tuple[int, ...]] = {}
        for request in requests:
            # The last token needs no slot, and nothing comes behind it.
            room = request.max_kv_len - request.num_tokens
            room = min(room, budget, self._max_draft_tokens)
            if room > 0 and (guesses := self._ask(request, room)):
                drafts[request] = guesses
                budget -= len(guesses)
        return drafts

    def _ask(self, request: Request, room: int) -> tuple[int, ...]:
        """Return the guesses for one request, at most `room`."""
        try:
            answer = self._drafter.propose(request, room)
        except Exception as error:
            raise PolicyError(
                f"the drafter failed on request {request.request_id!r}: {error!r}"
            ) from error
        try:
            guesses: list[int] = as_tokens(answer)[:room].tolist()
        except TokenError as error:
            raise self._refusal(request, answer) from error
        if guesses and max(guesses) >= self._vocab_size:
            raise self._refusal(request, answer)
        return tuple(guesses)

    def _refusal(self, request: Request, answer: object) -> TokenError:
        return TokenError(
            f"drafts must be a flat sequence of integers in [0, {self._vocab_size}), "
            f"got {answer!r} for request {request.request_id!r}"
        )


def cut_to_pages(
    drafts: Mapping[Request, tuple[int, ...]], page_size: int
) -> dict[Request, tuple[int, ...]]:
    """Keep the drafts that need no page but the one that the newest token needs.

    Args:
        drafts: The drafts of each request.
        page_size: Slots a page.

    Returns:
        What is left of them; requests without any are left out.
    """
    cut: dict[Request, tuple[int, ...]] = {}
    for request, guesses in drafts.items():
        room = -(request.scheduled_len + 1) % page_size
        if room:
            cut[request] = guesses[:room]
    return cut

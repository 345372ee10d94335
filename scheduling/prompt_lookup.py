"""Draft tokens without a draft model: what followed the last time."""

from __future__ import annotations

from itertools import cycle, islice

import numpy as np
from numpy.typing import NDArray

from radixkv.mem_cache.errors import ConfigError
from radixkv.mem_cache.sizes import as_size

from .request import Request


class PromptLookup:
    """Guesses that a request goes on as it did where its last tokens occurred before.

    Prompt lookup decoding (Saxena, 2023): of the n-grams at the end of prompt and
    output, it takes the longest that occurs earlier in them, there the most recent
    occurrence, and returns what follows it. Two things differ from the original, which
    takes the first occurrence: the most recent one is more likely to go on alike, and
    what follows it may run over the end of the text into the guesses themselves, as
    the copies of Ziv and Lempel (1977) do, so that a text that goes round in a circle
    is guessed for several rounds.

    Guesses change no output: the scheduler keeps those that the model samples anyway
    (Leviathan et al., 2022, arXiv:2211.17192). They pay where outputs repeat parts of
    their prompt or of themselves, as code, summaries and answers from documents do.

    It keeps nothing between calls, so nothing has to be cleared when a request ends.

    Example:
        >>> from radixkv.scheduling import Request
        >>> request = Request("a", [7, 1, 2, 3, 4, 9, 1, 2, 3])
        >>> PromptLookup().propose(request, max_tokens=2)
        (4, 9)
        >>> PromptLookup().propose(Request("b", [5, 6, 5]), max_tokens=5)
        (6, 5, 6, 5, 6)
        >>> PromptLookup(min_ngram=2).propose(Request("c", [5, 6, 5]), max_tokens=5)
        ()
    """

    def __init__(self, *, max_ngram: int = 3, min_ngram: int = 1) -> None:
        """Set how many last tokens are looked for.

        Args:
            max_ngram: At most, at least `min_ngram`.
            min_ngram: At least, at least 1; more make fewer guesses and better ones.

        Raises:
            ConfigError: A number is out of range.
        """
        self._max_ngram = as_size("max_ngram", max_ngram)
        self._min_ngram = as_size("min_ngram", min_ngram)
        if max_ngram < min_ngram:
            raise ConfigError(
                f"max_ngram must be >= min_ngram ({min_ngram}), got {max_ngram}"
            )

    def propose(self, request: Request, max_tokens: int) -> tuple[int, ...]:
        """Guess what follows the newest token of a request.

        Args:
            request: All its tokens are known.
            max_tokens: Most tokens that are of use, at least 1.

        Returns:
            `max_tokens` guesses, or none if the end of the text is new.

        Complexity: O(tokens of the request), as a few passes of numpy over them.
        """
        tokens = request.tokens
        last = self._last_occurrence(tokens)
        if last is None:
            return ()
        following = tokens[last + 1 : last + 1 + max_tokens].tolist()
        return tuple(islice(cycle(following), max_tokens))

    def _last_occurrence(self, tokens: NDArray[np.int32]) -> int | None:
        """Return where the longest n-gram at the end ended the last time before."""
        # Whether the n-gram at the end also starts at each position before.
        starts = tokens[:-1] == tokens[-1]
        length = 1
        while length < self._max_ngram and starts.any():
            longer = starts[1:] & (tokens[: len(starts) - 1] == tokens[-length - 1])
            if not longer.any():
                break
            starts = longer
            length += 1
        if length < self._min_ngram or not starts.any():
            return None
        return len(tokens) - 2 - int(starts[::-1].argmax())

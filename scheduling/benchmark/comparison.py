"""Compares the outputs of a benchmark with what the model generates alone."""

from __future__ import annotations

from dataclasses import dataclass

from ..models import LoadedModel
from ..reference import count_wrong_tokens, generate_reference, predict_reference
from .one_batch import BenchResult, Progress

_COMPARISON = "compare with the model alone"


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a comparison with the model alone showed.

    Attributes:
        num_tokens: Output tokens that were compared.
        num_wrong_tokens: Those of them that differ from the model's own.
        first_difference: Where the first of them is, in words; else empty.
    """

    num_tokens: int
    num_wrong_tokens: int
    first_difference: str


def compare_with_model(
    result: BenchResult,
    loaded: LoadedModel,
    progress: Progress = lambda what, done, total: None,
) -> Comparison:
    """Compare every output token with the model's own.

    Twice: with its `generate`, which keeps K and V within one text, and with its
    choices when nothing is cached at all.

    Args:
        result: What was measured.
        loaded: The model.
        progress: Told of every request.
    """
    config = result.config
    total = sum(len(request.output) for request in result.requests)
    eos_token_ids = loaded.eos_token_ids if config.input_len is None else []
    references: dict[bytes, list[int]] = {}
    num_tokens = num_wrong = 0
    first_difference = ""
    for i, request in enumerate(result.requests):
        progress(_COMPARISON, num_tokens, total)
        key = request.prompt.tobytes()
        if key not in references:
            references[key] = generate_reference(
                loaded.model,
                request.prompt,
                config.output_len,
                eos_token_ids=eos_token_ids,
                use_cache=True,
            )
        choices = predict_reference(loaded.model, request.prompt, request.output)
        wrong = count_wrong_tokens(choices, references[key], request.output)
        if wrong and not num_wrong:
            first_difference = (
                f"request {i + 1} of {len(result.requests)}: got {request.output}, "
                f"the model alone {references[key]}"
            )
        num_wrong += wrong
        num_tokens += len(request.output)
    progress(_COMPARISON, num_tokens, total)
    return Comparison(num_tokens, num_wrong, first_difference)

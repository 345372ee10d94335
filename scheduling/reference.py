"""What a model generates without RadixKV."""

from __future__ import annotations

from collections.abc import Collection, Generator
from contextlib import contextmanager
from itertools import zip_longest

import torch

from radixkv.mem_cache.tokens import Tokens, as_tokens

from .models import TransformersObject, import_transformers

_NUM_ROUNDINGS = 16
"""Logits count as equal up to so many roundings of the highest of them."""


def generate_reference(
    model: TransformersObject,
    prompt: Tokens,
    max_new_tokens: int,
    *,
    eos_token_ids: Collection[int] = (),
    use_cache: bool = False,
) -> list[int]:
    """Generate greedily with the model's own `generate` and its own attention.

    Args:
        model: A transformers causal language model; it may be in use by a runner.
        prompt: Token ids in `[0, 2**31)`, `[num_prompt_tokens]`.
        max_new_tokens: Most tokens to generate.
        eos_token_ids: Tokens to end with; none means that only the length ends it.
        use_cache: Whether transformers keeps K and V from token to token in a cache of
            its own; otherwise it computes the whole text again for every token.

    Returns:
        The tokens after the prompt, the final one of `eos_token_ids` included.
    """
    ids = torch.tensor(as_tokens(prompt), dtype=torch.int64, device=model.device)[None]
    with _plain(model):
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            eos_token_id=list(eos_token_ids) or None,
            # One sequence is never padded; a value keeps transformers from guessing.
            pad_token_id=0,
            use_cache=use_cache,
        )
    tokens: list[int] = output[0, ids.shape[1] :].tolist()
    return tokens


def predict_reference(
    model: TransformersObject, prompt: Tokens, output: list[int]
) -> list[frozenset[int]]:
    """Return the model's greedy choices at each position of an output, uncached.

    One forward pass over prompt and output, without any cache. If the output is made of
    such choices, then it is what `generate` makes without a cache: each of its tokens
    is a choice behind the tokens before it.

    Nearly always there is one choice. There are several where logits are equal up to
    the rounding of their dtype: then it is chance which of them is the highest, and
    another order of the same additions makes another one.

    Args:
        model: A transformers causal language model; it may be in use by a runner.
        prompt: Token ids in `[0, 2**31)`, `[num_prompt_tokens]`.
        output: The tokens after the prompt, at least one.
    """
    tokens = [*as_tokens(prompt).tolist(), *output[:-1]]
    ids = torch.tensor(tokens, dtype=torch.int64, device=model.device)[None]
    with _plain(model), torch.inference_mode():
        logits = model(ids, use_cache=False, logits_to_keep=len(output)).logits[0]
    tolerance = _NUM_ROUNDINGS * torch.finfo(logits.dtype).eps
    highest = logits.amax(-1, keepdim=True)
    is_choice = logits >= highest - tolerance * logits.abs().amax(-1, keepdim=True)
    return [frozenset(row.nonzero()[:, 0].tolist()) for row in is_choice]


def count_wrong_tokens(
    choices: list[frozenset[int]], reference: list[int], output: list[int]
) -> int:
    """Count the tokens of an output that are not the model's.

    Args:
        choices: The model's choices at each position of `output`, uncached.
        reference: What the model generates. Behind a near tie it may go another way;
            from there on, `choices` alone are the judge.
        output: The tokens to judge, at least one.
    """
    wrong = {i for i, token in enumerate(output) if token not in choices[i]}
    pairs = enumerate(zip_longest(reference, output))
    first = next((i for i, (ours, theirs) in pairs if ours != theirs), None)
    if first is not None and (
        first >= min(len(reference), len(output))
        or reference[first] not in choices[first]
    ):
        wrong.add(first)
    return len(wrong)


@contextmanager
def _plain(model: TransformersObject) -> Generator[None]:
    """Take away a runner's attention and a checkpoint's generation defaults."""
    attention = model.config._attn_implementation
    defaults = model.generation_config
    # Torch's own attention has no soft cap, so models that have one do without it.
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    model.generation_config = import_transformers().GenerationConfig()
    try:
        yield
    finally:
        model.set_attn_implementation(attention)
        model.generation_config = defaults

"""What a model generates without RadixKV."""

from __future__ import annotations

from collections.abc import Collection, Generator
from contextlib import contextmanager

import torch

from radixkv.mem_cache.tokens import Tokens, as_tokens

from .models import TransformersObject, import_transformers


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
) -> list[int]:
    """Return the model's greedy choice at each position of an output, uncached.

    One forward pass over prompt and output, without any cache. If all choices equal the
    output, then so does what `generate` makes without a cache: each of its tokens is
    the choice behind the tokens before it.

    Args:
        model: A transformers causal language model; it may be in use by a runner.
        prompt: Token ids in `[0, 2**31)`, `[num_prompt_tokens]`.
        output: The tokens after the prompt, at least one.
    """
    tokens = [*as_tokens(prompt).tolist(), *output[:-1]]
    ids = torch.tensor(tokens, dtype=torch.int64, device=model.device)[None]
    with _plain(model), torch.inference_mode():
        logits = model(ids, use_cache=False, logits_to_keep=len(output)).logits
    choices: list[int] = logits[0].argmax(-1).tolist()
    return choices


def count_wrong_tokens(reference: list[int], output: list[int]) -> int:
    """Count the positions at which two outputs differ, missing ones included."""
    differ = sum(a != b for a, b in zip(reference, output, strict=False))
    return differ + abs(len(reference) - len(output))


@contextmanager
def _plain(model: TransformersObject) -> Generator[None]:
    """Take away a runner's attention and a checkpoint's generation defaults."""
    attention = model.config._attn_implementation
    defaults = model.generation_config
    model.set_attn_implementation("sdpa")
    model.generation_config = import_transformers().GenerationConfig()
    try:
        yield
    finally:
        model.set_attn_implementation(attention)
        model.generation_config = defaults

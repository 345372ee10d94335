"""Prompts of a benchmark: from files, shipped, or synthetic."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.mem_cache import ConfigError
from radixkv.scheduling.benchmark import load_prompts, synthetic_prompts
from radixkv.scheduling.benchmark.prompts import chat_messages


class LetterTokenizer:
    """One token a letter; 1 begins a text, 0 asks for the answer."""

    def __init__(self, chat_template: str | None = None) -> None:
        self.chat_template = chat_template

    def apply_chat_template(
        self,
        messages: list[dict[str, str]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
    ) -> str:
        assert not tokenize
        text = "".join(f"{m['role'][0]}:{m['content']};" for m in messages)
        return text + "a:" * add_generation_prompt

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [1] * add_special_tokens + [ord(letter) for letter in text]


def letters(prompt: np.ndarray) -> str:
    return "".join(chr(token) for token in prompt)


def texts_of(path: Path, chat_template: str | None = None) -> list[str]:
    prompts = load_prompts(LetterTokenizer(chat_template), path).prompts

    assert all(prompt.dtype == np.int32 for prompt in prompts)
    return [letters(prompt) for prompt in prompts]


def test_a_text_file_holds_a_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\n  \ntwo words\r\nthrée", encoding="utf-8")

    prompts = load_prompts(LetterTokenizer(), path)

    expected = ["\x01one", "\x01two words", "\x01thrée"]
    assert expected == [letters(prompt) for prompt in prompts.prompts]
    assert ((), "") == (prompts.chat, prompts.system)


def test_a_json_file_holds_questions_and_maybe_a_system_prompt_and_a_chat(
    tmp_path: Path,
) -> None:
    path = tmp_path / "prompts.json"
    path.write_text('{"questions": ["a", "b"], "system": "S", "chat": ["x", "y"]}')

    prompts = load_prompts(LetterTokenizer(), path)

    assert ["\x01S\n\na", "\x01S\n\nb"] == [letters(x) for x in prompts.prompts]
    assert (("x", "y"), "S") == (prompts.chat, prompts.system)


def test_a_chat_template_is_used_and_brings_its_own_special_tokens(
    tmp_path: Path,
) -> None:
    path = tmp_path / "prompts.json"
    path.write_text('{"questions": ["q"], "system": "S"}')

    assert ["s:S;u:q;a:"] == texts_of(path, chat_template="{{ }}")


def test_in_a_chat_user_and_assistant_take_turns() -> None:
    assert [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ] == chat_messages("S", ["a", "b", "c"])
    assert [{"role": "user", "content": "a"}] == chat_messages("", ["a"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "cannot be read"),
        ("missing.json", None, "cannot be read"),
        ("empty.txt", b"", "must hold prompts, got none"),
        ("blank.txt", b"\n  \n", "must hold prompts, got none"),
        ("binary.txt", b"\xff\xfe\x00", "is malformed"),
        ("empty.json", b"", "is malformed"),
        ("cut.json", b'{"questions": ["a"', "is malformed"),
        ("binary.json", b"\xff\xfe\x00", "is malformed"),
        ("list.json", b'["a"]', "is malformed"),
        ("other.json", b'{"prompts": ["a"]}', "is malformed"),
        ("extra.json", b'{"questions": ["a"], "chats": []}', "is malformed"),
        ("number.json", b'{"questions": [5]}', "is malformed"),
        ("null.json", b'{"questions": null}', "is malformed"),
        ("none.json", b'{"questions": []}', "must hold prompts, got none"),
        ("blank.json", b'{"questions": ["a", " "]}', "must hold prompts, got none"),
    ],
)
def test_a_file_without_prompts_is_refused_by_name(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(ConfigError, match=message) as refusal:
        load_prompts(LetterTokenizer(), path)

    assert name in str(refusal.value)


def test_a_folder_is_no_prompt_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_prompts(LetterTokenizer(), tmp_path)


@given(st.binary(max_size=60))
def test_any_bytes_are_prompts_or_refused(content: bytes) -> None:
    for name in ("x.json", "x.txt"):
        # A file object in memory: Hypothesis and tmp_path do not go together.
        class InMemory(type(Path())):
            def read_bytes(self) -> bytes:
                return content

        texts: list[str] = []
        message = ""
        try:
            texts = texts_of(InMemory(name))
        except ConfigError as refusal:
            message = str(refusal)
        assert texts or name in message


def test_the_shipped_prompts_share_a_long_system_prompt() -> None:
    prompts = load_prompts(LetterTokenizer())

    assert len(prompts.prompts) == 8
    assert len(prompts.chat) == 4
    assert len({prompt.tobytes() for prompt in prompts.prompts}) == 8
    shared = 1 + len(prompts.system)
    assert len({prompt[:shared].tobytes() for prompt in prompts.prompts}) == 1
    assert shared > 0.9 * max(len(prompt) for prompt in prompts.prompts)


@given(
    num_prompts=st.integers(1, 5),
    input_len=st.integers(1, 20),
    shared=st.integers(0, 19),
    vocab_size=st.integers(1, 50),
    seed=st.integers(0, 9),
)
def test_synthetic_prompts_are_as_long_and_share_as_much_as_they_should(
    num_prompts: int, input_len: int, shared: int, vocab_size: int, seed: int
) -> None:
    shared = min(shared, input_len - 1)

    def make(seed: int) -> list[list[int]]:
        made = synthetic_prompts(
            num_prompts, input_len, shared, vocab_size=vocab_size, seed=seed
        )
        assert all(prompt.dtype == np.int32 for prompt in made.prompts)
        return [prompt.tolist() for prompt in made.prompts]

    prompts = make(seed)

    assert [input_len] * num_prompts == [len(prompt) for prompt in prompts]
    assert len({tuple(prompt[:shared]) for prompt in prompts}) == 1
    assert all(0 <= token < vocab_size for prompt in prompts for token in prompt)
    assert prompts == make(seed)


def test_synthetic_prompts_differ_behind_the_shared_part_and_by_seed() -> None:
    first = synthetic_prompts(3, 20, 10, vocab_size=500, seed=0).prompts
    other = synthetic_prompts(3, 20, 10, vocab_size=500, seed=1).prompts

    assert len({prompt[10] for prompt in first}) > 1
    assert first[0].tolist() != other[0].tolist()


def test_the_shipped_file_is_in_the_format_of_a_users_file() -> None:
    path = Path(load_prompts.__code__.co_filename).parent / "prompts" / "library.json"
    content = msgspec.json.decode(path.read_bytes())

    assert {"questions", "system", "chat"} == set(content)


def test_what_editors_add_to_a_file_is_no_part_of_it(tmp_path: Path) -> None:
    text = tmp_path / "prompts.txt"
    text.write_text("one\ntwo", encoding="utf-8-sig")
    upper = tmp_path / "PROMPTS.JSON"
    upper.write_text('{"questions": ["one"]}')

    assert ["\x01one", "\x01two"] == texts_of(text)
    assert ["\x01one"] == texts_of(upper)

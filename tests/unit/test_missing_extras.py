"""Without an extra, whatever needs it says how to install it."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from radixkv.mem_cache import ConfigError, MissingExtraError
from radixkv.scheduling import load_model
from radixkv.scheduling.models import import_transformers

HEAD = "import sys; sys.modules[{package!r}] = None\n"
SHOW = """
from radixkv.mem_cache import MissingExtraError
try:
    {statement}
except MissingExtraError as error:
    assert isinstance(error, ImportError)
    print(error.extra, error, sep="|")
"""

CASES = {
    "testing": ("hypothesis", "import radixkv.mem_cache.testing"),
    "a module of testing": ("hypothesis", "import radixkv.mem_cache.testing.oracle"),
    "testing a scheduler": ("hypothesis", "import radixkv.scheduling.testing"),
    "tiny": (
        "transformers",
        "from radixkv.scheduling import load_model; load_model('tiny')",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_missing_package_is_an_error_that_names_its_extra(case: str) -> None:
    package, statement = CASES[case]
    extra = "testing" if package == "hypothesis" else "models"
    code = HEAD.format(package=package)
    code += SHOW.format(statement=statement)
    command = [sys.executable, "-P", "-c", code]
    run = subprocess.run(command, check=True, capture_output=True, text=True)

    told, _, message = run.stdout.strip().partition("|")
    assert extra == told
    assert package in message.lower()
    assert f"pip install 'radixkv[{extra}]'" in message


def test_what_transformers_misses_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Some versions want gguf or accelerate, which come with the same extra."""

    def fail(*args: object, **options: object) -> None:
        raise ImportError("\nLoading needs gguf>=0.10\nand more")

    transformers = import_transformers()
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    file = tmp_path / "model.gguf"
    file.touch()

    with pytest.raises(MissingExtraError) as refusal:
        load_model(str(file))
    assert "(Loading needs gguf>=0.10): pip install" in str(refusal.value)


def test_a_file_that_is_cut_short_is_no_model(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")

    with pytest.raises(ConfigError, match=r"model\.gguf"):
        load_model(str(file))


def test_nothing_else_needs_an_extra() -> None:
    """All packages import without what only extras bring."""
    code = "import sys\n"
    for package in ("hypothesis", "transformers", "gguf", "accelerate"):
        code += f"sys.modules[{package!r}] = None\n"
    code += """
import radixkv.mem_cache as mem_cache
import radixkv.kernels as kernels
import radixkv.scheduling as scheduling
import radixkv.scheduling.benchmark as benchmark
for package in (mem_cache, kernels, scheduling, benchmark):
    for name in package.__all__:
        getattr(package, name)
"""
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def test_the_error_is_a_config_error_and_survives_a_pickle() -> None:
    error = MissingExtraError("models", "transformers", "models")
    again = pickle.loads(pickle.dumps(error))

    assert isinstance(error, ConfigError)
    assert "models need transformers: pip install 'radixkv[models]'" == str(again)
    assert "models" == again.extra

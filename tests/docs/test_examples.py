"""Every example that the project prints runs: README, documentation, docstrings.

The Python blocks of a page share one namespace and run from top to bottom. A block may
hold plain code or a session with `>>>`. One that begins with the name of a file, as
`# worker.py`, is a part of that file; a `console` block that runs such a file shows
what it prints.
"""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import radixkv

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (\w+\.py)\n")
RUN = re.compile(r"^```console\n\$ python (\w+\.py)\n(.*?)^```$", re.M | re.DOTALL)
PAGES = [
    page.relative_to(ROOT).as_posix()
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if FENCE.search(page.read_text())
]
MODULES = [
    module.name for module in pkgutil.walk_packages(radixkv.__path__, "radixkv.")
]


def run_session(text: str, namespace: dict[str, object], page: str, line: int) -> None:
    """Run a block of `>>>` lines in `namespace`."""
    test = doctest.DocTestParser().get_doctest(text, namespace, page, page, line)
    report: list[str] = []
    doctest.DocTestRunner().run(test, out=report.append, clear_globs=False)
    namespace.update(test.globs)

    assert [] == report, "".join(report)


def test_the_readme_has_an_example() -> None:
    assert "README.md" in PAGES


@pytest.mark.parametrize("page", PAGES)
def test_the_examples_of_a_page_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / page).read_text()
    monkeypatch.chdir(tmp_path)

    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in FENCE.finditer(text):
        line = text.count("\n", 0, block.start(1))
        if file := FILE.match(block[1]):
            with Path(file[1]).open("a") as part:
                part.write(block[1])
        elif ">>> " in block[1]:
            run_session(block[1], namespace, page, line)
        else:
            # The empty lines make a traceback name the line of the page.
            exec(compile("\n" * line + block[1], page, "exec"), namespace)
    for run in RUN.finditer(text):
        result = subprocess.run(
            [sys.executable, run[1]], capture_output=True, text=True, timeout=300
        )

        assert (0, run[2]) == (result.returncode, result.stdout), result.stderr


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_of_the_docstrings_run(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module))

    assert 0 == result.failed

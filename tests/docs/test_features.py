"""Every feature and invariant that the documentation lists has a test (S0.7)."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (?P<feature>[^|]+?) \| (?P<tests>`tests/.+`) \|$", re.MULTILINE)
FEATURES = [
    (row["feature"], re.findall(r"`([^`]+)`", row["tests"]))
    for row in ROW.finditer((ROOT / "docs" / "features.md").read_text())
]


NAMED = sorted(
    (path.relative_to(ROOT).as_posix(), test)
    for path in (ROOT / "docs").rglob("*.md")
    for test in set(re.findall(r"`(tests/[^`]+::[^`]+)`", path.read_text()))
)


def defines(path: Path, name: str) -> bool:
    """Tell whether a test file defines a function or class `name`, or assigns it."""
    return any(
        (isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name)
        or (isinstance(node, ast.Name) and node.id == name)
        for node in ast.walk(ast.parse(path.read_text()))
    )


def test_the_list_has_a_row_a_feature() -> None:
    names = [feature for feature, _ in FEATURES]

    assert names
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize(("feature", "tests"), FEATURES)
def test_s0_7_every_feature_names_a_test(feature: str, tests: list[str]) -> None:
    assert all("::" in test for test in tests), feature


@pytest.mark.parametrize(("page", "test"), NAMED)
def test_s0_7_every_test_that_the_docs_name_exists(page: str, test: str) -> None:
    path, *names = test.split("::")
    file = ROOT / path

    assert file.is_file(), page
    assert all(defines(file, name) for name in names), page

"""What a user installs: the three rooms under one name, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("kernels", "mem_cache", "scheduling")
NOT_SOURCES = shutil.ignore_patterns(
    ".*", "__pycache__", "*.egg-info", "_build", "build", "dist", "tests"
)


def build(source: Path, out: Path, *options: str) -> Path:
    """Build `source` with the installed setuptools and return the wheel."""
    command = [sys.executable, "-m", "build", "--no-isolation", *options]
    command += ["--outdir", str(out), str(source)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=out.parent)
    assert 0 == result.returncode, result.stdout + result.stderr
    return next(out.glob("*.whl"))


def contents(wheel: Path) -> set[str]:
    """Return the files that a wheel installs, without its metadata."""
    names = zipfile.ZipFile(wheel).namelist()
    return {name for name in names if ".dist-info/" not in name}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the repository, links as links, since a build writes into its tree."""
    copy = tmp_path_factory.mktemp("wheel") / "radixkv"
    return Path(shutil.copytree(ROOT, copy, symlinks=True, ignore=NOT_SOURCES))


def test_the_wheel_holds_the_three_rooms_and_nothing_else(tree: Path) -> None:
    wheel = build(tree, tree.parent / "wheel", "--wheel")

    rooms = {
        f"radixkv/{path.relative_to(tree).as_posix()}"
        for room in ROOMS
        for path in (tree / room).rglob("*")
        if path.is_file()
    }
    expected = {"radixkv/__init__.py", "radixkv/py.typed", *rooms}
    assert expected == contents(wheel), "are the links in src/radixkv in place?"


def test_a_wheel_from_the_sdist_equals_a_wheel_from_the_tree(tree: Path) -> None:
    from_tree = build(tree, tree.parent / "from-tree", "--wheel")
    from_sdist = build(tree, tree.parent / "from-sdist")

    assert contents(from_tree) == contents(from_sdist)

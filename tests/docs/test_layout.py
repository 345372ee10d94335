"""Rules of the house that no linter knows."""

from __future__ import annotations

import ast
import importlib.util
import os
import pkgutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

import radixkv

ROOT = Path(__file__).parents[2]
ROOMS = ("kernels", "mem_cache", "scheduling")


def nodes(room: str) -> Iterator[tuple[str, ast.AST]]:
    """Yield every syntax node of a room with the file it stands in."""
    for path in sorted((ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            yield path.relative_to(ROOT).as_posix(), node


def test_each_room_is_linked_into_the_package() -> None:
    expected = {room: f"../../{room}" for room in ROOMS}

    links = {
        path.name: os.readlink(path)
        for path in (ROOT / "src" / "radixkv").iterdir()
        if path.is_symlink()
    }

    assert expected == links, "check the repository out with core.symlinks=true"


def test_pyright_is_told_of_each_room() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]

    assert {f"src/radixkv/{room}" for room in ROOMS} <= set(settings["include"])


def test_s2_14_page_size_is_stored_by_the_allocator_only() -> None:
    stored_in = {
        path
        for room in ROOMS
        for path, node in nodes(room)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and node.attr.lstrip("_") == "page_size"
        and "/testing/" not in path  # models of a cache and of a worker
    }

    # A worker's pool reads that of its config.
    assert {"mem_cache/allocator.py"} == stored_in


def test_s2_1_scheduling_never_allocates_or_frees_pages() -> None:
    calls = [
        f"{path}:{node.lineno}"
        for path, node in nodes("scheduling")
        if isinstance(node, ast.Attribute)
        and node.attr in {"alloc", "allocator", "free", "free_all"}
    ]

    assert [] == calls


def test_s0_9_nothing_assigns_a_global() -> None:
    statements = [
        f"{path}:{node.lineno}"
        for room in ROOMS
        for path, node in nodes(room)
        if isinstance(node, ast.Global)
    ]

    assert [] == statements


def test_s0_9_no_module_holds_state() -> None:
    modules = [
        importlib.import_module(found.name)
        for found in pkgutil.walk_packages(radixkv.__path__, "radixkv.")
        # Triton has builds for Linux only.
        if "kernels.triton." not in found.name or importlib.util.find_spec("triton")
    ]

    state = [
        f"{module.__name__}.{name}"
        for module in modules
        for name, value in vars(module).items()
        if not name.startswith("__")
        and (
            isinstance(value, bytearray | list | set)
            or (isinstance(value, dict) and not name.lstrip("_").isupper())
            or (type(value).__module__.startswith("radixkv") and not hashable(value))
        )
    ]

    assert [] == state


def hashable(value: object) -> bool:
    """Tell whether `value` is a value, as frozen dataclasses and enums are."""
    return type(value).__eq__ is not object.__eq__ and type(value).__hash__ is not None

"""What callers reach takes wide types, so that caches say what they refuse.

Compiled code checks an argument against its annotation before the body runs. A bare
`int` would refuse a number of numpy's with a `TypeError` that says less.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

MODULES = Path(__file__).parents[2] / "mem_cache"
NARROW = {"int", "float", "bool", "bytes", "str", "RequestKV"}


def parameters(module: str) -> Iterator[tuple[str, str]]:
    """Yield each parameter of the public methods, and the names in its annotation."""
    for kind in ast.parse((MODULES / f"{module}.py").read_text()).body:
        if not isinstance(kind, ast.ClassDef):
            continue
        for method in kind.body:
            if not isinstance(method, ast.FunctionDef):
                continue
            if method.name.startswith("_") and method.name != "__init__":
                continue
            for argument in (*method.args.args, *method.args.kwonlyargs):
                if argument.annotation is not None:
                    name = f"{kind.name}.{method.name}({argument.arg})"
                    yield name, ast.unparse(argument.annotation)


@pytest.mark.parametrize(
    "module",
    ["allocator", "chunk_cache", "prefix_cache", "radix_cache", "request_table"],
)
def test_no_public_parameter_has_a_type_that_compiled_code_would_check(
    module: str,
) -> None:
    found = dict(parameters(module))
    narrow = {
        name: text
        for name, text in found.items()
        if text.removesuffix(" | None") in NARROW
    }

    assert len(found) > 2
    assert {} == narrow

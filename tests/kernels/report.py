"""Print what the compiled kernels need of a GPU; `make kernels` runs this.

No GPU is needed. The numbers are the compilers': of sm_80 and sm_90 read from the
machine code, of gfx942 from what Triton tells AMD's assembler. How many programs a
processor takes at a time is not among them; a machine with the GPU would tell.
"""

from __future__ import annotations

from pathlib import Path

from aot import Compiled, compile_ahead

COLUMNS = {
    "launch": "launch",
    "kernel": "kernel",
    "target": "target",
    "warps": "num_warps",
    "registers a thread": "registers",
    "spilled bytes": "spilled_bytes",
    "shared bytes": "shared_bytes",
    "widest access": "access_bytes",
}
"""Attribute of `Compiled` by title."""


def table(compiled: list[Compiled]) -> str:
    """Return the kernels as a table."""
    rows = [
        [str(getattr(each, name)) for name in COLUMNS.values()] for each in compiled
    ]
    widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in ([*COLUMNS], ["-" * width for width in widths], *rows)
    )
    return "\n".join(line.rstrip() for line in lines)


def main() -> None:
    """Compile what all launch files launch, and print it."""
    for path in sorted(Path(__file__).parent.glob("launches_*.py")):
        print(table(compile_ahead(path.stem)), end="\n\n", flush=True)


if __name__ == "__main__":
    main()

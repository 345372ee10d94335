"""Score the mutants of `mutmut run`; those that no test notices need a reason.

Run it in the folder that mutmut ran in. accepted.toml holds the reasons: a mutant is
named by its function, the line that was there and the line that took its place, since
the numbers of mutmut change with every edit.

Those mutants are controls, too. If one dies, and the line is still the same, then no
kill can be trusted: mutmut takes a test for failed that it does not find again, as by
an id that pytest spells otherwise the second time.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

LEAST_PERCENT = 95
"""Share of all mutants that must be killed, and of those of a module not accepted."""


class Mutant(NamedTuple):
    """A change of one line of a function."""

    function: str
    before: str
    after: str


def mutmut(*arguments: str) -> list[str]:
    """Return the lines that a command of mutmut prints."""
    command = [sys.executable, "-m", "mutmut", *arguments]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return result.stdout.splitlines()


def statuses() -> dict[str, str]:
    """Return what became of each mutant that was run, by its name."""
    lines = [line.strip().rpartition(": ") for line in mutmut("results", "--all=true")]
    return {
        name: status
        for name, _, status in lines
        if "__mutmut_" in name and status != "not checked"
    }


def function_of(name: str) -> str:
    """Return the function that a mutant is one of, with its module: `a.B.c`."""
    match = re.fullmatch(r".*?(\w+)\.x[_ǁ](.+)__mutmut_\d+", name)
    assert match is not None
    return f"{match[1]}.{match[2].replace('ǁ', '.')}"


def describe(name: str) -> Mutant:
    """Return what a mutant changes."""
    diff = [line for line in mutmut("show", name) if line[:3] not in ("---", "+++")]
    before, after = (
        " ".join(line[1:].strip() for line in diff if line.startswith(sign))
        for sign in "-+"
    )
    return Mutant(function_of(name), before, after)


def read_accepted() -> list[Mutant]:
    """Return the mutants that may survive."""
    entries = tomllib.loads(Path(__file__).with_name("accepted.toml").read_text())
    return [
        Mutant(function, mutant["before"], mutant["after"])
        for function, mutants in entries.items()
        for mutant in mutants
        if mutant["why"]
    ]


def main() -> str | None:
    """Print the report; returns what is wrong, if anything is."""
    results = statuses()
    alive = {
        name: describe(name)
        for name, status in results.items()
        if status not in ("killed", "timeout")
    }
    accepted = read_accepted()

    low = []
    print("module              mutants  survivors  accepted  killed")
    modules = sorted({function_of(name).partition(".")[0] for name in results})
    for module in [*modules, ""]:
        prefix = f"{module}." if module else ""
        names = [name for name in results if function_of(name).startswith(prefix)]
        survivors = [alive[name] for name in names if name in alive]
        num_accepted = sum(mutant in accepted for mutant in survivors)
        # Of a module with five mutants, one that is accepted would be too many.
        num_countable = len(names) - (num_accepted if module else 0)
        num_killed = len(names) - len(survivors)
        if 100 * num_killed < LEAST_PERCENT * num_countable:
            low.append(module or "all")
        print(
            f"{module or 'all':20}{len(names):7}{len(survivors):11}{num_accepted:10}"
            f"{100 * num_killed / len(names):7.1f}%"
        )

    for mutant in alive.values():
        if mutant not in accepted:
            print(f"\n{mutant.function}\n- {mutant.before}\n+ {mutant.after}")
    dead = [
        mutant
        for mutant in accepted
        if mutant.function.partition(".")[0] in modules and mutant not in alive.values()
    ]
    for mutant in dead:
        print(f"\naccepted, but not among the survivors: {mutant.function}")
        print(f"- {mutant.before}\n+ {mutant.after}")
    if dead:
        return "accepted.toml is out of date, or kills are false"
    return f"fewer than {LEAST_PERCENT} % killed: {', '.join(low)}" if low else None


if __name__ == "__main__":
    sys.exit(main())

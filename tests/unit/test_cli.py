"""The command line: what it refuses is one line and exit code 2, before torch loads."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

import radixkv
from radixkv.scheduling.cli import main, spread


def refusal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str
) -> str:
    """Run the command line and return the one line with which it refuses."""
    monkeypatch.setattr(sys, "argv", ["radixkv", *args])
    with pytest.raises(SystemExit) as end:
        main()
    output = capsys.readouterr()

    assert end.value.code == 2
    assert output.out == ""
    assert output.err.startswith("radixkv: ")
    assert output.err.count("\n") == 1
    assert output.err.endswith("\n")
    return output.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--page-size", "0"], "page-size must be >= 1 and < 2**31, got 0"),
        (["--page-size", "-16"], "page-size must be >= 1 and < 2**31, got -16"),
        (["--batch-size", "0"], "batch-size must be >= 1 and < 2**31, got 0"),
        (["--batch-size", "-1"], "batch-size must be >= 1 and < 2**31, got -1"),
        (["--batch-size", "1", "0"], "batch-size must be >= 1 and < 2**31, got 0"),
        (
            ["--batch-size", str(2**31)],
            f"batch-size must be >= 1 and < 2**31, got {2**31}",
        ),
        (["--input-len", "0"], "input-len must be >= 1 and < 2**31, got 0"),
        (["--output-len", "0"], "output-len must be >= 1 and < 2**31, got 0"),
        (["--num-pages", "0"], "num-pages must be >= 1 and < 2**31, got 0"),
        (["--seed", "-1"], "seed must be >= 0 and < 2**31, got -1"),
        (["--chunked-prefill-size", "0"], "chunked-prefill-size must be >= 1"),
        (
            ["--speculative-num-draft-tokens", "-1"],
            "speculative-num-draft-tokens must be >= 0",
        ),
        (["--mem-fraction", "0"], "mem-fraction must be in (0, 1], got 0.0"),
        (["--mem-fraction", "-0.5"], "mem-fraction must be in (0, 1], got -0.5"),
        (["--mem-fraction", "2"], "mem-fraction must be in (0, 1], got 2.0"),
        (["--mem-fraction", "nan"], "mem-fraction must be in (0, 1], got nan"),
        (["--mem-fraction", "inf"], "mem-fraction must be in (0, 1], got inf"),
        (
            ["--mem-fraction", "0.5", "--num-pages", "8"],
            "give num-pages or mem-fraction, got both",
        ),
        (
            ["--input-len", "8", "--shared-prefix-len", "8"],
            "shared-prefix-len must be < input-len (8), got 8",
        ),
        (
            ["--input-len", "8", "--shared-prefix-len", "-1"],
            "shared-prefix-len must be >= 0",
        ),
        (["--shared-prefix-len", "8"], "shared-prefix-len goes with input-len"),
        (
            ["--input-len", "8", "--prompt-filename", "x"],
            "give prompt-filename or input-len, got both",
        ),
        (["--bogus"], "No such option: --bogus"),
        (["--page-size"], "'--page-size' requires an argument"),
        (["--batch-size"], "'--batch-size' requires an argument"),
        (["--page-size", "x"], "'--page-size': Input should be a valid integer"),
        (["--page-size", "1.5"], "'--page-size': Input should be a valid integer"),
        (["--batch-size", "1", "x"], "'--batch-size': Input should be a valid integer"),
        (["--batch-size", "--input-len", "4"], "'--batch-size'"),
        (["--mem-fraction", "x"], "'--mem-fraction': Input should be a valid number"),
        (["--page-size", "16", "32"], "unexpected extra argument"),
        (["extra"], "unexpected extra argument"),
    ],
)
def test_a_bad_value_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    message: str,
) -> None:
    monkeypatch.setitem(sys.modules, "radixkv.scheduling.benchmark.grid", None)

    assert message in refusal(monkeypatch, capsys, "bench-one-batch", *args)


def test_an_unknown_command_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "No such command 'bench'" in refusal(monkeypatch, capsys, "bench")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--version"], [radixkv.__version__]),
        (
            ["--help"],
            ["bench-one-batch", "--version", "Plan a cache", "cache is worth"],
        ),
        ([], ["bench-one-batch", "--version"]),
        (
            ["bench-one-batch", "--help"],
            ["--batch-size", "--page-size", "--no-prefix-cache", "--mem-fraction"],
        ),
    ],
)
def test_it_tells_about_itself(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    words: list[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["radixkv", *args])

    with pytest.raises(SystemExit) as end:
        main()

    output = capsys.readouterr()
    assert (end.value.code, output.err) == (0, "")
    assert [] == [word for word in words if word not in output.out]


def test_ctrl_c_ends_it_quietly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("radixkv.scheduling.cli.app", interrupt)
    monkeypatch.setattr(sys, "argv", ["radixkv"])

    with pytest.raises(SystemExit) as end:
        main()

    assert end.value.code == 130
    assert capsys.readouterr().err == ""


def test_a_wrong_option_does_not_wait_for_torch() -> None:
    code = """
import sys
from radixkv.scheduling.cli import main

sys.argv = ["radixkv", "bench-one-batch", "--page-size", "0"]
try:
    main()
finally:
    print("torch" in sys.modules)
"""
    command = [sys.executable, "-c", code]

    result = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (2, "False\n") == (result.returncode, result.stdout)
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--batch-size 1 8", "--batch-size 1 --batch-size 8"),
        ("--batch-size=1 --seed 2", "--batch-size=1 --seed 2"),
        ("--batch-size=1 8", "--batch-size=1 --batch-size 8"),
        ("--page-size 1 8", "--page-size 1 8"),
        ("--batch-size", "--batch-size"),
        (
            "go --output-len 1 2 3 --input-len 4 5 --seed 6",
            "go --output-len 1 --output-len 2 --output-len 3 "
            "--input-len 4 --input-len 5 --seed 6",
        ),
    ],
)
def test_values_of_a_grid_are_spread(arguments: str, expected: str) -> None:
    assert expected.split() == spread(arguments.split())


WORDS = st.sampled_from(["--batch-size", "--output-len", "--seed", "1", "-1", "x"])


@given(st.lists(WORDS))
def test_spreading_only_repeats_options(arguments: list[str]) -> None:
    result = spread(arguments)

    assert spread(result) == result
    left = iter(result)
    assert all(argument in left for argument in arguments)
    assert [x for x in arguments if not x.startswith("--")] == [
        x for x in result if not x.startswith("--")
    ]

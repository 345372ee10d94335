"""Compile kernels ahead of time, for GPUs that need not be there.

A launch file (`launches_*.py`) maps names to functions that launch kernels on small CPU
tensors: its `LAUNCHES`. Here they run with `backend="triton"` in a process without the
interpreter, where a launch compiles its kernel for a target and does not run it. So
what is compiled is what the launchers ask for: their types, constants and alignments.

Tests call `compile_ahead`; as a script, this prints what it returns as JSON::

    python tests/kernels/aot.py sm_80,gfx942 launches_pages [launch ...]
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from radixkv.kernels import backend

TARGETS: Final = {
    "sm_80": ("cuda", 80, 32),
    "sm_86": ("cuda", 86, 32),
    "sm_89": ("cuda", 89, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_120": ("cuda", 120, 32),
    "gfx942": ("hip", "gfx942", 64),
}
"""Backend, architecture and warp size of each target.

A100, RTX 3090, RTX 4090, H100, RTX 5090 and MI300X.
"""


@dataclass(frozen=True)
class Compiled:
    """One variant of a kernel, compiled for one target.

    Attributes:
        launch: Name in `LAUNCHES` of what asked for it first.
        kernel: Name of the kernel.
        target: Key of `TARGETS`.
        num_warps: Warps a program.
        registers: Registers a thread; of a gfx942, vector registers, accumulation
            registers included.
        spilled_bytes: Local memory a thread, where registers are spilled.
        shared_bytes: Shared memory a program.
        access_bytes: What the widest access to global memory moves.
    """

    launch: str
    kernel: str
    target: str
    num_warps: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    access_bytes: int


def compile_ahead(
    launch_file: str, *launches: str, targets: Iterable[str] = TARGETS
) -> list[Compiled]:
    """Compile what a launch file launches, in a fresh process.

    Args:
        launch_file: Name of a file beside this one, without `.py`.
        *launches: Names in its `LAUNCHES`; all of them if none is given.
        targets: Keys of `TARGETS`.

    Returns:
        Each variant once, in the order in which the launches need them.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    with tempfile.TemporaryDirectory() as cache:
        environment |= {
            "OMP_NUM_THREADS": "1",
            "TRITON_CACHE_DIR": cache,
            "TRITON_DEFAULT_FP_FUSION": "1",  # what it is anyway; now without a warning
        }
        result = subprocess.run(
            [sys.executable, __file__, ",".join(targets), launch_file, *launches],
            env=environment,
            stdout=subprocess.PIPE,
            check=True,
        )
    return [Compiled(**fields) for fields in json.loads(result.stdout)]


# All below runs in the fresh process. What comes from Triton is `Any`, since Triton's
# own types are partial.


class OfflineDriver:
    """A driver that says which GPU to compile for, and has none."""

    def __init__(self, target: str) -> None:
        gpu_target: Any = import_module("triton.backends.compiler").GPUTarget
        self.device = list(TARGETS).index(target)
        self.target: object = gpu_target(*TARGETS[target])

    def get_current_target(self) -> object:
        return self.target

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_launches(
    targets: Iterable[str], launches: dict[str, Callable[[], object]]
) -> list[Compiled]:
    """Run launches for some targets, compiling instead of launching."""
    runtime: Any = import_module("triton.runtime")
    run = runtime.JITFunction.run
    variants: dict[object, tuple[str, str]] = {}
    launching = "", ""

    def compile_only(self: object, *args: object, **kwargs: object) -> None:
        kernel = run(self, *args, **kwargs | {"warmup": True})
        variants.setdefault(kernel, launching)

    runtime.JITFunction.run = compile_only
    # The tensors are on the CPU, which launchers refuse otherwise.
    any_backend: Any = backend
    any_backend.is_interpreted = lambda: True
    for target in targets:
        runtime.driver.set_active(OfflineDriver(target))
        for name, launch in launches.items():
            launching = name, target
            launch()
    return [describe(kernel, *by) for kernel, by in variants.items()]


def describe(kernel: object, launch: str, target: str) -> Compiled:
    """Tell what a compiled kernel needs."""
    compiled: Any = kernel
    read = read_cubin if "cubin" in compiled.asm else read_amdgcn
    registers, spilled_bytes = read(compiled.asm)
    return Compiled(
        launch=launch,
        kernel=compiled.name,
        target=target,
        num_warps=compiled.metadata.num_warps,
        registers=registers,
        spilled_bytes=spilled_bytes,
        shared_bytes=compiled.metadata.shared,
        access_bytes=max(accesses(compiled.asm), default=0),
    )


def read_cubin(asm: dict[str, bytes]) -> tuple[int, int]:
    """Read registers and bytes of stack, where spills go, from the machine code."""
    tools = Path(import_module("triton").__file__ or "").parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(asm["cubin"])
        cubin.flush()
        said = subprocess.run(
            [tools / "cuobjdump", "--dump-resource-usage", cubin.name],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout
    # There is one function; what is before it is about all of the file.
    numbers = dict(re.findall(r"(\w+):(\d+)", said))
    return int(numbers["REG"]), int(numbers["STACK"])


def read_amdgcn(asm: dict[str, str]) -> tuple[int, int]:
    """Read vector registers and bytes of scratch from what the assembler is told."""
    numbers = dict(re.findall(r"\.(\w+):\s+(\d+)\n", asm["amdgcn"]))
    return int(numbers["vgpr_count"]), int(numbers["private_segment_fixed_size"])


def accesses(asm: dict[str, str]) -> Iterator[int]:
    """Yield how many bytes each access to global memory moves."""
    if "ptx" in asm:
        access = r"(?:ld|st)\.global\S*?(?:\.v(\d))?\.b(\d+)\s"
        for count, bits in re.findall(access, asm["ptx"]):
            yield int(count or 1) * int(bits) // 8
    else:
        access = r"(?:buffer|global)_(?:load|store)_(?:dword(?:x(\d))?|\w*(byte)|\w+)"
        for count, is_byte in re.findall(access, asm["amdgcn"]):
            yield 4 * int(count or 1) if not is_byte else 1


def main(targets: str, launch_file: str, *names: str) -> None:
    """Print what the launches of a file compile, as JSON."""
    launches = import_module(Path(launch_file).stem).LAUNCHES
    chosen = {name: launches[name] for name in names} if names else launches
    json.dump(
        [asdict(each) for each in compile_launches(targets.split(","), chosen)],
        sys.stdout,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])

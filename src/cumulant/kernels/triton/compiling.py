# pyright: basic, reportMissingImports=false, reportMissingModuleSource=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOptionalMemberAccess=false
"""The kernels compiled for GPUs that need not be here: registers, spills, shared memory.

``python -m cumulant.kernels.triton.compiling cuda:90`` prints one line per kernel, head dimension
and type of number; a configuration is good if nothing spills and shared memory suffices.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from cumulant.kernels.tiles import Band, Program, Result
from cumulant.kernels.triton import answers, sums
from cumulant.kernels.triton.blocks import WIDTHS, Blocks, blocks_for

__all__ = ["TARGETS", "Launch", "Usage", "compile_launch", "launches"]

# With the shared memory that one program may have.
TARGETS = {
    "cuda:80": (GPUTarget("cuda", 80, 32), 166_912),
    "cuda:90": (GPUTarget("cuda", 90, 32), 232_448),
    "hip:gfx942": (GPUTarget("hip", "gfx942", 64), 65_536),
}

_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


@dataclass(frozen=True)
class Launch:
    """What a kernel would have been started with."""

    kernel: str
    given: Sequence[object]
    named: Mapping[str, Any]

    def with_blocks(self, b: Blocks) -> Launch:
        shape = {"ROWS": b.rows, "COLUMNS": b.columns, "PRECISION": b.precision}
        run = {"num_warps": b.warps, "num_stages": b.stages}
        return Launch(self.kernel, self.given, {**self.named, **shape, **run})


@dataclass(frozen=True)
class Usage:
    """Registers of a thread, bytes of its stack that hold spilled ones, bytes of shared memory."""

    registers: int
    spilled: int
    shared: int


def launches(d: int, e: int, dtype: torch.dtype) -> Iterator[Launch]:
    """One launch of every kernel, with everything asked for, under a causal band."""
    made: list[Launch] = []

    def record(kernel: str, _: object, given: Sequence[object], named: Mapping[str, Any]) -> None:
        made.append(Launch(kernel, given, named))

    def tensor(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.zeros(2, 4, *shape, dtype=kind)

    m = 1024
    measure = {"query": tensor(m, d), "key": tensor(m, d), "value": tensor(m, e)}
    level = {"log_normalizer": tensor(m, 1, kind=torch.float32)}
    along = {n: x.clone() for n, x in measure.items()}
    seeds = {"cotangent mean": tensor(m, e), "cotangent log_normalizer": level["log_normalizer"]}
    band, options = Band(upper=0), {"scale": 0.125, "rate": 0.0}

    def program(**results: Tensor) -> Program:
        wanted = tuple(Result(n, "i", tuple(x.shape)) for n, x in results.items())
        return Program(lambda *_: {}, {}, wanted, (m, m), band, whole_rows=True)

    kept = answers.launch, answers.target_of
    answers.launch, answers.target_of = record, lambda _: "interpreter"  # any tile will do
    try:
        fields = ("entropy", "score_mean", "score_variance", "score_max")
        answers.forward(measure, band=band, fields=fields, **options)
        rows = {"mean": tensor(m, e), "entropy": tensor(m, 1), **level}
        moved = {f"tangent {n}": x for n, x in along.items()}
        answers.tangent(program(**rows), {**measure, **level, **moved}, **options)
        pulled = program(**measure, bias=tensor(m, m, kind=torch.float32))
        answers.gradient(pulled, {**measure, **level, **seeds}, **options)
        second = {f"second {n}": x for n, x in along.items()}
        answers.curvature(pulled, {**measure, **level, **seeds, **second}, **options)
    finally:
        answers.launch, answers.target_of = kept
    yield from made


def compile_launch(launch: Launch, target: GPUTarget) -> Usage:
    """Compile as a launch on such a device would."""
    function = getattr(sums, launch.kernel)
    backend = make_backend(target)
    bind = create_function_from_signature(function.signature, function.params, backend)
    named = dict(launch.named)
    bound, specialization, options = bind(*launch.given, **named)
    parsed, signature, constants, attributes = function._pack_args(
        backend, named, bound, specialization, options
    )
    source = ASTSource(function, signature, constants, attributes)
    made = triton.compile(source, target=target, options=parsed.__dict__)
    if target.backend == "hip":
        text = made.asm["amdgcn"]
        spilled = sum(int(n) for n in re.findall(r"\.[vs]gpr_spill_count:\s+(\d+)", text))
        registers = re.search(r"\.vgpr_count:\s+(\d+)", text)
    else:
        text = _resources(made.asm["cubin"])
        spilled = 0 if "STACK:0 " in text else _spilled(made.asm["ptx"])
        registers = re.search(r"REG:(\d+)", text)
    return Usage(int(registers[1]) if registers else 0, spilled, made.metadata.shared)


def _spilled(source: str) -> int:
    """Bytes that the assembler spills; a stack of a few bytes may be there without."""
    processor = re.search(r"\.target (\w+)", source)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(source)
        file.flush()
        name = f"--gpu-name={processor[1] if processor else ''}"
        command = [str(_TOOLS / "ptxas"), "-v", name, file.name, "-o", "/dev/null"]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", told))


def _resources(binary: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(_TOOLS / "cuobjdump"), "-res-usage", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> int:
    """Print the table of a target, of all head dimensions or one; 1 if anything is too large."""
    target, most = TARGETS[sys.argv[1]]
    worst = False
    for dtype in (torch.float32, torch.float16):
        for d in [int(n) for n in sys.argv[2:]] or WIDTHS:
            for launch in launches(d, d, dtype):
                blocks = blocks_for(launch.kernel, d, dtype, sys.argv[1])
                if blocks is None:
                    continue
                found = compile_launch(launch.with_blocks(blocks), target)
                bad = found.spilled > 0 or found.shared > most
                worst |= bad
                words = (launch.kernel, dtype, d, *blocks, found, "BAD" if bad else "good")
                sys.stdout.write(" ".join(map(str, words)) + "\n")
                sys.stdout.flush()
    return int(worst)


if __name__ == "__main__":
    sys.exit(main())

# pyright: basic, reportMissingImports=false, reportMissingModuleSource=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOptionalMemberAccess=false
"""The kernels compiled for GPUs that need not be here: registers, spills, shared memory."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
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
from cumulant.kernels.triton.blocks import Blocks, candidates
from cumulant.kernels.triton.tile import Measure, tile_of

__all__ = ["TARGETS", "Compiled", "Launch", "Usage", "compile_launch", "compile_table", "launches"]


@dataclass(frozen=True)
class Target:
    """A GPU to compile for, its name, and the shared memory that one program may have."""

    gpu: GPUTarget
    name: str
    shared: int


TARGETS = {
    "cuda:80": Target(GPUTarget("cuda", 80, 32), "A100", 166_912),
    "cuda:90": Target(GPUTarget("cuda", 90, 32), "H100", 232_448),
    "hip:gfx942": Target(GPUTarget("hip", "gfx942", 64), "MI300", 65_536),
}

_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


@dataclass(frozen=True)
class Launch:
    """What a kernel would have been started with, by which question, and whether it has pairs."""

    question: str
    kernel: str
    measure: Measure
    given: Sequence[object]
    features: tuple[int, int]
    pairs: bool


@dataclass(frozen=True)
class Usage:
    """Registers of a thread, bytes of its memory that hold spilled ones, bytes of shared memory."""

    registers: int
    spilled: int
    shared: int

    def fits(self, target: Target) -> bool:
        return self.spilled == 0 and self.shared <= target.shared


def launches(d: int, e: int, dtype: torch.dtype, *, pairs: bool = False) -> Iterator[Launch]:
    """Every launch of the four questions, with everything asked for, under a causal band.

    With `pairs` there are a bias, a mask and dropout as well.
    """
    made: list[Launch] = []
    question = ""

    def record(kernel: str, _: object, given: Sequence[Any], **__: int) -> None:
        made.append(Launch(question, kernel, given[0], given[1:], (d, e), pairs))

    def tensor(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.zeros(2, 4, *shape, dtype=kind)

    m = 256
    measure = {"query": tensor(m, d), "key": tensor(m, d), "value": tensor(m, e)}
    along = {n: x.clone() for n, x in measure.items()}
    rate = 0.0
    if pairs:  # a bias is float32 beside vectors of any type
        along["bias"] = tensor(m, m, kind=torch.float32)
        measure |= {"bias": along["bias"].clone(), "mask": tensor(m, m, kind=torch.bool)}
        measure["seed"], rate = tensor(1, 1, kind=torch.int32), 0.1
    level = {"log_normalizer": tensor(m, 1, kind=torch.float32)}
    seeds = {"cotangent mean": tensor(m, e), "cotangent log_normalizer": level["log_normalizer"]}
    band, options = Band(upper=0), {"scale": 0.125, "rate": rate}

    def program(**results: Tensor) -> Program:
        wanted = tuple(Result(n, "i", tuple(x.shape)) for n, x in results.items())
        return Program(lambda *_: {}, {}, wanted, (m, m), band, whole_rows=True)

    kept = answers.launch, answers.choose
    tile = Blocks(32, 32, 32, 4, 1, "ieee")  # any will do: `compile_launch` sets another
    answers.launch, answers.choose = record, lambda *_, **__: tile
    try:
        question = "forward"
        fields = ("entropy", "score_mean", "score_variance", "score_max")
        answers.forward(measure, band=band, fields=fields, **options)
        question = "tangent"
        rows = {"mean": tensor(m, e), "entropy": tensor(m, 1), **level}
        moved = {f"tangent {n}": x for n, x in along.items()}
        answers.tangent(program(**rows), {**measure, **level, **moved}, **options)
        question = "gradient"
        primal = {n: measure[n] for n in ("query", "key", "value")}
        pulled = program(**primal, bias=tensor(m, m, kind=torch.float32))
        answers.gradient(pulled, {**measure, **level, **seeds}, **options)
        question = "curvature"
        second = {f"second {n}": x for n, x in along.items()}
        both = program(**primal, **seeds, bias=tensor(m, m, kind=torch.float32))
        answers.curvature(both, {**measure, **level, **seeds, **second}, **options)
    finally:
        answers.launch, answers.choose = kept
    yield from made


def compile_launch(launch: Launch, b: Blocks, target: Target) -> Usage:
    """Compile as a launch on such a device would."""
    function = getattr(sums, launch.kernel)
    backend = make_backend(target.gpu)
    bind = create_function_from_signature(function.signature, function.params, backend)
    measure = launch.measure._replace(tile=tile_of(b, *launch.features))
    named = {"num_warps": b.warps, "num_stages": b.stages}
    bound, specialization, options = bind(measure, *launch.given, **named)
    parsed, signature, constants, attributes = function._pack_args(
        backend, named, bound, specialization, options
    )
    source = ASTSource(function, signature, constants, attributes)
    made = triton.compile(source, target=target.gpu, options=parsed.__dict__)
    if target.gpu.backend == "hip":
        text = made.asm["amdgcn"]
        stack = re.search(r"\.private_segment_fixed_size:\s+(\d+)", text)
        spilled = int(stack[1]) if stack else 0
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


@dataclass(frozen=True)
class Compiled:
    """One configuration of the table, compiled for one launch."""

    target: str
    dtype: str
    width: int
    launch: Launch
    blocks: Blocks
    usage: Usage

    @property
    def fits(self) -> bool:
        return self.usage.fits(TARGETS[self.target])


def compile_table(
    target: str, dtype: torch.dtype, width: int, *, every_launch: bool = False
) -> Iterator[Compiled]:
    """Every tile of one line of the table for the kernel's last launch, or for all of them.

    The last is the curvature's, mostly the hungriest, with a bias, a mask and dropout if the tile
    is to take them.
    """
    for pairs in (False, True):
        made = list(launches(width, width, dtype, pairs=pairs))
        last = {launch.kernel: launch for launch in made}
        for launch in made if every_launch else last.values():
            for b in candidates(launch.kernel, width, dtype, target, pairs=pairs):
                if every_launch or b.pairs == pairs:
                    usage = compile_launch(launch, b, TARGETS[target])
                    name = str(dtype).removeprefix("torch.")
                    yield Compiled(target, name, width, launch, b, usage)

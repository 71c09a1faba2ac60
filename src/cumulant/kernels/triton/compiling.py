# pyright: basic, reportMissingImports=false, reportMissingModuleSource=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOptionalMemberAccess=false
"""The kernels compiled for GPUs that need not be here: registers, spills, shared memory."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
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

from cumulant.kernels.tiles import Band, Named, Program, Result
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


# What a call has, from the least to the most. Fewer arguments can need more registers: the
# assembler then trades them for programs that run at the same time.
_CALLS = ("plain", "everything", "softcap")


def launches(
    d: int, e: int, dtype: torch.dtype, *, pairs: bool = False, length: int = 256
) -> Iterator[Launch]:
    """Every launch of the four questions under a causal band: plain calls, and with everything.

    A plain call has no bias, no dropout, no entropy and one cotangent, that of the mean; with
    `pairs` it has a mask, and calls with everything have a bias, a mask and dropout as well, then a
    softcap beside them for the questions that take one. The gradient of the entropy is asked for
    with the softcap and where there are no `pairs`.
    """
    for call in _CALLS if pairs else _CALLS[:2]:
        yield from _recorded(d, e, dtype, call, pairs=pairs, length=length)


def _recorded(
    d: int, e: int, dtype: torch.dtype, call: str, *, pairs: bool, length: int
) -> list[Launch]:
    made: list[Launch] = []
    question = ""

    def record(kernel: str, _: object, given: Sequence[Any], **__: int) -> None:
        made.append(Launch(f"{question}, {call}", kernel, given[0], given[1:], (d, e), pairs))

    kept = answers.launch, answers.choose
    tile = Blocks(32, 32, 32, 4, 1, "ieee")  # any will do: `compile_launch` sets another
    answers.launch, answers.choose = record, lambda *_, **__: tile
    try:
        for name, ask in _questions(d, e, dtype, call, pairs=pairs, m=length).items():
            question = name
            ask()
    finally:
        answers.launch, answers.choose = kept
    return made


def _questions(
    d: int, e: int, dtype: torch.dtype, call: str, *, pairs: bool, m: int
) -> dict[str, Callable[[], object]]:
    """The questions of such a call; none is answered, since launches are recorded."""
    full = call != "plain"
    band, options = Band(upper=0), {"scale": 0.125, "rate": 0.1 if full and pairs else 0.0}

    def tensor(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.zeros(2, 4, *shape, dtype=kind)

    def program(results: Named) -> Program:
        wanted = tuple(Result(n, "i", tuple(x.shape)) for n, x in results.items())
        return Program(lambda *_: {}, {}, wanted, (m, m), band, whole_rows=True)

    column, square = (tensor(m, n, kind=torch.float32) for n in (1, m))
    vectors = {"query": tensor(m, d), "key": tensor(m, d), "value": tensor(m, e)}
    measure = dict(vectors)
    if pairs:
        measure["mask"] = tensor(m, m, kind=torch.bool)
    if pairs and full:
        measure |= {"bias": square, "seed": tensor(1, 1, kind=torch.int32)}
    if call == "softcap":
        measure["cap"] = torch.ones(1, 1, 1, 1)
    along = {**vectors, **({"bias": square} if "bias" in measure else {})}
    known = {**measure, "log_normalizer": column}
    rows = {"mean": tensor(m, e), "log_normalizer": column}
    seeds = {"cotangent mean": tensor(m, e)}
    wanted = dict(vectors)
    heat = {"cotangent entropy": column} if full and (call == "softcap" or not pairs) else {}
    fields: tuple[str, ...] = ()
    if full:
        rows["entropy"], wanted["bias"] = column, square
        seeds["cotangent log_normalizer"] = column
        fields = ("entropy", "score_mean", "score_variance", "score_max")
    pushed, second = ({f"{p} {n}": x for n, x in along.items()} for p in ("tangent", "second"))
    scored = {n: x for n, x in measure.items() if n != "value"}
    found: dict[str, Callable[[], object]] = {
        "forward": lambda: answers.forward(measure, band=band, fields=fields, **options),
        "tangent": lambda: answers.tangent(program(rows), {**known, **pushed}, **options),
        "gradient": lambda: answers.gradient(
            program(wanted), {**known, **seeds, **heat}, **options
        ),
        "curvature": lambda: answers.curvature(
            program({**wanted, **seeds}), {**known, **seeds, **second}, **options
        ),
    }
    if full:
        top = ("score_max", "top")
        found["search"] = lambda: answers.forward(scored, band=band, fields=top, **options)
    return found


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


def compile_table(target: str, dtype: torch.dtype, width: int) -> Iterator[Compiled]:
    """Every tile of one line of the table for every launch that may use it."""
    for pairs in (False, True):
        for launch in launches(width, width, dtype, pairs=pairs):
            for b in candidates(launch.kernel, width, dtype, target, pairs=pairs):
                usage = compile_launch(launch, b, TARGETS[target])
                name = str(dtype).removeprefix("torch.")
                yield Compiled(target, name, width, launch, b, usage)

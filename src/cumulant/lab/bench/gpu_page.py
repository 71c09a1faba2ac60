"""The page about the GPU engine: what every configuration needs, and what it should cost."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.resources import files
from typing import TYPE_CHECKING

import torch

from cumulant.core.errors import InputError
from cumulant.core.progress import ProgressCallback, counted
from cumulant.kernels.triton.blocks import KERNELS, WIDTHS, candidates
from cumulant.lab.bench.costs import GPUS, WORK, ratio

if TYPE_CHECKING:  # Triton need not be installed
    from cumulant.kernels.triton.compiling import Compiled

__all__ = ["Line", "compile_all", "costs", "fingerprint", "markdown", "summary"]

_TARGETS = ("cuda:80", "cuda:90", "hip:gfx942")
# bfloat16 stands for half precision: float16 needs the same on NVIDIA's GPUs, nearly so on AMD's.
_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Line:
    """One tile of the table: the most that it needs in any launch that may use it.

    `dtype` is "float32" or "half".
    """

    target: str
    dtype: str
    width: int
    kernel: str
    blocks: str
    pairs: bool
    launches: int
    registers: int
    spilled: int
    shared: int
    fits: bool

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def compile_all(
    targets: Sequence[str] | None = None,
    widths: Sequence[int] | None = None,
    *,
    progress: ProgressCallback | None = None,
) -> list[Line]:
    """Compile the table for these GPUs and head dimensions, every launch; by default all of it.

    Raises:
        InputError: a target or width is not in the table.
    """
    from cumulant.kernels.triton.compiling import compile_table

    targets, widths = targets or _TARGETS, widths or WIDTHS
    for target in targets:
        if target not in _TARGETS:
            raise InputError(f"--target must be one of {', '.join(_TARGETS)}, not {target!r}.")
    for width in widths:
        if width not in WIDTHS:
            known = ", ".join(map(str, WIDTHS))
            raise InputError(f"--width must be one of {known}, not {width}.")
    plan = [(t, d, w) for t in targets for d in _DTYPES for w in widths]
    tick = counted(progress, len(plan))
    found: dict[tuple[str, ...], list[Compiled]] = {}
    for target, dtype, width in plan:
        tick(f"{target} {str(dtype).removeprefix('torch.')} {width}")
        kind = "float32" if dtype == torch.float32 else "half"
        for c in compile_table(target, dtype, width):
            key = (kind, target, str(width), c.launch.kernel, str(c.blocks))
            found.setdefault(key, []).append(c)
    return [_line(kind, group) for (kind, *_), group in found.items()]


def _line(kind: str, every: Sequence[Compiled]) -> Line:
    one = every[0]
    return Line(
        one.target,
        kind,
        one.width,
        one.launch.kernel,
        str(one.blocks).rstrip("+"),
        one.blocks.pairs,
        len(every),
        max(c.usage.registers for c in every),
        max(c.usage.spilled for c in every),
        max(c.usage.shared for c in every),
        all(c.fits for c in every),
    )


def summary(rows: Sequence[Line]) -> str:
    """One line for each tile, and the verdict."""
    lines = [
        f"{r.target:<11}{r.dtype:<8}{r.width:>4} {r.kernel:<11}{r.blocks:<17}"
        f"{r.registers:>4} registers {r.spilled:>5} B spilled {r.shared:>7} B shared"
        f"{'' if r.fits else '   TOO LARGE'}"
        for r in rows
    ]
    bad = sum(not r.fits for r in rows)
    total = sum(r.launches for r in rows)
    said = "all fit" if bad == 0 else f"{bad} do not fit"
    return "\n".join([*lines, f"{len(rows)} tiles in {total} compiled launches: {said}."])


def fingerprint() -> str:
    """A hash of the kernels as they are compiled: without comments and docstrings."""
    found: list[str] = []
    for name in ("tile.py", "sums.py"):
        tree = ast.parse(files("cumulant.kernels.triton").joinpath(name).read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and ast.get_docstring(
                node
            ):
                node.body = node.body[1:] or [ast.Pass()]
        found.append(ast.unparse(tree))
    return hashlib.sha256("\0".join(found).encode()).hexdigest()[:12]


def costs() -> list[str]:
    """The cost model as two Markdown tables."""
    lines = [
        "| question | kernel | products of width d | of width e | reads again per block |",
        "|---|---|---|---|---|",
    ]
    for question, kernels in WORK.items():
        for kernel, w in kernels.items():
            swept = f"{w.swept_d} d + {w.swept_e} e"
            lines.append(f"| {question} | `{kernel}` | {w.d} | {w.e} | {swept} |")
    lines += ["", "| GPU | type | d = e | forward | JVP with value | gradient | double backward |"]
    lines.append("|---|---|---|---|---|---|---|")
    asked = (("forward",), ("forward", "tangent"), ("gradient",), ("curvature",))
    for name, gpu in GPUS.items():
        for dtype in (torch.float16, torch.float32):
            for d in (64, 128, 256):
                found = (_short(ratio(*q, d=d, dtype=dtype, gpu=gpu)) for q in asked)
                kind = "half" if dtype == torch.float16 else "float32"
                lines.append(f"| {name} | {kind} | {d} | {' | '.join(found)} |")
    return lines


def _short(expected: float) -> str:
    return "-" if expected == float("inf") else f"{expected:.1f}"


_PAGE = """\
# The GPU engine: what it needs and what it should cost

**Nothing on this page was timed on a GPU.** The Triton kernels are compiled for A100 (`cuda:80`),
H100 (`cuda:90`) and MI300 (`hip:gfx942`) and checked in Triton's interpreter against dense
attention in float64. Written by `{command}`
with Triton {triton}, which compiles without a GPU and fails if a tile spills registers or needs
more shared memory than the GPU has. The kernels were those of fingerprint `{fingerprint}`; a test
fails if they or the table of tiles change without this page.

On a GPU, run `cumulant doctor --self-test` first (validates the kernels there, picks the fastest
tiles, and has them compute what torch's own attention does not), then
`cumulant bench calculus --device cuda`, which prints measured ratios beside the expected ones
below.

## What the kernels answer

| quantity | Triton kernels | ordinary torch operations, in tiles |
|---|---|---|
| mean, G, entropy | value, first derivatives; second of mean and G | second of the entropy |
| mean, variance and maximum of the score, its key | value | derivatives |
| value variance | on GPUs slow at float64, up to 128 features, in float32 | in float64 elsewhere |
| row statistics (k90, higher moments), `received`, `top_keys(k)` for k > 1, losses | | everything |
| a softcap | value, first derivatives | second derivatives |

The kernels take float32, float16 and bfloat16, head dimensions up to 256 (d and e may differ), any
lengths of queries and keys, causal bands and windows, boolean and additive masks of any broadcast,
the gradient of the bias, grouped heads, softcap, sinks and dropout. Derivatives of third and higher
order, float64 and wider heads go to the tiles, with the same results. Packed sequences are one call
each: a kernel for all of them would save launches, but every engine would have to take offsets.

## Expected cost

Per pair of a query and a key a kernel takes so many products of rows (2 FLOPs per feature) and one
exponential; every block of queries (in `to_keys`: of keys) reads the rows it sweeps over again,
from L2. The time of a kernel is that of the slowest of tensor cores, exponentials, L2 and memory
(`cumulant/lab/bench/costs.py`); launches and latency are left out. A test counts the products in
the interpreter.

The second table gives expected multiples of a flash forward pass, under the same model, at length
4096. float32 products are three TF32 products on NVIDIA's GPUs (24 bits kept, a third of the
speed), IEEE on AMD's; never one TF32 product, which keeps ten bits. A flash pass in the same
arithmetic is the baseline there, too.

{costs}

Derivatives recompute scores in each pass instead of adding with atomics: sums run in a fixed order,
at the price of more products than FlashAttention's backward pass takes (9 against 5).

## Registers and shared memory

Each line is a tile of the table in `kernels/triton/blocks.txt`: queries x keys / features that a
product takes at a time / warps / stages (`i`: IEEE products), and the most that it takes in any of
the launches it was compiled for. Those are, under a causal band, the launches of forward pass,
search, tangent, gradient and curvature, plain and with everything that can be asked; for tiles
"with pairs" also with a mask alone, with a bias, a mask and dropout, and with a softcap beside
those. A call with any of them takes the first tile so marked. `cumulant doctor --self-test` times
the tiles where a kernel has several ({several} of {cells} combinations of GPU, type, width and
kernel) and keeps the fastest; elsewhere there is nothing to choose. Half precision was compiled as
bfloat16: float16 needed exactly as much in all of 74 launches compared on NVIDIA's GPUs, and at
most 6 registers more or fewer in 11 on MI300. Other mixtures of arguments, and heads narrower than
the width, are not in the table, and some spill. On A100 in half precision at width 64, grouped
heads and a single query fit; heads of 40 and 41 features at odd lengths spill 56 and 76 bytes in
the curvature, and grouped heads with a bias, a mask, dropout and the entropy up to 232 bytes: that
costs time, not digits.

Limits: 255 registers a thread on NVIDIA's GPUs, 512 on MI300; 166,912, 232,448 and 65,536 bytes of
shared memory. {verdict}

| GPU | type | width | kernel | tile | launches | registers | spilled, B | shared, B | with pairs |
|---|---|---|---|---|---|---|---|---|---|
{lines}
"""


def markdown(rows: Sequence[Line], command: str) -> str:
    """The whole page, which says what `command` wrote it."""
    order = {name: number for number, name in enumerate(KERNELS)}
    places = sorted(rows, key=lambda r: (r.target, r.dtype, r.width, order[r.kernel]))
    lines = [
        f"| {r.target} | {r.dtype} | {r.width} | `{r.kernel}` | {r.blocks} | {r.launches} "
        f"| {r.registers} | {r.spilled} | {r.shared} | {'yes' if r.pairs else 'no'} |"
        for r in places
    ]
    cells = [
        candidates(k, w, d, t) for t in _TARGETS for d in _DTYPES for w in WIDTHS for k in KERNELS
    ]
    every = sum(map(len, cells))
    verdict = summary(rows).splitlines()[-1]
    if len(rows) < every:
        verdict += f" The table has {every}; those not listed were not compiled for this page."
    return _PAGE.format(
        command=command,
        triton=metadata.version("triton"),
        fingerprint=fingerprint(),
        costs="\n".join(costs()),
        verdict=verdict,
        several=sum(len(x) > 1 for x in cells),
        cells=len(cells),
        lines="\n".join(lines),
    )

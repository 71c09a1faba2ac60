# pyright: basic, reportMissingImports=false, reportMissingModuleSource=false
"""Fills the table of tiles by compiling; ``python -m cumulant.kernels.triton.searching FILE``.

For every target, type, head dimension and kernel it walks down a list from the tiles that reuse
most to those that need fewest registers, and keeps the first that spills nothing in any launch of
the kernel (``compiling.launches``). No launch stands for the others: where a kernel needs about a
half or a third of the registers, NVIDIA's assembler may spill a few bytes to run more programs at a
time, and plain calls come close to that as others do not. A line may list more tiles, for
``tuning.py`` to choose from; one without "+" serves calls that have none of the three. What is
already in the file is kept, so an interrupted search resumes. ``cumulant bench gpu`` compiles every
tile for every launch that may use it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice, product
from pathlib import Path

import torch

from cumulant.core.files import write_file
from cumulant.kernels.triton.blocks import KERNELS, WIDTHS, Blocks, read
from cumulant.kernels.triton.compiling import TARGETS, compile_launch, launches

_HEADER = """\
# Tiles of the Triton kernels: target, type, padded head dimension, kernel, then the tiles that fit,
# queries x keys / features at a time / warps / stages; i: IEEE products; +: fits with bias, mask
# and dropout. Found by `python -m cumulant.kernels.triton.searching`, which compiles.
"""

# What is tried, by padded head dimension (queries x keys, features at a time, warps, stages), from
# the tiles that reuse most to those that need fewest registers. The first line of a width is for
# the kernels that keep little (forward, rows), the second for the others.
_HALF = {
    32: ("64x64/256/4/2 64x32/256/4/2 32x32/256/4/1",) * 2,
    64: ("64x64/256/4/2 64x32/256/4/2 32x32/256/4/1", "64x32/256/4/2 32x32/256/4/1 32x16/32/4/1"),
    128: (
        "64x32/256/4/2 32x32/64/4/1 32x16/64/4/1",
        "32x32/64/4/1 32x32/32/8/1 32x16/64/4/1 32x16/64/8/1 16x16/64/4/1 16x16/32/8/1",
    ),
    256: (
        "32x32/64/8/1 32x16/64/4/1 16x16/64/4/1",
        "32x16/64/4/1 32x16/64/8/1 16x16/64/4/1 16x16/32/8/1",
    ),
}
_SINGLE = {
    32: ("64x32/256/4/1 32x32/256/8/1 16x16/256/4/1", "64x16/256/4/1 32x16/256/4/1 16x16/256/4/1"),
    64: ("64x16/256/4/1 32x32/32/8/1 16x16/32/4/1", "32x32/32/8/1 32x16/32/4/1 16x16/32/4/1"),
    128: ("32x32/32/8/1 32x16/32/4/1 16x16/32/4/1", "32x16/32/8/1 16x16/32/8/1 16x16/16/8/1"),
    256: ("32x16/32/8/1 16x16/32/8/1 16x16/16/8/1", "16x16/32/8/1 16x16/16/8/1"),
}


def _list(target: str, dtype: torch.dtype, width: int, kernel: str) -> Iterator[Blocks]:
    half = dtype == torch.float16
    precision = "ieee" if half or target.startswith("hip") else "tf32x3"
    tiles = (_HALF if half else _SINGLE)[width][kernel not in ("forward", "rows")]
    yield from (read(text)._replace(precision=precision, pairs=True) for text in tiles.split())
    if not half:
        yield read("16x16/16/8/1i+")


def search(target: str, dtype: torch.dtype, width: int, kernel: str) -> list[Blocks]:
    """The first tile that fits every launch of the kernel; of the launches, the fullest first."""
    kind = torch.bfloat16 if dtype == torch.float16 else dtype  # needs a little more on AMD's GPUs
    every = [x for pairs in (False, True) for x in launches(width, width, kind, pairs=pairs)]
    loaded = [x for x in every if x.kernel == kernel]
    gpu = TARGETS[target]
    fitting = (
        b
        for b in _list(target, dtype, width, kernel)
        if all(compile_launch(x, b, gpu).fits(gpu) for x in reversed(loaded))
    )
    return list(islice(fitting, 1))


def main() -> int:
    """Search what the file does not have; 1 if some kernel fits nowhere."""
    path = Path(sys.argv[1])
    lines = path.read_text().splitlines() if path.exists() else []
    filled = (x for x in lines if not x.startswith("#") and len(x.split()) > 4)
    known = {" ".join(x.split()[:4]): x for x in filled}
    cells = {
        f"{target} {str(dtype).removeprefix('torch.')} {width} {kernel}": (dtype, width, kernel)
        for target, dtype, width, kernel in product(
            TARGETS, (torch.float32, torch.float16), WIDTHS, KERNELS
        )
    }
    missing = False
    for key, cell in cells.items():
        target = key.split()[0]
        if key in known or target not in (sys.argv[2:] or TARGETS):
            continue
        found = search(target, *cell)
        missing |= not found
        known[key] = " ".join([key, *map(str, found)])
        sys.stdout.write(f"{known[key]}\n")
        sys.stdout.flush()
        write_file(path, _HEADER + "\n".join(known[k] for k in cells if k in known) + "\n")
    return int(missing)


if __name__ == "__main__":
    sys.exit(main())

"""Tiles per kernel and head dimension, found by compiling for each target: none of them spills."""

from __future__ import annotations

import os
from functools import cache
from typing import Any, NamedTuple, cast

import torch

__all__ = ["WIDTHS", "Blocks", "blocks_for", "padded", "target_of"]

WIDTHS = (16, 32, 64, 128, 256)
_KERNELS = ("forward", "rows", "means", "to_queries", "to_keys", "to_bias")

# Queries x keys / warps / stages of each of _KERNELS, by target, type and padded head dimension.
# The largest of a list of candidates that spills nothing, under a causal band and with everything
# asked for (``compiling.py``). float32 is multiplied as three TF32 products on NVIDIA's GPUs, in
# IEEE arithmetic where "i" is and on AMD's; never as one TF32 product, which keeps ten bits. "-":
# none was found, and the torch tiles answer.
_TABLE = """
cuda:80 float32 16  64x32/4/1  64x32/4/1  64x32/4/1  64x32/4/1  16x32/4/1  64x32/4/1
cuda:80 float32 32  64x32/4/1  64x32/4/1  64x16/4/1  64x16/4/1  16x16/4/1  64x16/4/1
cuda:80 float32 64  64x32/8/1  64x16/4/1  16x16/8/1  16x16/4/1  16x32/8/1  32x16/8/1i
cuda:80 float32 128  32x16/8/1  -  -  -  -  -
cuda:80 float16 16  64x64/4/2  64x64/4/2  64x64/4/2  64x64/4/2  64x64/4/2  64x64/4/2
cuda:80 float16 32  64x64/4/2  64x64/4/2  64x64/4/2  64x64/8/1  64x64/4/2  64x64/4/2
cuda:80 float16 64  64x64/8/1  64x64/4/2  64x32/8/1  64x32/4/2  32x32/4/1  64x32/4/2
cuda:80 float16 128  64x32/4/2  64x32/4/2  32x16/4/1  32x32/4/1  32x64/8/1  32x16/4/1
cuda:80 float16 256  64x32/8/1  32x16/4/1  -  -  -  -
cuda:90 float32 16  64x32/4/1  64x32/4/1  64x32/4/1  64x32/4/1  32x64/4/1  64x32/4/1
cuda:90 float32 32  64x32/4/1  64x32/4/1  64x32/4/1  64x32/4/1  16x64/4/1  64x32/4/1
cuda:90 float32 64  64x32/4/1  64x32/4/1  64x16/4/1  64x16/4/1  16x64/8/1  64x16/4/1
cuda:90 float32 128  64x16/8/1  64x16/4/1  -  -  -  -
cuda:90 float16 16  64x64/4/2  64x64/4/2  64x64/4/2  64x64/4/2  64x64/4/2  64x64/4/2
cuda:90 float16 32  64x64/4/2  64x64/4/2  64x64/4/2  64x64/4/2  64x64/4/2  64x64/4/2
cuda:90 float16 64  64x64/4/2  64x64/4/2  64x64/4/2  64x64/4/2  32x64/4/2  64x64/8/1
cuda:90 float16 128  64x32/4/2  64x32/4/2  64x32/4/2  64x32/4/2  32x64/8/1  32x16/4/1
cuda:90 float16 256  64x32/8/1  32x16/4/1  -  -  -  -
hip:gfx942 float32 16  64x32/4/1  64x32/4/1  64x32/4/1  64x32/4/1  16x32/4/1  64x16/4/1
hip:gfx942 float32 32  64x32/4/1  64x32/4/1  64x32/4/1  64x32/4/1  16x32/4/1  64x16/4/1
hip:gfx942 float32 64  64x32/4/1  64x32/4/1  64x32/4/1  64x32/4/1  16x64/4/1  64x16/4/1
hip:gfx942 float32 128  64x32/4/1  64x32/4/1  64x16/4/1  64x16/4/1  16x32/4/1  64x16/4/1
hip:gfx942 float32 256  64x16/4/1  64x16/4/1  64x16/4/1  16x16/4/1  -  -
hip:gfx942 float16 16  64x32/4/2  64x64/4/2  64x32/8/1  64x32/8/1  16x32/4/1  32x16/8/1
hip:gfx942 float16 32  64x32/4/2  64x64/4/2  64x32/8/1  64x32/8/1  16x32/4/1  32x16/4/1
hip:gfx942 float16 64  64x32/4/2  64x64/4/2  64x32/8/1  64x32/8/1  16x32/4/1  16x16/4/1
hip:gfx942 float16 128  64x32/4/2  64x32/4/2  64x32/4/2  64x32/4/2  16x32/4/1  16x16/4/1
"""


class Blocks(NamedTuple):
    """Queries and keys of a tile, warps of a program, stages of its pipeline, kind of product."""

    rows: int
    columns: int
    warps: int
    stages: int
    precision: str


def padded(features: int) -> int:
    """The width of a tile that holds so many features: a power of two, at least 16."""
    return max(16, 1 << (features - 1).bit_length())


@cache
def target_of(device: torch.device) -> str | None:
    """What is compiled for: a target of the table, the interpreter, or ``None``."""
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return "interpreter"
    if device.type != "cuda":
        return None
    if torch.version.hip:
        properties = cast(Any, torch.cuda).get_device_properties(device)
        return f"hip:{str(properties.gcnArchName).split(':')[0]}"
    major, minor = torch.cuda.get_device_capability(device)
    return f"cuda:{10 * major + minor}"


@cache
def _table() -> dict[tuple[str, str, int], dict[str, Blocks]]:
    out: dict[tuple[str, str, int], dict[str, Blocks]] = {}
    for line in _TABLE.split("\n")[1:-1]:
        target, kind, width, *cells = line.split()
        usual = "tf32x3" if target.startswith("cuda") and kind == "float32" else "ieee"
        out[target, kind, int(width)] = {
            kernel: _cell(cell, usual)
            for kernel, cell in zip(_KERNELS, cells, strict=True)
            if cell != "-"
        }
    return out


def _cell(text: str, usual: str) -> Blocks:
    tile, warps, stages = text.removesuffix("i").split("/")
    rows, columns = tile.split("x")
    precision = "ieee" if text.endswith("i") else usual
    return Blocks(int(rows), int(columns), int(warps), int(stages), precision)


def blocks_for(kernel: str, width: int, dtype: torch.dtype, target: str | None) -> Blocks | None:
    """The tile of a kernel for the wider of the two head dimensions; ``None``: it does not fit.

    >>> blocks_for("forward", 64, torch.float16, "cuda:90").precision
    'ieee'
    """
    if target == "interpreter":
        return Blocks(32, 32, 4, 1, "ieee")
    kind = "float32" if dtype == torch.float32 else "float16"
    return _table().get((target or "", kind, padded(width)), {}).get(kernel)

"""Tiles per kernel, head dimension and GPU: the table that ``searching.py`` found by compiling."""

from __future__ import annotations

import os
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple, cast

import torch

__all__ = ["KERNELS", "WIDTHS", "Blocks", "candidates", "padded", "read", "target_of"]

KERNELS = ("forward", "rows", "means", "to_queries", "to_keys", "to_bias")
WIDTHS = (32, 64, 128, 256)  # of the table's lines


class Blocks(NamedTuple):
    """How a kernel cuts its work.

    Queries and keys of a tile; how many features a product <q, k> takes at a time; warps of a
    program; stages of its pipeline; how float32 is multiplied ("tf32x3" or "ieee"); whether it
    fits with a bias, a mask and dropout as well.
    """

    rows: int
    columns: int
    chunk: int
    warps: int
    stages: int
    precision: str
    pairs: bool = True

    def __str__(self) -> str:
        sizes = f"{self.rows}x{self.columns}/{self.chunk}/{self.warps}/{self.stages}"
        return sizes + "i" * (self.precision == "ieee") + "+" * self.pairs


_INTERPRETED = Blocks(32, 32, 32, 4, 1, "ieee")  # wider heads than 32 go in chunks


def read(text: str) -> Blocks:
    """The blocks that `str` wrote.

    >>> str(read("64x32/256/4/1i+"))
    '64x32/256/4/1i+'
    """
    tile, chunk, warps, stages = text.rstrip("i+").split("/")
    rows, columns = (int(n) for n in tile.split("x"))
    precision = "ieee" if "i" in text else "tf32x3"
    pairs = text.endswith("+")
    return Blocks(rows, columns, int(chunk), int(warps), int(stages), precision, pairs)


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


def _nearest(target: str) -> str:
    """The GPU of the table whose tiles another one gets: of its maker, and not newer.

    The self-test decides whether they run there.
    """
    maker, _, model = target.partition(":")
    if maker == "hip":
        return "hip:gfx942"
    return "cuda:90" if int(model) >= 90 else "cuda:80"


@cache
def _table() -> dict[tuple[str, str, int, str], tuple[Blocks, ...]]:
    out: dict[tuple[str, str, int, str], tuple[Blocks, ...]] = {}
    for line in files("cumulant.kernels.triton").joinpath("blocks.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            target, kind, width, kernel, *found = line.split()
            out[target, kind, int(width), kernel] = tuple(map(read, found))
    return out


def candidates(
    kernel: str, width: int, dtype: torch.dtype, target: str | None, *, pairs: bool = False
) -> tuple[Blocks, ...]:
    """The table's tiles for the wider of the two head dimensions, largest first.

    With `pairs`, those that fit when there is a bias, a mask, dropout or a softcap. A GPU that is
    not in the table gets the tiles of the nearest one that is.

    >>> all(b.precision == "tf32x3" for b in candidates("forward", 64, torch.float32, "cuda:90"))
    True
    """
    if target is None or target == "interpreter":
        return () if target is None else (_INTERPRETED,)
    kind = "float32" if dtype == torch.float32 else "float16"
    found = _table().get((_nearest(target), kind, max(WIDTHS[0], padded(width)), kernel), ())
    return tuple(b for b in found if b.pairs or not pairs)

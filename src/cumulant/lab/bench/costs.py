"""What the Triton kernels should cost, on paper: arithmetic and bytes, before anyone times them.

A kernel visits every pair of a query and a key once. Per pair it multiplies some rows of d features
and some of e (two FLOPs each), takes one exponential, and each block of queries (or keys) reads the
rows it sweeps over again, from the L2 cache. Its time is that of the slowest of the four: tensor
cores, exponentials, L2, memory. Latency, launches and registers are left out, so the ratios are
what a well-scheduled kernel would reach, and a measurement far above them means a fault.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from cumulant.kernels.triton.blocks import candidates

__all__ = ["GPUS", "WORK", "Gpu", "Work", "ratio", "seconds"]


class Work(NamedTuple):
    """Products per pair of width d and e, and the rows of both widths that a block sweeps over."""

    d: int
    e: int
    swept_d: int
    swept_e: int


# By question and kernel; ``sums.py`` has the products. s = <q, k> is computed in every kernel
# (1 d), t = <a_q, k> + <q, a_k> takes 2 d, w = <g, v> and u = <g, a_v> take 1 e each.
WORK: dict[str, dict[str, Work]] = {
    "forward": {"forward": Work(1, 1, 1, 1)},
    "tangent": {"rows": Work(3, 0, 2, 0), "means": Work(3, 2, 2, 2)},
    "gradient": {
        "rows": Work(1, 1, 1, 1),
        "to_queries": Work(2, 1, 1, 1),
        "to_keys": Work(2, 2, 1, 1),
    },
    "curvature": {
        "rows": Work(3, 1, 2, 1),
        "means": Work(3, 2, 2, 2),
        "to_queries": Work(5, 2, 2, 2),
        "to_keys": Work(5, 3, 2, 1),
    },
}
_FLASH = Work(1, 1, 1, 1)
_FLASH_ROWS = 128  # queries of a tile of FlashAttention-2


@dataclass(frozen=True)
class Gpu:
    """Peak rates by the data sheets; L2 as others measured it, 16 exponentials per clock and SM."""

    target: str
    half: float  # FLOP/s
    tf32: float
    exponentials: float
    l2: float  # bytes/s
    memory: float


GPUS = {
    "A100": Gpu("cuda:80", 312e12, 156e12, 2.4e12, 5.0e12, 2.0e12),
    "H100": Gpu("cuda:90", 989e12, 495e12, 3.7e12, 5.5e12, 3.35e12),
}


def _time(gpu: Gpu, work: Work, n: int, d: int, e: int, dtype: torch.dtype, rows: int) -> float:
    """Seconds for one head with n queries and n keys."""
    if rows == 0:
        return math.inf  # the torch tiles answer
    single = dtype == torch.float32
    size = 4 if single else 2
    flops = 2 * n * n * (work.d * d + work.e * e)
    rate = gpu.tf32 / 3 if single else gpu.half  # float32 is three TF32 products
    swept = size * n * n / rows * (work.swept_d * d + work.swept_e * e)
    once = size * n * 2 * (work.swept_d * d + work.swept_e * e)
    return max(flops / rate, n * n / gpu.exponentials, swept / gpu.l2, once / gpu.memory)


def _rows(kernel: str, gpu: Gpu, width: int, dtype: torch.dtype) -> int:
    """Queries of a tile, or keys where a block of keys sweeps over queries; 0 if there is none."""
    found = candidates(kernel, width, dtype, gpu.target)
    if not found:
        return 0
    return found[0].columns if kernel == "to_keys" else found[0].rows


def seconds(question: str, *, length: int, d: int, e: int, dtype: torch.dtype, gpu: Gpu) -> float:
    """Expected time of one question for one head; the first tile of the table."""
    width = max(d, e)
    return sum(
        _time(gpu, work, length, d, e, dtype, _rows(kernel, gpu, width, dtype))
        for kernel, work in WORK[question].items()
    )


def ratio(*questions: str, d: int, dtype: torch.dtype, gpu: Gpu, length: int = 4096) -> float:
    """Expected time of these questions together, over that of a flash forward pass.

    The flash kernel gets the same model with 128 queries a tile. float32 is compared with a flash
    pass in float32 of three TF32 products as well, which does as much.
    """
    flash = _time(gpu, _FLASH, length, d, d, dtype, _FLASH_ROWS)
    ours = sum(seconds(q, length=length, d=d, e=d, dtype=dtype, gpu=gpu) for q in questions)
    return ours / flash

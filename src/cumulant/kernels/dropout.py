"""Dropout that does not depend on the tiling.

Whether pair (i, j) is kept is a hash of (seed, i, j), so forward, backward, double backward and
recomputation see the same mask whatever tiles they use, and nothing M x N is stored.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _mix(x: Tensor) -> Tensor:
    """A bijective scrambling of 32-bit integers (the finalizer constants of triple32)."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * (0x846CA68B - 2**32)
    return x ^ ((x >> 16) & 0xFFFF)


def _integers(numbers: range, device: torch.device) -> Tensor:
    return torch.arange(numbers.start, numbers.stop, device=device, dtype=torch.int32)


def kept(seed: Tensor, rows: range, columns: range, rate: float) -> Tensor:
    """True where a weight survives (probability 1 - rate); `seed` is int32 ``(*batch, 1, 1)``."""
    row = _mix(_integers(rows, seed.device)[:, None] ^ _mix(seed))
    column = _mix(_integers(columns, seed.device)[None, :] ^ 0x5BD1E995 ^ _mix(_mix(seed)))
    # int32 products wrap; the result is uniform on [-2^31, 2^31).
    return _mix(row ^ column * 0x2545F491).to(torch.int64) >= int((rate - 0.5) * 2**32)

"""The precision to compute in: half precision in and out, but never for sums."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["HALF", "wide", "widened", "widest"]

HALF = (torch.float16, torch.bfloat16)


def widened(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: float32 for half precision, otherwise `dtype` itself.

    >>> import torch
    >>> from cumulant.core.precision import widened
    >>> widened(torch.bfloat16), widened(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float32 if dtype in HALF else dtype


def wide(x: Tensor) -> Tensor:
    """`x` in the computing precision."""
    return x.to(widened(x.dtype))


def widest(device: torch.device) -> torch.dtype:
    """The most precise dtype of a device: float64, except on MPS, which has none."""
    return torch.float32 if device.type == "mps" else torch.float64

"""The precision to compute in: half precision in and out, but never for sums."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

__all__ = ["HALF", "autocast_of", "wide", "widened", "widest", "without_autocast"]

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


# NVIDIA's GPUs for data centers, by compute capability: others compute float64 at 1/32 or 1/64 of
# the speed of float32.
_FAST_DOUBLE = {(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)}


def widest(x: Tensor) -> torch.dtype:
    """The most precise dtype to compute `x` in: float64, unless its device is slow at it.

    >>> import torch
    >>> from cumulant.core.precision import widest
    >>> widest(torch.ones(1))
    torch.float64
    """
    device, slow = x.device, x.device.type == "mps"
    if device.type == "cuda" and torch.cuda.is_available() and torch.version.hip is None:
        slow = torch.cuda.get_device_capability(device) not in _FAST_DOUBLE
    return torch.promote_types(x.dtype, torch.float32 if slow else torch.float64)


def autocast_of(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast asks for on the device of `x`; None where it is off.

    Tensors without values (meta) have no autocast: torch raises when asked for it.
    """
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context in which operations on the device of `x` compute in the dtypes they are given.

    Where autocast is off there is nothing to enter, which alone would take 15 us.
    """
    on = autocast_of(x) is not None
    return torch.autocast(x.device.type, enabled=False) if on else nullcontext()

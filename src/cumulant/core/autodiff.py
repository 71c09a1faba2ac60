"""Whether the current computation may be differentiated."""

from __future__ import annotations

import torch
from torch import Tensor

from cumulant.core.typed import forward_ad, functorch

__all__ = ["on_tape", "transformed"]


def on_tape(*tensors: Tensor) -> bool:
    """Whether any of these tensors may be differentiated: by tape, dual numbers or a transform."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return True
    wrapped = functorch.is_functorch_wrapped_tensor
    if any(wrapped(x) for x in tensors):
        return True
    inside = forward_ad._current_level >= 0
    return inside and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def transformed() -> bool:
    """Whether forward mode or a functorch transform may be acting on the inputs."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0

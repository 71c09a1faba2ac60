"""`Function`: an autograd Function that costs little to call, for those that are called often."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch._functorch.utils import unwrap_dead_wrappers

from cumulant.core.typed import Function as _Function
from cumulant.core.typed import forward_ad

__all__ = ["Function"]


class Function(_Function):
    """`torch.autograd.Function` for positional arguments only; ``apply`` does the same sooner.

    torch binds the arguments to the signature of ``forward`` with `inspect` at every call, which
    takes 40 us. And where nothing is recorded, as in a backward pass that is not differentiated
    again, ``forward`` alone gives the result.
    """

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        if kwargs or torch._C._are_functorch_transforms_active():
            return super().apply(*args, **kwargs)
        args = unwrap_dead_wrappers(args)
        if not torch.is_grad_enabled() and forward_ad._current_level < 0:
            return cls.forward(*args)
        return cast(Any, super(torch.autograd.Function, cls)).apply(*args)

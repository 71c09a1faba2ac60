"""torch's norms with every derivative right: layer_norm, batch_norm, instance_norm, rms_norm.

torch's forward-mode rules for them treat the saved mean and deviation as constants, so
differentiating a tangent again gives a wrong number; so does a third reverse derivative. Here a
norm is torch's fused operator as long as only values and first gradients are computed, and
elsewhere the formula itself,

    y = (x - mean) / sqrt(variance + eps) * weight + bias,

whose derivatives torch takes from elementary operators. torch's group_norm is right in every mode
to third order and needs no replacement (``cumulant doctor --derivatives torch``). So is rms_norm on
a CPU, where torch computes it by its formula; GPUs have a fused operator with a rule for forward
mode of its own, which the formula here passes by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cumulant.core.autodiff import transformed
from cumulant.core.precision import wide
from cumulant.core.typed import Function

__all__ = ["batch_norm", "instance_norm", "layer_norm", "rms_norm"]

Norm = Callable[..., Tensor]

# torch's own, which `differentiable` replaces under these names.
_layer_norm, _batch_norm, _instance_norm = torch.layer_norm, torch.batch_norm, torch.instance_norm
_rms_norm = torch.rms_norm


class _Fused(Function):
    """A fused operator whose derivatives beyond the first are those of a formula.

    The operator runs again in backward, which costs less than the first gradient and keeps
    only the inputs. With ``create_graph`` the formula runs in its place.
    """

    @staticmethod
    def forward(ctx: Any, fused: Norm, formula: Norm, *tensors: Tensor | None) -> Tensor:
        ctx.fused, ctx.formula = fused, formula
        ctx.save_for_backward(*tensors)
        return fused(*tensors)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            # Views, so that a weight that is itself a function of x is not differentiated in x.
            inputs: list[Any] = [None if t is None else t.view_as(t) for t in ctx.saved_tensors]
            if not again:
                inputs = [None if t is None else t.detach().requires_grad_() for t in inputs]
            y = (ctx.formula if again else ctx.fused)(*inputs)
        needed = [i for i, n in enumerate(ctx.needs_input_grad[2:]) if n]
        wanted = [inputs[i] for i in needed]
        found = torch.autograd.grad(y, wanted, gradient, create_graph=again)
        out: list[Tensor | None] = [None] * len(inputs)
        for i, g in zip(needed, found, strict=True):
            out[i] = g
        return None, None, *out


def _norm(fused: Norm, formula: Norm, *tensors: Tensor | None) -> Tensor:
    if transformed():
        return formula(*tensors)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return _Fused.apply(fused, formula, *tensors)  # pyright: ignore[reportReturnType]
    return fused(*tensors)


def _standardized(x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    centered = x - x.mean(dims, keepdim=True)
    return centered * (centered.square().mean(dims, keepdim=True) + eps).rsqrt()


def _affine(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """``torch.nn.functional.layer_norm`` with every derivative right.

    >>> import torch, cumulant as cm
    >>> f = lambda x: cm.derivatives.layer_norm(x, (3,))
    >>> cm.check_derivatives(f, torch.tensor([0.3, -1.2, 0.7])).ok
    True
    """
    shape = tuple(normalized_shape)

    def fused(x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
        return _layer_norm(x, shape, w, b, eps, torch.backends.cudnn.enabled)

    def formula(x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
        y = _standardized(wide(x), tuple(range(-len(shape), 0)), eps)
        return _affine(y, w, b).to(_result_dtype(x))

    fits = bool(shape) and tuple(input.shape[-len(shape) :]) == shape
    if not fits or any(p is not None and tuple(p.shape) != shape for p in (weight, bias)):
        return fused(input, weight, bias)  # which says what does not fit
    return _norm(fused, formula, input, weight, bias)


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """``torch.nn.functional.rms_norm`` with every derivative right: x w / sqrt(mean(x^2) + eps)."""
    shape = tuple(normalized_shape)
    fits = bool(shape) and tuple(input.shape[-len(shape) :]) == shape
    if not transformed() or not fits or (weight is not None and tuple(weight.shape) != shape):
        return _rms_norm(input, shape, weight, eps)
    x = wide(input)
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    square = x.square().mean(tuple(range(-len(shape), 0)), keepdim=True)
    return _affine(x * (square + eps).rsqrt(), weight, None).to(input.dtype)


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``torch.nn.functional.batch_norm`` with every derivative right.

    Running statistics are updated as torch updates them. Without `training` this is torch's own
    operator, whose derivatives are right.
    """
    if not training:
        cudnn = torch.backends.cudnn.enabled
        running = (running_mean, running_var)
        return _batch_norm(input, weight, bias, *running, False, momentum, eps, cudnn)
    torchs = partial(_from_input, _batch_norm, momentum=momentum, eps=eps)
    return _over_batch(torchs, input, weight, bias, running_mean, running_var, eps, first=0)


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``torch.nn.functional.instance_norm`` with every derivative right.

    Running statistics are updated as torch updates them. Without `use_input_stats` this is torch's
    own operator, whose derivatives are right.
    """
    if not use_input_stats:
        cudnn = torch.backends.cudnn.enabled
        running = (running_mean, running_var)
        return _instance_norm(input, weight, bias, *running, False, momentum, eps, cudnn)
    torchs = partial(_from_input, _instance_norm, momentum=momentum, eps=eps)
    return _over_batch(torchs, input, weight, bias, running_mean, running_var, eps, first=1)


def _from_input(torchs: Norm, *tensors: Tensor | None, momentum: float, eps: float) -> Tensor:
    return torchs(*tensors, True, momentum, eps, torch.backends.cudnn.enabled)


def _over_batch(
    torchs: Norm,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    eps: float,
    *,
    first: int,
) -> Tensor:
    """Statistics over the dimensions from `first` on, but for the channels, dimension 1."""

    def fused(x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
        return torchs(x, w, b, None, None)

    def formula(x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
        y = _standardized(wide(x), tuple(d for d in range(first, x.ndim) if d != 1), eps)
        return _affine(y, _per_channel(w, x), _per_channel(b, x)).to(x.dtype)

    if running_mean is not None or running_var is not None or transformed():
        with torch.no_grad():  # torch's own update of the statistics, and its checks
            torchs(input.detach(), weight, bias, running_mean, running_var)
    return _norm(fused, formula, input, weight, bias)


def _per_channel(parameter: Tensor | None, x: Tensor) -> Tensor | None:
    """(C,) as (C, 1, ..., 1), to go with (N, C, ...)."""
    return None if parameter is None else parameter.reshape(-1, *(1,) * (x.ndim - 2))


def _result_dtype(x: Tensor) -> torch.dtype:
    """The dtype of torch's layer_norm, which CUDA's autocast computes in float32."""
    if x.is_cuda and torch.is_autocast_enabled("cuda"):
        return torch.float32
    return x.dtype

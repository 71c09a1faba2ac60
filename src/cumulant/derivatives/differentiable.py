"""A context in which attention and torch's norms have right derivatives of any order and mode."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cumulant.attention.sdpa import replacements
from cumulant.core.interception import Begun, Handler, Scope
from cumulant.derivatives import algebra
from cumulant.derivatives.composites import batch_norm, instance_norm, layer_norm, rms_norm

__all__ = ["differentiable"]


def differentiable() -> Scope[None]:
    """A context in which models have correct derivatives of any order and mode, in this thread.

    Attention is ours, as in `sdpa_replaced`. torch's layer_norm, batch_norm and instance_norm,
    whose forward-mode rules torch cannot differentiate again, are those of
    `cumulant.derivatives`: torch's fused operators for values and first gradients, and formulas
    beyond. The linear algebra that torch gets wrong in the same way (solve, det, slogdet,
    cholesky_inverse, householder_product) and the chunked linear_cross_entropy are those of
    `cumulant.derivatives` too. It covers what calls them through ``torch`` or
    ``torch.nn.functional``, so ``nn``'s layers and Hugging Face models with
    ``attn_implementation="sdpa"``; other norms of these models are right in torch
    already. `check_derivatives` tells whether anything else is wrong.

    The derivatives must be taken inside; ``backward`` of what was computed inside may run outside,
    unless parts are checkpointed. Not reached: code that imported a function by name before,
    methods of tensors (``a.det()``), and modules after ``torch.compile``.

    >>> import torch, cumulant as cm
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    >>> with cm.differentiable():
    ...     cm.check_derivatives(layer, torch.randn(1, 5, 8)).ok
    True
    """
    return Scope(lambda: Begun(None, [*replacements(), *_norms(), *_others()]))


def _norms() -> list[Handler]:
    return [
        Handler(torch, "layer_norm", _layer_norm),
        Handler(torch, "batch_norm", _batch_norm),
        Handler(torch, "instance_norm", _instance_norm),
    ]


def _others() -> list[Handler]:
    places = [
        (torch, "rms_norm", rms_norm),
        (torch.linalg, "solve", algebra.solve),
        (torch.linalg, "det", algebra.det),
        (torch, "det", algebra.det),
        (torch.linalg, "slogdet", algebra.slogdet),
        (torch, "slogdet", algebra.slogdet),
        (torch, "logdet", algebra.logdet),
        (torch, "cholesky_inverse", algebra.cholesky_inverse),
        (torch.linalg, "householder_product", algebra.householder_product),
        (F, "linear_cross_entropy", algebra.linear_cross_entropy),
    ]
    return [
        Handler(owner, name, partial(_instead, ours))
        for owner, name, ours in places
        if hasattr(owner, name)  # linear_cross_entropy is from torch 2.13 on
    ]


def _instead(ours: Callable[..., Any], _: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return ours(*args, **kwargs)


# ``torch.layer_norm`` and its kin are what ``torch.nn.functional`` calls; they take their arguments
# in another order, and whether cuDNN may be used.


def _layer_norm(
    _: Callable[..., Tensor], input: Tensor, normalized_shape: Any, *args: Any, **options: Any
) -> Tensor:
    options.pop("cudnn_enable", None)
    return layer_norm(input, normalized_shape, *args[:3], **options)


def _batch_norm(
    _: Callable[..., Tensor],
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    return batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


def _instance_norm(
    _: Callable[..., Tensor],
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    running = (running_mean, running_var)
    return instance_norm(input, *running, weight, bias, use_input_stats, momentum, eps)

"""Attention run backwards (docs/theory.md, T30)."""

from __future__ import annotations

import torch
from torch import Tensor

from cumulant.core.errors import ConvergenceError, InputError
from cumulant.dynamics.field import prepare
from cumulant.dynamics.fixed_point import fixed_point
from cumulant.measures.mixture import GaussianMixture

__all__ = ["inverse"]


def inverse(
    y: Tensor,
    *,
    beta: float = 1.0,
    step_size: float = 1.0,
    patterns: Tensor | None = None,
) -> Tensor:
    """The x with ``step(x, beta=, step_size=, patterns=) == y``, without weights or contraction.

    For fixed patterns there is exactly one: x + tau grad G(x) is the gradient of a strictly convex
    function, and x = argmin_z ||z - y||^2 / 2 + tau G(beta z) / beta, a proximal map, hence
    1-Lipschitz. That function is, but for a factor beta / tau, the log-normalizer of a mixture of
    Gaussians around the patterns (T4), so its inverse is the mixture's link, found by damped Newton
    steps (T8).

    For self-attention all points are solved for together, by `fixed_point`. There is no guarantee:
    it may have no solution, or several.

    Args:
        y: ``(*batch, N, d)``.
        beta, step_size, patterns: as they were in `step`; step_size at least 0.

    Returns:
        x, differentiable.

    Raises:
        ConvergenceError: none was found; with patterns that means rounding.
        InputError: see `step`.

    >>> import torch, cumulant as cm
    >>> patterns, x = torch.randn(10, 3, dtype=torch.float64), torch.randn(4, 3).double()
    >>> y = cm.dynamics.step(x, patterns=patterns, beta=2.0)
    >>> torch.allclose(cm.dynamics.inverse(y, patterns=patterns, beta=2.0), x)
    True
    """
    call = prepare("inverse", y, beta=beta, step_size=step_size, patterns=patterns)
    tau, b, fixed = call.step_size, call.field.beta, call.field.patterns
    if not isinstance(tau, float) or not isinstance(b, float) or tau < 0:
        raise InputError(
            "inverse: beta and step_size must be plain numbers, step_size not negative: a step "
            "down the gradient need not be invertible."
        )
    if tau == 0.0 or call.x.numel() == 0:
        return call.x.to(call.dtype)
    eps = torch.finfo(call.x.dtype).eps
    if fixed is None:
        # A point that sees mostly itself moves by tau x: hence the start, and the damping.
        found = fixed_point(
            lambda x: call.x - tau * call.field(x),
            call.x / (1 + tau),
            damping=1 / (1 + tau),
            tol=max(100 * eps * float(call.x.abs().max()), torch.finfo(call.x.dtype).tiny),
            throw=False,
        )
        if not bool(found.status.converged):
            raise ConvergenceError(
                f"inverse: {found.status} (residual {float(found.residual):.3g}). Self-attention "
                "need not have an inverse; a smaller step_size or beta has one near y.",
                found,
            )
        return found.value.to(call.dtype)
    if tau * b * float(fixed.detach().square().sum(-1).amax()) <= eps:
        # attention is constant to working precision
        return (call.x - tau * call.field(call.x)).to(call.dtype)
    one = torch.eye(call.x.shape[-1], dtype=call.x.dtype, device=call.x.device)
    lifted = GaussianMixture(b * fixed, b / tau * one, covariance_type="shared")
    found = lifted.link(b / tau * call.x, throw=False)
    if not bool(found.status.converged.all()):
        raise ConvergenceError(f"inverse: {found.status}.", found)
    return found.value.to(call.dtype)

"""Attention run backwards (docs/theory.md, T30)."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from cumulant.core.errors import InputError
from cumulant.core.outcome import Outcome, Solution
from cumulant.dynamics.field import Call, prepare
from cumulant.dynamics.fixed_point import fixed_point
from cumulant.measures.mixture import GaussianMixture

__all__ = ["inverse"]


@overload
def inverse(
    y: Tensor,
    *,
    beta: float = 1.0,
    step_size: float = 1.0,
    patterns: Tensor | None = None,
    throw: Literal[True] = True,
) -> Tensor: ...


@overload
def inverse(
    y: Tensor,
    *,
    beta: float = 1.0,
    step_size: float = 1.0,
    patterns: Tensor | None = None,
    throw: Literal[False],
) -> Solution: ...


def inverse(
    y: Tensor,
    *,
    beta: float = 1.0,
    step_size: float = 1.0,
    patterns: Tensor | None = None,
    throw: bool = True,
) -> Tensor | Solution:
    """The x with ``step(x, beta=, step_size=, patterns=) == y``, without weights or contraction.

    For fixed patterns there is exactly one: x + tau grad G(x) is the gradient of a strictly convex
    function, and x = argmin_z ||z - y||^2 / 2 + tau G(beta z) / beta, a proximal map, hence
    1-Lipschitz. That function is, up to a factor beta / tau, the log-normalizer of a mixture of
    Gaussians around the patterns (T4), so its inverse is the mixture's link, found by damped Newton
    steps (T8).

    For self-attention, `fixed_point` solves for all points together. There may be no solution, or
    several.

    Args:
        y: ``(*batch, N, d)``.
        beta, step_size, patterns: as they were in `step`; step_size at least 0.
        throw: False returns a `Solution`, x and an `Outcome`, instead of raising. The outcome has
            one code for each point, ``(*batch, N)``; in self-attention all points share one.

    Returns:
        x, differentiable.

    Raises:
        ConvergenceError: no x was found; with patterns that means rounding.
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
        found, note = _exact(call.x), ""
    elif fixed is None:
        found, note = _self_attention(call, tau)
    else:
        found, note = _given_patterns(call, tau, b, fixed), ""
    found = Solution(found.value.to(call.dtype), found.status)
    return found.status.check("inverse", found, note).value if throw else found


def _exact(x: Tensor) -> Solution:
    """x, and the outcome of no iteration at all."""
    return Solution(x, Outcome.of(torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device)))


def _self_attention(call: Call, tau: float) -> tuple[Solution, str]:
    """x = y - tau attention(x) for all points together, and figures for an error message."""
    precision = torch.finfo(call.x.dtype)
    # A point that sees mostly itself moves by tau x: hence the start, and the damping.
    found = fixed_point(
        lambda x: call.x - tau * call.field(x),
        call.x / (1 + tau),
        damping=1 / (1 + tau),
        tol=max(100 * precision.eps * float(call.x.abs().max()), precision.tiny),
        throw=False,
    )
    note = (
        f"residual {float(found.residual):.3g}; self-attention need not have an inverse, but a "
        "smaller step_size or beta has one near y"
    )
    status = Outcome(found.status.code.expand(call.x.shape[:-1]))
    return Solution(found.value, status), note


def _given_patterns(call: Call, tau: float, beta: float, patterns: Tensor) -> Solution:
    """The link of a mixture of Gaussians around the patterns."""
    eps = torch.finfo(call.x.dtype).eps
    if tau * beta * float(patterns.detach().square().sum(-1).amax()) <= eps:
        # Attention is constant to working precision.
        return _exact(call.x - tau * call.field(call.x))
    one = torch.eye(call.x.shape[-1], dtype=call.x.dtype, device=call.x.device)
    lifted = GaussianMixture(beta * patterns, beta / tau * one, covariance_type="shared")
    return lifted.link(beta / tau * call.x, throw=False)

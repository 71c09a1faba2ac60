"""The log-normalizer of the sphere, stable from zero to huge concentrations.

On the unit sphere of R^d, with nu = d/2 - 1 and s = ||eta||^2, the uniform law has

    G = F_nu(s) = log 0F1(; nu + 1; s / 4),    mean = r_nu(s) eta,    r_nu = 2 dF_nu/ds,

r_nu = I_{nu+1}(k) / (k I_nu(k)) at k = ||eta||. Both are analytic in s, so derivatives of every
order exist at eta = 0. They are computed at a large order N by Debye's uniform expansion (DLMF
10.41.3) and carried down by two recurrences with positive terms, free of cancellation:

    1 / r_n = 2 (n + 1) + s r_{n+1},    F_n = F_{n+1} + log(1 + s r_{n+1} / (2 (n + 1))).
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache

import torch
from torch import Tensor

__all__ = ["sphere"]

_TERMS = 9
_LARGE = 40.0


@cache
def _debye() -> tuple[tuple[float, ...], ...]:
    """Coefficients of u_1, u_2, ... in powers of t.

    u_{k+1} = t^2 (1 - t^2) u_k' / 2 + (1/8) times the integral of (1 - 5 t^2) u_k from 0 to t.
    """
    u = [Fraction(1)]
    out: list[tuple[float, ...]] = []
    for _ in range(_TERMS):
        new = [Fraction(0)] * (len(u) + 3)
        for power, c in enumerate(u):
            new[power + 1] += c * power / 2 + c / (8 * (power + 1))
            new[power + 3] -= c * power / 2 + 5 * c / (8 * (power + 3))
        u = new
        out.append(tuple(float(c) for c in u))
    return tuple(out)


def _series(order: float) -> list[float]:
    """U(t) = 1 + u_1(t) / order + ..., as one polynomial."""
    total = [0.0] * (3 * _TERMS + 1)
    total[0] = 1.0
    for k, u in enumerate(_debye(), start=1):
        for power, c in enumerate(u):
            total[power] += c / order**k
    return total


def _horner(coefficients: list[float], t: Tensor) -> Tensor:
    out = torch.full_like(t, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        out = out * t + c
    return out


def _at_large_order(order: float, s: Tensor) -> tuple[Tensor, Tensor]:
    """(F, r) at a large order; F(0) = 0 holds by construction, so no constants appear."""
    root = (order**2 + s).sqrt()
    t = order / root
    series = _series(order)
    U = _horner(series, t)
    slope = _horner([k * c for k, c in enumerate(series)][1:], t)
    # U(t) - U(1) = (t - 1) Q(t), with t - 1 = -s / (root (root + order)): exact for small s.
    quotient = [0.0] * (len(series) - 1)
    carry = 0.0
    for k in range(len(series) - 1, 0, -1):
        carry += series[k]
        quotient[k - 1] = carry
    away = s / (root + order)  # root - order
    change = -away / root * _horner(quotient, t)
    F = (
        away
        - order * torch.log1p(away / (2 * order))
        - torch.log1p(s / order**2) / 4
        + torch.log1p(change / sum(series))
    )
    r = 1 / (order + root) - 1 / (2 * root**2) - order / root**3 * slope / U
    return F, r


def sphere(d: int, s: Tensor) -> tuple[Tensor, Tensor]:
    """(F, r) of the unit sphere in R^d at s = ||eta||^2, in the precision of s."""
    nu = d / 2 - 1
    steps = max(0, math.ceil(_LARGE - nu))
    log_transform, r = _at_large_order(nu + steps, s)
    for k in range(steps - 1, -1, -1):
        rest = s * r
        width = 2 * (nu + k + 1)
        log_transform = log_transform + torch.log1p(rest / width)
        r = 1 / (width + rest)
    return log_transform, r

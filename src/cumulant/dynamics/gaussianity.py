"""Is a cloud Gaussian? Four statistics, each with its null distribution at that size.

See docs/theory.md, T17.

Every statistic is taken of the standardized cloud, so under any Gaussian, whatever its mean and
covariance, it has one and the same law, which depends on N and d only. That law is sampled, so
p-values are exact (up to the number of draws) at every N, with the parameters estimated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cumulant.core.checks import whole
from cumulant.core.describing import described_fields
from cumulant.core.errors import InputError
from cumulant.core.randomness import checked_generator
from cumulant.core.renamed import renamed
from cumulant.core.typed import linalg
from cumulant.dynamics.cloud_checks import levels_of, some_points
from cumulant.dynamics.shape import size_of

__all__ = ["STATISTICS", "Gaussianity", "gaussianity"]


class Gaussianity(NamedTuple):
    """A test of the hypothesis that the points are independent draws of one Gaussian.

    Attributes:
        statistic: ``(*batch,)``; large values are evidence against it.
        p_value: ``(*batch,)``: the probability of a statistic as large under the hypothesis.
        levels: of the null quantiles.
        null_quantiles: of the statistic for Gaussian clouds of the same N and d.
    """

    statistic: Tensor
    p_value: Tensor
    levels: Tensor
    null_quantiles: Tensor

    __repr__ = described_fields


def _standardized(x: Tensor) -> Tensor:
    """Mean zero, covariance the identity, by Cholesky: rotations do not matter to what follows."""
    away = x / size_of(x)
    away = away - away.mean(-2, keepdim=True)
    away = away / size_of(away)
    covariance = away.mT @ away / x.shape[-2]
    factor, info = linalg.cholesky_ex(covariance)
    pivots = factor.diagonal(dim1=-2, dim2=-1)
    flat = (info != 0) | ~(pivots.square() > 1e-12 * covariance.diagonal(dim1=-2, dim2=-1)).all(-1)
    if bool(flat.any()):
        raise InputError(
            f"gaussianity: {int(flat.sum())} of {flat.numel()} clouds lie in a subspace (their "
            "covariance is singular), so they have no density to test. Test a projection, or "
            "see participation_ratio."
        )
    return linalg.solve_triangular(factor, away.mT, upper=False).mT


def _over_pairs(x: Tensor, kernel: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    """The mean over all pairs of kernel(<x,y>, |x|^2, |y|^2), some rows at a time."""
    n = x.shape[-2]
    squares = x.square().sum(-1)
    total = x.new_zeros(x.shape[:-2])
    # A few intermediates of 2 MB each: in cache, and below where malloc's heap fragments.
    rows = max(1, 2**18 // (n * max(1, math.prod(x.shape[:-2]))))
    for start in range(0, n, rows):
        cut = slice(start, start + rows)
        gram = x[..., cut, :] @ x.mT
        total = total + kernel(gram, squares[..., cut, None], squares[..., None, :]).sum((-2, -1))
    return total / n**2


def skewness(z: Tensor) -> Tensor:
    """Mardia's b1: the mean of <x, y>^3, the squared length of the third cumulant."""
    return _over_pairs(z, lambda g, a, b: g**3)


def kurtosis(z: Tensor) -> Tensor:
    """Mardia's b2 as a distance: |mean of |x|^4 - d(d + 2)(N - 1)/(N + 1)|."""
    n, d = z.shape[-2:]
    return (z.square().sum(-1).square().mean(-1) - d * (d + 2) * (n - 1) / (n + 1)).abs()


def energy(z: Tensor) -> Tensor:
    """N times the energy distance to N(0, I) (Székely and Rizzo, 2005):
    2 E|x - Z| - E|Z - Z'| - mean |x - y|."""
    n, d = z.shape[-2:]
    unit = math.sqrt(2) * math.exp(math.lgamma((d + 1) / 2) - math.lgamma(d / 2))
    to_normal = distance_to_normal(z.square().sum(-1), d).mean(-1)
    among = _over_pairs(z, lambda g, a, b: (a + b - 2 * g).clamp_min(0.0).sqrt())
    return n * (2 * to_normal - math.sqrt(2) * unit - among)


def distance_to_normal(squares: Tensor, d: int) -> Tensor:
    """E|a - Z| for Z ~ N(0, I) of dimension d, given |a|^2.

    sqrt(y) is the integral of (1 - e^(-ty)) t^(-3/2) dt / (2 sqrt(pi)), and
    E exp(-t |a - Z|^2) = (1 + 2t)^(-d/2) exp(-t |a|^2 / (1 + 2t)). With t = e^u the trapezoidal
    rule converges geometrically: the integrand is bounded in the strip |Im u| < pi / 2.
    """
    h = 0.25
    top = math.log(d + float(squares.max()) + 1)
    u = torch.arange(-76 - 2 * top, 76, h, dtype=squares.dtype, device=squares.device)
    total = torch.zeros_like(squares)
    for t in torch.split(u.exp(), max(1, 2**16 // max(1, squares.numel()))):
        log_phi = -0.5 * d * torch.log1p(2 * t) - squares[..., None] * (t / (1 + 2 * t))
        total = total - torch.expm1(log_phi) @ (h / t.sqrt())
    return total / (2 * math.sqrt(math.pi))


def stein(z: Tensor) -> Tensor:
    """N times the squared kernel Stein discrepancy to N(0, I).

    Kernel (c^2 + |x - y|^2)^(-1/2) with c^2 = d, score -x (Gorham and Mackey, 2017): with
    u = c^2 + |x - y|^2 the Stein kernel is
    <x, y> u^(-1/2) - |x - y|^2 u^(-3/2) + d u^(-3/2) - 3 |x - y|^2 u^(-5/2).
    """
    n, d = z.shape[-2:]

    def kernel(g: Tensor, a: Tensor, b: Tensor) -> Tensor:
        gap = (a + b - 2 * g).clamp_min(0.0)
        w = (d + gap).rsqrt()
        cube = w**3
        return g * w + (d - gap) * cube - 3 * gap * cube * w.square()

    return n * _over_pairs(z, kernel)


STATISTICS: dict[str, Callable[[Tensor], Tensor]] = {
    "energy": energy,
    "stein": stein,
    "skewness": skewness,
    "kurtosis": kurtosis,
}


def _null(statistic: str, n: int, d: int, draws: int, generator: torch.Generator) -> Tensor:
    """The statistic of that many standard normal clouds, in ascending order."""
    at_once = max(1, 2**21 // (n * max(n, d)))
    drawn: list[Tensor] = []
    for start in range(0, draws, at_once):
        size = (min(at_once, draws - start), n, d)
        x = torch.randn(size, dtype=torch.float64, generator=generator)
        drawn.append(STATISTICS[statistic](_standardized(x)))
    return torch.cat(drawn).sort().values


@lru_cache(maxsize=64)
def _usual_null(statistic: str, n: int, d: int, draws: int) -> Tensor:
    """One fixed table for all calls."""
    return _null(statistic, n, d, draws, torch.Generator().manual_seed(0))


@renamed(seed="generator")
def gaussianity(
    x: Tensor,
    *,
    statistic: str = "energy",
    draws: int = 499,
    generator: torch.Generator | None = None,
    levels: tuple[float, ...] = (0.05, 0.5, 0.95),
) -> Gaussianity:
    """Test whether the points of each cloud were drawn from one Gaussian.

    Args:
        x: ``(*batch, N, d)`` with N > d. Memory is linear in N, time quadratic.
        statistic: "energy" and "stein" see any departure; "skewness" and "kurtosis" (Mardia, 1970)
            the third and fourth moments.
        draws: of the null distribution; the smallest p-value is 1 / (draws + 1). They cost `draws`
            times the statistic, in the fixed table once for each (N, d).
        generator: of the draws. By default they come from one fixed table, so the same cloud always
            has the same p-value.
        levels: which null quantiles to return.

    Returns:
        `Gaussianity`. With many clouds, expect a twentieth of the p-values below 0.05 even if all
        are Gaussian.

    Raises:
        InputError: an unknown statistic, too few points, a cloud in a subspace.

    >>> import torch, cumulant as cm
    >>> x = torch.randn(200, 2, generator=torch.Generator().manual_seed(1))
    >>> p = cm.dynamics.gaussianity(x).p_value
    >>> uniform = cm.dynamics.gaussianity(torch.rand(200, 2)).p_value
    >>> bool(p > 0.05), bool(uniform < 0.05)
    (True, True)
    """
    if statistic not in STATISTICS:
        raise InputError(
            f"gaussianity: statistic must be one of {', '.join(STATISTICS)}, not {statistic!r}."
        )
    points = some_points("gaussianity", x).detach()
    n, d = points.shape[-2:]
    if n <= d + 2:
        raise InputError(f"gaussianity: N must exceed d + 2 = {d + 2}, but is {n}.")
    whole("gaussianity", "draws", draws, 1)
    wide: Any = points.dtype if points.device.type == "mps" else torch.float64
    flat = points.to(wide).reshape(-1, n, d)
    at_once = max(1, 2**21 // (n * max(n, d)))
    parts = [STATISTICS[statistic](_standardized(some)) for some in torch.split(flat, at_once)]
    value = torch.cat(parts).reshape(points.shape[:-2])
    random = checked_generator("gaussianity", generator)
    law = statistic, n, d, draws
    null = (_usual_null(*law) if random is None else _null(*law, random)).to(value)
    above = draws - torch.searchsorted(null, value.contiguous())
    at = levels_of("gaussianity", levels, null)
    return Gaussianity(value, (above + 1).to(wide) / (draws + 1), at, null.quantile(at))

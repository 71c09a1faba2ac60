"""The von Mises-Fisher family on the unit sphere (docs/theory.md, T6, T32)."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch import distributions as td

from cumulant.core.checks import common_shape, finite, numbers, require
from cumulant.core.errors import InputError
from cumulant.core.typed import linalg
from cumulant.measures.bessel import sphere
from cumulant.measures.family import ExponentialFamily, coded

__all__ = ["VonMisesFisher"]


class VonMisesFisher(ExponentialFamily):
    """Directions on the unit sphere of R^d, theta = kappa * direction: exp<theta, x> (T6).

    G(eta) = F(||theta + eta||) - F(||theta||), F the log of the sphere's Laplace transform; the
    mean is A_d(||theta + eta||) along theta + eta, A_d a ratio of Bessel functions. Computed in
    double precision, stable for every concentration >= 0. d = 1 is the two points -1 and 1.

    Args:
        mean_direction: ``(*batch, d)``, nonzero; normalized automatically.
        concentration: kappa >= 0, ``(*batch,)``; 0 is the uniform distribution.

    >>> import torch, cumulant as cm
    >>> h = cm.VonMisesFisher(torch.tensor([0.0, 0.0, 1.0]), 0.0)
    >>> h.mean(torch.tensor([[0.0, 0.0, 1.0]]))  # coth(1) - 1
    tensor([[0.0000, 0.0000, 0.3130]])
    """

    def __init__(self, mean_direction: Tensor, concentration: Tensor | float) -> None:
        owner = "VonMisesFisher"
        got, self._weak = numbers(owner, mean_direction=mean_direction, concentration=concentration)
        direction, kappa = (
            finite(owner, "mean_direction", got["mean_direction"]),
            got["concentration"],
        )
        if direction.ndim < 1 or direction.shape[-1] < 1:
            raise InputError(f"{owner}: mean_direction must have shape (..., d).")
        require(
            (kappa >= 0) & kappa.isfinite(),
            lambda: (
                f"{owner}: concentration must be >= 0 and finite; the smallest is "
                f"{float(kappa.min()):.6g}. For the opposite direction, negate mean_direction."
            ),
        )
        largest = direction.detach().abs().amax(-1, keepdim=True)
        direction = direction / torch.where(largest > 0, largest, 1.0)
        length = linalg.vector_norm(direction, dim=-1, keepdim=True)
        require(length > 0, lambda: f"{owner}: mean_direction must not be zero.")
        if common_shape(direction.shape[:-1], kappa.shape) is None:
            raise InputError(
                f"{owner}: mean_direction {tuple(direction.shape)} and concentration "
                f"{tuple(kappa.shape)} do not broadcast."
            )
        self._theta = (direction / length * kappa[..., None])[..., None, :]

    def _check_size(self) -> None:
        """Any dimension is valid."""

    @property
    def concentration(self) -> Tensor:
        """kappa, the norm of theta."""
        return self._shown(linalg.vector_norm(self._theta, dim=-1), 0)

    @property
    def mean_direction(self) -> Tensor:
        """theta normalized; the first axis where theta is zero."""
        kappa = linalg.vector_norm(self._theta, dim=-1, keepdim=True)
        first = torch.zeros_like(self._theta)
        first[..., 0] = 1.0
        unit = torch.where(kappa > 0, self._theta / torch.where(kappa > 0, kappa, 1.0), first)
        return self._shown(unit, 1)

    def _bessel(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        return sphere(theta.shape[-1], theta.square().sum(-1))

    def _potential(self, theta: Tensor) -> Tensor:
        return self._bessel(theta)[0]

    def _gradient(self, theta: Tensor) -> Tensor:
        return self._bessel(theta)[1][..., None] * theta

    def _hull(self, mean: Tensor) -> Tensor:
        length = linalg.vector_norm(mean, dim=-1)
        return coded(length > 1, length == 1)

    def _interior(self, mean: Tensor) -> Tensor:
        return torch.zeros_like(mean)

    def _start(self, mean: Tensor) -> Tensor:
        # Banerjee et al. 2005.
        square = mean.square().sum(-1, keepdim=True)
        return mean * (mean.shape[-1] - square) / (1 - square).clamp_min(1e-300)

    def _log_base(self, x: Tensor) -> Tensor:
        """Minus the log of the sphere's area: densities are with respect to area."""
        half = x.shape[-1] / 2
        area = math.log(2) + half * math.log(math.pi) - math.lgamma(half)
        slack = 1e2 * torch.finfo(torch.float32).eps
        on = (linalg.vector_norm(x, dim=-1) - 1).abs() <= slack
        return torch.where(on, x.new_full((), -area), -torch.inf)

    def _distribution(self, theta: Tensor) -> td.Distribution:
        raise InputError("VonMisesFisher: torch has no distribution of this kind.")

    def _sample(self, eta: Tensor, n: int) -> Tensor:
        """The component along theta by rejection (Wood 1994), then an orthogonal direction."""
        theta = (self._theta + eta).double()
        d = theta.shape[-1]
        kappa = linalg.vector_norm(theta, dim=-1).expand(n, *theta.shape[:-1])
        axis = theta / torch.where(kappa[0] > 0, kappa[0], 1.0)[..., None]
        still = (kappa[0] == 0)[..., None] & (torch.arange(d, device=theta.device) == 0)
        axis = torch.where(still, 1.0, axis)
        along = _along(d, kappa)
        across = torch.randn(n, *theta.shape, dtype=theta.dtype, device=theta.device)
        across = across - (across * axis).sum(-1, keepdim=True) * axis
        across = across / linalg.vector_norm(across, dim=-1, keepdim=True).clamp_min(1e-300)
        x = along[..., None] * axis + (1 - along**2).clamp_min(0).sqrt()[..., None] * across
        return (x / linalg.vector_norm(x, dim=-1, keepdim=True)).to(eta.dtype)


def _along(d: int, kappa: Tensor) -> Tensor:
    """<x, direction> of von Mises-Fisher draws."""
    if d == 1:
        return torch.where(torch.rand_like(kappa) < torch.sigmoid(2 * kappa), 1.0, -1.0).to(kappa)
    m = d - 1
    b = m / (2 * kappa + (4 * kappa**2 + m**2).sqrt())
    x0 = (1 - b) / (1 + b)
    c = kappa * x0 + m * (4 * b / (1 + b) ** 2).log()  # log(1 - x0^2)
    ball = td.Beta(torch.tensor(m / 2, dtype=kappa.dtype), torch.tensor(m / 2, dtype=kappa.dtype))
    out = torch.zeros_like(kappa)
    open_ = torch.ones_like(kappa, dtype=torch.bool)
    for _ in range(200):  # each round accepts two thirds or more
        if not bool(open_.any()):
            break
        z = ball.sample(kappa.shape)
        w = (1 - (1 + b) * z) / (1 - (1 - b) * z)
        accept = kappa * w + m * torch.log1p(-x0 * w) - c >= torch.rand_like(w).log()
        out = torch.where(open_, w, out)
        open_ = open_ & ~accept
    return out

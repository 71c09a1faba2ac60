"""Families on the positive half-line (docs/theory.md, T6, T26)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch import distributions as td

from cumulant.core.checks import broadcast, numbers, positive, row_of
from cumulant.core.errors import InputError
from cumulant.core.outcome import Solution
from cumulant.core.typed import functions
from cumulant.measures.family import ExponentialFamily, coded, interval, solved

__all__ = ["Exponential", "FixedShapeGamma", "Gamma"]


class FixedShapeGamma(ExponentialFamily):
    """Gamma with fixed shape a, tilted in x alone: G(eta) = -a log(1 - eta / rate) (T6).

    theta = -rate, and eta < rate. `Gamma` also tilts the shape.

    Args:
        concentration: the shape a > 0, ``(*batch,)``.
        rate: > 0, ``(*batch,)``.

    >>> import torch, cumulant as cm
    >>> cm.FixedShapeGamma(2.0, 4.0).mean(torch.tensor([[0.0], [3.0], [4.0]]))
    tensor([[0.5000],
            [2.0000],
            [   inf]])
    """

    _parameters: ClassVar[Mapping[str, int]] = {"_theta": 2, "_shape": 2}
    _shape: Tensor

    def __init__(self, concentration: Tensor | float, rate: Tensor | float) -> None:
        name = type(self).__name__
        got, self._weak = numbers(name, concentration=concentration, rate=rate)
        broadcast(name, **{n: x.shape for n, x in got.items()})
        self._shape = row_of(positive(name, "concentration", got["concentration"]))
        self._theta = -row_of(positive(name, "rate", got["rate"]))

    @classmethod
    def _empty(cls, d: int, **fixed: Any) -> Self:
        if set(fixed) != {"concentration"}:
            raise InputError(f"{cls.__name__} takes only concentration=, its fixed shape.")
        got, _ = numbers(cls.__name__, **fixed)
        new = cls.__new__(cls)
        new._shape = row_of(positive(cls.__name__, "concentration", got["concentration"]))
        return new

    @property
    def concentration(self) -> Tensor:
        """The shape."""
        return self._shown(self._shape[..., 0], 0)

    @property
    def rate(self) -> Tensor:
        """The rate."""
        return self._shown(-self._theta[..., 0], 0)

    def _potential(self, theta: Tensor) -> Tensor:
        return -(self._shape * (-theta).log())[..., 0]

    def _increment(self, theta: Tensor, eta: Tensor) -> Tensor:
        return -(self._shape * torch.log1p(eta / theta))[..., 0]

    def _gradient(self, theta: Tensor) -> Tensor:
        return -self._shape / theta

    def _valid(self, theta: Tensor) -> Tensor | None:
        return theta[..., 0] < 0

    def _hull(self, mean: Tensor) -> Tensor:
        return interval(mean, 0.0, None)

    def _inverse(self, mean: Tensor) -> Solution:
        return solved(-self._shape / mean)

    def _log_base(self, x: Tensor) -> Tensor:
        ok, a = (x[..., 0] > 0) & x[..., 0].isfinite(), self._shape[..., 0]
        log_x = torch.where(ok, x[..., 0], 1.0).log()
        return torch.where(ok, (a - 1) * log_x - torch.lgamma(a), -torch.inf)

    def _distribution(self, theta: Tensor) -> td.Distribution:
        shape = self._shape.expand_as(theta)[..., 0]
        return td.Gamma(shape, -theta[..., 0], validate_args=False)


class Exponential(FixedShapeGamma):
    """Waiting times: G(eta) = -log(1 - eta / rate), eta < rate (T6).

    Args:
        rate: > 0, ``(*batch,)``.

    >>> import torch, cumulant as cm
    >>> cm.Exponential(2.0).log_normalizer(torch.tensor([[0.0], [3.0]]))
    tensor([0., inf])
    """

    def __init__(self, rate: Tensor | float) -> None:
        super().__init__(1.0, rate)

    @classmethod
    def _empty(cls, d: int, **fixed: Any) -> Self:
        if fixed:
            raise InputError(f"Exponential has no fixed parameter {', '.join(fixed)}.")
        return super()._empty(d, concentration=1.0)

    def _log_base(self, x: Tensor) -> Tensor:
        return torch.where((x[..., 0] >= 0) & x[..., 0].isfinite(), 0.0, -torch.inf)

    def _distribution(self, theta: Tensor) -> td.Distribution:
        return td.Exponential(-theta[..., 0], validate_args=False)


class Gamma(ExponentialFamily):
    """Gamma with statistics u(x) = (x, log x), theta = (-rate, shape), base 1/x (T26).

    A = log Gamma(shape) - shape log rate. The conjugate prior of Poisson and exponential rates. To
    tilt in x alone, with d = 1, use `FixedShapeGamma`.

    Args:
        concentration: the shape, > 0, ``(*batch,)``.
        rate: > 0, ``(*batch,)``.

    >>> import torch, cumulant as cm
    >>> cm.Gamma(2.0, 4.0).expectation  # E[x], E[log x]
    tensor([ 0.5000, -0.9635])
    """

    def __init__(self, concentration: Tensor | float, rate: Tensor | float) -> None:
        got, self._weak = numbers("Gamma", concentration=concentration, rate=rate)
        broadcast("Gamma", **{n: x.shape for n, x in got.items()})
        shape = positive("Gamma", "concentration", got["concentration"])
        both = functions.broadcast_tensors(-positive("Gamma", "rate", got["rate"]), shape)
        self._theta = torch.stack(both, -1)[..., None, :]

    def _check_size(self) -> None:
        self._needs(2)

    @property
    def concentration(self) -> Tensor:
        """The shape."""
        return self._shown(self._theta[..., 1], 0)

    @property
    def rate(self) -> Tensor:
        """The rate."""
        return self._shown(-self._theta[..., 0], 0)

    def statistic(self, x: Tensor) -> Tensor:
        return torch.cat([x, x.log()], -1)

    def _event_size(self) -> int:
        return 1

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of x."""
        mean = (self.concentration / self.rate)[..., None]
        return mean, mean[..., None] / self.rate[..., None, None]

    def _potential(self, theta: Tensor) -> Tensor:
        a, b = theta[..., 1], -theta[..., 0]
        return torch.lgamma(a) - a * b.log()

    def _gradient(self, theta: Tensor) -> Tensor:
        a, b = theta[..., 1], -theta[..., 0]
        return torch.stack([a / b, torch.digamma(a) - b.log()], -1)

    def _valid(self, theta: Tensor) -> Tensor | None:
        return (theta[..., 0] < 0) & (theta[..., 1] > 0)

    def _hull(self, mean: Tensor) -> Tensor:
        # Jensen: log E[x] > E[log x], with equality for a point mass.
        x = torch.where(mean[..., 0] > 0, mean[..., 0], 1.0)
        gap = x.log() - mean[..., 1]
        return coded((mean[..., 0] <= 0) | (gap < 0), gap == 0)

    def _inverse(self, mean: Tensor) -> Solution:
        # One equation, log a - digamma(a) = gap, by Minka's approximation and his Newton steps in
        # 1/a. Two recorded steps from the solution give derivatives exact through third order.
        gap = mean[..., 0].log() - mean[..., 1]
        known = gap.detach()
        a = (3 - known + ((known - 3) ** 2 + 24 * known).sqrt()) / (12 * known)
        for _ in range(6):
            a = _shape_step(a, known)
        for _ in range(2):
            a = _shape_step(a, gap)
        return solved(torch.stack([-a / mean[..., 0], a], -1))

    def _interior(self, mean: Tensor) -> Tensor:
        return mean.new_tensor([1.0, -1.0]).expand_as(mean)

    def _typical(self, x: Tensor) -> Tensor:
        return torch.ones_like(x)

    def _log_base(self, x: Tensor) -> Tensor:
        ok = (x[..., 0] > 0) & x[..., 0].isfinite()
        return torch.where(ok, -torch.where(ok, x[..., 0], 1.0).log(), -torch.inf)

    def _distribution(self, theta: Tensor) -> td.Distribution:
        return td.Gamma(theta[..., 1], -theta[..., 0], validate_args=False)


def _shape_step(a: Tensor, gap: Tensor) -> Tensor:
    """A Newton step in 1/a towards log a - digamma(a) = gap."""
    large = a > 1e3
    b = torch.where(large, 1.0, a)
    slope = 1 / b - torch.polygamma(1, b)
    c = torch.where(large, a, 1e3)
    # The asymptotic series, where the difference of large numbers would cancel.
    far = 1 / (2 * c) + 1 / (12 * c**2) - 1 / (120 * c**4)
    far_slope = -1 / (2 * c**2) - 1 / (6 * c**3) + 1 / (30 * c**5)
    value = torch.where(large, far, b.log() - torch.digamma(b))
    slope = torch.where(large, far_slope, slope)
    return 1 / (1 / a + (value - gap) / (a * a * slope))

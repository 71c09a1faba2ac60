"""Families on the simplex and the unit interval, with logarithms as statistics.

See docs/theory.md, T26.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch import distributions as td

from cumulant.core.checks import broadcast, numbers, positive
from cumulant.core.errors import InputError
from cumulant.core.typed import functions
from cumulant.measures.family import ExponentialFamily, coded

__all__ = ["Beta", "Dirichlet"]


class Dirichlet(ExponentialFamily):
    """Dirichlet with statistics u(x) = log x, theta = concentration, base 1 / prod x (T26).

    A = sum_k log Gamma(a_k) - log Gamma(sum_k a_k). The conjugate prior of categorical
    probabilities.

    Args:
        concentration: a > 0, ``(*batch, K)`` with K at least 2.

    >>> import torch, cumulant as cm
    >>> cm.Dirichlet(torch.ones(3)).expectation  # E[log x]
    tensor([-1.5000, -1.5000, -1.5000])
    """

    def __init__(self, concentration: Tensor) -> None:
        got, self._weak = numbers("Dirichlet", concentration=concentration)
        a = positive("Dirichlet", "concentration", got["concentration"])
        if a.ndim < 1 or a.shape[-1] < 2:
            raise InputError(
                f"Dirichlet: concentration must have shape (..., K) with K at least 2, but has "
                f"{tuple(a.shape)}."
            )
        self._theta = a[..., None, :]

    def _check_size(self) -> None:
        if self._theta.shape[-1] < 2:
            raise InputError("Dirichlet: parameters must end in a dimension of at least 2.")

    @property
    def concentration(self) -> Tensor:
        """The concentration."""
        return self._shown(self._theta, 1)

    def statistic(self, x: Tensor) -> Tensor:
        return x.log()

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and covariance of x."""
        a = self.concentration
        total = a.sum(-1, keepdim=True)
        mean = a / total
        spread = torch.diag_embed(mean) - mean[..., :, None] * mean[..., None, :]
        return mean, spread / (total[..., None] + 1)

    def _potential(self, theta: Tensor) -> Tensor:
        return torch.lgamma(theta).sum(-1) - torch.lgamma(theta.sum(-1))

    def _gradient(self, theta: Tensor) -> Tensor:
        return torch.digamma(theta) - torch.digamma(theta.sum(-1, keepdim=True))

    def _valid(self, theta: Tensor) -> Tensor | None:
        return (theta > 0).all(-1)

    def _hull(self, mean: Tensor) -> Tensor:
        # Jensen: sum_k exp E[log x_k] < 1, with equality for a point mass.
        total = mean.exp().sum(-1)
        return coded(total > 1, total == 1)

    def _start(self, mean: Tensor) -> Tensor:
        # For large a = sum a_k, E[log x_k] is near log m_k - (1/m_k - 1) / (2 a), m_k = a_k / a.
        missing = 1 - mean.exp().sum(-1, keepdim=True)
        total = (mean.shape[-1] - 1) / 2 / missing.clamp_min(1e-300)
        a = _inverse_digamma(mean + torch.digamma(total))
        for _ in range(5):  # Minka's fixed point
            a = _inverse_digamma(mean + torch.digamma(a.sum(-1, keepdim=True)))
        return a

    def _interior(self, mean: Tensor) -> Tensor:
        return mean.new_full((1,), -2.0).expand_as(mean) - torch.tensor(mean.shape[-1]).log()

    def _typical(self, x: Tensor) -> Tensor:
        return torch.full_like(x, 1 / x.shape[-1])

    def _log_base(self, x: Tensor) -> Tensor:
        slack = 1e2 * torch.finfo(torch.float32).eps
        inside = (x > 0).all(-1) & ((x.sum(-1) - 1).abs() <= slack)
        logs = torch.where(inside[..., None], x, 1.0).log()
        return torch.where(inside, -logs.sum(-1), -torch.inf)

    def _event(self, x: Tensor) -> Tensor:
        return x

    def _distribution(self, theta: Tensor) -> td.Distribution:
        return td.Dirichlet(theta, validate_args=False)


def _inverse_digamma(y: Tensor) -> Tensor:
    """The a with digamma(a) = y: Minka's guess and three steps of Newton's method."""
    a = torch.where(y >= -2.22, y.exp() + 0.5, -1 / (y + 0.5772156649015329).clamp_max(-1e-3))
    for _ in range(3):
        a = a - (torch.digamma(a) - y) / torch.polygamma(1, a)
    return a


class Beta(Dirichlet):
    """Beta with statistics u(x) = (log x, log(1 - x)), theta = (a, b), base 1 / (x (1 - x)) (T26).

    A Dirichlet of (x, 1 - x). The conjugate prior of Bernoulli probabilities.

    Args:
        concentration1, concentration0: a, b > 0, ``(*batch,)``.

    >>> import torch, cumulant as cm
    >>> cm.Beta(1.0, 1.0).expectation
    tensor([-1., -1.])
    """

    def __init__(self, concentration1: Tensor | float, concentration0: Tensor | float) -> None:
        got, self._weak = numbers(
            "Beta", concentration1=concentration1, concentration0=concentration0
        )
        broadcast("Beta", **{n: x.shape for n, x in got.items()})
        both = functions.broadcast_tensors(*(positive("Beta", n, x) for n, x in got.items()))
        self._theta = torch.stack(both, -1)[..., None, :]

    def _check_size(self) -> None:
        self._needs(2)

    @property
    def concentration1(self) -> Tensor:
        """a."""
        return self.concentration[..., 0]

    @property
    def concentration0(self) -> Tensor:
        """b."""
        return self.concentration[..., 1]

    def statistic(self, x: Tensor) -> Tensor:
        return torch.cat([x.log(), torch.log1p(-x)], -1)

    def _event_size(self) -> int:
        return 1

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of x."""
        mean, spread = super().moments()
        return mean[..., :1], spread[..., :1, :1]

    def _typical(self, x: Tensor) -> Tensor:
        return torch.full_like(x, 0.5)

    def _log_base(self, x: Tensor) -> Tensor:
        inside = (x[..., 0] > 0) & (x[..., 0] < 1)
        y = torch.where(inside, x[..., 0], 0.5)
        return torch.where(inside, -y.log() - torch.log1p(-y), -torch.inf)

    def _event(self, x: Tensor) -> Tensor:
        return x[..., None]

    def _distribution(self, theta: Tensor) -> td.Distribution:
        return td.Beta(theta[..., 0], theta[..., 1], validate_args=False)

"""Families on integers and categories (docs/theory.md, T6)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch import distributions as td

from cumulant.core.checks import (
    broadcast,
    log_masses,
    numbers,
    positive,
    probability,
    require,
    row_of,
)
from cumulant.core.errors import InputError
from cumulant.core.outcome import Code, Outcome, Solution
from cumulant.kernels.merge import Pool
from cumulant.measures.calculus import log_sum_exp
from cumulant.measures.family import ExponentialFamily, coded, interval, solved

__all__ = ["Bernoulli", "Binomial", "Categorical", "Geometric", "Poisson"]


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x); torch's default threshold is too low for double precision."""
    return F.softplus(x, threshold=50.0)


def _whole(x: Tensor) -> Tensor:
    return (x >= 0) & (x == x.round())


def _atom(family: ExponentialFamily, x: Tensor) -> Tensor:
    """KL(point mass at x || h): minus the log-mass of h at x."""
    return -family._log_density(x, torch.zeros_like(x))


class Binomial(ExponentialFamily):
    """Successes in n trials, theta = log(p / (1 - p)): G(eta) = n log(1 - p + p e^eta) (T6).

    Args:
        total_count: n, a positive integer, ``(*batch,)``.
        probs: p in [0, 1], ``(*batch,)``.

    >>> import torch, cumulant as cm
    >>> cm.Binomial(10, 0.5).mean(torch.tensor([[0.0]]))
    tensor([[5.]])
    """

    _parameters: ClassVar[Mapping[str, int]] = {"_theta": 2, "_count": 2}
    _count: Tensor
    _closed: ClassVar[bool] = True

    def __init__(self, total_count: Tensor | int, probs: Tensor | float) -> None:
        name = type(self).__name__
        got, self._weak = numbers(name, total_count=total_count, probs=probs)
        broadcast(name, **{n: x.shape for n, x in got.items()})
        self._set_count(got["total_count"])
        self._theta = row_of(torch.logit(probability(name, "probs", got["probs"])))

    def _set_count(self, count: Tensor) -> None:
        require(
            _whole(count) & (count > 0) & count.isfinite(),
            lambda: f"{type(self).__name__}: total_count must be a positive integer.",
        )
        self._count = row_of(count)

    @classmethod
    def _empty(cls, d: int, **fixed: Any) -> Self:
        new = cls.__new__(cls)
        if set(fixed) != {"total_count"}:
            raise InputError("Binomial takes only total_count=, the number of trials.")
        got, _ = numbers(cls.__name__, **fixed)
        new._set_count(got["total_count"])
        return new

    @property
    def probs(self) -> Tensor:
        """p."""
        return self._shown(self._theta.sigmoid()[..., 0], 0)

    @property
    def total_count(self) -> Tensor:
        """n."""
        return self._shown(self._count[..., 0], 0)

    def _potential(self, theta: Tensor) -> Tensor:
        return (self._count * softplus(theta))[..., 0]

    def _increment(self, theta: Tensor, eta: Tensor) -> Tensor:
        # Also for p = 0 and p = 1, where theta is infinite.
        ends = Pool([-softplus(theta), eta - softplus(-theta)])
        return (self._count * ends.log_normalizer())[..., 0]

    def _gradient(self, theta: Tensor) -> Tensor:
        return self._count * theta.sigmoid()

    def _hull(self, mean: Tensor) -> Tensor:
        return interval(mean, 0.0, self._count[..., 0])

    def _inverse(self, mean: Tensor) -> Solution:
        return solved(mean.log() - (self._count - mean).log())

    def _interior(self, mean: Tensor) -> Tensor:
        return (self._count / 2).expand_as(mean)

    def _edge(self, mean: Tensor, near: Tensor) -> Tensor:
        return _atom(self, mean)

    def _log_base(self, x: Tensor) -> Tensor:
        n = self._count[..., 0]
        ok = (_whole(x[..., 0])) & (x[..., 0] <= n)
        k = torch.where(ok, x[..., 0], 0.0)
        ways = torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
        return torch.where(ok, ways, -torch.inf)

    def _log_density(self, x: Tensor, eta: Tensor) -> Tensor:
        base, k, n = self._log_base(x), x[..., 0], self._count[..., 0]
        k = torch.where(base > -torch.inf, k, 0.0)
        theta = (self._theta + eta)[..., 0]
        log_p, log_q = -softplus(-theta), -softplus(theta)
        value = torch.where(k == 0, 0.0, k * log_p) + torch.where(k == n, 0.0, (n - k) * log_q)
        return base + value

    def _distribution(self, theta: Tensor) -> td.Distribution:
        n = self._count.expand_as(theta)[..., 0]
        return td.Binomial(n, probs=theta[..., 0].sigmoid(), validate_args=False)


class Bernoulli(Binomial):
    """One trial, theta = log(p / (1 - p)): G(eta) = log(1 - p + p e^eta) (T6).

    Args:
        probs: p in [0, 1], ``(*batch,)``.

    >>> import torch, cumulant as cm
    >>> cm.Bernoulli(0.5).mean(torch.tensor([[0.0], [100.0]]))
    tensor([[0.5000],
            [1.0000]])
    """

    def __init__(self, probs: Tensor | float) -> None:
        super().__init__(1, probs)

    @classmethod
    def _empty(cls, d: int, **fixed: Any) -> Self:
        if fixed:
            raise InputError(f"Bernoulli has no fixed parameter {', '.join(fixed)}.")
        return super()._empty(d, total_count=1)

    def _distribution(self, theta: Tensor) -> td.Distribution:
        return td.Bernoulli(probs=theta[..., 0].sigmoid(), validate_args=False)


class Poisson(ExponentialFamily):
    """Counts, theta = log rate: G(eta) = rate (e^eta - 1) (T6).

    Args:
        rate: > 0, ``(*batch,)``.

    >>> import torch, cumulant as cm
    >>> cm.Poisson(3.0).mean(torch.zeros(1, 1))
    tensor([[3.]])
    """

    def __init__(self, rate: Tensor | float) -> None:
        got, self._weak = numbers("Poisson", rate=rate)
        self._theta = row_of(positive("Poisson", "rate", got["rate"]).log())

    @property
    def rate(self) -> Tensor:
        """The mean."""
        return self._shown(self._theta.exp()[..., 0], 0)

    def _potential(self, theta: Tensor) -> Tensor:
        return theta.exp()[..., 0]

    def _increment(self, theta: Tensor, eta: Tensor) -> Tensor:
        # rate (e^eta - 1), as a difference where eta is so large that rate may have underflowed.
        near = eta.abs() < 1
        small = theta.exp() * torch.where(near, eta, 0.0).expm1()
        return torch.where(near, small, (theta + eta).exp() - theta.exp())[..., 0]

    def _valid(self, theta: Tensor) -> Tensor | None:
        return theta[..., 0] < math.log(torch.finfo(theta.dtype).max)  # e^theta is finite

    def _gradient(self, theta: Tensor) -> Tensor:
        return theta.exp()

    def _hull(self, mean: Tensor) -> Tensor:
        return interval(mean, 0.0, None)

    def _inverse(self, mean: Tensor) -> Solution:
        return solved(mean.log())

    def _edge(self, mean: Tensor, near: Tensor) -> Tensor:
        return _atom(self, mean)

    def _log_base(self, x: Tensor) -> Tensor:
        ok = _whole(x[..., 0])
        return torch.where(ok, -torch.lgamma(torch.where(ok, x[..., 0], 0.0) + 1), -torch.inf)

    def _distribution(self, theta: Tensor) -> td.Distribution:
        return td.Poisson(theta[..., 0].exp(), validate_args=False)


class Geometric(ExponentialFamily):
    """Failures before the first success, theta = log(1 - p); eta < -log(1 - p) (T6).

    G(eta) = log p - log(1 - (1 - p) e^eta).

    Args:
        probs: p in (0, 1], ``(*batch,)``.

    >>> import torch, cumulant as cm
    >>> cm.Geometric(0.5).log_normalizer(torch.tensor([[0.0], [1.0]]))
    tensor([0., inf])
    """

    _closed: ClassVar[bool] = True

    def __init__(self, probs: Tensor | float) -> None:
        got, self._weak = numbers("Geometric", probs=probs)
        p = positive("Geometric", "probs", probability("Geometric", "probs", got["probs"]))
        self._theta = row_of(torch.log1p(-p))

    @property
    def probs(self) -> Tensor:
        """p."""
        return self._shown(-self._theta.expm1()[..., 0], 0)

    def _potential(self, theta: Tensor) -> Tensor:
        return -torch.log(-theta.expm1())[..., 0]

    def _gradient(self, theta: Tensor) -> Tensor:
        return -theta.exp() / theta.expm1()

    def _valid(self, theta: Tensor) -> Tensor | None:
        return theta[..., 0] < 0

    def _hull(self, mean: Tensor) -> Tensor:
        return interval(mean, 0.0, None)

    def _inverse(self, mean: Tensor) -> Solution:
        return solved(-torch.log1p(1 / mean))

    def _edge(self, mean: Tensor, near: Tensor) -> Tensor:
        return _atom(self, mean)

    def _log_base(self, x: Tensor) -> Tensor:
        return torch.where(_whole(x[..., 0]), 0.0, -torch.inf)

    def _distribution(self, theta: Tensor) -> td.Distribution:
        return td.Geometric(probs=-theta[..., 0].expm1(), validate_args=False)


class Categorical(ExponentialFamily):
    """One of K categories as a one-hot vector: G(eta) = log sum_k p_k e^eta_k (T6).

    The mean is the vector of tilted probabilities. Adding a constant to eta changes only G, and
    `link` returns the eta that sums to zero over the categories with p > 0.

    Args:
        probs: ``(*batch, K)``, >= 0 with a positive sum; normalized automatically.

    >>> import torch, cumulant as cm
    >>> cm.Categorical([0.2, 0.8]).mean(torch.zeros(1, 2))
    tensor([[0.2000, 0.8000]])
    """

    _closed: ClassVar[bool] = True

    def __init__(self, probs: Tensor) -> None:
        got, self._weak = numbers("Categorical", probs=probs)
        p = got["probs"]
        if p.ndim < 1 or p.shape[-1] < 1:
            raise InputError(f"Categorical: probs must have shape (..., K), not {tuple(p.shape)}.")
        require(
            (p >= 0) & p.isfinite() & (p.sum(-1, keepdim=True) > 0),
            lambda: (
                "Categorical: probs must be finite and >= 0, and not all zero; probabilities lie "
                f"in [0, 1], these range from {float(p.min()):.6g} to {float(p.max()):.6g}."
            ),
        )
        p = p / p.amax(-1, keepdim=True)
        self._theta = (p / p.sum(-1, keepdim=True)).log()[..., None, :]

    def _edge(self, mean: Tensor, near: Tensor) -> Tensor:
        used = mean > 0
        ratio = torch.where(used, mean, 1.0).log() - torch.where(used, self._theta, 0.0)
        return (mean * ratio).sum(-1)

    def _check_natural(self, owner: str) -> None:
        """-inf gives a category zero weight."""
        log_masses(owner, "natural", self._theta, self._theta.shape[-1])
        self._theta = self._theta.log_softmax(-1)

    def _check_size(self) -> None:
        """Any number of categories is valid."""

    @property
    def probs(self) -> Tensor:
        """The probabilities."""
        return self._shown(self._gradient(self._theta), 1)

    def _potential(self, theta: Tensor) -> Tensor:
        return log_sum_exp(theta, -1)

    def _gradient(self, theta: Tensor) -> Tensor:
        return (theta - self._potential(theta)[..., None]).exp()

    def _hull(self, mean: Tensor) -> Tensor:
        alive = self._theta > -torch.inf
        slack = 1e-5  # what single precision makes of a sum of one
        total = (mean.sum(-1) - 1).abs() > slack
        stray = (~alive & (mean.abs() > slack)).any(-1)
        inner = torch.where(alive, mean, 1.0)
        return coded(total | stray | (inner < 0).any(-1), (inner == 0).any(-1))

    def _inverse(self, mean: Tensor) -> Solution:
        return solved(mean.log())

    def _link(self, mean: Tensor) -> Solution:
        code = self._hull(mean)
        alive = (self._theta > -torch.inf).expand_as(mean)
        good = alive & (code == Code.CONVERGED)[..., None]
        eta = torch.where(good, mean, 1.0).log() - torch.where(good, self._theta, 0.0)
        center = torch.where(good, eta, 0.0).sum(-1, keepdim=True) / alive.sum(-1, keepdim=True)
        return Solution(torch.where(good, eta - center, 0.0), Outcome(code))

    def _log_base(self, x: Tensor) -> Tensor:
        hot = ((x == 0) | (x == 1)).all(-1) & (x.sum(-1) == 1)
        return torch.where(hot, 0.0, -torch.inf)

    def _typical(self, x: Tensor) -> Tensor:
        return F.one_hot(torch.zeros_like(x[..., 0], dtype=torch.long), x.shape[-1]).to(x.dtype)

    def _event(self, x: Tensor) -> Tensor:
        return x

    def _distribution(self, theta: Tensor) -> td.Distribution:
        return td.OneHotCategorical(logits=theta, validate_args=False)

"""Gaussians: tilted in the mean alone, or in mean and covariance (docs/theory.md, T3, T26)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch import distributions as td

from cumulant.core.checks import (
    broadcast,
    finite,
    holds,
    numbers,
    positive,
    symmetric_definite,
)
from cumulant.core.errors import InputError
from cumulant.core.outcome import Solution
from cumulant.core.typed import linalg
from cumulant.measures.empirical import unpack
from cumulant.measures.family import ExponentialFamily, coded, solved
from cumulant.measures.measure import Measure

__all__ = ["Gaussian", "MeanCovarianceGaussian"]

LOG_2PI = math.log(2 * math.pi)


def read_covariance(owner: str, mean: Tensor, covariance: Tensor) -> tuple[Tensor, bool]:
    """A dense ``(..., d, d)`` or diagonal ``(..., d)`` covariance, and whether it is diagonal.

    A number is a multiple of the identity. If the batch size of the mean is also d, a ``(d, d)``
    array is ambiguous: it counts as dense if it is symmetric positive definite.
    """
    d = mean.shape[-1]
    if covariance.ndim == 0:
        covariance = covariance.expand(d)
    square = covariance.ndim >= 2 and covariance.shape[-2:] == (d, d)
    either = square and covariance.ndim == mean.ndim and mean.shape[-2] == d
    if either and d > 1:
        square = could_be_dense(owner, "covariance", covariance)
    if not square and covariance.shape[-1] != d:
        raise InputError(
            f"{owner}: covariance must have shape (..., {d}, {d}), or (..., {d}) if diagonal, to "
            f"match the mean {tuple(mean.shape)}; got {tuple(covariance.shape)}."
        )
    finite(owner, "covariance", covariance)
    if square:
        return symmetric_definite(owner, "covariance", covariance), False
    return positive(owner, "covariance", covariance), True


def could_be_dense(owner: str, name: str, x: Tensor) -> bool:
    """Whether an ambiguous array is symmetric positive definite."""
    if holds(x == x.detach()) is None:
        raise InputError(
            f"{owner}: {name} of shape {tuple(x.shape)} could be a matrix or a table of variances, "
            "and its entries cannot be read inside vmap: add a dimension, or for "
            "mixtures covariance_type."
        )
    try:
        symmetric_definite(owner, name, x)
    except InputError:
        return False
    return True


class Gaussian(Measure):
    """N(m, S), tilted in x: the mean moves to m + S eta, the covariance stays (T3).

    G(eta) = <m, eta> + eta' S eta / 2.

    Args:
        mean: m, ``(*batch, d)``.
        covariance: S, ``(*batch, d, d)``, or its diagonal ``(*batch, d)``, or one number.

    Raises:
        InputError: the covariance is not symmetric positive definite or does not match the mean.

    >>> import torch, cumulant as cm
    >>> h = cm.Gaussian(torch.zeros(2), torch.eye(2))
    >>> h.mean(torch.tensor([[1.0, 2.0]]))
    tensor([[1., 2.]])
    """

    _loc: Tensor
    _cov: Tensor

    def __init__(self, mean: Tensor, covariance: Tensor | float) -> None:
        got, self._weak = numbers("Gaussian", mean=mean, covariance=covariance)
        loc = finite("Gaussian", "mean", got["mean"])
        if loc.ndim < 1 or loc.shape[-1] < 1:
            raise InputError(
                f"Gaussian: mean must have shape (..., d), but has {tuple(loc.shape)}; for d = 1 "
                "pass x[..., None]."
            )
        self._cov, self.diagonal = read_covariance("Gaussian", loc, got["covariance"])
        tail = self._cov.ndim - (1 if self.diagonal else 2)
        broadcast("Gaussian", mean=loc.shape[:-1], covariance=self._cov.shape[:tail])
        self._loc = loc[..., None, :]
        self._set_parameters()

    def _set_parameters(self) -> None:
        self._parameters: Mapping[str, int] = {"_loc": 2, "_cov": 1 if self.diagonal else 2}  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def dimension(self) -> int:
        return self._loc.shape[-1]

    def _row_count(self) -> int:
        return self._loc.shape[-2]

    @property
    def loc(self) -> Tensor:
        """The mean, ``(*batch, d)``."""
        return self._loc if self._rows else self._loc.squeeze(-2)

    @property
    def covariance_matrix(self) -> Tensor:
        """The covariance, ``(*batch, d, d)``."""
        return self._dense()

    def _dense(self) -> Tensor:
        return torch.diag_embed(self._cov) if self.diagonal else self._cov

    def _times(self, x: Tensor) -> Tensor:
        """S x for each row x."""
        return x * self._cov[..., None, :] if self.diagonal else x @ self._cov

    def _log_normalizer(self, eta: Tensor) -> Tensor:
        return ((self._loc + self._times(eta) / 2) * eta).sum(-1)

    def _mean(self, eta: Tensor) -> Tensor:
        return self._loc + self._times(eta)

    def _covariance(self, eta: Tensor) -> Tensor:
        d = self.dimension
        return self._dense()[..., None, :, :].expand(*eta.shape[:-1], d, d).clone()

    def _product(self, eta: Tensor, vector: Tensor) -> Tensor:
        return self._times(vector)

    def _relative_entropy(self, eta: Tensor) -> Tensor:
        return (eta * self._times(eta)).sum(-1) / 2

    def _link(self, mean: Tensor) -> Solution:
        away = mean - self._loc
        return solved(
            away / self._cov[..., None, :] if self.diagonal else away @ inverse(self._cov)
        )

    def _tilted(self, eta: Tensor) -> Measure:
        return self._rebuilt({"_loc": self._mean(eta)})

    def _root(self) -> Tensor:
        return linalg.cholesky(self._dense())

    def _sample(self, eta: Tensor, n: int) -> Tensor:
        noise = torch.randn(n, *eta.shape, dtype=eta.dtype, device=eta.device)
        return self._mean(eta) + noise @ self._root().mT

    def _log_density(self, x: Tensor, eta: Tensor) -> Tensor:
        return log_gaussian(x - self._mean(eta), self._root())

    def to_torch(self, eta: Tensor | None = None) -> td.MultivariateNormal:
        """p_eta as torch's MultivariateNormal of batch shape ``(*batch, M)``."""
        entry = self._enter("to_torch", eta=eta)
        measure, (eta,) = entry.measure, entry.arguments
        loc, matrix = measure._mean(eta), measure._covariance(eta)
        if entry.flat:
            loc, matrix = loc[..., 0, :], matrix[..., 0, :, :]
        return td.MultivariateNormal(loc, matrix)


def inverse(matrix: Tensor) -> Tensor:
    """The inverse of a symmetric matrix, symmetrized.

    Of torch's solvers only this one has correct derivatives in every mode: cholesky_inverse is
    wrong in forward mode, and solve at second order over forward mode (2.13).
    """
    out = linalg.inv(matrix)
    return (out + out.mT) / 2


def log_gaussian(away: Tensor, root: Tensor) -> Tensor:
    """log N(away; 0, root root') for rows ``(..., M, d)`` and roots ``(..., d, d)``."""
    white = linalg.solve_triangular(root, away.mT, upper=False)
    log_root = root.diagonal(dim1=-2, dim2=-1).log().sum(-1)[..., None]
    return -(white.square().sum(-2) + away.shape[-1] * LOG_2PI) / 2 - log_root


class MeanCovarianceGaussian(ExponentialFamily):
    """A Gaussian tilted in mean and covariance: u(x) = (x, x_a x_b for a <= b) (T26).

    theta = (P m, -P_aa / 2, -P_ab for a < b) with the precision P = S^-1. `Gaussian` is the same
    distribution tilted in the mean alone, with d statistics.

    Args:
        mean: m, ``(*batch, k)``.
        covariance: S, ``(*batch, k, k)``, or its diagonal ``(*batch, k)``, or one number.

    >>> import torch, cumulant as cm
    >>> cm.MeanCovarianceGaussian(torch.ones(1), torch.eye(1)).expectation  # E[x], E[x^2]
    tensor([1., 2.])
    """

    def __init__(self, mean: Tensor, covariance: Tensor | float) -> None:
        base = Gaussian(mean, covariance)
        self._weak = base._weak
        precision = inverse(base._dense())[..., None, :, :]
        first = (precision @ base._loc[..., None])[..., 0]
        self._theta = torch.cat(
            [first, packed_natural(precision).expand(*first.shape[:-1], -1)], -1
        )

    def _check_size(self) -> None:
        k = self._size()
        if k * (k + 3) // 2 != self._theta.shape[-1]:
            raise InputError(
                "MeanCovarianceGaussian has k + k (k + 1) / 2 statistics in k dimensions (2, 5, "
                f"9, ...); got {self._theta.shape[-1]}."
            )

    def _size(self, d: int | None = None) -> int:
        d = self._theta.shape[-1] if d is None else d
        return (math.isqrt(9 + 8 * d) - 3) // 2

    def _event_size(self) -> int:
        return self._size()

    def _split(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """(P m, P)."""
        k = self._size()
        packed = -unpack(theta[..., k:], k)
        return theta[..., :k], packed + torch.diag_embed(packed.diagonal(dim1=-2, dim2=-1))

    def _member(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """(m, S)."""
        first, precision = self._split(theta)
        covariance = inverse(precision)
        return (covariance @ first[..., None])[..., 0], covariance

    @property
    def loc(self) -> Tensor:
        """The mean."""
        return self._shown(self._member(self._theta)[0], 1)

    @property
    def covariance_matrix(self) -> Tensor:
        """The covariance."""
        return self._shown(self._member(self._theta)[1], 2)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and covariance of x."""
        return self.loc, self.covariance_matrix

    def statistic(self, x: Tensor) -> Tensor:
        return torch.cat([x, _packed_products(x)], -1)

    def _potential(self, theta: Tensor) -> Tensor:
        first, precision = self._split(theta)
        root = linalg.cholesky(precision)
        white = linalg.solve_triangular(root, first[..., None], upper=False)[..., 0]
        log_root = root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return white.square().sum(-1) / 2 - log_root + self._size() * LOG_2PI / 2

    def _gradient(self, theta: Tensor) -> Tensor:
        return expected_statistic(*self._member(theta))

    def _valid(self, theta: Tensor) -> Tensor | None:
        _, precision = self._split(theta.detach())
        return linalg.cholesky_ex(precision).info == 0

    def _hull(self, mean: Tensor) -> Tensor:
        # Rank is judged by correlations: coordinates may be in different units.
        spread = _spread(mean, self._size(mean.shape[-1]))
        variances = spread.diagonal(dim1=-2, dim2=-1)
        unit = torch.where(variances > 0, variances, 1.0).sqrt()
        lowest = linalg.eigvalsh(spread / unit[..., :, None] / unit[..., None, :])[..., 0]
        slack = 100 * torch.finfo(mean.dtype).eps
        outside = (variances < 0).any(-1) | (lowest < -slack)
        return coded(outside, (variances == 0).any(-1) | (lowest <= slack))

    def _inverse(self, mean: Tensor) -> Solution:
        k = self._size(mean.shape[-1])
        precision = inverse(_spread(mean, k))
        first = (precision @ mean[..., :k, None])[..., 0]
        return solved(torch.cat([first, packed_natural(precision)], -1))

    def _interior(self, mean: Tensor) -> Tensor:
        k = self._size(mean.shape[-1])
        eye = torch.eye(k, dtype=mean.dtype, device=mean.device)
        return expected_statistic(eye[0] * 0, eye).expand_as(mean)

    def _log_base(self, x: Tensor) -> Tensor:
        return torch.where(x.isfinite().all(-1), 0.0, -torch.inf)

    def _event(self, x: Tensor) -> Tensor:
        return x

    def _distribution(self, theta: Tensor) -> td.Distribution:
        loc, covariance = self._member(theta)
        return td.MultivariateNormal(loc, covariance, validate_args=False)


def _packed_products(x: Tensor) -> Tensor:
    """x_a x_b for a <= b, row-major."""
    first, second = torch.triu_indices(x.shape[-1], x.shape[-1], device=x.device)
    return x[..., first] * x[..., second]


def packed_natural(precision: Tensor) -> Tensor:
    """-P_aa / 2 and -P_ab, row-major."""
    k = precision.shape[-1]
    first, second = torch.triu_indices(k, k, device=precision.device)
    weight = torch.where(first == second, 0.5, 1.0).to(precision.dtype)
    return -precision[..., first, second] * weight


def expected_statistic(mean: Tensor, covariance: Tensor) -> Tensor:
    """E[(x, x x')] of a distribution with this mean and covariance."""
    k = mean.shape[-1]
    first, second = torch.triu_indices(k, k, device=mean.device)
    square = covariance[..., first, second] + mean[..., first] * mean[..., second]
    return torch.cat([mean.expand(*square.shape[:-1], k), square], -1)


def _spread(statistic: Tensor, k: int) -> Tensor:
    """The covariance behind E[(x, x x')]."""
    mean = statistic[..., :k]
    return unpack(statistic[..., k:], k) - mean[..., :, None] * mean[..., None, :]

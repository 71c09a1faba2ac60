"""Bayes' rule for conjugate pairs: the prior tilted by the observations.

See docs/theory.md, T11, T26.
"""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch import distributions as td

from cumulant.core.checks import broadcast, finite, numbers, require
from cumulant.core.describing import described_fields
from cumulant.core.errors import InputError
from cumulant.core.typed import functions, linalg
from cumulant.measures.counts import Bernoulli, Categorical, Poisson
from cumulant.measures.family import ExponentialFamily
from cumulant.measures.gaussian import (
    LOG_2PI,
    Gaussian,
    MeanCovarianceGaussian,
    inverse,
    packed_natural,
)
from cumulant.measures.measure import Measure
from cumulant.measures.positive import Exponential, Gamma
from cumulant.measures.project import FROM_TORCH
from cumulant.measures.simplex import Beta, Dirichlet

__all__ = ["Posterior", "posterior"]

_M = TypeVar("_M", bound=Measure)
Likelihood = type[Measure] | type[td.Distribution] | Gaussian


class Posterior(NamedTuple, Generic[_M]):
    """The updated prior, and log p(observations), ``(*batch,)``."""

    measure: _M
    log_evidence: Tensor

    __repr__ = described_fields


def posterior(prior: _M, likelihood: Likelihood, observations: Tensor) -> Posterior[_M]:
    """Bayes' rule for conjugate pairs: the prior tilted by the observations (T11, T26).

    A likelihood conjugate to the prior is exp<t(y), u(x)> b(y) in the prior's own statistics u, so
    the posterior is prior.tilt(t(y)) and the evidence log p(y) = G(t(y)) + log b(y).

    ======================================= =============================== ======================
    prior                                   likelihood                      observations
    ======================================= =============================== ======================
    `Gamma`                                 `Poisson` or `Exponential`      ``(*batch, n)``
    `Beta`                                  `Bernoulli`                     ``(*batch, n)``, 0, 1
    `Dirichlet`                             `Categorical`                   ``(*batch, n, K)``
    `Gaussian` or `MeanCovarianceGaussian`  ``Gaussian(zeros, R)``: noise R ``(*batch, n, k)``
    ======================================= =============================== ======================

    Categories are one-hot.

    Args:
        prior: the prior of the parameter x, batch shape ``(*batch,)``.
        likelihood: a class from the table; for Gaussians, the distribution of y - x.
        observations: n per prior, independent given x.

    >>> import torch, cumulant as cm
    >>> cm.posterior(cm.Gamma(2.0, 1.0), cm.Poisson, torch.tensor([3.0, 5.0])).measure.rate
    tensor(3.)
    """
    if not isinstance(prior, Measure):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(
            f"posterior: prior must be a measure, not {type(prior).__name__}; convert torch "
            "distributions with from_torch."
        )
    if prior._row_count() != 1:
        raise InputError("posterior: the prior must not be tilted by several eta at once.")
    if isinstance(prior, Gaussian):
        free = MeanCovarianceGaussian(prior.loc, prior.covariance_matrix)
        full = posterior(free, likelihood, observations)
        member = Gaussian(full.measure.loc, full.measure.covariance_matrix)
        return Posterior(cast(_M, member), full.log_evidence)
    got, weak = numbers("posterior", observations=observations)
    y = finite("posterior", "observations", got["observations"])
    kind = torch.get_default_dtype() if weak else y.dtype
    if not prior._weak:
        kind = prior.dtype if weak else torch.promote_types(y.dtype, prior.dtype)
    if isinstance(likelihood, type):
        likelihood = FROM_TORCH.get(likelihood, likelihood)
    message, log_base = _message(prior, likelihood, y.double())
    member = cast(ExponentialFamily, prior._to(message.dtype))
    try:
        shift = message[..., None, :]
        evidence = member._log_normalizer(shift)[..., 0] + log_base
    except RuntimeError:
        raise InputError(
            f"posterior: priors of batch shape {tuple(prior.batch_shape)} and observations "
            f"{tuple(y.shape)} do not broadcast."
        ) from None
    updated = member._tilted(shift)._to(kind)
    updated._weak = False
    return Posterior(cast(_M, updated), evidence.to(kind))


def _message(prior: Measure, likelihood: Any, y: Tensor) -> tuple[Tensor, Tensor]:
    """t(y) ``(*batch, d)`` in the prior's statistics, and log b(y) ``(*batch,)``."""

    def need(ok: Tensor, what: str) -> None:
        require(ok, lambda: f"posterior: {what}.")

    vectors = isinstance(prior, Dirichlet | MeanCovarianceGaussian) and not isinstance(prior, Beta)
    if y.ndim < (2 if vectors else 1):
        raise InputError(
            f"posterior: observations must have shape (..., n{', k' * vectors}), not "
            f"{tuple(y.shape)}{'; categories are one-hot' * isinstance(prior, Dirichlet)}."
        )
    lead, count = (y.shape[:-2], y.shape[-2]) if vectors else (y.shape[:-1], y.shape[-1])
    n = y.new_full(lead, count)
    match prior:
        case Gamma() if likelihood is Poisson:
            need((y >= 0) & (y == y.round()), "Poisson observations must be counts 0, 1, 2, ...")
            return torch.stack([-n, y.sum(-1)], -1), -torch.lgamma(y + 1).sum(-1)
        case Gamma() if likelihood is Exponential:
            need(y >= 0, "exponential observations must be >= 0")
            return torch.stack([-y.sum(-1), n], -1), torch.zeros_like(n)
        case Beta() if likelihood is Bernoulli:
            need((y == 0) | (y == 1), "Bernoulli observations must be 0 or 1")
            return torch.stack([y.sum(-1), (1 - y).sum(-1)], -1), torch.zeros_like(n)
        case Dirichlet() if likelihood is Categorical and not isinstance(prior, Beta):
            if y.shape[-1] != prior.dimension:
                raise InputError(
                    f"posterior: one-hot observations must have {prior.dimension} categories, not "
                    f"{y.shape[-1]}."
                )
            hot = ((y == 0) | (y == 1)).all(-1) & (y.sum(-1) == 1)
            need(hot, "categorical observations must be one-hot vectors")
            return y.sum(-2), torch.zeros_like(n)
        case MeanCovarianceGaussian() if isinstance(likelihood, Gaussian):
            k = prior._event_size()
            if likelihood.dimension != k or y.shape[-1] != k:
                raise InputError(
                    f"posterior: the prior has dimension {k}, the noise {likelihood.dimension} and "
                    f"the observations {y.shape[-1]}; they must agree."
                )
            noise = likelihood._to(y.dtype)
            broadcast("posterior", noise=noise.batch_shape, observations=y.shape[:-2])
            root, precision = noise._root(), inverse(noise._dense())
            away = y - noise._loc
            first = (away.sum(-2, keepdim=True) @ precision)[..., 0, :]
            second = n[..., None] * packed_natural(precision)
            shape = functions.broadcast_shapes(first.shape[:-1], second.shape[:-1])
            white = linalg.solve_triangular(root, away.mT, upper=False)
            log_root = root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
            base = -white.square().sum((-2, -1)) / 2 - n * (log_root + k * LOG_2PI / 2)
            both = [first.expand(*shape, -1), second.expand(*shape, -1)]
            return torch.cat(both, -1), base
        case _:
            pass
    name = likelihood.__name__ if isinstance(likelihood, type) else type(likelihood).__name__
    name = name if isinstance(likelihood, type) else f"an object of type {name}"
    raise InputError(
        f"posterior: {type(prior).__name__} is not conjugate to {name} here. Pairs: Gamma with "
        "Poisson or Exponential, Beta with Bernoulli, Dirichlet with Categorical (pass these as "
        "classes), MeanCovarianceGaussian or Gaussian with a Gaussian (the noise)."
    )

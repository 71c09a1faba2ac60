"""From torch's distributions to measures."""

from __future__ import annotations

import torch
from torch import Tensor
from torch import distributions as td

from cumulant.core.errors import InputError
from cumulant.measures.counts import Bernoulli, Binomial, Categorical, Geometric, Poisson
from cumulant.measures.gaussian import Gaussian
from cumulant.measures.measure import Measure
from cumulant.measures.mixture import GaussianMixture, Mixture
from cumulant.measures.positive import Exponential, Gamma
from cumulant.measures.simplex import Beta, Dirichlet
from cumulant.measures.sphere import VonMisesFisher

__all__ = ["from_torch"]


def from_torch(distribution: td.Distribution) -> Measure:
    """The measure of a torch distribution, with the same batch shape.

    Bernoulli, Binomial, Poisson, Geometric, Exponential, Gamma and Chi2 (statistics x and log x),
    Beta, Dirichlet, Categorical and OneHotCategorical (one-hot vectors), Normal,
    MultivariateNormal, LowRankMultivariateNormal, Independent normals, VonMises (as directions in
    the plane), and MixtureSameFamily of any of these.

    Raises:
        InputError: a family that cannot be tilted in closed form.

    >>> import torch, cumulant as cm
    >>> h = cm.from_torch(torch.distributions.Poisson(torch.tensor(3.0)))
    >>> h.mean(torch.zeros(1, 1))
    tensor([[3.]])
    """
    match distribution:
        case td.Bernoulli() if "logits" in vars(distribution):  # probs would round
            return Bernoulli.from_natural(distribution.logits[..., None])
        case td.Bernoulli():
            return Bernoulli(distribution.probs)
        case td.Binomial():
            return Binomial(distribution.total_count, distribution.probs)
        case td.Categorical() if "logits" in vars(distribution):
            return Categorical.from_natural(distribution.logits)
        case td.Poisson():
            return Poisson(distribution.rate)
        case td.Geometric():
            return Geometric(distribution.probs)
        case td.Exponential():
            return Exponential(distribution.rate)
        case td.Gamma():
            return Gamma(distribution.concentration, distribution.rate)
        case td.Beta():
            return Beta(distribution.concentration1, distribution.concentration0)
        case td.Dirichlet():
            return Dirichlet(distribution.concentration)
        case td.Categorical() | td.OneHotCategorical():
            return Categorical(distribution.probs)
        case td.VonMises():
            angle = distribution.loc
            return VonMisesFisher(
                torch.stack([angle.cos(), angle.sin()], -1), distribution.concentration
            )
        case td.MixtureSameFamily():
            return _mixture(distribution)
        case _:
            pass
    gaussian = _gaussian(distribution)
    if gaussian is not None:
        return Gaussian(*gaussian)
    name = type(distribution).__name__ if isinstance(distribution, td.Distribution) else None  # pyright: ignore[reportUnnecessaryIsInstance]
    if name is None:
        raise InputError(
            f"from_torch takes a torch.distributions object, not a {type(distribution).__name__}."
        )
    raise InputError(
        f"from_torch: {name} is not among the families that tilt in closed form; draw a sample and "
        "use Empirical(sample)."
    )


def _gaussian(distribution: td.Distribution) -> tuple[Tensor, Tensor] | None:
    """(mean, covariance) of a normal distribution; the covariance is a diagonal or a matrix."""
    match distribution:
        case td.MultivariateNormal() | td.LowRankMultivariateNormal():
            return distribution.mean, distribution.covariance_matrix
        case td.Normal():
            return distribution.loc[..., None], distribution.variance[..., None, None]
        case td.Independent() if (
            isinstance(distribution.base_dist, td.Normal) and len(distribution.event_shape) == 1
        ):
            base = distribution.base_dist
            return base.loc, torch.diag_embed(base.variance)
        case _:
            return None


def _mixture(distribution: td.MixtureSameFamily) -> Measure:
    log_weights: Tensor = distribution.mixture_distribution.logits.log_softmax(-1)
    parts = distribution.component_distribution
    gaussian = _gaussian(parts)
    if gaussian is not None:
        means, covariances = gaussian
        return GaussianMixture(means, covariances, log_weights, covariance_type="own")
    return Mixture(from_torch(parts), log_weights)

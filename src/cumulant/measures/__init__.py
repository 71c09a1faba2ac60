"""Tilted measures: G, mean, covariance, link, dual, M-projection (docs/theory.md, T1-T11)."""

from cumulant.measures.conjugate import Posterior, posterior
from cumulant.measures.counts import Bernoulli, Binomial, Categorical, Geometric, Poisson
from cumulant.measures.empirical import Empirical, maximum_entropy
from cumulant.measures.family import ExponentialFamily
from cumulant.measures.gaussian import Gaussian, Normal
from cumulant.measures.interop import from_torch
from cumulant.measures.measure import Measure, Tilted
from cumulant.measures.mixture import GaussianMixture, Mixture
from cumulant.measures.positive import Exponential, FixedShapeGamma, Gamma
from cumulant.measures.project import project
from cumulant.measures.simplex import Beta, Dirichlet
from cumulant.measures.sphere import VonMisesFisher
from cumulant.measures.status import Link, Status

__all__ = [
    "Bernoulli",
    "Beta",
    "Binomial",
    "Categorical",
    "Dirichlet",
    "Empirical",
    "Exponential",
    "ExponentialFamily",
    "FixedShapeGamma",
    "Gamma",
    "Gaussian",
    "GaussianMixture",
    "Geometric",
    "Link",
    "Measure",
    "Mixture",
    "Normal",
    "Poisson",
    "Posterior",
    "Status",
    "Tilted",
    "VonMisesFisher",
    "from_torch",
    "maximum_entropy",
    "posterior",
    "project",
]

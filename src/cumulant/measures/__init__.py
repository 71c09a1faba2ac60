"""Tilted measures: G, mean, covariance, link, dual, M-projection (docs/theory.md, T1-T11)."""

from typing import NoReturn

from cumulant.core.outcome import Outcome, Solution
from cumulant.core.renamed import moved
from cumulant.measures.conjugate import Posterior, posterior
from cumulant.measures.counts import Bernoulli, Binomial, Categorical, Geometric, Poisson
from cumulant.measures.empirical import Empirical, maximum_entropy
from cumulant.measures.family import ExponentialFamily
from cumulant.measures.gaussian import Gaussian, MeanCovarianceGaussian
from cumulant.measures.interop import from_torch
from cumulant.measures.measure import Measure, Tilted
from cumulant.measures.mixture import GaussianMixture, Mixture
from cumulant.measures.positive import Exponential, FixedShapeGamma, Gamma
from cumulant.measures.project import project
from cumulant.measures.simplex import Beta, Dirichlet
from cumulant.measures.sphere import VonMisesFisher

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
    "MeanCovarianceGaussian",
    "Measure",
    "Mixture",
    "Outcome",
    "Poisson",
    "Posterior",
    "Solution",
    "Tilted",
    "VonMisesFisher",
    "from_torch",
    "maximum_entropy",
    "posterior",
    "project",
]

_MOVED = {
    "Link": "cumulant.measures.Solution",
    "Normal": "cumulant.MeanCovarianceGaussian",
    "Status": "cumulant.Outcome",
}


def __getattr__(name: str) -> NoReturn:
    moved("cumulant.measures", name, _MOVED)

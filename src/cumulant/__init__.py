"""Cumulant: the calculus of attention.

Attention is a measure over keys tilted by the query, and everything people want from it is a
derivative of its log-normalizer G.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cumulant.attention import (
    Attended,
    Received,
    TopKeys,
    attend,
    attend_packed,
    merge,
    rollout,
    scaled_dot_product_attention,
    sdpa_replaced,
)
from cumulant.core.errors import (
    ConvergenceError,
    GroupError,
    InputError,
    NoSolutionError,
    UnknownFieldError,
)
from cumulant.core.outcome import Outcome
from cumulant.core.renamed import moved
from cumulant.kernels.engines import engine
from cumulant.measures import (
    Bernoulli,
    Beta,
    Binomial,
    Categorical,
    Dirichlet,
    Empirical,
    Exponential,
    FixedShapeGamma,
    Gamma,
    Gaussian,
    GaussianMixture,
    Geometric,
    MeanCovarianceGaussian,
    Measure,
    Mixture,
    Poisson,
    VonMisesFisher,
    from_torch,
    maximum_entropy,
    posterior,
    project,
)

if TYPE_CHECKING:
    from cumulant import (
        contrastive,
        derivatives,
        distributed,
        dynamics,
        filtering,
        lens,
        memory,
        nn,
    )
    from cumulant.contrastive import linear_cross_entropy
    from cumulant.derivatives import DerivativeReport, check_derivatives, differentiable
    from cumulant.memory import Memory

__version__ = "0.2.0"

__all__ = [
    "Attended",
    "Bernoulli",
    "Beta",
    "Binomial",
    "Categorical",
    "ConvergenceError",
    "DerivativeReport",
    "Dirichlet",
    "Empirical",
    "Exponential",
    "FixedShapeGamma",
    "Gamma",
    "Gaussian",
    "GaussianMixture",
    "Geometric",
    "GroupError",
    "InputError",
    "MeanCovarianceGaussian",
    "Measure",
    "Memory",
    "Mixture",
    "NoSolutionError",
    "Outcome",
    "Poisson",
    "Received",
    "TopKeys",
    "UnknownFieldError",
    "VonMisesFisher",
    "attend",
    "attend_packed",
    "check_derivatives",
    "contrastive",
    "derivatives",
    "differentiable",
    "distributed",
    "dynamics",
    "engine",
    "filtering",
    "from_torch",
    "lens",
    "linear_cross_entropy",
    "maximum_entropy",
    "memory",
    "merge",
    "nn",
    "posterior",
    "project",
    "rollout",
    "scaled_dot_product_attention",
    "sdpa_replaced",
]

# The parts that stand on attention and measures are imported when they are first asked for, so that
# whoever wants a derivative of attention does not wait for filters.
_PARTS = (
    *("contrastive", "derivatives", "distributed", "dynamics"),
    *("filtering", "lens", "memory", "nn"),
)
_NAMES = {
    "DerivativeReport": "derivatives",
    "Memory": "memory",
    "check_derivatives": "derivatives",
    "differentiable": "derivatives",
    "linear_cross_entropy": "contrastive",
}

# Names that moved. Asking for the old one says where the new one is.
_MOVED = {"Normal": "cumulant.MeanCovarianceGaussian", "claims": "cumulant.lab.claims"}


def __getattr__(name: str) -> Any:
    if name in _PARTS:
        return import_module(f"cumulant.{name}")
    if name in _NAMES:
        return getattr(import_module(f"cumulant.{_NAMES[name]}"), name)
    moved("cumulant", name, _MOVED)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

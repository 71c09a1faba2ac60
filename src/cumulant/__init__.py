"""Cumulant: the calculus of attention.

Attention is a measure over keys tilted by the query, and everything people want from it is a
derivative of its log-normalizer G.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
    from cumulant.contrastive import linear_cross_entropy
    from cumulant.core.checks import value_checks
    from cumulant.core.errors import (
        ConvergenceError,
        GroupError,
        InputError,
        NoSolutionError,
        UnknownFieldError,
    )
    from cumulant.core.outcome import Outcome
    from cumulant.derivatives import DerivativeReport, check_derivatives, differentiable
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
    "value_checks",
]

# Everything is imported when it is first asked for: `cumulant --help` does not wait for torch, and
# whoever wants a derivative of attention does not wait for filters.
_PARTS = (
    *("attention", "contrastive", "core", "derivatives", "distributed", "dynamics"),
    *("filtering", "integrations", "kernels", "lens", "measures", "memory", "nn", "testing"),
)
_HOMES = {
    "attention": """
        Attended Received TopKeys attend attend_packed merge rollout scaled_dot_product_attention
        sdpa_replaced""",
    "contrastive": "linear_cross_entropy",
    "core.checks": "value_checks",
    "core.errors": "ConvergenceError GroupError InputError NoSolutionError UnknownFieldError",
    "core.outcome": "Outcome",
    "derivatives": "DerivativeReport check_derivatives differentiable",
    "kernels.engines": "engine",
    "measures": """
        Bernoulli Beta Binomial Categorical Dirichlet Empirical Exponential FixedShapeGamma Gamma
        Gaussian GaussianMixture Geometric MeanCovarianceGaussian Measure Mixture Poisson
        VonMisesFisher from_torch maximum_entropy posterior project""",
    "memory": "Memory",
}
_NAMES = {name: home for home, names in _HOMES.items() for name in names.split()}

# Names that moved. Asking for the old one says where the new one is.
_MOVED = {"Normal": "cumulant.MeanCovarianceGaussian", "claims": "cumulant.lab.claims"}


def __getattr__(name: str) -> Any:
    if name in _PARTS:
        return import_module(f"cumulant.{name}")
    if name in _NAMES:
        found = getattr(import_module(f"cumulant.{_NAMES[name]}"), name)
        globals()[name] = found
        return found
    from cumulant.core.renamed import moved

    moved("cumulant", name, _MOVED)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

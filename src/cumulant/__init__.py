"""Cumulant: the calculus of attention.

Attention is a measure over keys tilted by the query, and everything people want from it is a
derivative of its log-normalizer G.
"""

from cumulant import contrastive, dynamics, filtering, lens, memory, nn
from cumulant.attention import (
    Attended,
    attend,
    attend_packed,
    merge,
    scaled_dot_product_attention,
    sdpa_replaced,
)
from cumulant.errors import ConvergenceError, InputError
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
    Measure,
    Mixture,
    Normal,
    Poisson,
    VonMisesFisher,
    from_torch,
    maximum_entropy,
    posterior,
    project,
)
from cumulant.memory import Memory

__version__ = "0.1.0"

__all__ = [
    "Attended",
    "Bernoulli",
    "Beta",
    "Binomial",
    "Categorical",
    "ConvergenceError",
    "Dirichlet",
    "Empirical",
    "Exponential",
    "FixedShapeGamma",
    "Gamma",
    "Gaussian",
    "GaussianMixture",
    "Geometric",
    "InputError",
    "Measure",
    "Memory",
    "Mixture",
    "Normal",
    "Poisson",
    "VonMisesFisher",
    "attend",
    "attend_packed",
    "contrastive",
    "dynamics",
    "filtering",
    "from_torch",
    "lens",
    "maximum_entropy",
    "memory",
    "merge",
    "nn",
    "posterior",
    "project",
    "scaled_dot_product_attention",
    "sdpa_replaced",
]

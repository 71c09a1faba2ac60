"""Attention as a map on clouds of points: expansion, contraction, fixed points.

See docs/theory.md, T13-T18.
"""

from cumulant.dynamics.contraction import Contraction, LayerNorm, RMSNorm, Sphere, Whiten
from cumulant.dynamics.expansion import (
    Bounds,
    Expansion,
    Lipschitz,
    bounds,
    expansion,
    local_lipschitz,
)
from cumulant.dynamics.field import step
from cumulant.dynamics.fixed_point import FixedPoint, fixed_point, spectral_radius
from cumulant.dynamics.gaussian import GaussianPath, gaussian_flow, gaussian_map
from cumulant.dynamics.gaussianity import Gaussianity, gaussianity
from cumulant.dynamics.gibbs import (
    Alternation,
    BlockGibbs,
    alternate,
    alternation_matrix,
    block_gibbs,
    stationary,
)
from cumulant.dynamics.inverse import inverse
from cumulant.dynamics.krylov import Spectrum
from cumulant.dynamics.shape import Clusters, clusters, entropy, norm, participation_ratio, spread
from cumulant.dynamics.simulate import flow, simulate
from cumulant.dynamics.spins import MeanField, mean_field
from cumulant.dynamics.starts import start
from cumulant.dynamics.trajectory import Trajectory

__all__ = [
    "Alternation",
    "BlockGibbs",
    "Bounds",
    "Clusters",
    "Contraction",
    "Expansion",
    "FixedPoint",
    "GaussianPath",
    "Gaussianity",
    "LayerNorm",
    "Lipschitz",
    "MeanField",
    "RMSNorm",
    "Spectrum",
    "Sphere",
    "Trajectory",
    "Whiten",
    "alternate",
    "alternation_matrix",
    "block_gibbs",
    "bounds",
    "clusters",
    "entropy",
    "expansion",
    "fixed_point",
    "flow",
    "gaussian_flow",
    "gaussian_map",
    "gaussianity",
    "inverse",
    "local_lipschitz",
    "mean_field",
    "norm",
    "participation_ratio",
    "simulate",
    "spectral_radius",
    "spread",
    "start",
    "stationary",
    "step",
]

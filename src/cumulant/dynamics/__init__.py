"""Attention as a map on clouds of points: expansion, contraction, fixed points.

See docs/theory.md, T13-T18, T32, T34, T38.
"""

from typing import NoReturn

from cumulant.core.renamed import moved
from cumulant.dynamics.contraction import Contraction, LayerNorm, RMSNorm, Sphere, Whiten
from cumulant.dynamics.expansion import (
    Expansion,
    ExpansionBounds,
    Lipschitz,
    expansion,
    expansion_bounds,
    local_lipschitz,
)
from cumulant.dynamics.field import step
from cumulant.dynamics.fixed_point import FixedPoint, fixed_point, spectral_radius
from cumulant.dynamics.gaussian_path import GaussianPath, gaussian_flow, gaussian_map
from cumulant.dynamics.gaussianity import Gaussianity, gaussianity
from cumulant.dynamics.gibbs import (
    Alternation,
    BlockGibbs,
    alternate,
    alternation_matrix,
    block_gibbs,
    stationary,
)
from cumulant.dynamics.growth import (
    circle_growth_rate,
    fastest_degree,
    gaussian_growth_rate,
    sphere_growth_rate,
)
from cumulant.dynamics.initial import initial_cloud
from cumulant.dynamics.inverse import inverse
from cumulant.dynamics.krylov import Spectrum
from cumulant.dynamics.shape import (
    Clusters,
    cloud_entropy,
    cloud_norm,
    cloud_spread,
    clusters,
    participation_ratio,
)
from cumulant.dynamics.simulate import flow, simulate
from cumulant.dynamics.spins import MeanField, mean_field
from cumulant.dynamics.trajectory import Trajectory
from cumulant.dynamics.walk import WalkMeanField, walk_mean_field

__all__ = [
    "Alternation",
    "BlockGibbs",
    "Clusters",
    "Contraction",
    "Expansion",
    "ExpansionBounds",
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
    "WalkMeanField",
    "Whiten",
    "alternate",
    "alternation_matrix",
    "block_gibbs",
    "circle_growth_rate",
    "cloud_entropy",
    "cloud_norm",
    "cloud_spread",
    "clusters",
    "expansion",
    "expansion_bounds",
    "fastest_degree",
    "fixed_point",
    "flow",
    "gaussian_flow",
    "gaussian_growth_rate",
    "gaussian_map",
    "gaussianity",
    "initial_cloud",
    "inverse",
    "local_lipschitz",
    "mean_field",
    "participation_ratio",
    "simulate",
    "spectral_radius",
    "sphere_growth_rate",
    "stationary",
    "step",
    "walk_mean_field",
]

_MOVED = {
    "Bounds": "cumulant.dynamics.ExpansionBounds",
    "Status": "cumulant.Outcome",
    "bounds": "cumulant.dynamics.expansion_bounds",
    "entropy": "cumulant.dynamics.cloud_entropy",
    "norm": "cumulant.dynamics.cloud_norm",
    "spread": "cumulant.dynamics.cloud_spread",
    "start": "cumulant.dynamics.initial_cloud",
}


def __getattr__(name: str) -> NoReturn:
    moved("cumulant.dynamics", name, _MOVED)

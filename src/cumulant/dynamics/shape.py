"""The shape of a cloud in a few numbers: size, spread, dimension, clusters, entropy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cumulant.errors import InputError
from cumulant.measures.checks import finite, numbers

__all__ = ["Clusters", "clusters", "entropy", "norm", "participation_ratio", "spread"]


def cloud(owner: str, x: Tensor, name: str = "x") -> Tensor:
    """A finite ensemble of clouds ``(*batch, N, d)``."""
    got = finite(owner, name, numbers(owner, **{name: x})[0][name])
    if got.ndim < 2 or 0 in got.shape[-2:]:
        raise InputError(
            f"{owner}: {name} must have shape (*batch, N, d), N and d at least 1, but has "
            f"{tuple(got.shape)}."
        )
    return got


def norm(x: Tensor) -> Tensor:
    """Root mean square of the points' norms, ``(*batch,)``."""
    size = _size(x)
    return (x / size).square().sum(-1).mean(-1).sqrt() * size[..., 0, 0]


def _size(x: Tensor) -> Tensor:
    """The largest coordinate, ``(*batch, 1, 1)``: what to divide by before squaring."""
    size = x.detach().abs().amax((-2, -1), keepdim=True)
    return size.where(size > 0, 1.0)


def spread(x: Tensor) -> Tensor:
    """Root mean square distance from the cloud's mean, ``(*batch,)``."""
    return norm(x - x.mean(-2, keepdim=True))


def participation_ratio(x: Tensor) -> Tensor:
    """(tr C)^2 / tr C^2 of the covariance C: how many dimensions the cloud fills, ``(*batch,)``.

    d for an isotropic cloud, 1 on a line, 0 where all points coincide to working precision.

    >>> import torch, cumulant as cm
    >>> cm.dynamics.participation_ratio(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
    tensor(1.)
    """
    away = x - x.mean(-2, keepdim=True)
    size, whole = _size(away), _size(x)
    away = away / size
    n, d = x.shape[-2:]
    gram = away.mT @ away if d <= n else away @ away.mT
    total = away.square().sum((-2, -1))
    ratio = total.square() / gram.square().sum((-2, -1)).clamp_min(torch.finfo(x.dtype).tiny)
    apart = (size > 8 * torch.finfo(x.dtype).eps * whole)[..., 0, 0]
    return torch.where(apart, ratio, 0.0)


@dataclass(frozen=True)
class Clusters:
    """How many clusters there are, ``(*batch,)``, and which each point is in, ``(*batch, N)``."""

    count: Tensor
    labels: Tensor


def clusters(x: Tensor, *, distance: float = 0.1) -> Clusters:
    """Groups of points connected by links no longer than `distance` (single linkage).

    Labels count from 0 in the order in which the points come. The default suits clouds on the unit
    sphere.

    >>> import torch, cumulant as cm
    >>> cm.dynamics.clusters(torch.tensor([[0.0], [0.05], [1.0]])).count
    tensor(2)
    """
    points = cloud("clusters", x)
    if not (distance >= 0 and math.isfinite(distance)):
        raise InputError(f"clusters: distance must be finite and not negative, not {distance}.")
    flat = points.detach().cpu().double().reshape(-1, *points.shape[-2:]).numpy()
    labels = np.array([_linked(one, distance) for one in flat])
    found = torch.as_tensor(labels, device=x.device).long().reshape(points.shape[:-1])
    return Clusters(found.amax(-1) + 1, found)


def _linked(x: Any, distance: float) -> Any:
    """Labels of one cloud, in memory linear in N even where all points have run together.

    Every point joins the first leader within distance / 2, so that the points of a leader are all
    linked with each other; then only leaders up to 2 * distance apart are compared.
    """
    tree_of = import_module("scipy.spatial").cKDTree
    size = max(1.0, float(np.abs(x).max()))  # far-off clouds would overflow the tree's squares
    x, distance = x / size, distance / size
    tree = tree_of(x)
    leader = np.full(len(x), -1)
    for i in range(len(x)):
        if leader[i] < 0:
            near = np.array(tree.query_ball_point(x[i], distance / 2))
            leader[near[leader[near] < 0]] = i
    leaders, member = np.unique(leader, return_inverse=True)
    group = list(range(len(leaders)))

    def root(a: int) -> int:
        while group[a] != a:
            group[a] = group[group[a]]
            a = group[a]
        return a

    heads = x[leaders]
    pairs = tree_of(heads).query_pairs(2 * distance, output_type="ndarray")
    gaps = np.linalg.norm(heads[pairs[:, 0]] - heads[pairs[:, 1]], axis=-1)
    order = np.argsort(gaps, kind="stable")
    crowds = np.split(np.argsort(member, kind="stable"), np.bincount(member).cumsum()[:-1])
    for k in order:
        a, b = (root(int(p)) for p in pairs[k])
        if a == b:
            continue
        if gaps[k] > distance:
            first, second = (x[crowds[p]] for p in pairs[k])
            if tree_of(first).query(second)[0].min() > distance:
                continue
        group[max(a, b)] = min(a, b)
    roots = np.array([root(a) for a in range(len(leaders))])[member]
    _, where = np.unique(roots, return_index=True)
    rank = {int(roots[i]): k for k, i in enumerate(np.sort(where))}
    return np.array([rank[int(r)] for r in roots])


def entropy(x: Tensor, *, neighbors: int = 3) -> Tensor:
    """Differential entropy of the law the points were drawn from, in nats, ``(*batch,)``.

    Kozachenko and Leonenko's estimate from the distance to the k-th neighbor. -inf where points
    coincide k-fold: a law with atoms has no density.

    >>> import torch, cumulant as cm
    >>> x = torch.randn(4000, 2, generator=torch.Generator().manual_seed(0))
    >>> cm.dynamics.entropy(x)  # log(2 pi e) = 2.84
    tensor(2.8...)
    """
    points = cloud("entropy", x)
    n, d = points.shape[-2:]
    if not 1 <= neighbors < n:
        raise InputError(
            f"entropy: neighbors must lie between 1 and N - 1 = {n - 1}, not {neighbors}."
        )
    radii: list[Tensor] = []
    rows = max(1, 2**22 // n)
    for piece in points.double().split(rows, -2):
        gaps = torch.cdist(piece, points.double(), compute_mode="donot_use_mm_for_euclid_dist")
        radii.append(gaps.kthvalue(neighbors + 1, -1).values)  # the nearest is the point itself
    log_ball = 0.5 * d * math.log(math.pi) - math.lgamma(0.5 * d + 1)
    digamma = torch.digamma(torch.tensor([n, neighbors], dtype=torch.float64))
    offset = float(digamma[0] - digamma[1]) + log_ball
    return (offset + d * torch.cat(radii, -1).log().mean(-1)).to(points.dtype)

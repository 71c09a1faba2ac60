"""The shape of a cloud in a few numbers: size, spread, dimension, clusters, entropy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cumulant.core.checks import real
from cumulant.core.describing import described_fields
from cumulant.core.errors import InputError
from cumulant.dynamics.cloud_checks import cloud, some_points

__all__ = [
    "Clusters",
    "cloud_entropy",
    "cloud_norm",
    "cloud_spread",
    "clusters",
    "participation_ratio",
]


def cloud_norm(x: Tensor) -> Tensor:
    """Root mean square of the points' norms, ``(*batch,)``."""
    return _norm(cloud("cloud_norm", x))


def cloud_spread(x: Tensor) -> Tensor:
    """Root mean square distance from the cloud's mean, ``(*batch,)``."""
    points = cloud("cloud_spread", x)
    size = size_of(points)
    away, size = _centred(points / size), size[..., 0, 0]
    return _norm(away) * size


def _norm(x: Tensor) -> Tensor:
    size = size_of(x)
    return (x / size).square().sum(-1).mean(-1).sqrt() * size[..., 0, 0]


def _centred(x: Tensor) -> Tensor:
    return x - x.mean(-2, keepdim=True)


def size_of(x: Tensor) -> Tensor:
    """The largest coordinate, ``(*batch, 1, 1)``: what to divide by before squaring."""
    if x.numel() == 0:
        return x.new_ones(*x.shape[:-2], 1, 1)
    size = x.detach().abs().amax((-2, -1), keepdim=True)
    return size.where(size > 0, 1.0)


def participation_ratio(x: Tensor) -> Tensor:
    """(tr C)^2 / tr C^2 of the covariance C: how many dimensions the cloud fills, ``(*batch,)``.

    d for an isotropic cloud, 1 on a line, 0 where all points coincide to working precision.

    >>> import torch, cumulant as cm
    >>> cm.dynamics.participation_ratio(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
    tensor(1.)
    """
    points = cloud("participation_ratio", x)
    n, d = points.shape[-2:]
    away = _centred(points / size_of(points))
    size = size_of(away)  # in units of the largest coordinate
    away = away / size
    gram = away.mT @ away if d <= n else away @ away.mT
    total = away.square().sum((-2, -1))
    ratio = total.square() / gram.square().sum((-2, -1)).clamp_min(torch.finfo(away.dtype).tiny)
    apart = (size > 8 * torch.finfo(away.dtype).eps)[..., 0, 0] & (total > 0)
    return torch.where(apart, ratio, 0.0)


@dataclass(frozen=True)
class Clusters:
    """How many clusters there are, ``(*batch,)``, and which each point is in, ``(*batch, N)``."""

    count: Tensor
    labels: Tensor

    __repr__ = described_fields


def clusters(x: Tensor, *, distance: float = 0.1) -> Clusters:
    """Groups of points connected by links no longer than `distance` (single linkage).

    Labels count from 0 in the order in which the points come. The default suits clouds on the unit
    sphere.

    >>> import torch, cumulant as cm
    >>> cm.dynamics.clusters(torch.tensor([[0.0], [0.05], [1.0]])).count
    tensor(2)
    """
    points = some_points("clusters", x)
    reach = real("clusters", "distance", distance, least=0.0)
    flat = points.detach().cpu().double().reshape(-1, *points.shape[-2:]).numpy()
    labels = np.array([_linked(one, reach) for one in flat])
    found = torch.as_tensor(labels, device=points.device).long().reshape(points.shape[:-1])
    return Clusters(found.amax(-1) + 1, found)


_AT_ONCE = 2_000_000


def _linked(x: Any, distance: float) -> Any:
    """Labels of one cloud, in memory linear in N even where all points have run together.

    Every point joins the first leader within distance / 2, so that the crowd of a leader is linked
    throughout. Leaders within the distance are linked; of those farther apart, crowds are compared
    where their radii allow a link.
    """
    tree_of = import_module("scipy.spatial").cKDTree
    size = float(np.abs(x).max())
    if size > 1e100 or 0 < size < 1e-100:  # the tree squares distances
        unit = 2.0 ** math.frexp(size)[1]  # a power of two loses no digit
        x, distance = x / unit, distance / unit
    tree = tree_of(x)
    leader = np.full(len(x), -1)
    for i in range(len(x)):
        if leader[i] < 0:
            near = np.array(tree.query_ball_point(x[i], distance / 2), dtype=int)
            leader[near[leader[near] < 0]] = i
            leader[i] = i
    leaders, member = np.unique(leader, return_inverse=True)
    heads = x[leaders]
    radius = np.zeros(len(leaders))
    np.maximum.at(radius, member, np.linalg.norm(x - heads[member], axis=-1))
    crowds = np.split(np.argsort(member, kind="stable"), np.bincount(member).cumsum()[:-1])
    group = np.arange(len(leaders))
    for first, second, gap in _neighbors(tree_of(heads), distance + 2 * float(radius.max())):
        sure = gap <= distance
        group = _merged(group, first[sure], second[sure])
        open_ = ~sure & (gap <= distance + radius[first] + radius[second])
        for a, b in zip(first[open_], second[open_], strict=True):
            if group[a] != group[b]:
                nearest = tree_of(x[crowds[a]]).query(x[crowds[b]])[0].min()
                if nearest <= distance:
                    group[group == group[b]] = group[a]
    roots = group[member]
    _, where, place = np.unique(roots, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(where))[place]


def _neighbors(tree: Any, reach: float) -> Iterator[tuple[Any, Any, Any]]:
    """Pairs of a tree's points within reach, and their distances, some at a time."""
    points = tree.data
    counts = tree.query_ball_point(points, reach, return_length=True)
    ends = [0, *np.flatnonzero(np.diff(np.cumsum(counts) // _AT_ONCE)) + 1, len(points)]
    for start, stop in pairwise(ends):
        lists = tree.query_ball_point(points[start:stop], reach)
        first = np.repeat(np.arange(start, stop), [len(x) for x in lists])
        second = np.concatenate([np.asarray(x, dtype=int) for x in lists])
        once = first < second
        first, second = first[once], second[once]
        yield first, second, np.linalg.norm(points[first] - points[second], axis=-1)


def _merged(group: Any, first: Any, second: Any) -> Any:
    """Group labels after these pairs have been linked."""
    sparse, graph = (import_module(f"scipy.{m}") for m in ("sparse", "sparse.csgraph"))
    n = len(group)
    links = sparse.coo_matrix((np.ones(len(first)), (group[first], group[second])), shape=(n, n))
    return graph.connected_components(links, directed=False)[1][group]


def cloud_entropy(x: Tensor, *, neighbors: int = 3) -> Tensor:
    """Differential entropy of the law the points were drawn from, in nats, ``(*batch,)``.

    Kozachenko and Leonenko's estimate from the distance to the k-th neighbor. -inf where points
    coincide k-fold: a law with atoms has no density.

    >>> import torch, cumulant as cm
    >>> x = torch.randn(4000, 2, generator=torch.Generator().manual_seed(0))
    >>> cm.dynamics.cloud_entropy(x)  # log(2 pi e) = 2.84
    tensor(2.8...)
    """
    points = some_points("cloud_entropy", x)
    n, d = points.shape[-2:]
    if not 1 <= neighbors < n:
        raise InputError(
            f"cloud_entropy: neighbors must lie between 1 and N - 1 = {n - 1}, not {neighbors}."
        )
    size = size_of(_centred(points / size_of(points))) * size_of(points)
    scaled = _centred(points.double() / size.double())
    radii: list[Tensor] = []
    for piece in torch.split(scaled, rows_at_once(scaled), -2):
        gaps = torch.cdist(piece, scaled, compute_mode="donot_use_mm_for_euclid_dist")
        radii.append(gaps.kthvalue(neighbors + 1, -1).values)  # the nearest is the point itself
    log_ball = 0.5 * d * math.log(math.pi) - math.lgamma(0.5 * d + 1)
    digamma = torch.digamma(torch.tensor([n, neighbors], dtype=torch.float64))
    offset = float(digamma[0] - digamma[1]) + log_ball
    logs = torch.cat(radii, -1).log().mean(-1) + size.double().log()[..., 0, 0]
    return (offset + d * logs).to(points.dtype)


def rows_at_once(x: Tensor) -> int:
    """How many rows of an N x N array over a batch ``(*batch, N, d)`` to hold together."""
    return max(1, 2**22 // max(1, x.shape[-2] * math.prod(x.shape[:-2])))

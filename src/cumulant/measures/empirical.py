"""Weighted points: the measure behind attention (docs/theory.md, T1, T7, T8)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Literal, overload

import torch
from torch import Tensor

from cumulant.core.checks import broadcast, finite, log_masses, numbers
from cumulant.core.errors import InputError
from cumulant.core.outcome import Outcome, Solution
from cumulant.kernels import formulas
from cumulant.kernels.attention import Moments, Options, attention, expectation
from cumulant.measures.calculus import log_sum_exp
from cumulant.measures.frame import whitening
from cumulant.measures.measure import Measure
from cumulant.measures.newton import Problem

__all__ = ["Empirical", "maximum_entropy"]


class Empirical(Measure):
    """Weighted points: G(eta) = log sum_j w_j exp<x_j, eta> (T1).

    ``mean`` is softmax attention with queries eta (without 1/sqrt(d)) and keys = values = x.
    Everything streams over the points, so memory is linear in M + N.

    Args:
        points: ``(*batch, N, d)``.
        log_weights: ``(*batch, N)``, unnormalized; -inf removes a point. Default all zero: the
            counting measure.
        values: ``(*batch, N, e)``, attached to the points for `value_mean`.

    Raises:
        InputError: no points, non-finite numbers, all weights zero, or mismatched shapes.

    >>> import torch, cumulant as cm
    >>> die = cm.Empirical(torch.arange(1.0, 7.0)[:, None])
    >>> die.mean(torch.zeros(1, 1)), die.log_normalizer(torch.zeros(1, 1)).exp().round()
    (tensor([[3.5000]]), tensor([6.]))
    """

    _parameters: ClassVar[Mapping[str, int]] = {"points": 2, "log_weights": 1, "values": 2}

    def __init__(
        self, points: Tensor, log_weights: Tensor | None = None, values: Tensor | None = None
    ) -> None:
        given = {"points": points, "log_weights": log_weights, "values": values}
        kept = {n: x for n, x in given.items() if x is not None or n == "points"}
        got, self._weak = numbers("Empirical", **kept)
        self.points = finite("Empirical", "points", got["points"])
        if self.points.ndim < 2 or 0 in self.points.shape[-2:]:
            raise InputError(
                "Empirical: points must have shape (..., N, d) with N and d at least 1, but have "
                f"{tuple(self.points.shape)}. Pass one-dimensional points as x[:, None]."
            )
        n = self.points.shape[-2]
        self.log_weights, self.values = got.get("log_weights"), got.get("values")
        shapes = {"points": self.points.shape[:-2]}
        if self.log_weights is not None:
            log_masses("Empirical", "log_weights", self.log_weights, n)
            shapes["log_weights"] = self.log_weights.shape[:-1]
        if self.values is not None:
            finite("Empirical", "values", self.values)
            if self.values.ndim < 2 or self.values.shape[-2] != n:
                raise InputError(
                    f"Empirical: values must have shape (..., {n}, e), one row per point, but "
                    f"have {tuple(self.values.shape)}."
                )
            shapes["values"] = self.values.shape[:-2]
        broadcast("Empirical", **shapes)

    def __repr__(self) -> str:
        count, batch = self.points.shape[-2], tuple(self.batch_shape)
        return f"Empirical({count} points, dimension={self.dimension}, batch_shape={batch})"

    @property
    def dimension(self) -> int:
        return self.points.shape[-1]

    def _arguments(self, eta: Tensor, points: Tensor) -> dict[str, Tensor]:
        """Named kernel arguments: keys relative to their center, weights scaled to maximum 1."""
        out = {"query": eta, "key": points}
        if self.log_weights is not None:
            out["bias"] = (self.log_weights - self._top())[..., None, :]
        rank = eta.ndim
        return {n: x[(None,) * (rank - x.ndim)] for n, x in out.items()}

    def _center(self) -> Tensor:
        """A constant near the points; subtracting it preserves precision far from the origin."""
        return self.points.detach().mean(-2, keepdim=True)

    def _top(self) -> Tensor:
        if self.log_weights is None:
            return self.points.new_zeros(1)
        return self.log_weights.detach().amax(-1, keepdim=True)

    def _moments(self, eta: Tensor, value: Tensor | None = None, entropy: bool = False) -> Moments:
        """Attention about the center; the values default to the points relative to it."""
        points = self.points - self._center()
        arguments = self._arguments(eta, points)
        value = points if value is None else value
        arguments["value"] = value[(None,) * (eta.ndim - value.ndim)]
        return attention(arguments, Options(entropy=entropy))

    def _lifted(self, eta: Tensor, moments: Moments) -> Tensor:
        along = (eta * self._center()).sum(-1)
        return moments.log_normalizer[..., 0] + along + self._top()

    def _log_normalizer(self, eta: Tensor) -> Tensor:
        return self._lifted(eta, self._moments(eta, self.points[..., :0]))

    def _mean(self, eta: Tensor) -> Tensor:
        return self._moments(eta).mean + self._center()

    def _value_and_mean(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        moments = self._moments(eta)
        return self._lifted(eta, moments), moments.mean + self._center()

    def _covariance(self, eta: Tensor) -> Tensor:
        # In double precision: with peaked weights the differences are far below the points' size.
        double = self._to(eta.dtype if eta.device.type == "mps" else torch.float64)
        return double._spread(eta.to(double.dtype)).to(eta.dtype)

    def _spread(self, eta: Tensor) -> Tensor:
        """Cov[x] = E[(x - c)(x - c)'] - (E[x] - c)(E[x] - c)', with c central among the means."""
        d = self.dimension
        moments = self._moments(eta)
        center = moments.mean.detach().mean(-2, keepdim=True)
        arguments = self._arguments(eta, self.points - self._center())
        arguments |= {"log_normalizer": moments.log_normalizer, "center": center}
        width = d * (d + 1) // 2
        sums = expectation(formulas.moments, "moments", arguments, Options(), width=1 + d + width)
        mean, square = torch.split(sums[..., 1:] / sums[..., :1], [d, width], -1)
        return unpack(square, d) - mean[..., :, None] * mean[..., None, :]

    def _relative_entropy(self, eta: Tensor) -> Tensor:
        """-H - E[log w], with H summed as p log p: the plain difference would cancel (T7)."""
        if self.log_weights is None:
            entropy = self._moments(eta, self.points[..., :0], entropy=True).entropy
            return -_column(entropy)
        removed = self.log_weights == -math.inf
        value = self.log_weights.masked_fill(removed, 0.0)[..., None]
        moments = self._moments(eta, value, entropy=True)
        return -_column(moments.entropy) - moments.mean[..., 0]

    def _visible(self, eta: Tensor) -> Tensor:
        center, spread = self._to(eta.dtype)._detached()._extent()
        frame, _ = whitening(center, spread, center, torch.finfo(eta.dtype).eps)
        return eta @ frame.span

    def _extent(self) -> tuple[Tensor, Tensor]:
        """Over the points with nonzero weight, equally weighted: the hull ignores weights."""
        count = torch.ones_like(self.points[..., :1])
        if self.log_weights is not None:
            count = count * (self.log_weights > -math.inf)[..., None]
        share = count / count.sum(-2, keepdim=True)
        center = (share * self.points).sum(-2, keepdim=True)
        away = self.points - center
        return center, (share * away).mT @ away

    def _problem(self) -> Problem:
        floor = self.points.new_zeros(1)
        if self.log_weights is not None:
            alive = self.log_weights > -math.inf
            floor = torch.where(alive, self.log_weights, math.inf).amin(-1, keepdim=True)
        single = self._to(torch.float32)

        def rough(eta: Tensor) -> Tensor:
            return single._spread(eta.to(single.dtype)).to(eta.dtype)

        reach = (self.points - self._center()).abs().amax(-2, keepdim=True)
        return Problem(
            self._value_and_mean, self._covariance, rough=rough, floor=floor, reach=reach
        )

    def value_mean(self, eta: Tensor | None = None) -> Tensor:
        """E[v] ``(*batch, M, e)``: the attention output. Its derivative in eta is Cov[v, x] (T1).

        >>> import torch, cumulant as cm
        >>> h = cm.Empirical(torch.eye(2), values=torch.tensor([[1.0], [3.0]]))
        >>> h.value_mean(torch.zeros(1, 2))
        tensor([[2.]])
        """
        if self.values is None:
            raise InputError("value_mean: this measure has no values; pass Empirical(values=...).")
        entry = self._enter("value_mean", eta=eta)
        measure = entry.measure
        return entry.finish(measure._moments(*entry.arguments, measure.values).mean, 1)

    def probabilities(self, eta: Tensor | None = None) -> Tensor:
        """p(j | eta) ``(*batch, M, N)``, the attention weights; the only M x N array formed."""
        entry = self._enter("probabilities", eta=eta)
        measure, (eta,) = entry.measure, entry.arguments
        return entry.finish(measure._scores(eta).softmax(-1), 1)

    def _scores(self, eta: Tensor) -> Tensor:
        """<x - center, eta> + log(w / max w), ``M x N``."""
        scores = eta @ (self.points - self._center()).mT
        if self.log_weights is None:
            return scores
        return scores + (self.log_weights - self._top())[..., None, :]

    def _sample(self, eta: Tensor, n: int) -> Tensor:
        """Inverse-transform sampling from cumulative weights, a block of rows at a time."""
        batch, (m, d) = eta.shape[:-2], eta.shape[-2:]
        points = self.points.expand(*batch, *self.points.shape[-2:])
        drawn = points.new_empty(n, *batch, m, d)
        step = max(1, 2**20 // (points.shape[-2] * max(1, math.prod(batch))))
        for start in range(0, m, step):
            rows = slice(start, start + step)
            scores = self._scores(eta[..., rows, :]).double()
            heights = (scores - scores.amax(-1, keepdim=True)).exp().cumsum(-1)
            level = torch.rand(*heights.shape[:-1], n, dtype=heights.dtype, device=eta.device)
            index = torch.searchsorted(heights, (1 - level) * heights[..., -1:])
            flat = index.flatten(-2)[..., None].expand(*batch, -1, d)
            some = torch.unflatten(points.gather(-2, flat), -2, (index.shape[-2], n))
            drawn[..., rows, :] = some.movedim(-2, 0)
        return drawn

    def _log_density(self, x: Tensor, eta: Tensor) -> Tensor:
        mass = self._log_mass(x)
        center = self._center()
        height = self._moments(eta, self.points[..., :0]).log_normalizer[..., 0] + self._top()
        here = ((x - center) * eta).sum(-1) + torch.where(mass == -math.inf, 0.0, mass)
        return torch.where(mass == -math.inf, mass, here - height)

    def _log_mass(self, x: Tensor) -> Tensor:
        """log h({x}): the total weight of the points equal to x."""
        parts: list[Tensor] = []
        step = max(1, 2**22 // (self.points.numel() * max(1, math.prod(x.shape[:-2]))))
        for piece in torch.split(x, step, -2):
            same = (piece[..., :, None, :] == self.points[..., None, :, :]).all(-1)
            logs = x.new_zeros(1) if self.log_weights is None else self.log_weights[..., None, :]
            parts.append(log_sum_exp(torch.where(same, logs, -math.inf), -1))
        return torch.cat(parts, -1) if parts else x.new_zeros(x.shape[:-1])


def _column(x: Tensor | None) -> Tensor:
    if x is None:
        raise RuntimeError("the kernel did not return the requested entropy")
    return x[..., 0]


def unpack(packed: Tensor, d: int) -> Tensor:
    """The symmetric matrix ``(..., d, d)`` with this row-major upper triangle."""
    first, second = torch.triu_indices(d, d, device=packed.device)
    place = torch.empty(d, d, dtype=torch.long, device=packed.device)
    place[first, second] = place[second, first] = torch.arange(len(first), device=packed.device)
    return packed[..., place]


@overload
def maximum_entropy(
    points: Tensor,
    moments: Tensor | float,
    *,
    log_weights: Tensor | None = None,
    throw: Literal[True] = True,
) -> Tensor: ...


@overload
def maximum_entropy(
    points: Tensor,
    moments: Tensor | float,
    *,
    log_weights: Tensor | None = None,
    throw: Literal[False],
) -> Solution: ...


def maximum_entropy(
    points: Tensor,
    moments: Tensor | float,
    *,
    log_weights: Tensor | None = None,
    throw: bool = True,
) -> Tensor | Solution:
    """The maximum-entropy probabilities on points, or features of them, with given means (T8).

    Among all p with sum_j p_j x_j = moments these have the largest entropy (relative to the given
    weights, the smallest KL); they are the tilted measure p_j ∝ w_j exp<x_j, eta>.

    Args:
        points: ``(*batch, N, d)``, or ``(N,)`` for d = 1; functions of the outcomes.
        moments: the mean to match, ``(*batch, d)``, or a number for d = 1.
        log_weights: ``(*batch, N)``, the prior; default uniform.
        throw: False returns a `Solution`, the probabilities and an `Outcome`, instead of raising.

    Returns:
        ``(*batch, N)``, summing to one; differentiable.

    Raises:
        NoSolutionError: no probabilities have these moments, or only ones that are zero somewhere.
        ConvergenceError: Newton's method stalled.

    Jaynes' die, whose throws average 4.5 instead of 3.5:

    >>> import torch, cumulant as cm
    >>> cm.maximum_entropy(torch.arange(1.0, 7.0), 4.5)
    tensor([0.0544, 0.0788, 0.1142, 0.1654, 0.2398, 0.3475])
    """
    got, weak = numbers("maximum_entropy", points=points, moments=moments)
    kind = torch.get_default_dtype() if weak else got["points"].dtype
    points, target = got["points"].double(), got["moments"].double()
    if points.ndim == 1:
        points, target = points[:, None], target[..., None]
    measure = Empirical(points, log_weights)
    if target.ndim == 0 or target.shape[-1] != measure.dimension:
        raise InputError(
            f"maximum_entropy: moments must have shape (..., {measure.dimension}), one per "
            f"column of the points, but have {tuple(target.shape)}."
        )
    eta, status = measure.link(target[..., None, :], throw=False)
    probabilities = measure.probabilities(eta)[..., 0, :].to(kind)
    found = Solution(probabilities, Outcome(status.code[..., 0]))
    return found.status.check("maximum_entropy", found).value if throw else found

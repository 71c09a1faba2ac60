"""Mixtures: G(eta) = log sum_n pi_n exp G_n(eta) (docs/theory.md, T4, T5)."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor
from torch import distributions as td

from cumulant.core.checks import (
    broadcast,
    finite,
    log_masses,
    numbers,
    positive,
    require,
    symmetric_definite,
)
from cumulant.core.errors import InputError
from cumulant.core.outcome import Code, Outcome, Solution
from cumulant.core.typed import functions, linalg
from cumulant.measures.calculus import log_sum_exp
from cumulant.measures.empirical import Empirical, unpack
from cumulant.measures.family import ExponentialFamily
from cumulant.measures.gaussian import could_be_dense, log_gaussian
from cumulant.measures.measure import Measure

__all__ = ["GaussianMixture", "Mixture"]

_KINDS = ("shared", "own", "diagonal", "isotropic")


class GaussianMixture(Measure):
    """Gaussians N(mu_n, S_n) with weights pi_n (T4, T5).

    G(eta) = log sum_n pi_n exp(<mu_n, eta> + eta' S_n eta / 2), exactly, and its gradient is
    sum_n r_n (mu_n + S_n eta) with responsibilities r_n. The exponent is linear in the features
    (eta, eta eta' / 2), so components are points and the attention kernel computes the sum; with
    shared S it is attention plus S eta.

    Args:
        means: ``(*batch, N, d)``.
        covariances: by `covariance_type`: "shared" ``(*batch, d, d)``, "own" ``(*batch, N, d, d)``,
            "diagonal" ``(*batch, N, d)``, "isotropic" ``(*batch, N)`` or one number.
        log_weights: log pi ``(*batch, N)``, unnormalized; default uniform.
        covariance_type: default inferred from the shape. If N = d, a ``(d, d)`` array is shared if
            it is symmetric positive definite, and diagonal otherwise.

    >>> import torch, cumulant as cm
    >>> h = cm.GaussianMixture(torch.tensor([[-1.0], [1.0]]), 0.5)
    >>> h.mean(torch.zeros(1, 1)), h.covariance(torch.zeros(1, 1))
    (tensor([[0.]]), tensor([[[1.5000]]]))
    """

    means: Tensor
    covariances: Tensor
    log_weights: Tensor

    def __init__(
        self,
        means: Tensor,
        covariances: Tensor | float,
        log_weights: Tensor | None = None,
        *,
        covariance_type: str | None = None,
    ) -> None:
        owner = "GaussianMixture"
        given: dict[str, Any] = {"means": means, "covariances": covariances}
        if log_weights is not None:
            given["log_weights"] = log_weights
        got, self._weak = numbers(owner, **given)
        self.means, spread = finite(owner, "means", got["means"]), got["covariances"]
        if self.means.ndim < 2 or 0 in self.means.shape[-2:]:
            raise InputError(
                f"{owner}: means must have shape (..., N, d) with N and d at least 1, but have "
                f"{tuple(self.means.shape)}."
            )
        n = self.means.shape[-2]
        if spread.ndim == 0:
            spread = spread.expand(n)
        self.covariance_type = kind = _kind(owner, self.means, spread, covariance_type)
        finite(owner, "covariances", spread)
        dense = kind in ("shared", "own")
        check = symmetric_definite if dense else positive
        self.covariances = check(owner, "covariances", spread)
        if log_weights is None:
            weights = torch.full_like(self.means[..., 0].detach(), -math.log(n))
        else:
            weights = log_masses(owner, "log_weights", got["log_weights"], n)
        self.log_weights = weights
        self._set_parameters()
        tail = self._parameters["covariances"]
        broadcast(
            owner,
            means=self.means.shape[:-2],
            covariances=self.covariances.shape[: self.covariances.ndim - tail],
            log_weights=self.log_weights.shape[:-1],
        )

    def _set_parameters(self) -> None:
        tail = {"shared": 2, "own": 3, "diagonal": 2, "isotropic": 1}[self.covariance_type]
        self._parameters: Mapping[str, int] = {  # pyright: ignore[reportIncompatibleVariableOverride]
            "means": 2,
            "covariances": tail,
            "log_weights": 1,
        }

    @property
    def dimension(self) -> int:
        return self.means.shape[-1]

    # The exponent is <features_n, lifted eta>, plus eta' S eta / 2 where S is shared.

    def _features(self) -> Empirical:
        means, spread = self.means, self.covariances
        if self.covariance_type == "shared":
            features = means
        else:
            if self.covariance_type == "own":
                d = self.dimension
                first, second = torch.triu_indices(d, d, device=spread.device)
                spread = spread[..., first, second]
            elif self.covariance_type == "isotropic":
                spread = spread[..., None]
            batch = functions.broadcast_shapes(means.shape[:-2], spread.shape[:-2])
            features = torch.cat([x.expand(*batch, *x.shape[-2:]) for x in (means, spread)], -1)
        new = Empirical.__new__(Empirical)
        new.points, new.log_weights, new.values = features, self.log_weights, None
        return new

    def _lift(self, eta: Tensor) -> Tensor:
        kind = self.covariance_type
        if kind == "shared":
            return eta
        if kind == "diagonal":
            second = eta.square() / 2
        elif kind == "isotropic":
            second = eta.square().sum(-1, keepdim=True) / 2
        else:  # twice the half off the diagonal, for both triangles
            i, j = torch.triu_indices(self.dimension, self.dimension, device=eta.device)
            second = eta[..., i] * eta[..., j] * torch.where(i == j, 0.5, 1.0).to(eta.dtype)
        return torch.cat([eta, second], -1)

    def _quadratic(self, eta: Tensor) -> Tensor:
        """eta' S eta / 2 of the shared covariance."""
        return (eta * (eta @ self.covariances)).sum(-1) / 2

    def _log_normalizer(self, eta: Tensor) -> Tensor:
        value = self._features()._log_normalizer(self._lift(eta))
        return value + self._quadratic(eta) if self.covariance_type == "shared" else value

    def _mean(self, eta: Tensor) -> Tensor:
        return self._value_and_mean(eta)[1]

    def _covariance(self, eta: Tensor) -> Tensor:
        # In double precision: peaked responsibilities give small differences of large features.
        double = self._to(eta.dtype if eta.device.type == "mps" else torch.float64)
        return super(GaussianMixture, double)._covariance(eta.to(double.dtype)).to(eta.dtype)

    def _value_and_mean(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        """G, and E[mu] + E[S] eta over the responsibilities."""
        value, expected = self._features()._value_and_mean(self._lift(eta))
        if self.covariance_type == "shared":
            return value + self._quadratic(eta), expected + eta @ self.covariances
        return value, self._applied(expected, eta)

    def _applied(self, features: Tensor, eta: Tensor) -> Tensor:
        """mu + S eta for features (mu, S), averaged or not."""
        d = self.dimension
        mean, spread = features[..., :d], features[..., d:]
        if self.covariance_type == "own":
            return mean + (unpack(spread, d) @ eta[..., None])[..., 0]
        return mean + spread * eta

    def log_normalizer_bound(self, eta: Tensor | None = None, q: Tensor | None = None) -> Tensor:
        """Jensen's lower bound of G for weights q on the components (T5).

        sum_n q_n (<mu_n, eta> + eta' S_n eta / 2 + log(pi_n / q_n)), below G by KL(q || r). It
        touches G where q are the responsibilities at eta.

        Args:
            eta: ``(*batch, M, d)``.
            q: probabilities ``(N,)`` or ``(*batch, M, N)``; default the mixture's own weights, for
                which the bound is tight at eta = 0.
        """
        entry = self._enter("log_normalizer_bound", eta=eta)
        measure, (eta,) = entry.measure, entry.arguments
        log_pi = measure.log_weights[..., None, :]
        n = log_pi.shape[-1]
        share: Tensor = log_pi.softmax(-1)
        if q is not None:
            got, _ = numbers("log_normalizer_bound", q=q)
            share = got["q"].to(eta.dtype)
            if share.ndim < 1 or share.shape[-1] != n:
                raise InputError(
                    f"log_normalizer_bound: q must end in a dimension of {n}, one weight per "
                    f"component, but has shape {tuple(share.shape)}."
                )
            slack = 1e2 * n * torch.finfo(share.dtype).eps
            require(
                (share >= 0) & ((share.sum(-1, keepdim=True) - 1).abs() <= slack),
                lambda: "log_normalizer_bound: q must be >= 0 and sum to 1 over the components.",
            )
            if share.ndim == 1:
                share = share[None]
            broadcast("log_normalizer_bound", q=share.shape[:-1], eta=eta.shape[:-1])
        expected = share @ measure._features().points
        value = (expected * measure._lift(eta)).sum(-1)
        if measure.covariance_type == "shared":
            value = value + measure._quadratic(eta)
        used = share > 0
        ratio = torch.where(used, log_pi, 0.0) - torch.where(used, share, 1.0).log()
        return entry.finish(value + (share * ratio).sum(-1), 0)

    def responsibilities(self, eta: Tensor | None = None) -> Tensor:
        """r_n(eta) ``(*batch, M, N)``: the share of each component in p_eta (T5)."""
        entry = self._enter("responsibilities", eta=eta)
        measure, (eta,) = entry.measure, entry.arguments
        scores = measure._features()._scores(measure._lift(eta))
        return entry.finish(scores.softmax(-1), 1)

    def _roots(self) -> Tensor:
        """Cholesky factors ``(*batch, N or 1, d, d)``."""
        kind, d = self.covariance_type, self.dimension
        if kind == "shared":
            return linalg.cholesky(self.covariances)[..., None, :, :]
        if kind == "own":
            return linalg.cholesky(self.covariances)
        spread = self.covariances
        spread = spread if kind == "diagonal" else spread[..., None].expand(*spread.shape, d)
        return torch.diag_embed(spread.sqrt())

    def _sample(self, eta: Tensor, n: int) -> Tensor:
        """Draw a component by responsibility, then from N(mu_n + S_n eta, S_n)."""
        features, lifted = self._features(), self._lift(eta)
        drawn = features._sample(lifted, n)
        noise = torch.randn(n, *eta.shape, dtype=eta.dtype, device=eta.device)
        kind, d = self.covariance_type, self.dimension
        if kind == "shared":
            root = linalg.cholesky(self.covariances)
            return drawn + eta @ self.covariances + noise @ root.mT
        center = self._applied(drawn, eta)
        if kind == "own":
            root = linalg.cholesky(unpack(drawn[..., d:], d))
            return center + (root @ noise[..., None])[..., 0]
        return center + drawn[..., d:].sqrt() * noise

    def _log_density(self, x: Tensor, eta: Tensor) -> Tensor:
        inside = x.isfinite().all(-1)
        x = torch.where(inside[..., None], x, 0.0)
        away = x[..., None, :, :] - self.means[..., :, None, :]  # (..., N, M, d)
        logs = log_gaussian(away, self._roots()) + self.log_weights[..., None]
        value = log_sum_exp(logs, -2) + (x * eta).sum(-1) - self._log_normalizer(eta)
        return torch.where(inside, value, -math.inf)

    def to_torch(self) -> td.MixtureSameFamily:
        """The mixture as a torch distribution."""
        batch, n, d = self.batch_shape, self.means.shape[-2], self.dimension
        parts = td.MultivariateNormal(
            self.means.expand(*batch, n, d), scale_tril=self._roots().expand(*batch, n, d, d)
        )
        return td.MixtureSameFamily(
            td.Categorical(logits=self.log_weights.expand(*batch, n)), parts
        )


def _kind(owner: str, means: Tensor, spread: Tensor, asked: str | None) -> str:
    """Which of the four covariance types this is."""
    n, d = means.shape[-2:]
    ends = {"shared": (d, d), "own": (n, d, d), "diagonal": (n, d), "isotropic": (n,)}
    fits = [
        kind
        for kind, end in ends.items()
        if spread.ndim >= len(end)
        and tuple(spread.shape[spread.ndim - len(end) :]) == end
        and (asked == kind or spread.ndim - len(end) <= means.ndim - 2)
    ]
    if asked is not None:
        if asked not in _KINDS:
            raise InputError(f"{owner}: covariance_type must be one of {_KINDS}, not {asked!r}.")
        fits = [kind for kind in fits if kind == asked]
    # With a batch, shorter suffixes match too: take the longest.
    for kind in ("own", "shared", "diagonal", "isotropic"):
        if kind not in fits:
            continue
        both = kind == "shared" and "diagonal" in fits and asked is None and d > 1
        return kind if not both or could_be_dense(owner, "covariances", spread) else "diagonal"
    told = ", ".join(f"{kind} (..., {', '.join(map(str, end))})" for kind, end in ends.items())
    raise InputError(
        f"{owner}: covariances of shape {tuple(spread.shape)} do not fit {n} means of dimension "
        f"{d}" + (f" as {asked}" if asked else "") + f"; expected {told}."
    )


class Mixture(Measure):
    """A mixture of measures of one type, weights pi_n: G(eta) = log sum_n pi_n exp G_n(eta).

    For many Gaussians use `GaussianMixture`, which streams.

    Args:
        components: a measure with batch shape ``(*batch, N)``.
        log_weights: log pi ``(*batch, N)``; default uniform.

    >>> import torch, cumulant as cm
    >>> h = cm.Mixture(cm.Poisson(torch.tensor([1.0, 5.0])))
    >>> h.mean(torch.zeros(1, 1))
    tensor([[3.]])
    """

    def __init__(self, components: Measure, log_weights: Tensor | None = None) -> None:
        if not isinstance(components, Measure):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(
                f"Mixture: components must be a measure, not {type(components).__name__}."
            )
        if not components.batch_shape or components._rows:
            raise InputError(
                "Mixture: components must be a batch of untilted measures, (..., N); got "
                f"batch shape {tuple(components.batch_shape)}."
            )
        n = components.batch_shape[-1]
        if n == 0:
            raise InputError("Mixture: there must be at least one component.")
        self.components, self._weak = components, components._weak
        self._double = True
        if log_weights is None:
            like = torch.zeros(n, dtype=components.dtype, device=components.device)
            self.log_weights = like - math.log(n)
        else:
            got, _ = numbers("Mixture", log_weights=log_weights)
            given = log_masses("Mixture", "log_weights", got["log_weights"], n)
            self.log_weights = given.to(components.device, components.dtype)
            broadcast(
                "Mixture",
                log_weights=self.log_weights.shape[:-1],
                components=components.batch_shape[:-1],
            )

    def _leaves(self) -> dict[str, tuple[Tensor, int]]:
        inner = {"of." + n: (x, k + 1) for n, (x, k) in self.components._leaves().items()}
        return {**inner, "log_weights": (self.log_weights, 1)}

    def _rebuilt(self, leaves: Mapping[str, Tensor]) -> Self:
        new = copy.copy(self)
        inner = {n.removeprefix("of."): x for n, x in leaves.items() if n.startswith("of.")}
        new.components = self.components._rebuilt(inner)
        new.log_weights = leaves.get("log_weights", self.log_weights)
        return new

    @property
    def dimension(self) -> int:
        return self.components.dimension

    def _own(self, eta: Tensor) -> Tensor:
        """eta per component ``(*batch, N, M, d)``; zero where the component has no weight."""
        alive = (self.log_weights > -math.inf)[..., None, None]
        return torch.where(alive, eta[..., None, :, :], 0.0)

    def _parts(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        """G and log responsibilities ``(*batch, N, M)``."""
        logs = self.components._log_normalizer(self._own(eta)) + self.log_weights[..., None]
        total = log_sum_exp(logs, -2)
        return total, logs - total[..., None, :]

    def _log_normalizer(self, eta: Tensor) -> Tensor:
        return self._parts(eta)[0]

    def _mean(self, eta: Tensor) -> Tensor:
        share = self._parts(eta)[1].exp()[..., None]
        return (share * self.components._mean(self._own(eta))).sum(-3)

    def _inside(self, eta: Tensor) -> Tensor | None:
        inside = self.components._inside(self._own(eta))
        return None if inside is None else inside.all(-2)

    def _link(self, mean: Tensor) -> Solution:
        """By Newton's method, inside the hull of the components' supports."""
        if isinstance(self.components, Empirical):
            return self._pooled(self.components)._link(mean)
        if not isinstance(self.components, ExponentialFamily):
            return super()._link(mean)
        code = self.components._hull(mean[..., None, :, :]).amin(-2).expand(mean.shape[:-1])
        outside = (code == Code.OUTSIDE)[..., None]
        found = super()._link(torch.where(outside, self._mean(torch.zeros_like(mean)), mean))
        code = torch.where(code == Code.CONVERGED, found.status.code, code)
        return Solution(found.value, Outcome(code))

    def _pooled(self, components: Empirical) -> Empirical:
        """A mixture of weighted point sets is itself a weighted point set."""
        points, own = components.points, components.log_weights
        logs = self.log_weights[..., None].expand(*self.log_weights.shape, points.shape[-2])
        logs = logs if own is None else logs + own
        batch = functions.broadcast_shapes(points.shape[:-2], logs.shape[:-1])
        points = points.expand(*batch, *points.shape[-2:])
        return Empirical(points.flatten(-3, -2), logs.expand(*batch, -1).flatten(-2))

    def _edge(self, mean: Tensor, near: Tensor) -> Tensor:
        """The limit, unless the components have no mass on the boundary."""
        edge = self.components._edge(mean[..., None, :, :], near[..., None, :])
        return torch.where((edge == torch.inf).all(-2), torch.inf, near)

    def _sample(self, eta: Tensor, n: int) -> Tensor:
        share = self._parts(eta)[1].movedim(-2, -1)
        index = td.Categorical(logits=share).sample(torch.Size((n,)))  # (n, *batch, M)
        drawn = self.components._sample(self._own(eta), n)  # (n, *batch, N, M, k)
        place = index[..., None, :, None].expand(*drawn.shape[:-3], 1, *drawn.shape[-2:])
        return drawn.gather(-3, place).squeeze(-3)

    def _log_density(self, x: Tensor, eta: Tensor) -> Tensor:
        share = self._parts(eta)[1]
        logs = self.components._log_density(x[..., None, :, :], self._own(eta))
        return log_sum_exp(logs + share, -2)

    def _event_size(self) -> int:
        return self.components._event_size()

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and covariance of x: law of total covariance."""
        mean, spread = self.components.moments()
        share = self.log_weights.softmax(-1)[..., None]
        center = (share * mean).sum(-2)
        away = mean - center[..., None, :]
        outer = away[..., :, None] * away[..., None, :]
        return center, (share[..., None] * (spread + outer)).sum(-3)

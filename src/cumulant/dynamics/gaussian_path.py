"""What attention does to a Gaussian population, in closed form where there is one.

See docs/theory.md, T17.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cumulant.core.checks import broadcast, finite, numbers, real, semi_definite, whole
from cumulant.core.describing import described_fields
from cumulant.core.errors import InputError
from cumulant.core.typed import linalg, tolist
from cumulant.dynamics.ode import integrate
from cumulant.dynamics.simulate import ascending

__all__ = ["GaussianPath", "gaussian_flow", "gaussian_map"]


@dataclass(frozen=True)
class GaussianPath:
    """A Gaussian at several times.

    Attributes:
        times: ``(T,)``; those after the last blow-up are dropped.
        mean: ``(T, *batch, d)``; inf in a member of the batch that has blown up.
        covariance: ``(T, *batch, d, d)``, likewise.
        blow_up_time: ``(*batch,)``, when the covariance becomes infinite, or leaves the range of
            double precision; inf if it never does or, if it had to be integrated (values not a
            multiple of the identity), not before the last time requested. There the mean may
            overflow first, which counts too.
    """

    times: Tensor
    mean: Tensor
    covariance: Tensor
    blow_up_time: Tensor

    __repr__ = described_fields

    @property
    def participation_ratio(self) -> Tensor:
        """(tr S)^2 / tr S^2, ``(T, *batch)``: how many dimensions are filled, 0 for a point, inf
        after the blow-up."""
        size = self.covariance.abs().amax((-2, -1), keepdim=True)
        S = torch.where((size > 0) & size.isfinite(), self.covariance / size, 0.0)
        trace = S.diagonal(dim1=-2, dim2=-1).sum(-1)
        squares = S.square().sum((-2, -1))
        ratio = torch.where(squares > 0, trace.square() / squares, 0.0)
        return torch.where(size[..., 0, 0].isinf(), math.inf, ratio)

    @property
    def rank(self) -> Tensor:
        """Eigenvalues of the covariance above 1e-6 of the largest, ``(T, *batch)``; -1 after the
        blow-up."""
        sure = self.covariance.nan_to_num(0.0, 0.0, 0.0)
        values = linalg.eigvalsh(sure)
        counted = (values > 1e-6 * values[..., -1:].clamp_min(0.0)).sum(-1)
        return torch.where(self.covariance.isinf().any(-1).any(-1), -1, counted)


@dataclass(frozen=True)
class _Law:
    """Mean and covariance in double precision, with scores y'Ax and values Vy."""

    mean: Tensor
    covariance: Tensor
    A: Tensor
    V: Tensor
    dtype: torch.dtype


def _check(owner: str, mean: Tensor, covariance: Tensor, scores: Any, values: Any) -> _Law:
    """Everything in double precision and expanded to one batch."""
    given = {"mean": mean, "covariance": covariance, "scores": scores, "values": values}
    got, weak = numbers(owner, **{n: x for n, x in given.items() if x is not None})
    kind = torch.get_default_dtype() if weak else got["mean"].dtype
    got = {n: finite(owner, n, x) for n, x in got.items()}
    m, spread = got["mean"], got["covariance"]
    d = m.shape[-1] if m.ndim else 0
    if d == 0 or spread.ndim < 2 or spread.shape[-2:] != (d, d):
        raise InputError(
            f"{owner}: mean (*batch, d) and covariance (*batch, d, d) must agree, d at least 1, "
            f"but are {tuple(m.shape)} and {tuple(spread.shape)}."
        )
    semi_definite(owner, "covariance", spread)  # by the rounding of the precision it came in
    m, spread = m.double(), (spread.double() + spread.double().mT) / 2
    maps = [_matrix(owner, name, got.get(name), m) for name in ("scores", "values")]
    batch = broadcast(
        owner,
        mean=m.shape[:-1],
        covariance=spread.shape[:-2],
        scores=maps[0].shape[:-2],
        values=maps[1].shape[:-2],
    )
    S, A, V = (x.expand(*batch, d, d) for x in (spread, *maps))
    return _Law(m.expand(*batch, d), S, A, V, kind)


def _matrix(owner: str, name: str, given: Tensor | None, mean: Tensor) -> Tensor:
    """A matrix ``(..., d, d)``: the given one, a multiple of the identity, or the identity."""
    d = mean.shape[-1]
    one = torch.eye(d, dtype=mean.dtype, device=mean.device)
    x = one if given is None else given.to(mean.dtype)
    x = x * one if x.ndim == 0 else x
    if x.ndim < 2 or x.shape[-2:] != (d, d):
        raise InputError(
            f"{owner}: {name} must be a number or a matrix ({d}, {d}) like the covariance, but "
            f"has shape {tuple(x.shape)}."
        )
    return x


def _path(law: _Law, moments: list[tuple[float, Tensor, Tensor]], blow_up: Tensor) -> GaussianPath:
    """Gather; what has blown up is inf, and times at which nothing is left are dropped."""
    last = float(blow_up.abs().max()) if blow_up.numel() else math.inf
    kept = [m for m in moments if abs(m[0]) < last]
    times = torch.tensor([t for t, _, _ in kept], dtype=torch.float64)
    d = law.mean.shape[-1]
    batch = law.mean.shape[:-1]
    mean, covariance = law.mean.new_empty(0, *batch, d), law.mean.new_empty(0, *batch, d, d)
    if kept:
        mean = torch.stack([m for _, m, _ in kept])
        covariance = torch.stack([S for _, _, S in kept])
    gone = times.abs().reshape(-1, *[1] * blow_up.ndim).to(blow_up.device) >= blow_up.abs()
    mean = mean.masked_fill(gone[..., None], math.inf)
    covariance = covariance.masked_fill(gone[..., None, None], math.inf)
    return GaussianPath(times, mean.to(law.dtype), covariance.to(law.dtype), blow_up)


def gaussian_map(
    mean: Tensor,
    covariance: Tensor,
    steps: int,
    *,
    step_size: float = 1.0,
    scores: Tensor | float | None = None,
    values: Tensor | float | None = None,
) -> GaussianPath:
    """`step` of an infinite Gaussian cloud: N(m, S) stays Gaussian, in closed form.

    Attention over N(m, S) is V(m + S A x), so the step is affine, x -> B x + tau V m with
    B = I + tau V S A, and N(m, S) becomes N(B m + tau V m, B S B') (T17). Where B is singular,
    as for A = -I, S = I, tau = 1, the cloud loses rank.

    Args:
        mean, covariance: ``(*batch, d)`` and ``(*batch, d, d)``, which may be singular.
        steps: number of steps.
        step_size: tau.
        scores: A in the score y' A x; a number stands for a multiple of the identity, so it is
            beta. The identity by default.
        values: V, in the same way.

    Returns:
        A `GaussianPath` with steps + 1 times ``k * step_size``. It grows doubly exponentially and
        then ends where it left the range of double precision, see ``blow_up_time``.

    >>> import torch, cumulant as cm
    >>> path = cm.dynamics.gaussian_map(torch.zeros(1), torch.eye(1), 2)
    >>> path.covariance.flatten()  # 1, (1 + 1)^2, 4 (1 + 4)^2
    tensor([  1.,   4., 100.])
    """
    law = _check("gaussian_map", mean, covariance, scores, values)
    whole("gaussian_map", "steps", steps, 0)
    step_size = real("gaussian_map", "step_size", step_size)
    m, spread = law.mean, law.covariance
    one = torch.eye(m.shape[-1], dtype=m.dtype, device=m.device)
    blow_up = torch.full(m.shape[:-1], math.inf, dtype=torch.float64, device=m.device)
    moments = [(0.0, m, spread)]
    limit = torch.finfo(law.dtype).max
    for k in range(1, steps + 1):
        B = one + step_size * law.V @ spread @ law.A
        m, spread = _apply(B, m) + step_size * _apply(law.V, m), B @ spread @ B.mT
        spread = (spread + spread.mT) / 2
        good = (spread.abs() < limit).all(-1).all(-1) & (m.abs() < limit).all(-1)
        blow_up = torch.where(good | blow_up.isfinite(), blow_up, k * step_size)
        moments.append((k * step_size, m, spread))
        if not bool(blow_up.isinf().any()):
            break
    return _path(law, moments, blow_up)


def gaussian_flow(
    mean: Tensor,
    covariance: Tensor,
    times: Tensor | Sequence[float],
    *,
    scores: Tensor | float | None = None,
    values: Tensor | float | None = None,
) -> GaussianPath:
    """`flow` of an infinite Gaussian cloud: m' = V(I + S A) m, S' = V S A S + (V S A S)'.

    For V = I the covariance is S0^(1/2) (I - t S0^(1/2) (A + A') S0^(1/2))^(-1) S0^(1/2), which
    becomes infinite at t* = 1 / lambda_max(S0^(1/2) (A + A') S0^(1/2)) if that is positive (T17);
    for A = A' the mean is e^t (I - t S0 (A + A'))^(-1/2) m0. V = c I puts c A for A and e^(ct) for
    e^t. Cases without a closed form are integrated; there t* is where the solver's steps vanish.

    N points follow this only while beta^2 x' S x is well below 2 log N: they cannot outrun their
    largest member, and never blow up in finite time.

    Args:
        mean, covariance: ``(*batch, d)`` and ``(*batch, d, d)`` at time 0; the covariance may be
            singular.
        times: output times, increasing, from 0 or later.
        scores: A in the score y' A x; a number stands for a multiple of the identity, so it is
            beta. The identity by default.
        values: V, in the same way.

    Returns:
        A `GaussianPath`; its times end before the blow-up.

    >>> import torch, cumulant as cm
    >>> path = cm.dynamics.gaussian_flow(torch.zeros(1), torch.eye(1), [0.0, 0.25, 0.4, 0.6])
    >>> path.covariance.flatten(), path.blow_up_time  # 1 / (1 - 2t)
    (tensor([1., 2., 5.]), tensor(0.5000, dtype=torch.float64))
    """
    law = _check("gaussian_flow", mean, covariance, scores, values)
    given = (law.mean, law.covariance, law.A, law.V)
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        raise InputError(
            "gaussian_flow has no derivative, but an input requires one. Use "
            "gaussian_map with a small step_size, which has, or pass detached tensors."
        )
    wanted = ascending("gaussian_flow", times)
    one = torch.eye(law.mean.shape[-1], dtype=torch.float64, device=law.mean.device)
    if not torch.equal(law.V, law.V[..., :1, :1] * one):
        return _integrated(law, wanted)
    closed = _Closed(law)
    alive = [t for t in tolist(wanted) if t < float(closed.blow_up_time.max())]
    if torch.equal(law.A, law.A.mT):
        means = [closed.mean(t) for t in alive]
    else:
        means = _driven_means(law, alive)
    moments = list(zip(alive, means, map(closed.covariance, alive), strict=True))
    return _path(law, moments, closed.blow_up_time)


class _Closed:
    """The solution for V = c I: the eigenvalues of c L'(A + A')L, where S0 = L L'."""

    def __init__(self, law: _Law) -> None:
        values, vectors = linalg.eigh(law.covariance)
        self.L = vectors * values.clamp_min(0.0).sqrt()[..., None, :]
        self.V = law.V[..., 0, 0]  # values c I are values I with scores c A, but for m' = c m + ...
        self.A = law.V @ law.A
        self.S = self.A + self.A.mT
        self.start = law.mean
        self.rates, Q = linalg.eigh(self.L.mT @ self.S @ self.L)
        self.LQ = self.L @ Q
        top = self.rates[..., -1]
        tiny = 1e-14 * law.covariance.abs().amax((-2, -1)) * self.S.abs().amax((-2, -1))
        self.blow_up_time = torch.where(top > tiny, 1 / top, math.inf)

    def _left(self, t: float) -> Tensor:
        """1 - t * rate; held at 1 for members that have blown up, whose values are not used."""
        alive = (t < self.blow_up_time)[..., None]
        return torch.where(alive, 1 - t * self.rates, 1.0)

    def covariance(self, t: float) -> Tensor:
        return (self.LQ / self._left(t)[..., None, :]) @ self.LQ.mT

    def mean(self, t: float) -> Tensor:
        """e^(ct) f(S0 (A + A')) m0 with f(z) = (1 - tz)^(-1/2), by f(LL'S) = I + L g(L'SL) L'S.

        g(z) = (f(z) - 1) / z, written without the cancellation at z = 0.
        """
        root = self._left(t).sqrt()
        g = t / (root * (1 + root))
        along = _apply(self.LQ.mT @ self.S, self.start)
        slow = self.start + _apply(self.LQ, g * along)
        return ((self.V * t).exp()[..., None] * slow).nan_to_num(0.0, math.inf, -math.inf)


def _driven_means(law: _Law, times: list[float]) -> list[Tensor]:
    """m' = (I + S(t) A) m for a score matrix that is not symmetric, one member after another."""
    d = law.mean.shape[-1]
    out = law.mean.new_full((len(times), *law.mean.shape), math.inf)
    flat = out.reshape(len(times), -1, d)
    tensors = zip(
        law.mean.reshape(-1, d),
        *(x.reshape(-1, d, d) for x in (law.covariance, law.A, law.V)),
        strict=True,
    )
    for i, member in enumerate(tensors):
        alone = _Law(member[0], member[1], member[2], member[3], law.dtype)
        for k, mean in enumerate(_driven_mean(alone, times)):
            flat[k, i] = mean
    return list(out)


def _driven_mean(law: _Law, times: list[float]) -> Iterator[Tensor]:
    """One mean, at the times before its blow-up.

    Time is stretched towards it, t = t* (1 - e^(-s)): the mean grows like a power of t* - t, and
    1 - t rate keeps its digits as (1 - rate / top) + (rate / top) e^(-s).
    """
    closed = _Closed(law)
    end = float(closed.blow_up_time)
    mine = [t for t in times if t < end]
    share = closed.rates / closed.rates[-1] if math.isfinite(end) else closed.rates
    rest = (closed.rates[-1] - closed.rates) / closed.rates[-1]

    def velocity(s: float, m: Tensor) -> Tensor:
        pace, left = 1.0, 1 - s * closed.rates
        if math.isfinite(end):
            pace, left = end * math.exp(-s), rest + share * math.exp(-s)
        along = closed.LQ.mT @ (closed.A @ m)
        return pace * (closed.V * m + closed.LQ @ (along / left))

    clock = [-math.log1p(-t / end) for t in mine] if math.isfinite(end) else mine
    if not mine:
        return
    outputs = integrate(
        velocity,
        law.mean,
        torch.tensor(clock, dtype=torch.float64),
        size=lambda m: m.abs().amax(-1),
        limit=1e290,
        rtol=1e-10,
        atol=1e-300,
    )
    for out in outputs:
        if bool(out.escaped.isfinite()):
            return
        yield out.state


def _integrated(law: _Law, times: Tensor) -> GaussianPath:
    """Any V: the pair (m, S) as one matrix [m | S].

    At a singularity the solver's steps fall below the spacing of numbers, which is how it is told
    from mere exponential growth; S grows like 1 / (t* - t), so what is left is S / S'.
    """

    def split(y: Tensor) -> tuple[Tensor, Tensor]:
        return y[..., 0], y[..., 1:]

    def velocity(_: float, y: Tensor) -> Tensor:
        m, S = split(y)
        drift = law.V @ S @ law.A @ S
        slope = _apply(law.V, m + _apply(S @ law.A, m))
        return torch.cat([slope[..., None], drift + drift.mT], -1)

    def size(y: Tensor) -> Tensor:
        m, S = split(y)
        return torch.maximum(S.abs().amax((-2, -1)), m.abs().amax(-1).sqrt())

    start = torch.cat([law.mean[..., None], law.covariance], -1)
    limit = 1e140  # squares of it are still numbers
    moments: list[tuple[float, Tensor, Tensor]] = []
    blow_up = torch.full(law.mean.shape[:-1], math.inf, dtype=torch.float64, device=start.device)
    atol = 1e-14 * float(start.abs().max().clamp(1e-280, 1.0))
    outputs = integrate(velocity, start, times, size=size, limit=limit, rtol=1e-10, atol=atol)
    for out in outputs:
        m, S = split(out.state)
        fresh = out.escaped.to(blow_up.device).isfinite() & blow_up.isinf()
        if bool(fresh.any()):
            found = out.escaped.to(blow_up.device)
            pace = split(velocity(0.0, out.state))[1].abs().amax((-2, -1))
            left = S.abs().amax((-2, -1)) / pace
            blow_up = torch.where(fresh, found + left.where(left < 1e-3 * found, 0.0), blow_up)
        moments.append((out.time, m, (S + S.mT) / 2))
    asked = set(tolist(times))
    return _path(law, [x for x in moments if x[0] in asked], blow_up)


def _apply(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector[..., None])[..., 0]

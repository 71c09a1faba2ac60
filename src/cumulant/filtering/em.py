"""Expectation-maximization: smoothed moments, then least squares in each mode.

See docs/theory.md, T25.

In mode j the dynamics and the emission are regressions r = Theta z + N(0, S) with z = (x, 1, u), of
which the smoother gives E[z z'], E[r z'] and E[r r'] for each step; the M-step solves the normal
equations of the weighted sums. Missing elements of y take part with what the model expects of them
given the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.core.errors import InputError
from cumulant.core.typed import linalg
from cumulant.filtering.backward import Pair, backward
from cumulant.filtering.filters import run
from cumulant.filtering.kalman import GaussianBank
from cumulant.filtering.model import COVARIANCES, SHAPES, SwitchingLinearGaussian
from cumulant.filtering.model_checks import proper_start
from cumulant.filtering.moments import symmetric
from cumulant.filtering.posterior import step_of, whole
from cumulant.filtering.recursion import Belief, Scheme

__all__ = ["expectation_maximization", "supported"]


class _Sums(NamedTuple):
    """Weighted sums over series, steps and histories, for each mode j."""

    weight: Tensor
    rr: Tensor
    rz: Tensor
    zz: Tensor


def expectation_maximization(
    model: SwitchingLinearGaussian,
    observations: Tensor,
    inputs: Tensor | None,
    scheme: Scheme,
    free: Mapping[str, Tensor],
) -> tuple[float, SwitchingLinearGaussian]:
    """The log-likelihood of the model, and the model after one step."""
    given = model
    model = given.unchecked({n: x.double() for n, x in given.parameters.items()})
    bank = GaussianBank(model, observations.double(), inputs)
    belief, alike = bank.start()
    post = run(bank, scheme, belief, alike=alike)
    pairs, last = list[Pair](), belief
    for pair, earlier in backward(post):
        pairs.append(pair)
        last = earlier
    pairs.reverse()
    changes: dict[str, Tensor] = {}
    if "transition" in free:
        M = model.modes
        each = [
            torch.unflatten(p.log_weights.exp(), -2, (-1, M)).reshape(-1, M, M).sum(0)
            for p in pairs
        ]
        counts = torch.stack(each).sum(0)
        total = counts.sum(-1, keepdim=True)
        old = model.parameters["transition"]
        changes["transition"] = torch.where(total > 0, counts / total.clamp_min(1e-300), old)
    changes |= _initial(model, last, free)
    for which, of in {"dynamics": _dynamics_sums, "emission": _emission_sums}.items():
        if any(name.startswith(which) for name in free):
            parts = [of(step_of(bank, a, b), pairs[a:b]) for a, b in _alike(pairs)]
            sums = _Sums(*(torch.stack(x).sum(0) for x in zip(*parts, strict=True)))
            changes |= _regression(model, which, sums, free)
    changes = {name: x.to(given.dtype) for name, x in changes.items()}
    return float(post.log_likelihood.sum()), given.unchecked(changes)


def _alike(pairs: list[Pair]) -> list[tuple[int, int]]:
    """Ranges of steps that keep the same number of histories."""
    sizes = [p.log_weights.shape for p in pairs]
    edges = [t for t in range(1, len(pairs)) if sizes[t] != sizes[t - 1]]
    return list(pairwise([0, *edges, len(pairs)]))


def supported(model: SwitchingLinearGaussian, free: Mapping[str, Tensor]) -> None:
    """Raise where EM has no closed-form step."""
    if getattr(model, "functions", None):
        raise InputError("fit: EM is for linear models; method='lbfgs' fits nonlinear ones.")
    proper_start("fit: EM", model)
    for name, mask in free.items():
        _check_one(model, name, mask)
    both = ("initial_mean", "initial_covariance")
    own_start = any(not _is_common(model, n) for n in both)
    if own_start and any(n in free for n in both):
        raise InputError(
            "fit: EM learns one initial_mean and one initial_covariance for all modes; "
            "method='lbfgs' learns one for each."
        )
    for which in ("dynamics", "emission"):
        _check_regression(model, which, free)


def _check_one(model: SwitchingLinearGaussian, name: str, mask: Tensor) -> None:
    """A parameter that EM learns is constant, and moves as a whole."""
    x, tail = model.parameters[name], len(SHAPES.get(name, "M"))
    most = tail if name == "initial" else tail + 1
    if x.ndim > most:
        raise InputError(
            f"fit: EM learns parameters that are constant, but {name} has shape "
            f"{tuple(x.shape)}; method='lbfgs' learns it."
        )
    plain = name in ("transition", "initial") or name.endswith(("noise", "covariance"))
    each = mask.diagonal(dim1=-2, dim2=-1) if name in COVARIANCES else mask
    if (not plain or name in COVARIANCES) and not bool(each.all()):
        raise InputError(f"fit: EM moves all of {name} or none of it; method='lbfgs' takes masks.")


def _check_regression(
    model: SwitchingLinearGaussian, which: str, free: Mapping[str, Tensor]
) -> None:
    """What is learned together is constant, and is shared by the modes together."""
    own = [n for n in model.parameters if n.startswith(which)]
    changing = [n for n in own if model.parameters[n].ndim > len(SHAPES[n]) + 1]
    if changing and any(n in free for n in own):
        raise InputError(
            f"fit: EM learns {which} only if nothing in it changes with time or between series, "
            f"but {changing[0]} changes with time or from series to series; method='lbfgs' learns "
            "it."
        )
    parts = [n for n in (which, f"{which}_bias", f"{which}_input") if n in free]
    shared = [n for n in parts if _is_common(model, n)]
    if shared and (len(shared) < len(parts) or not _is_common(model, f"{which}_noise")):
        raise InputError(
            f"fit: EM shares {', '.join(shared)} between modes only if {which}_noise and "
            "everything learned with it are shared too; method='lbfgs' takes any mixture."
        )


def _is_common(model: SwitchingLinearGaussian, name: str) -> bool:
    """Whether all modes share a parameter."""
    return model.parameters[name].ndim == len(SHAPES[name])


def _initial(
    model: SwitchingLinearGaussian, first: Belief, free: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Modes and state at time 0, averaged over the series."""
    out: dict[str, Tensor] = {}
    M = model.modes
    if "initial" in free:
        out["initial"] = first.log_weights.logsumexp(-2).exp().reshape(-1, M).mean(0)
    if "initial_mean" in free or "initial_covariance" in free:
        mean, covariance = (
            (x.flatten(0, -k - 1) for k, x in enumerate(whole(first), 1))
            if (first.log_weights.ndim > 2)
            else (x[None] for x in whole(first))
        )
        center = mean.mean(0) if "initial_mean" in free else model.parameters["initial_mean"]
        away = mean - center
        if "initial_mean" in free:
            out["initial_mean"] = center
        if "initial_covariance" in free:
            spread = covariance + away[..., :, None] * away[..., None, :]
            mask = free["initial_covariance"]
            out["initial_covariance"] = symmetric(spread.mean(0)) * (mask | mask.mT)
    return out


def _regressors(mean: Tensor, second: Tensor, u: Tensor | None) -> tuple[Tensor, Tensor]:
    """E[z] and E[z z'] for z = (x, 1, u)."""
    known = mean.new_ones(*mean.shape[:-1], 1)
    if u is not None:
        known = torch.cat([known, u.expand(*mean.shape[:-1], u.shape[-1])], -1)
    mixed = mean[..., :, None] * known[..., None, :]
    square = known[..., :, None] * known[..., None, :]
    top, bottom = torch.cat([second, mixed], -1), torch.cat([mixed.mT, square], -1)
    return torch.cat([mean, known], -1), torch.cat([top, bottom], -2)


def _second(mean: Tensor, covariance: Tensor) -> Tensor:
    return covariance + mean[..., :, None] * mean[..., None, :]


def _total(weights: Tensor, x: Tensor) -> Tensor:
    """sum over all but the mode of weights ``(*batch, T, G, M)`` times x ``(..., M, a, b)``."""
    return (weights[..., None, None] * x).flatten(0, -4).sum(0)


def _dynamics_sums(bank: GaussianBank, pairs: list[Pair]) -> _Sums:
    weights = torch.stack([p.log_weights for p in pairs], -3).exp()
    lead = weights.ndim - 3
    mean0, cov0 = (torch.stack([p.before[k] for p in pairs], lead) for k in (0, 1))
    mean1, cov1 = (torch.stack([p.after[k] for p in pairs], lead) for k in (0, 1))
    cross = torch.stack([p.cross for p in pairs], lead)
    u = None if bank.inputs is None else bank.inputs[..., None, None, :]
    z, zz = _regressors(mean0, _second(mean0, cov0), u)
    rz = mean1[..., :, None] * z[..., None, :]
    n = mean0.shape[-1]
    rz = torch.cat([rz[..., :n] + cross, rz[..., n:]], -1)
    return _Sums(
        weights.flatten(0, -2).sum(0),
        _total(weights, _second(mean1, cov1)),
        _total(weights, rz),
        _total(weights, zz),
    )


def _emission_sums(bank: GaussianBank, pairs: list[Pair]) -> _Sums:
    weights = torch.stack([p.log_weights for p in pairs], -3).exp()
    lead = weights.ndim - 3
    mean, covariance = (torch.stack([p.after[k] for p in pairs], lead) for k in (0, 1))
    u = None if bank.inputs is None else bank.inputs[..., None, None, :]
    second = _second(mean, covariance)
    z, zz = _regressors(mean, second, u)
    y, emission = bank.value, bank.affine("emission", None)
    if bank.seen is None:
        rz = y[..., :, None] * z[..., None, :]
        rr = (y[..., :, None] * y[..., None, :]).expand(*weights.shape, -1, -1)
    else:
        # Given x and the elements seen, y = K x + k + N(0, V): K and V vanish where it was seen.
        mask = bank.seen.to(y.dtype)
        R = emission.noise
        seen = R * (mask[..., :, None] * mask[..., None, :]) + torch.diag_embed(1 - mask)
        F = linalg.solve(seen, (R * mask[..., None, :]).mT).mT * mask[..., None, :]
        eye = torch.eye(R.shape[-1], dtype=R.dtype, device=R.device)
        K = (eye - F) @ emission.matrix
        k = ((eye - F) @ emission.offset[..., None])[..., 0] + (F @ y[..., None])[..., 0]
        V = R - F @ R
        expected = (K @ mean[..., None])[..., 0] + k
        n = mean.shape[-1]
        rz = expected[..., :, None] * z[..., None, :]
        rz = torch.cat([rz[..., :n] + K @ covariance, rz[..., n:]], -1)
        rr = _second(expected, K @ covariance @ K.mT + V)
    return _Sums(
        weights.flatten(0, -2).sum(0),
        _total(weights, rr),
        _total(weights, rz),
        _total(weights, zz),
    )


def _regression(
    model: SwitchingLinearGaussian, which: str, sums: _Sums, free: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Coefficients and noise of each mode, or of all where they are shared."""
    names = {which: which, "bias": f"{which}_bias", "input": f"{which}_input"}
    M, n = model.modes, model.state_size
    p = sums.rr.shape[-1]
    zeros = {f"{which}_bias": (M, p), f"{which}_input": (M, p, model.input_size)}

    def part(name: str) -> Tensor:
        x = model.steps_of(name)
        x = sums.rr.new_zeros(zeros[name]) if x is None else x
        return x[..., None] if name.endswith("bias") else x

    blocks = [part(name) for name in names.values()]
    theta = torch.cat([b.expand(M, p, b.shape[-1]) for b in blocks], -1)
    columns = [n, 1, model.input_size]
    moves = torch.cat(
        [torch.full((c,), name in free) for c, name in zip(columns, names.values(), strict=True)]
    )
    sums = _pooled(sums) if _is_shared(model, which, free) else sums
    if bool(moves.any()):
        rest = sums.rz[..., moves] - theta[..., ~moves] @ sums.zz[..., ~moves, :][..., moves]
        square = sums.zz[..., moves, :][..., moves]
        solved = linalg.lstsq(square, rest.mT).solution.mT
        theta = theta.clone()
        theta[..., moves] = solved.to(theta)
    out: dict[str, Tensor] = {}
    for name, x in zip(names.values(), torch.split(theta, columns, -1), strict=True):
        if name in free:
            x = x[..., 0] if name.endswith("bias") else x
            out[name] = x[0] if _is_common(model, name) else x
    noise = f"{which}_noise"
    if noise in free:
        left = sums.rr - theta @ sums.rz.mT - sums.rz @ theta.mT + theta @ sums.zz @ theta.mT
        count = sums.weight
        if model.parameters[noise].ndim == 2:
            left, count = left.sum(0, keepdim=True), count.sum(0, keepdim=True)
            if _is_shared(model, which, free):  # the sums were pooled before
                left, count = left / M, count / M
        value = symmetric(left / count.clamp_min(1e-300)[..., None, None])
        mask = free[noise]
        kept = value * (mask | mask.mT)
        out[noise] = kept[0] if model.parameters[noise].ndim == 2 else kept
    return out


def _is_shared(model: SwitchingLinearGaussian, which: str, free: Mapping[str, Tensor]) -> bool:
    parts = [which, f"{which}_bias", f"{which}_input"]
    return any(n in free and _is_common(model, n) for n in parts)


def _pooled(sums: _Sums) -> _Sums:
    return _Sums(*(x.sum(0, keepdim=True).expand_as(x) for x in sums))

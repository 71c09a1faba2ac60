"""Measures against what people would write without them.

Shapes are (natural parameters or means) x (points or components) x dimension. scipy's minimize is
looped over eight of the means, in double precision as ours, and its time multiplied.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cumulant.core.errors import InputError
from cumulant.core.progress import ProgressCallback, counted
from cumulant.kernels.attention import attention
from cumulant.lab.bench.peak import growth
from cumulant.lab.bench.timing import Row, interleave, row
from cumulant.measures import Empirical, GaussianMixture

__all__ = ["run"]

Cases = dict[str, Callable[[], object]]


def _empirical(n: int, d: int) -> Cases:
    eta, points = torch.randn(n, d) / d**0.5, torch.randn(n, d)
    h = Empirical(points)
    return {
        "kernel itself": lambda: attention({"query": eta, "key": points, "value": points}),
        "empirical mean": lambda: h.mean(eta),
    }


def _mixture(n: int, d: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    eta, means = torch.randn(2, n, d, generator=generator) / d**0.5
    variances = torch.rand(n, d, generator=generator) + 0.5
    return eta, means, variances, torch.full((n,), -math.log(n))


def broadcast_mixture(n: int = 4096, d: int = 64) -> Callable[[], Tensor]:
    """The log-normalizer as one would write it: an M x N x d array."""
    eta, means, variances, log_weights = _mixture(n, d)

    def run() -> Tensor:
        exponent = (means * eta[:, None] + variances * (eta[:, None] ** 2 / 2)).sum(-1)
        return (exponent + log_weights).logsumexp(-1)

    return run


def our_mixture(n: int = 4096, d: int = 64) -> Callable[[], Tensor]:
    """The same by the kernel."""
    eta, means, variances, log_weights = _mixture(n, d)
    h = GaussianMixture(means, variances, log_weights, covariance_type="diagonal")
    return lambda: h.log_normalizer(eta)


def our_mixture_mean(n: int = 4096, d: int = 64) -> Callable[[], Tensor]:
    """Its gradient."""
    eta, means, variances, log_weights = _mixture(n, d)
    h = GaussianMixture(means, variances, log_weights, covariance_type="diagonal")
    return lambda: h.mean(eta)


_BROADCAST = "G by broadcasting"


def _mixtures(n: int, d: int) -> Cases:
    return {
        _BROADCAST: broadcast_mixture(n, d),
        "mixture G": our_mixture(n, d),
        "mixture mean": our_mixture_mean(n, d),
    }


_PLAIN = "scipy, f alone"
_GRADIENT = "scipy, gradient, to 1e-10"
_LOOSE = "scipy, gradient, to 1e-5"
_NEWTON = "scipy, Hessian, to 1e-10"


def links(targets: int, points: int, d: int, share: int) -> Cases:
    """`share` of the targets by scipy, in double precision like ours."""
    try:
        solve: Any = import_module("scipy.optimize").minimize
    except ModuleNotFoundError:
        raise InputError("bench measures compares with scipy: pip install scipy.") from None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(points, d, dtype=torch.float64, generator=generator)
    h = Empirical(x)
    means = h.mean(0.3 * torch.randn(targets, d, dtype=torch.float64, generator=generator))
    X, some = x.numpy(), means[:share].numpy()

    def both(e: Any, mean: Any) -> tuple[float, Any]:
        s = X @ e
        w = np.exp(s - s.max())
        return float(s.max() + np.log(w.sum()) - e @ mean), w @ X / w.sum() - mean

    def hessian(e: Any, mean: Any) -> Any:
        s = X @ e
        w = np.exp(s - s.max())
        w /= w.sum()
        return (X * w[:, None]).T @ X - np.outer(w @ X, w @ X)

    def value(e: Any, mean: Any) -> float:
        return both(e, mean)[0]

    def loop(**how: Any) -> Callable[[], object]:
        function = both if "jac" in how else value
        return lambda: [solve(function, np.zeros(d), args=(m,), **how) for m in some]

    return {
        _PLAIN: loop(),
        _LOOSE: loop(jac=True),
        _GRADIENT: loop(jac=True, options={"gtol": 1e-10}),
        _NEWTON: loop(jac=True, hess=hessian, method="trust-exact", options={"gtol": 1e-10}),
        "empirical link": lambda: h.link(means),
    }


def run(
    *, rounds: int = 7, quick: bool = False, progress: ProgressCallback | None = None
) -> list[Row]:
    """Measure everything; `progress` is called before every single run."""
    n, m, (targets, points, d) = (
        (4096, 1024, (128, 4000, 16))
        if quick
        else (
            8192,
            4096,
            (1024, 10_000, 32),
        )
    )
    share = 8
    few = max(3, rounds // 2)
    plan = [
        (f"{n} x {n} x 64", _empirical(n, 64), rounds),
        (f"{m} x {m} x 64", _mixtures(m, 64), few),
        (f"{targets} x {points} x {d}", links(targets, points, d, share), few),
    ]
    tick = counted(progress, sum(len(cases) * (r + 1) for _, cases, r in plan) + 2 * (not quick))
    seconds: list[dict[str, list[float]]] = []
    for label, cases, repeats in plan:
        seconds.append(
            interleave(
                cases,
                rounds=repeats,
                tick=lambda name, label=label: tick(f"{label}: {name}"),
            )
        )
    names = [label for label, _, _ in plan]
    rows = [row(seconds[0], names[0], "empirical mean", "kernel itself", 1.2)]
    rows += [
        row(seconds[1], names[1], "mixture " + what, _BROADCAST, 1 / 5) for what in ("G", "mean")
    ]
    if not quick:
        rows += _memory(names[1], tick)
    for name in (_PLAIN, _LOOSE, _GRADIENT, _NEWTON):  # scipy did a share of the targets
        seconds[2][name] = [s * targets / share for s in seconds[2][name]]
        rows.append(row(seconds[2], names[2], "empirical link", name, 1 / 20))
    return rows


def _memory(label: str, tick: Callable[[str], None]) -> list[Row]:
    tick(f"{label}: peak memory, broadcast")
    theirs = growth("cumulant.lab.bench.measures", "broadcast_mixture")
    tick(f"{label}: peak memory, ours")
    ours = growth("cumulant.lab.bench.measures", "our_mixture")
    if ours is None or theirs is None:
        return []
    what = "mixture G, peak memory"
    return [Row(label, what, _BROADCAST, ours, theirs, ours / theirs, 1 / 10, unit="MB")]

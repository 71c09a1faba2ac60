"""T30: cross-attention with its residual can be inverted, by a proximal map."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cumulant import ConvergenceError, dynamics
from cumulant.core.typed import functions, linalg
from cumulant.figures import MUTED, series_color, tidy
from cumulant.lab.claims.claim import Claim, Found, Trial, table
from cumulant.lab.claims.measuring import gap, minimized

BETA, STEP = 2.0, 1.5

CLAIM = Claim(
    id="T30",
    title="Attention run backwards",
    evidence="identity",
    statement="For fixed patterns I + τ∇G is a bijection. Its inverse is a proximal map, the "
    "resolvent of a monotone operator, and so never increases distances.",
    source="main draft, §2.2, after Winston and Kolter (2020)",
    formula=r"(I + \tau \nabla G)^{-1}(y) = \operatorname{argmin}_z "
    r"\frac{1}{2} \|z - y\|^2 + \tau\, G(z)",
    recorded="holds",
    systems=("monotone operators (Winston & Kolter)",),
    tests=("tests/laws/test_inverse_sublayer.py",),
    rules=table("""
      statement:
        round_trip ≤ 1e-6: step, then its inverse: distance from the start
        onto_gap ≤ 1e-5: arbitrary points: the explicit sublayer applied to the inverse
        proximal_gap ≤ 0.0001: the inverse against scipy's minimum of the proximal problem
        lipschitz ≤ 1.000000001: largest ratio of distances under the inverse
        firmness ≥ -1e-9: least ⟨Δx,Δy⟩ − ‖Δx‖², relative: firmly nonexpansive, as resolvents are
      noted:
        undamped_failed: share of points where undamped Newton fails
        self_attention_small: share of clouds N(0, I) for which a solver inverted self-attention
        self_attention_large: the same for clouds eight times as large; that the solver stops
            proves nothing
        self_attention_folds: share of clouds at which the determinant of self-attention's
            Jacobian is negative; one would prove that the joint map is not one-to-one
    """),
    finding="Every output has exactly one input, found to {onto_gap:.0e}; the inverse never "
    "stretches a distance (largest ratio {lipschitz:.3f}). Undamped Newton fails for "
    "{undamped_failed:.0%} of the points. For self-attention, where all points "
    "move at once, nothing is guaranteed: the solver converged for {self_attention_small:.0%} of "
    "small clouds and {self_attention_large:.0%} of large ones. That it stops does not mean that "
    "there is no inverse: the determinant of the Jacobian was negative at "
    "{self_attention_folds:.0%} of the clouds tried, so whether the joint map folds is open.",
    caption="A square grid of outputs of a cross-attention sublayer with three patterns (stars) "
    "and the inputs they came from: the inverse is a map of the whole plane that moves no two "
    "points farther apart.",
)


def proximal(y: Tensor, patterns: Tensor) -> Tensor:
    """argmin_z |z - y|^2 / 2 + tau log sum exp(beta <x, z>) / beta for one y, by scipy."""
    p, at = patterns.numpy(), y.numpy()
    lse: Any = import_module("scipy.special").logsumexp

    def objective(z: Any) -> Any:
        scores = BETA * p @ z
        weights = np.exp(scores - scores.max())
        slope = z - at + STEP * weights @ p / weights.sum()
        return 0.5 * ((z - at) ** 2).sum() + STEP * lse(scores) / BETA, slope

    found = minimized(objective, at, jac=True, method="BFGS", options={"gtol": 1e-9})
    return functions.from_numpy(found.x)


def undamped(y: Tensor, patterns: Tensor, rounds: int = 60) -> Tensor:
    """Newton's method as it stands, in plain torch; how far each point is from solving."""
    z, one = y.clone(), torch.eye(y.shape[-1], dtype=y.dtype)
    for _ in range(rounds):
        p = (BETA * z @ patterns.mT).softmax(-1)
        mean = p @ patterns
        moment = torch.einsum("mn,ni,nj->mij", p, patterns, patterns)
        hessian = one + STEP * BETA * (moment - mean[:, :, None] * mean[:, None, :])
        z = z - linalg.solve(hessian, z + STEP * mean - y)
    left = z + STEP * (BETA * z @ patterns.mT).softmax(-1) @ patterns - y
    return left.abs().amax(-1)


def solved(trial: Trial, size: float, tries: int) -> float:
    """The share of clouds of this size for which self-attention could be undone."""
    count = 0
    for _ in range(tries):
        with suppress(ConvergenceError):
            dynamics.inverse(size * trial.normal(12, 3), beta=BETA, step_size=STEP)
            count += 1
    return count / tries


def folds(trial: Trial, tries: int) -> float:
    """The share of clouds where self-attention's Jacobian has a negative determinant.

    A one-to-one smooth map has a determinant of one sign (or zero); where all points are equal it
    is (1 + τ)^d > 0.
    """
    found = 0

    def sublayer(z: Tensor) -> Tensor:
        return dynamics.step(z.reshape(6, 2), beta=BETA, step_size=STEP).flatten()

    for _ in range(tries):
        size = 10 ** (1.5 * float(trial.uniform(1)) - 0.5)
        jacobian: Any = torch.func.jacrev(sublayer)(size * trial.normal(12))
        found += int(linalg.slogdet(jacobian).sign < 0)
    return found / tries


def measure(trial: Trial) -> Found:
    """Steps undone, points that no step has made, and distances on the way back."""
    n, d = trial.size(300, 80), 3
    patterns = 4 * trial.normal(9, d)

    def undone(y: Tensor) -> Tensor:
        return dynamics.inverse(y, beta=BETA, step_size=STEP, patterns=patterns)

    x = 2 * trial.normal(n, d)
    forth = dynamics.step(x, beta=BETA, step_size=STEP, patterns=patterns)
    y = 8 * trial.normal(n, d)  # anywhere, not made by a step
    back = undone(y)
    residual = back + STEP * (BETA * back @ patterns.mT).softmax(-1) @ patterns - y
    some = min(n, 40)
    by_scipy = torch.stack([proximal(one, patterns) for one in y[:some]])
    i, j = torch.triu_indices(n, n, 1)
    dx, dy = back[i] - back[j], y[i] - y[j]
    small, large = (solved(trial, size, trial.size(8, 2)) for size in (1.0, 8.0))
    numbers = {
        "round_trip": gap(undone(forth), x),
        "onto_gap": residual.abs().max(),
        "proximal_gap": gap(back[:some], by_scipy),
        "lipschitz": (linalg.vector_norm(dx, dim=-1) / linalg.vector_norm(dy, dim=-1)).max(),
        "firmness": (((dx * dy).sum(-1) - dx.square().sum(-1)) / dy.square().sum(-1)).min(),
        "undamped_failed": (undamped(y, patterns) > 1e-6).double().mean(),
        "self_attention_small": small,
        "self_attention_large": large,
        "self_attention_folds": folds(trial, trial.size(400, 40)),
    }
    return Found(numbers)


def draw(figure: Any, seen: Any) -> None:
    """A grid of outputs, and the inputs they came from."""
    left, right = figure.subplots(1, 2)
    stars = torch.tensor([[2.0, 1.0], [-2.0, 1.5], [0.3, -2.2]], dtype=torch.float64)
    line = torch.linspace(-4, 4, 17, dtype=torch.float64)
    fine = torch.linspace(-4, 4, 81, dtype=torch.float64)
    for axes, undo in ((left, False), (right, True)):
        for c in line:
            flat = torch.stack([fine, c.expand(81)], -1)
            for one in (flat, flat.flip(-1)):
                z = dynamics.inverse(one, patterns=stars) if undo else one
                axes.plot(*z.mT, color=series_color(0 if undo else 2), linewidth=0.8)
        axes.scatter(*stars.mT, marker="*", s=60, color=series_color(1), zorder=3)
        axes.set(aspect="equal", xticks=[], yticks=[], xlim=(-4.3, 4.3), ylim=(-4.3, 4.3))
        axes.spines[:].set_color(MUTED)
        tidy(axes)
    left.set_title("Outputs of the sublayer")
    right.set_title("Their inputs, by running it backwards")

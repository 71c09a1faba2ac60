"""Monotone operator equilibrium networks, beside attention's own monotone part."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cumulant import dynamics
from cumulant.core.typed import linalg
from cumulant.figures import series_color
from cumulant.lab.claims.claim import Claim, Found, Trial, table
from cumulant.lab.claims.measuring import gap

CLAIM = Claim(
    id="mondeq",
    title="Monotone operator equilibria",
    evidence="identity",
    statement="With W = (1 − m)I − AᵀA + B − Bᵀ the layer z = relu(Wz + x) has exactly one fixed "
    "point, which forward–backward and Peaceman–Rachford splitting find from any start.",
    theory="T42",
    source="main draft, §2.2, after Winston and Kolter (2020)",
    formula=r"W = (1 - m) I - A^\top A + B - B^\top, \qquad z = \operatorname{relu}(W z + x)",
    recorded="holds",
    systems=("monotone operator equilibrium network",),
    tests=("tests/laws/test_neighbors.py",),
    rules=table("""
      statement:
        starts_gap ≤ 1e-8: fixed points from different starts and by both splittings, largest
            difference over m and sizes
        residual ≤ 1e-8: how far they are from solving z = relu(Wz + x)
        monotone ≥ -1e-10: least eigenvalue of the symmetric part of I − W, minus m
        attention_gap ≤ 1e-8: the same question for attention, z + τ∇G(z) = x: solutions by
            forward–backward steps against the library's inverse (T30)
      noted:
        plain_failed: share of layers where plain iteration z ← relu(Wz + x) does not converge
        forward_steps: steps of forward–backward, median
        reflected_steps: steps of Peaceman–Rachford, median
    """),
    finding="Both splittings reach one fixed point from every start, to {starts_gap:.0e}; plain "
    "iteration fails for {plain_failed:.0%} of the layers. Attention's sublayer is monotone as it "
    "is: the same forward–backward steps invert it, to {attention_gap:.0e}.",
    caption="Distance to the fixed point against steps, for one layer.",
)


def forward_backward(W: Tensor, x: Tensor, z: Tensor, steps: int) -> list[Tensor]:
    """z ← relu(z − α((I − W)z − x)), with α = m / L²."""
    operator = torch.eye(len(W), dtype=W.dtype) - W
    least = linalg.eigvalsh((operator + operator.mT) / 2)[0]
    alpha = least / linalg.svdvals(operator)[0] ** 2
    path = [z]
    for _ in range(steps):
        path.append(torch.relu(path[-1] - alpha * (operator @ path[-1] - x)))
    return path


def peaceman_rachford(W: Tensor, x: Tensor, z: Tensor, steps: int) -> list[Tensor]:
    """Reflections in the resolvents of relu's subgradient and of I − W, α = 1."""
    one = torch.eye(len(W), dtype=W.dtype)
    solve = linalg.inv(2 * one - W)
    u, path = z, [z]
    for _ in range(steps):
        middle = 2 * path[-1] - u
        half = solve @ (middle + x)
        u = 2 * half - middle
        path.append(torch.relu(u))
    return path


def measure(trial: Trial) -> Found:
    """Random layers of several sizes and m; then attention with fixed patterns."""
    gaps, residuals, monotone = list[float](), list[float](), list[float]()
    failed, steps = list[float](), list[tuple[int, int]]()
    shown: tuple[Tensor, Tensor] | None = None
    for n in (4, 12) if trial.quick else (4, 12, 24):
        for m in (0.5, 1.0):
            one = torch.eye(n, dtype=torch.float64)
            A, B = (trial.normal(n, n) / n**0.5 for _ in range(2))
            W, x = (1 - m) * one - A.mT @ A + B - B.mT, trial.normal(n)
            symmetric = one - (W + W.mT) / 2
            monotone.append(float(linalg.eigvalsh(symmetric)[0]) - m)
            many = trial.size(20_000, 5000)
            ends = [forward_backward(W, x, 5 * trial.normal(n), many)[-1] for _ in range(2)]
            paths = peaceman_rachford(W, x, 5 * trial.normal(n), 1000)
            truth = paths[-1]
            gaps.append(max(gap(z, truth) for z in ends))
            residuals.append(gap(truth, torch.relu(W @ truth + x)))
            z = torch.zeros_like(x)
            for _ in range(500):
                z = torch.relu(W @ z + x)
            failed.append(float(not gap(z, truth) < 1e-6))
            both = [forward_backward(W, x, 0 * x, 1000), peaceman_rachford(W, x, 0 * x, 1000)]
            away = [linalg.vector_norm(torch.stack(p) - truth, dim=-1) for p in both]
            steps.append((int((away[0] > 1e-6).sum()), int((away[1] > 1e-6).sum())))
            shown = (away[0], away[1])
    middle = torch.tensor(steps, dtype=torch.float64).quantile(0.5, 0)
    numbers = {
        "starts_gap": max(gaps),
        "residual": max(residuals),
        "monotone": min(monotone),
        "attention_gap": attention_gap(trial),
        "plain_failed": sum(failed) / len(failed),
        "forward_steps": middle[0],
        "reflected_steps": middle[1],
    }
    return Found(numbers, shown=shown)


def attention_gap(trial: Trial) -> float:
    """z + τ∇G(z) = x by gradient steps on ½|z − x|² + τG(z), which is strongly convex."""
    patterns, x = trial.normal(6, 3), 2 * trial.normal(20, 3)
    bound = 1 + float(linalg.svdvals(patterns)[0]) ** 2
    z = x.clone()
    for _ in range(1000):
        z = z - (z + (z @ patterns.mT).softmax(-1) @ patterns - x) / bound
    return gap(z, dynamics.inverse(x, patterns=patterns))


def draw(figure: Any, seen: Any) -> None:
    """Distance to the fixed point against steps."""
    axes = figure.subplots()
    for i, (path, label) in enumerate(
        zip(seen.shown, ("forward–backward", "Peaceman–Rachford"), strict=True)
    ):
        axes.semilogy(path.clamp_min(1e-14)[:1000], color=series_color(i), label=label)
    axes.set(xlabel="step", ylabel="distance")
    axes.legend()

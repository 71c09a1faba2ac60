"""T19: the Hopfield energy, which attention without a skip connection never raises."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from cumulant import Memory
from cumulant.core.typed import linalg
from cumulant.figures import MUTED, series_color, tidy
from cumulant.lab.claims.claim import Claim, Found, Trial, table
from cumulant.lab.claims.measuring import gap

CLAIM = Claim(
    id="T19",
    title="The Hopfield energy",
    evidence="identity",
    statement="The energy of the modern Hopfield network is minus the log-normalizer plus a "
    "quadratic term. It is never negative, attention over the patterns never raises it, and a "
    "unit descent step on it is attention without the skip connection.",
    source="abstract; proofs draft, section B; Ramsauer et al. (2021)",
    formula=r"E(\xi) = -\beta^{-1} G(\beta\xi) + \tfrac12 \|\xi\|^2 + \beta^{-1}\log N"
    r" + \tfrac12 M^2 \ge 0, \qquad \xi - \nabla E(\xi) = \operatorname{softmax}"
    r"(\beta X \xi)^\top X",
    recorded="holds",
    systems=("modern Hopfield network",),
    tests=("tests/laws/test_hopfield.py", "tests/memory/test_dense_memory.py"),
    rules=table("""
      statement:
        energy_gap ≤ 1e-12: largest error of E against plain torch
        lowest_energy ≥ -1e-12: lowest energy of any state
        largest_rise ≤ 1e-12: largest rise of E by an update, any step
        descent_gap ≤ 1e-12: update against ξ − τ∇E, E differentiated by torch
      noted:
        rise_with_skip: share of states whose E a skip connection raises
    """),
    finding="None of {updates:,} updates raised E beyond rounding, and no energy was below "
    "{lowest_energy:.2g}. A unit descent step is attention without skip to {descent_gap:.0e}; with "
    "a skip connection E rises in {rise_with_skip:.0%} of the states.",
    caption="Five patterns on the plane (red) at β = 5: every path descends the energy into a "
    "minimum beside a pattern.",
)


def energy(xi: Tensor, patterns: Tensor, beta: float) -> Tensor:
    """E written out in plain torch."""
    most = linalg.vector_norm(patterns, dim=-1).max()
    tilted = torch.logsumexp(beta * xi @ patterns.mT, -1) / beta
    return -tilted + (xi**2).sum(-1) / 2 + math.log(len(patterns)) / beta + most**2 / 2


def one_network(trial: Trial, n: int) -> dict[str, float]:
    """A random network, 50 states, a whole step and a shorter one; the worst of each number."""
    patterns = trial.normal(4 + n % 9, 1 + n % 5)
    beta, size = 10 ** (2 * float(trial.uniform(1)) - 1), 0.05 + 0.95 * float(trial.uniform(1))
    memory = Memory(patterns, beta=beta)
    xi = 2 * trial.normal(50, patterns.shape[-1])
    state = xi.clone().requires_grad_()
    before = energy(state, patterns, beta)
    (slope,) = torch.autograd.grad(before.sum(), state)
    before = before.detach()
    moved = {tau: memory.retrieve(xi, step_size=tau).state for tau in (1.0, size)}
    attended = (beta * xi @ patterns.mT).softmax(-1) @ patterns
    return {
        "energy_gap": gap(memory.energy(xi), before),
        "lowest_energy": float(before.min()),
        "largest_rise": max(
            float((energy(x, patterns, beta) - before).max()) for x in moved.values()
        ),
        "descent_gap": max(gap(x, xi - tau * slope) for tau, x in moved.items()),
        "rise_with_skip": float((energy(xi + attended, patterns, beta) > before).double().mean()),
    }


def measure(trial: Trial) -> Found:
    """Many networks, from blurred to sharp, with steps from short to whole."""
    rows = [one_network(trial, n) for n in range(trial.size(60, 12))]
    numbers = {name: max(row[name] for row in rows) for name in rows[0]}
    numbers["lowest_energy"] = min(row["lowest_energy"] for row in rows)
    numbers["rise_with_skip"] = sum(row["rise_with_skip"] for row in rows) / len(rows)
    # A small network on the plane to look at.
    angles = 2 * math.pi / 5 * torch.arange(5, dtype=torch.float64)
    ring = torch.stack([angles.cos(), angles.sin()], -1)
    memory, path = Memory(ring, beta=5.0), [1.3 * (2 * trial.uniform(10, 2) - 1)]
    for _ in range(20):
        path.append(memory.retrieve(path[-1], step_size=0.5).state)
    return Found(
        numbers, updates=100 * len(rows), memory=memory, paths=torch.stack(path), ring=ring
    )


def draw(figure: Any, seen: Any) -> None:
    """Paths on the energy of five patterns, and the energy along them."""
    plane, fall = figure.subplots(1, 2, width_ratios=(1, 1.6))
    axis = torch.linspace(-1.5, 1.5, 81, dtype=torch.float64)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1)
    height = seen.memory.energy(grid)
    levels = height.min() + (height.max() - height.min()) * torch.linspace(0.01, 1, 14) ** 2
    plane.contour(axis, axis, height, levels=levels.tolist(), colors=MUTED, linewidths=0.6)
    for i in range(seen.paths.shape[1]):
        plane.plot(*seen.paths[:, i].T, ".-", color=series_color(0), markersize=3, linewidth=1)
    plane.plot(*seen.ring.T, "o", color=series_color(1), markersize=5)
    plane.set(aspect="equal", xticks=[], yticks=[], title="states fall toward patterns")
    tidy(plane)
    fall.plot(seen.memory.energy(seen.paths), color=series_color(0), linewidth=1)
    fall.set(xlabel="update", ylabel="energy E", title="E along each path, step ½")
    fall.set_ylim(bottom=0)

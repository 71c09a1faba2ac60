"""T19: the Hopfield energy, which attention without a skip connection never raises."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from cumulant import Memory
from cumulant.figures import MUTED, series_color, tidy
from cumulant.lab.claims.claim import (
    HOLDS,
    Claim,
    Evidence,
    Picture,
    Trial,
    at_least,
    at_most,
    noted,
)


def energy(xi: Tensor, patterns: Tensor, beta: float) -> Tensor:
    """E written out in plain torch."""
    most = patterns.norm(dim=-1).max()
    tilted = torch.logsumexp(beta * xi @ patterns.mT, -1) / beta
    return -tilted + (xi**2).sum(-1) / 2 + math.log(len(patterns)) / beta + most**2 / 2


def experiment(trial: Trial) -> Evidence:
    """Many networks, from blurred to sharp, with steps from short to whole."""
    gaps, rises, lowest, descents, skipped = (list[Tensor]() for _ in range(5))
    for n in range(trial.size(60, 12)):
        patterns = trial.normal(4 + n % 9, 1 + n % 5)
        beta, size = 10 ** (2 * float(trial.uniform(1)) - 1), 0.05 + 0.95 * float(trial.uniform(1))
        memory = Memory(patterns, beta=beta)
        xi = 2 * trial.normal(50, patterns.shape[-1])
        for tau in (1.0, size):
            state = xi.clone().requires_grad_()
            before = energy(state, patterns, beta)
            (slope,) = torch.autograd.grad(before.sum(), state)
            moved = memory.retrieve(xi, step_size=tau).state
            gaps.append((memory.energy(xi) - before.detach()).abs().max())
            descents.append((moved - (xi - tau * slope)).abs().max())
            rises.append((energy(moved, patterns, beta) - before.detach()).max())
        lowest.append(before.detach().min())
        attended = (beta * xi @ patterns.mT).softmax(-1) @ patterns
        skipped.append((energy(xi + attended, patterns, beta) > before).double().mean())
    gap, rise, low, descent = (torch.stack(x) for x in (gaps, rises, lowest, descents))
    share = float(torch.stack(skipped).mean())

    # A small network on the plane to look at.
    angles = 2 * math.pi / 5 * torch.arange(5, dtype=torch.float64)
    ring = torch.stack([angles.cos(), angles.sin()], -1)
    memory, path = Memory(ring, beta=5.0), [1.3 * (2 * trial.uniform(10, 2) - 1)]
    for _ in range(20):
        path.append(memory.retrieve(path[-1], step_size=0.5).state)
    paths = torch.stack(path)

    def draw(figure: Any) -> None:
        plane, fall = figure.subplots(1, 2, width_ratios=(1, 1.6))
        axis = torch.linspace(-1.5, 1.5, 81, dtype=torch.float64)
        grid = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1)
        height = memory.energy(grid)
        levels = height.min() + (height.max() - height.min()) * torch.linspace(0.01, 1, 14) ** 2
        plane.contour(axis, axis, height, levels=levels.tolist(), colors=MUTED, linewidths=0.6)
        for i in range(paths.shape[1]):
            plane.plot(*paths[:, i].T, ".-", color=series_color(0), markersize=3, linewidth=1)
        plane.plot(*ring.T, "o", color=series_color(1), markersize=5)
        plane.set(aspect="equal", xticks=[], yticks=[], title="states fall toward patterns")
        tidy(plane)
        fall.plot(memory.energy(paths), color=series_color(0), linewidth=1)
        fall.set(xlabel="update", ylabel="energy E", title="E along each path, step ½")
        fall.set_ylim(bottom=0)

    return Evidence(
        [
            at_most("energy_gap", gap.max(), 1e-12, "largest error of E against plain torch"),
            at_least("lowest_energy", low.min(), -1e-12, "lowest energy of any state"),
            at_most("largest_rise", rise.max(), 1e-12, "largest rise of E by an update, any step"),
            at_most(
                "descent_gap",
                descent.max(),
                1e-12,
                "update against ξ − τ∇E, E differentiated by torch",
            ),
            noted("rise_with_skip", share, "share of states whose E a skip connection raises"),
        ],
        f"No update of {50 * len(gap):,} raised E by more than rounding, and no energy was below "
        f"{float(low.min()):.2g}. A unit descent step is attention without skip to "
        f"{float(descent.max()):.0e}; with a skip connection E rises in {share:.0%} of the states.",
        Picture(
            draw,
            "Five patterns on the plane (red) at β = 5: every path descends the energy into a "
            "minimum beside a pattern.",
        ),
    )


CLAIM = Claim(
    id="T19",
    title="The Hopfield energy",
    statement=(
        "The energy of the modern Hopfield network is minus the log-normalizer plus a quadratic "
        "term. It is never negative, attention over the patterns never raises it, and a unit "
        "descent step on it is attention without skip connection."
    ),
    source="abstract; proofs draft, section B; Ramsauer et al. (2021)",
    formula=r"E(\xi) = -\beta^{-1} G(\beta\xi) + \tfrac12 \|\xi\|^2 + \beta^{-1}\log N"
    r" + \tfrac12 M^2 \ge 0, \qquad \xi - \nabla E(\xi) = \operatorname{softmax}"
    r"(\beta X \xi)^\top X",
    recorded=HOLDS,
    experiment=experiment,
    systems=("modern Hopfield network",),
    tests=("tests/laws/test_hopfield.py", "tests/memory/test_dense_memory.py"),
)

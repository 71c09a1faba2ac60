"""T33: the Hopfield energy is a density, its update an EM step, its sampler block Gibbs."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from cumulant import Memory
from cumulant.dynamics import block_gibbs
from cumulant.figures import MUTED, series_color, tidy
from cumulant.lab.claims.claim import HOLDS, Claim, Evidence, Picture, Trial, at_most, noted


def densities(x: Tensor, patterns: Tensor, beta: float) -> Tensor:
    """πᵢ N(x; xᵢ, I/β) with πᵢ ∝ exp(½β‖xᵢ‖²), written out, ``(..., N)``."""
    weights = (beta / 2 * (patterns**2).sum(-1)).softmax(-1)
    squares = ((x[..., None, :] - patterns) ** 2).sum(-1)
    d = patterns.shape[-1]
    return weights * (beta / (2 * math.pi)) ** (d / 2) * torch.exp(-beta / 2 * squares)


def experiment(trial: Trial) -> Evidence:
    """A grid on the plane for the density; chains against exact moments for the sampler."""
    beta = 3.0
    # Near enough to each other for chains to wander between them.
    patterns = torch.tensor([[-1.2, -0.2], [0.9, -0.7], [0.2, 1.1], [1.0, 0.4]]).double()
    memory = Memory(patterns, beta=beta)
    axis = torch.linspace(-8, 8, trial.size(401, 161), dtype=torch.float64)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1)
    truth = densities(grid, patterns, beta).sum(-1)
    cell = float(axis[1] - axis[0]) ** 2
    boltzmann = torch.exp(-beta * memory.energy(grid))
    of_energy = boltzmann / (boltzmann.sum() * cell)
    zero = torch.zeros(1, 2, dtype=torch.float64)
    of_mixture = memory.mixture().log_prob(grid[..., None, :], zero).exp()[..., 0]
    density_gap = (of_energy - truth).abs().max()
    mixture_gap = (of_mixture - truth).abs().max()

    xi = 2 * trial.normal(200, 2)
    near = densities(xi, patterns, beta)
    em = near / near.sum(-1, keepdim=True) @ patterns
    em_gap = (memory.retrieve(xi).state - em).abs().max()

    # Independent chains, so the last state of each is one independent draw.
    chains = trial.size(40000, 6000)
    run = block_gibbs(patterns, 60, beta=beta, chains=chains, generator=trial.generator)
    last = run.states[-1]
    weights = (beta / 2 * (patterns**2).sum(-1)).softmax(-1)
    mean = weights @ patterns
    seconds = torch.eye(2) / beta + torch.einsum("n,ni,nj->ij", weights, patterns, patterns)
    drawn = torch.cat([last, (last[:, :, None] * last[:, None, :]).flatten(1)], -1)
    exact = torch.cat([mean, seconds.flatten()])
    spread = drawn.std(0) / math.sqrt(chains)
    moments = ((drawn.mean(0) - exact) / spread).abs().max()
    # Of the hidden unit, Pearson's statistic against its exact marginal, 3 degrees of freedom.
    counts = torch.bincount(run.index[-1], minlength=len(patterns))
    pearson = ((counts - chains * weights) ** 2 / (chains * weights)).sum()
    plain = patterns.mean(0)
    unweighted = ((drawn.mean(0)[:2] - plain) / spread[:2]).abs().max()

    def draw(figure: Any) -> None:
        plane, line = figure.subplots(1, 2, width_ratios=(1, 1.4))
        plane.plot(*last[:1500].T, ".", color=series_color(0), markersize=2, rasterized=True)
        plane.contour(axis, axis, truth, levels=6, colors=MUTED, linewidths=0.8)
        plane.plot(*patterns.T, "o", color=series_color(1), markersize=5)
        box = (float(patterns.min()) - 2.2, float(patterns.max()) + 2.2)
        plane.set(aspect="equal", xlim=box, ylim=box, xticks=[], yticks=[], title="block Gibbs")
        tidy(plane)
        line.hist(
            last[:, 0], bins=60, density=True, color=series_color(0), alpha=0.35, label="chains"
        )
        line.plot(axis, truth.sum(0) * math.sqrt(cell), color=series_color(1), label="mixture")
        ours = of_energy.sum(0) * math.sqrt(cell)
        line.plot(axis, ours, ":", color=series_color(2), label="exp(−βE), normalized")
        line.set(xlim=box, xlabel="first coordinate", ylabel="density", title="margin")
        line.set_ylim(top=1.6 * float((truth.sum(0) * math.sqrt(cell)).max()))
        line.legend()

    return Evidence(
        [
            at_most("density_gap", density_gap, 1e-12, "exp(−βE), normalized, against the mixture"),
            at_most("mixture_gap", mixture_gap, 1e-12, "the library's mixture, written out"),
            at_most("em_gap", em_gap, 1e-12, "the update against the EM step by Bayes' rule"),
            at_most("moments", moments, 5.0, "error of Gibbs moments, in s.e.", error=1.0),
            at_most("hidden_law", pearson, 30.0, "Pearson's χ² of the hidden unit, 3 d.o.f."),
            noted("unweighted", unweighted, "errors of means if all patterns weighed the same"),
        ],
        f"exp(−βE) is the mixture to {float(density_gap):.0e} and the update its EM step to "
        f"{float(em_gap):.0e}. The moments of {chains:,} Gibbs chains lie within "
        f"{float(moments):.1f} standard errors of the exact ones.",
        Picture(
            draw,
            "Left: states drawn by block Gibbs over the contours of the mixture, patterns in red. "
            "Right: their first coordinate, the mixture's density and exp(−βE) are one curve.",
        ),
    )


CLAIM = Claim(
    id="T33",
    title="The Hopfield energy as a density",
    statement=(
        "The quadratic term makes exp(−βE) integrable: it is a mixture of Gaussians around the "
        "patterns. The network's update is the mixture's EM step, and drawing a pattern by "
        "softmax, then a state around it, is block Gibbs in a restricted Boltzmann machine."
    ),
    source="proofs draft, section B",
    formula=r"e^{-\beta E(\xi)} \propto \sum_i e^{\frac{\beta}{2}\|x_i\|^2}"
    r" e^{-\frac{\beta}{2}\|\xi - x_i\|^2}, \qquad i \sim \operatorname{softmax}"
    r"(\beta X \xi), \quad \xi \sim \mathcal{N}(x_i, I/\beta)",
    recorded=HOLDS,
    experiment=experiment,
    systems=("Gaussian–categorical restricted Boltzmann machine",),
    tests=("tests/laws/test_hopfield.py", "tests/laws/test_gibbs.py"),
)

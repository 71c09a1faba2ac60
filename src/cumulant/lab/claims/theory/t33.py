"""T33: the Hopfield energy is a density, its update an EM step, its sampler block Gibbs."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from cumulant import Memory
from cumulant.dynamics import block_gibbs
from cumulant.figures import MUTED, series_color, tidy
from cumulant.lab.claims.claim import Claim, Found, Trial, table
from cumulant.lab.claims.measuring import gap

CLAIM = Claim(
    id="T33",
    title="The Hopfield energy as a density",
    evidence="identity",
    statement="The quadratic term makes exp(−βE) integrable: it is a mixture of Gaussians around "
    "the patterns. The network's update is the mixture's EM step, and drawing a pattern by "
    "softmax, then a state around it, is block Gibbs in a restricted Boltzmann machine.",
    source="proofs draft, section B",
    formula=r"e^{-\beta E(\xi)} \propto \sum_i e^{\frac{\beta}{2}\|x_i\|^2}"
    r" e^{-\frac{\beta}{2}\|\xi - x_i\|^2}, \qquad i \sim \operatorname{softmax}"
    r"(\beta X \xi), \quad \xi \sim \mathcal{N}(x_i, I/\beta)",
    bounds="Five standard errors do not come by chance. χ² with three degrees of freedom exceeds "
    "30 once in 700,000 draws.",
    recorded="holds",
    systems=("Gaussian–categorical restricted Boltzmann machine",),
    tests=("tests/laws/test_hopfield.py", "tests/laws/test_gibbs.py"),
    rules=table("""
      statement:
        density_gap ≤ 1e-12: exp(−βE), normalized, against the mixture
        mixture_gap ≤ 1e-12: the library's mixture, written out
        em_gap ≤ 1e-12: the update against the EM step by Bayes' rule
        moments ≤ 5: error of Gibbs moments, in s.e.
        hidden_law ≤ 30: Pearson's χ² of the hidden unit, 3 d.o.f.
      noted:
        unweighted: error of the means if all patterns had equal weight
    """),
    finding="exp(−βE) is the mixture to {density_gap:.0e} and the update its EM step to "
    "{em_gap:.0e}. The moments of {chains:,} Gibbs chains lie within {moments:.1f} standard "
    "errors of the exact ones.",
    caption="Left: states drawn by block Gibbs over the contours of the mixture, patterns in red. "
    "Right: the histogram of their first coordinate follows the mixture's density, which is "
    "exp(−βE).",
)


BETA = 3.0
# Near enough to each other for chains to wander between them.
PATTERNS = torch.tensor([[-1.2, -0.2], [0.9, -0.7], [0.2, 1.1], [1.0, 0.4]]).double()
WEIGHTS = (BETA / 2 * (PATTERNS**2).sum(-1)).softmax(-1)


def densities(x: Tensor) -> Tensor:
    """πᵢ N(x; xᵢ, I/β) with πᵢ ∝ exp(½β‖xᵢ‖²), written out, ``(..., N)``."""
    squares = ((x[..., None, :] - PATTERNS) ** 2).sum(-1)
    return WEIGHTS * BETA / (2 * math.pi) * torch.exp(-BETA / 2 * squares)


def sampled(index: Tensor, last: Tensor) -> dict[str, Any]:
    """Draws against exact moments, in standard errors, and against the hidden unit's law."""
    seconds = torch.eye(2) / BETA + torch.einsum("n,ni,nj->ij", WEIGHTS, PATTERNS, PATTERNS)
    drawn = torch.cat([last, (last[:, :, None] * last[:, None, :]).flatten(1)], -1)
    exact = torch.cat([WEIGHTS @ PATTERNS, seconds.flatten()])
    mean, spread = drawn.mean(0), drawn.std(0) / math.sqrt(len(last))
    # Pearson's statistic of the hidden unit has 3 degrees of freedom.
    counts, expected = torch.bincount(index, minlength=len(PATTERNS)), len(last) * WEIGHTS
    return {
        "moments": (((mean - exact) / spread).abs().max(), 1.0),
        "hidden_law": ((counts - expected) ** 2 / expected).sum(),
        "unweighted": ((mean[:2] - PATTERNS.mean(0)) / spread[:2]).abs().max(),
    }


def measure(trial: Trial) -> Found:
    """A grid on the plane for the density; chains against exact moments for the sampler."""
    memory = Memory(PATTERNS, beta=BETA)
    axis = torch.linspace(-8, 8, trial.size(401, 161), dtype=torch.float64)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1)
    truth = densities(grid).sum(-1)
    side = float(axis[1] - axis[0])
    boltzmann = torch.exp(-BETA * memory.energy(grid))
    of_energy = boltzmann / (boltzmann.sum() * side**2)
    zero = torch.zeros(1, 2, dtype=torch.float64)
    of_mixture = memory.mixture().log_prob(grid[..., None, :], zero).exp()[..., 0]
    xi = 2 * trial.normal(200, 2)
    near = densities(xi)
    # Independent chains, so the last state of each is one independent draw.
    chains = trial.size(40000, 6000)
    run = block_gibbs(PATTERNS, 60, beta=BETA, chains=chains, generator=trial.generator)
    numbers = sampled(run.index[-1], run.states[-1]) | {
        "density_gap": gap(of_energy, truth),
        "mixture_gap": gap(of_mixture, truth),
        "em_gap": gap(memory.retrieve(xi).state, near / near.sum(-1, keepdim=True) @ PATTERNS),
    }
    margins = truth.sum(0) * side, of_energy.sum(0) * side
    return Found(
        numbers, chains=chains, axis=axis, truth=truth, margins=margins, last=run.states[-1]
    )


def draw(figure: Any, seen: Any) -> None:
    """States drawn by block Gibbs over the mixture; their first coordinate."""
    plane, line = figure.subplots(1, 2, width_ratios=(1, 1.4))
    axis, last = seen.axis, seen.last
    plane.plot(*last[:1500].T, ".", color=series_color(0), markersize=2, rasterized=True)
    plane.contour(axis, axis, seen.truth, levels=6, colors=MUTED, linewidths=0.8)
    plane.plot(*PATTERNS.T, "o", color=series_color(1), markersize=5)
    box = (float(PATTERNS.min()) - 2.2, float(PATTERNS.max()) + 2.2)
    plane.set(aspect="equal", xlim=box, ylim=box, xticks=[], yticks=[], title="block Gibbs")
    tidy(plane)
    look = {"color": series_color(0), "alpha": 0.35, "label": "chains"}
    line.hist(last[:, 0], bins=60, density=True, **look)
    mixture, of_energy = seen.margins
    line.plot(axis, mixture, color=series_color(1), label="mixture")
    line.plot(axis, of_energy, ":", color=series_color(2), label="exp(−βE), normalized")
    line.set(xlim=box, xlabel="first coordinate", ylabel="density", title="margin")
    line.set_ylim(top=1.6 * float(mixture.max()))
    line.legend()

"""T2: tilting a member of an exponential family shifts its natural parameter."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cumulant import Binomial, Gamma, Normal, Poisson
from cumulant.figures import series_color
from cumulant.lab.claims.claim import HOLDS, Claim, Evidence, Picture, Trial, at_most, noted


def experiment(trial: Trial) -> Evidence:
    """Gamma, normal, Poisson and binomial laws, tilted by quadrature and by the library."""
    a, b, m, s, p = torch.tensor([2.0, 2.5, 0.5, 0.8, 0.25], dtype=torch.float64)
    etas = torch.linspace(-2, 1.5, trial.size(141, 36), dtype=torch.float64)
    # The laws as textbooks have them: masses, or densities on the nodes of Gauss and Legendre.
    count = torch.arange(150, dtype=torch.float64)
    poisson = torch.exp(count * b.log() - b - torch.lgamma(count + 1))
    trials = count[:8]
    binomial = (
        torch.tensor([math.comb(7, k) for k in range(8)]) * p**trials * (1 - p) ** (7 - trials)
    )
    node, weight = (torch.tensor(x) for x in np.polynomial.legendre.leggauss(150))
    positive, line = 30 * (node + 1), 13 * node + 1
    density = 30 * weight * b**a * positive * torch.exp(-b * positive)  # a = 2, and 1! = 1
    bell = 13 * weight * torch.exp(-((line - m) ** 2) / (2 * s)) / (2 * math.pi * s).sqrt()

    def padded(eta: Tensor, size: int) -> Tensor:
        """η for the statistic x, nothing for the others."""
        return torch.cat([eta[:, None], eta.new_zeros(len(eta), size - 1)], -1)

    gamma = Gamma(a, b)
    families = (
        (gamma, positive, density),
        (Normal(m[None], s[None, None]), line, bell),
        (Poisson(b), count, poisson),
        (Binomial(7, p), trials, binomial),
    )
    gaps: list[Tensor] = []
    for h, x, mass in families:
        weights = mass * torch.exp(torch.outer(etas, x))
        mean = weights @ x / weights.sum(-1)
        points = etas.clone().requires_grad_()
        value = h.log_normalizer(padded(points, h.dimension))
        (slope,) = torch.autograd.grad(value.sum(), points)
        member = h.tilt(padded(etas, h.dimension)).moments()[0].flatten()
        here = torch.stack([value.detach() - weights.sum(-1).log(), slope - mean, member - mean])
        gaps.append(here.abs().amax(-1))
    normalizer, gradient, moved = torch.stack(gaps).amax(0).tolist()

    # Eq. (1), first line, has η2 for η under the integral; for this gamma law η2 = a - 1 = 1.
    misprint = (density * positive.exp()).sum().log()
    slip = float((gamma.log_normalizer(padded(etas, 2)) - misprint).abs().max())

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        grid = torch.linspace(0.01, 4, 200, dtype=torch.float64)
        some = grid[4::12]
        for i, e in enumerate((-2.0, 0.0, 1.5)):
            eta, color = torch.tensor([e, 0.0], dtype=torch.float64), series_color(i)
            tilted = (
                b**a * some * torch.exp((e - b) * some) / (density * (e * positive).exp()).sum()
            )
            axes.plot(grid, gamma.log_prob(grid[:, None], eta).exp(), color=color)
            axes.plot(
                some,
                tilted,
                "o",
                ms=4,
                color=color,
                label=f"η = {e:g}: rate {2.5 - e:g}".replace("-", "−"),
            )
        axes.set(xlabel="x", ylabel="density", ylim=(0, 1.75))
        axes.legend()

    return Evidence(
        [
            at_most("normalizer_gap", normalizer, 1e-11, "G against log ∫ p₀ e^{ηx} by quadrature"),
            at_most("gradient_gap", gradient, 1e-11, "∇G by autograd, mean by quadrature"),
            at_most("member_gap", moved, 1e-11, "mean of the member η₁ + η against quadrature"),
            noted("misprint_gap", slip, "error of G with η₂ in place of η, as eq. (1) prints"),
        ],
        f"For four families ∇G is the mean of the member η₁ + η to {max(gradient, moved):.0e}. "
        f"The misprint in eq. (1) would leave an integral without η, off by up to {slip:.1f}.",
        Picture(
            draw,
            "A gamma law of rate 2.5, tilted: the library's members of the family (lines) are "
            "p₀(x) e^{ηx} normalized by quadrature (dots), with the rate lowered by η.",
        ),
    )


CLAIM = Claim(
    id="T2",
    title="Tilting a member of an exponential family",
    statement=(
        "If h is itself a member of an exponential family that has x among its statistics, tilting "
        "adds η to the natural parameter of x, and the gradient of G is the mean of that member."
    ),
    source="proofs draft, Theorem 1b and eq. (1), (2)",
    formula=r"h(x) = p_0(x \mid \eta_1, \eta_2) \quad\Rightarrow\quad "
    r"\nabla G(\eta) = E_{x \sim p_0(x \mid \eta_1 + \eta,\, \eta_2)}[x]",
    recorded=HOLDS,
    experiment=experiment,
    correction=(
        "The theorem holds as stated. The first line of eq. (1) in its proof misprints η₁ + η₂ for "
        "η₁ + η; the second line is right."
    ),
    systems=("exponential families",),
    tests=("tests/laws/test_tilted_measures.py", "tests/measures/test_families.py"),
)

"""T2: tilting a member of an exponential family shifts its natural parameter."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cumulant import Binomial, Gamma, MeanCovarianceGaussian, Measure, Poisson
from cumulant.figures import series_color
from cumulant.lab.claims.claim import Claim, Found, Trial, table
from cumulant.lab.claims.measuring import gap

CLAIM = Claim(
    id="T2",
    title="Tilting a member of an exponential family",
    evidence="identity",
    statement="If h is itself a member of an exponential family that has x among its statistics, "
    "tilting adds η to the natural parameter of x, and the gradient of G is the mean of that "
    "member.",
    slips=("The first line of eq. (1) prints η₁ + η₂ for η₁ + η; the second line is correct.",),
    source="proofs draft, Theorem 1b and eq. (1), (2)",
    formula=r"h(x) = p_0(x \mid \eta_1, \eta_2) \quad\Rightarrow\quad "
    r"\nabla G(\eta) = E_{x \sim p_0(x \mid \eta_1 + \eta,\, \eta_2)}[x]",
    recorded="holds",
    systems=("exponential families",),
    tests=("tests/laws/test_tilted_measures.py", "tests/measures/test_families.py"),
    rules=table("""
      statement:
        normalizer_gap ≤ 1e-11: G against log ∫ p₀ e^{ηx} by quadrature
        gradient_gap ≤ 1e-11: ∇G by autograd, mean by quadrature
        member_gap ≤ 1e-11: mean of the member η₁ + η against quadrature
      noted:
        misprint_gap: error of G with η₂ in place of η, as eq. (1) prints
    """),
    finding="For four families ∇G is the mean of the member η₁ + η to {worst:.0e}. The misprint "
    "in eq. (1) drops η from the integral, an error of up to {misprint_gap:.1f}.",
    caption="A gamma law of rate 2.5, tilted: the library's members of the family (lines) are "
    "p₀(x) e^{{ηx}} normalized by quadrature (dots), with the rate lowered by η.",
)


A, B, M, S, P = torch.tensor([2.0, 2.5, 0.5, 0.8, 0.25], dtype=torch.float64)
NODE, WEIGHT = (torch.tensor(x) for x in np.polynomial.legendre.leggauss(150))
POSITIVE, LINE = 30 * (NODE + 1), 13 * NODE + 1
GAMMA = 30 * WEIGHT * B**A * POSITIVE * torch.exp(-B * POSITIVE)  # a = 2, and 1! = 1


def families() -> tuple[tuple[Measure, Tensor, Tensor], ...]:
    """Textbook laws: measure, nodes, and masses or densities with Gauss's weights."""
    count = torch.arange(150, dtype=torch.float64)
    poisson = torch.exp(count * B.log() - B - torch.lgamma(count + 1))
    few, choose = count[:8], torch.tensor([math.comb(7, k) for k in range(8)])
    bell = 13 * WEIGHT * torch.exp(-((LINE - M) ** 2) / (2 * S)) / (2 * math.pi * S).sqrt()
    return (
        (Gamma(A, B), POSITIVE, GAMMA),
        (MeanCovarianceGaussian(M[None], S[None, None]), LINE, bell),
        (Poisson(B), count, poisson),
        (Binomial(7, P), few, choose * P**few * (1 - P) ** (7 - few)),
    )


def padded(eta: Tensor, size: int) -> Tensor:
    """η for the statistic x, 0 for the others."""
    return torch.cat([eta[:, None], eta.new_zeros(len(eta), size - 1)], -1)


def measure(trial: Trial) -> Found:
    """Gamma, normal, Poisson and binomial laws, tilted by quadrature and by the library."""
    etas = torch.linspace(-2, 1.5, trial.size(141, 36), dtype=torch.float64)
    gaps: list[list[float]] = []
    for h, x, mass in families():
        weights = mass * torch.exp(torch.outer(etas, x))
        mean = weights @ x / weights.sum(-1)
        points = etas.clone().requires_grad_()
        value = h.log_normalizer(padded(points, h.dimension))
        (slope,) = torch.autograd.grad(value.sum(), points)
        member: Any = h.tilt(padded(etas, h.dimension))
        means = member.moments()[0].flatten()
        gaps.append([gap(value, weights.sum(-1).log()), gap(slope, mean), gap(means, mean)])
    normalizer, gradient, moved = map(max, zip(*gaps, strict=True))
    # Eq. (1), first line, has η2 for η under the integral; for this gamma law η2 = a - 1 = 1.
    misprint = (GAMMA * POSITIVE.exp()).sum().log()
    numbers = {
        "normalizer_gap": normalizer,
        "gradient_gap": gradient,
        "member_gap": moved,
        "misprint_gap": gap(Gamma(A, B).log_normalizer(padded(etas, 2)), misprint),
    }
    return Found(numbers, worst=max(gradient, moved))


def draw(figure: Any, seen: Any) -> None:
    """A gamma law and two tilted ones, by the library and by quadrature."""
    axes = figure.subplots()
    grid = torch.linspace(0.01, 4, 200, dtype=torch.float64)
    some = grid[4::12]
    for i, e in enumerate((-2.0, 0.0, 1.5)):
        eta, color = torch.tensor([e, 0.0], dtype=torch.float64), series_color(i)
        total = (GAMMA * (e * POSITIVE).exp()).sum()
        tilted = B**A * some * torch.exp((e - B) * some) / total
        axes.plot(grid, Gamma(A, B).log_prob(grid[:, None], eta).exp(), color=color)
        label = f"η = {e:g}: rate {2.5 - e:g}".replace("-", "−")
        axes.plot(some, tilted, "o", ms=4, color=color, label=label)
    axes.set(xlabel="x", ylabel="density", ylim=(0, 1.75))
    axes.legend()

"""T3: tilting a Gaussian moves its mean to m + Ση and keeps its covariance."""

from __future__ import annotations

import math
from typing import Any

import torch

from cumulant import Gaussian
from cumulant.core.typed import linalg
from cumulant.figures import INK, MUTED, series_color
from cumulant.lab.claims.claim import Claim, Found, Trial, table
from cumulant.lab.claims.measuring import gap

CLAIM = Claim(
    id="T3",
    title="A Gaussian measure",
    evidence="identity",
    statement="For Gaussian h with mean m and covariance Σ the gradient of G is m + Ση.",
    source="proofs draft, Corollary 1",
    formula=r"h = \mathcal{N}(m, \Sigma) \quad\Rightarrow\quad "
    r"G(\eta) = \langle m, \eta\rangle + \tfrac12 \eta^\top \Sigma \eta, \qquad "
    r"\nabla G(\eta) = m + \Sigma\eta",
    recorded="holds",
    tests=("tests/laws/test_tilted_measures.py", "tests/measures/test_families.py"),
    rules=table("""
      statement:
        normalizer_gap ≤ 1e-10: G against quadrature in the plane
        mean_gap ≤ 1e-10: tilted mean against quadrature
        covariance_gap ≤ 1e-9: tilted covariance against quadrature
        gradient_gap ≤ 1e-11: ∇G by autograd against m + Ση, d = 6
        link_gap ≤ 1e-8: link of m + Ση against η: the link is linear
    """),
    finding="The tilted mean agrees with quadrature to {mean_gap:.0e} and the covariance is "
    "unchanged to {covariance_gap:.0e}; in six dimensions ∇G is m + Ση to {gradient_gap:.0e}.",
    caption="A Gaussian tilted three ways keeps its shape and moves by Ση (solid), not along η "
    "(dotted).",
    size=(7.0, 3.3),
)


def measure(trial: Trial) -> Found:
    """In the plane against quadrature on a grid, in more dimensions against the closed form."""
    m = torch.tensor([0.5, -0.3], dtype=torch.float64)
    spread = torch.tensor([[1.4, 0.5], [0.5, 0.6]], dtype=torch.float64)
    eta = 4 * trial.uniform(trial.size(24, 6), 2) - 2
    h = Gaussian(m, spread)
    # The oracle: h e^{<x, η>} on a grid, its total, mean and covariance by sums.
    step = 0.1
    line = torch.arange(-14, 14, step, dtype=torch.float64)
    x = torch.cartesian_prod(line, line)
    away = x - m
    density = torch.exp(-((away @ linalg.inv(spread)) * away).sum(-1) / 2)
    density /= 2 * math.pi * linalg.det(spread).sqrt()
    tilted = density * torch.exp(eta @ x.T) * step**2
    total = tilted.sum(-1)
    mean = tilted @ x / total[:, None]
    second = torch.einsum("mn,na,nb->mab", tilted, x, x) / total[:, None, None]
    covariance = second - mean[:, :, None] * mean[:, None, :]

    root = trial.normal(6, 6)
    many, center = root @ root.T / 6 + 0.2 * torch.eye(6, dtype=torch.float64), trial.normal(6)
    points = trial.normal(50, 6).requires_grad_()
    (slope,) = torch.autograd.grad(Gaussian(center, many).log_normalizer(points).sum(), points)
    closed = center + points.detach() @ many
    numbers = {
        "normalizer_gap": gap(h.log_normalizer(eta), total.log()),
        "mean_gap": gap(h.mean(eta), mean),
        "covariance_gap": gap(h.covariance(eta), covariance),
        "gradient_gap": gap(slope, closed),
        "link_gap": gap(Gaussian(center, many).link(closed), points),
    }
    return Found(numbers, h=h, m=m, spread=spread)


def draw(figure: Any, seen: Any) -> None:
    """A Gaussian at one standard deviation, tilted three ways."""
    axes = figure.subplots()
    turn = torch.linspace(0, 2 * math.pi, 100, dtype=torch.float64)
    circle = torch.stack([turn.cos(), turn.sin()], -1)
    ellipse = circle @ linalg.cholesky(seen.spread).T
    axes.plot(*(seen.m + ellipse).T, color=INK, label="h, at one standard deviation")
    for i, push in enumerate(torch.tensor([[2.0, 0.0], [-1.0, 2.2], [-1.0, -2.2]]).double()):
        to, color = seen.h.mean(push[None])[0], series_color(i)
        axes.plot(*(to + ellipse).T, color=color)
        for end, line in ((to, "-"), (seen.m + push, ":")):
            axes.plot(*torch.stack([seen.m, end]).T, line, color=color, marker=".", markevery=[1])
    axes.plot(*seen.m, "o", color=INK, ms=4)
    axes.plot([], [], "-", color=MUTED, label="moved by Ση: the tilted law")
    axes.plot([], [], ":", color=MUTED, label="moved by η")
    axes.set(xlabel="x₁", ylabel="x₂", aspect="equal", xlim=(-3.5, 8.5), ylim=(-3.1, 2.2))
    axes.legend(loc="center right")

"""T4: a mixture of Gaussians with one covariance, and the weights the draft drops."""

from __future__ import annotations

from typing import Any

import torch

from cumulant import GaussianMixture
from cumulant.figures import series_color
from cumulant.lab.claims.claim import CORRECTED, Claim, Evidence, Picture, Trial, at_most


def experiment(trial: Trial) -> Evidence:
    """On a line, against quadrature on a grid: G's gradient with and without the weights."""
    means, spread = torch.tensor([-2.0, 0.5, 2.5], dtype=torch.float64), 0.6
    weights = torch.tensor([0.7, 0.25, 0.05], dtype=torch.float64)
    eta = torch.linspace(-3, 3, trial.size(241, 61), dtype=torch.float64)
    # The oracle: the tilted density on a fine grid, its mean by the trapezoidal rule.
    x = torch.linspace(-15, 15, 6001, dtype=torch.float64)
    density = weights @ torch.exp(-((x - means[:, None]) ** 2) / (2 * spread))
    tilted = density * torch.exp(torch.outer(eta, x) - (eta.abs() * 15)[:, None])
    truth = torch.trapezoid(tilted * x, x) / torch.trapezoid(tilted, x)
    ours = GaussianMixture(
        means[:, None], torch.tensor([[spread]], dtype=torch.float64), weights.log()
    ).mean(eta[:, None])[:, 0]
    drafted = spread * eta + torch.softmax(torch.outer(eta, means), -1) @ means
    gap, mended = (drafted - truth).abs(), (ours - truth).abs()

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.plot(eta, truth, color=series_color(0), label="quadrature")
        axes.plot(eta, ours, "--", color=series_color(2), label="with log π in the softmax")
        axes.plot(eta, drafted, ":", color=series_color(1), label="as drafted, without π")
        axes.set(xlabel="η", ylabel="∇G(η)")
        axes.legend()

    return Evidence(
        [
            at_most("drafted_gap", gap.max(), 1e-8, "largest error of ∇G without the weights"),
            at_most(
                "corrected_gap",
                mended.max(),
                1e-8,
                "largest error of ∇G with log π inside the softmax",
                form="correction",
            ),
        ],
        f"Without π the gradient is off by up to {float(gap.max()):.2f}; "
        f"with it, it agrees with quadrature to {float(mended.max()):.0e}.",
        Picture(
            draw,
            "The gradient of G for three Gaussians of unequal weight: the draft's form, which "
            "drops the weights, misses the quadrature that the corrected one falls on.",
        ),
    )


CLAIM = Claim(
    id="T4",
    title="Gaussian mixtures with one covariance",
    statement=(
        "For a mixture of Gaussians that share Σ, the gradient of G is Ση plus attention over the "
        "component means."
    ),
    source="proofs draft, Theorem 2 and eq. (3)",
    formula=r"\nabla G(\eta) = \Sigma\eta + \sum_n \operatorname{softmax}_n"
    r"\left(\langle\mu_n, \eta\rangle + \log \pi_n\right) \mu_n",
    recorded=CORRECTED,
    experiment=experiment,
    correction="The proof loses the weights π; they stay, as log π added to the scores.",
    tests=("tests/laws/test_gaussian_mixtures.py",),
)

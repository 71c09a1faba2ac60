"""T4: a Gaussian mixture with a shared covariance, and the weights the draft drops."""

from __future__ import annotations

from typing import Any

import torch

from cumulant import GaussianMixture
from cumulant.figures import series_color
from cumulant.lab.claims.claim import Claim, Found, Trial, table

CLAIM = Claim(
    id="T4",
    title="Gaussian mixtures with one covariance",
    evidence="identity",
    statement="For a mixture of Gaussians that share Σ, the gradient of G is Ση plus attention "
    "over the component means.",
    correction="The proof drops the weights π; they belong in the scores, as log π.",
    source="proofs draft, Theorem 2 and eq. (3)",
    formula=r"\nabla G(\eta) = \Sigma\eta + \sum_n \operatorname{softmax}_n"
    r"\left(\langle\mu_n, \eta\rangle + \log \pi_n\right) \mu_n",
    recorded="holds with a correction",
    tests=("tests/laws/test_gaussian_mixtures.py",),
    rules=table("""
      statement:
        drafted_gap ≤ 1e-8: largest error of ∇G without the weights
      correction:
        corrected_gap ≤ 1e-8: largest error of ∇G with log π inside the softmax
    """),
    finding="Without π the gradient is off by up to {drafted_gap:.2f}; with π it agrees with "
    "quadrature to {corrected_gap:.0e}.",
    caption="The gradient of G for three Gaussians of unequal weight: the draft's form, which "
    "drops the weights, misses the quadrature; the corrected form matches it.",
)


def measure(trial: Trial) -> Found:
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
    numbers = {"drafted_gap": gap.max(), "corrected_gap": mended.max()}
    return Found(numbers, drafted=drafted, eta=eta, ours=ours, truth=truth)


def draw(figure: Any, seen: Any) -> None:
    """∇G by quadrature, corrected, and as drafted."""
    axes = figure.subplots()
    axes.plot(seen.eta, seen.truth, color=series_color(0), label="quadrature")
    axes.plot(seen.eta, seen.ours, "--", color=series_color(2), label="with log π in the softmax")
    axes.plot(seen.eta, seen.drafted, ":", color=series_color(1), label="as drafted, without π")
    axes.set(xlabel="η", ylabel="∇G(η)")
    axes.legend()

"""T5: a Gaussian mixture with separate covariances; G has a closed form, no bound is needed."""

from __future__ import annotations

from typing import Any

import torch

from cumulant import GaussianMixture
from cumulant.figures import series_color
from cumulant.lab.claims.claim import Claim, Found, Trial, table
from cumulant.lab.claims.measuring import gap

CLAIM = Claim(
    id="T5",
    title="Gaussian mixtures with own covariances",
    evidence="identity",
    statement="For Gaussians with different covariances only a lower bound of G is available, and "
    "the gradient step uses that bound. (Theorem 3 breaks off after log Z ≥; we take the bound "
    "with the mixture's weights.)",
    correction="No bound is needed: G has a closed form, and ∇G = Σₙ rₙ(μₙ + Σₙη) with the "
    "responsibilities r. Jensen's bound is a bound for any weights q, with gap KL(q‖r); its "
    "gradient is that of G wherever q = r(η), as at η = 0 for q = π, and in general not elsewhere.",
    source="proofs draft, Theorem 3 and the sentence before it",
    formula=r"G(\eta) = \log \sum_n \pi_n e^{\langle\mu_n, \eta\rangle + \frac12 \eta^\top "
    r"\Sigma_n \eta} \;\ge\; \sum_n q_n \left(\langle\mu_n, \eta\rangle + \tfrac12 \eta^\top "
    r"\Sigma_n \eta + \log \frac{\pi_n}{q_n}\right)",
    recorded="holds with a correction",
    tests=("tests/laws/test_gaussian_mixtures.py",),
    rules=table("""
      statement:
        bound_excess ≤ 1e-10: how far Jensen's bound exceeds G
        wrong_way ≤ 0: share of η at which a step on the bound (q = π) lowers G
      correction:
        value_gap ≤ 1e-10: closed G against quadrature
        gradient_gap ≤ 1e-9: closed ∇G against quadrature
        gap_is_kl ≤ 1e-11: G − bound against KL(q‖r)
        touching_gap ≤ 1e-11: value and gradient of the bound frozen at q = r(η), against G
      noted:
        bound_gradient_gap: gradient of the bound, q = π, against ∇G
    """),
    finding="The bound with q = π stays below G, but its gradient is off by up to "
    "{bound_gradient_gap:.1f} and points downhill at {wrong_way:.0%} of the η. The closed ∇G "
    "agrees with quadrature to {gradient_gap:.0e}; the gap is KL(q‖r) to {gap_is_kl:.0e}.",
    caption="Three Gaussians of different width. The bound with q = π touches G only at 0; away "
    "from it the slope is wrong. Frozen at r(0.8) it matches value and slope there. The closed "
    "gradient matches quadrature everywhere.",
)


def any_weights(trial: Trial) -> tuple[float, float]:
    """In four dimensions: G - bound against KL(q‖r), and the bound frozen at q = r against G."""
    n, d, m = 6, 4, trial.size(200, 30)
    centers, factor, logits = trial.normal(n, d), trial.normal(n, d, d), trial.normal(n)
    matrices = factor @ factor.mT / d + 0.1 * torch.eye(d, dtype=torch.float64)
    point = trial.normal(m, d)
    h = GaussianMixture(centers, matrices, logits.log_softmax(0))
    pushed = torch.einsum("nab,mb->mna", matrices, point)
    scores = point @ centers.T + (pushed * point[:, None]).sum(-1) / 2
    r = (scores + logits).softmax(-1)
    q = (2 * trial.normal(m, n)).softmax(-1)
    short = h.log_normalizer(point) - h.log_normalizer_bound(point, q)
    at = point.clone().requires_grad_()
    touching = h.log_normalizer_bound(at, r)
    (tangent,) = torch.autograd.grad(touching.sum(), at)
    closed = (r[..., None] * (centers + pushed)).sum(1)
    touch = max(gap(touching, h.log_normalizer(point)), gap(tangent, closed))
    return gap(short, (q * (q / r).log()).sum(-1)), touch


def measure(trial: Trial) -> Found:
    """On a line against quadrature; in four dimensions against sums written out."""
    means, spreads = torch.tensor([[-2.0, 0.5, 2.0], [0.3, 0.8, 2.0]], dtype=torch.float64)
    weights = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    eta = torch.linspace(-1.5, 1.5, trial.size(241, 61), dtype=torch.float64, requires_grad=True)
    h = GaussianMixture(means[:, None], spreads[:, None, None], weights.log())
    x = torch.linspace(-15, 20, 7001, dtype=torch.float64)
    root = spreads[:, None].sqrt()
    density = weights @ (torch.exp(-(((x - means[:, None]) / root) ** 2) / 2) / root)
    tilted = density * torch.exp(torch.outer(eta.detach(), x)) / (2 * torch.pi) ** 0.5
    total = torch.trapezoid(tilted, x)
    truth, slope = total.log(), torch.trapezoid(tilted * x, x) / total

    exact = h.log_normalizer(eta[:, None])
    bound = h.log_normalizer_bound(eta[:, None])  # q = π
    (up,) = torch.autograd.grad(bound.sum(), eta)
    (steepest,) = torch.autograd.grad(exact.sum(), eta)
    jensen, touch = any_weights(trial)
    numbers = {
        "bound_excess": (bound.detach() - truth).max(),
        "wrong_way": ((up * slope) < 0).double().mean(),
        "value_gap": gap(exact, truth),
        "gradient_gap": gap(steepest, slope),
        "gap_is_kl": jensen,
        "touching_gap": touch,
        "bound_gradient_gap": gap(up, slope),
    }
    values = {
        "truth": truth,
        "bound": bound.detach(),
        "slope": slope,
        "up": up,
        "steepest": steepest,
    }
    return Found(numbers, at=eta.detach(), h=h, **values)


def draw(figure: Any, seen: Any) -> None:
    """G and its bounds; their gradients."""
    at, touched = seen.at, torch.tensor([[0.8]], dtype=torch.float64)
    frozen = seen.h.log_normalizer_bound(at[:, None], seen.h.responsibilities(touched)[0])
    left, right = figure.subplots(1, 2)
    left.plot(at, seen.truth, color=series_color(0), label="G by quadrature")
    left.plot(at, seen.bound, ":", color=series_color(1), label="bound, q = π")
    left.plot(at, frozen, "--", color=series_color(2), label="bound, q = r(0.8)")
    left.plot([0.8], seen.h.log_normalizer(touched), "o", color=series_color(2))
    left.set(xlabel="η", ylabel="G(η)", ylim=(-3, 7))
    right.plot(at, seen.slope, color=series_color(0), label="∇G by quadrature")
    right.plot(at, seen.up, ":", color=series_color(1), label="of the bound, q = π")
    right.plot(at, seen.steepest, "--", color=series_color(2), label="closed form")
    right.set(xlabel="η", ylabel="gradient")
    for axes in (left, right):
        axes.legend(loc="upper left")

"""T11: M-projection matches expected statistics, which also parametrize conjugate priors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import cumulant as cm
from cumulant.figures import INK, series_color
from cumulant.lab.claims.claim import Claim, Found, Trial, table
from cumulant.lab.claims.measuring import gap, minimized

CLAIM = Claim(
    id="T11",
    title="M-projection and conjugate priors",
    evidence="identity",
    statement="The member of a family closest to a law in KL(law‖member) has the law's expected "
    "statistics. The conjugate prior of a family is parametrized by expected statistics too: "
    "under exp(⟨χ,η⟩ − νG(η)) the mean of ∇G is χ/ν.",
    source="message passing draft, sections 3 and 3.2",
    formula=r"\operatorname{argmin}_\theta \operatorname{KL}(p \| q_\theta): \ E_{q_\theta}[u] = "
    r"E_p[u], \qquad \pi(\eta) \propto e^{\langle\chi, \eta\rangle - \nu G(\eta)} \Rightarrow "
    r"E_\pi[\nabla G(\eta)] = \chi / \nu",
    recorded="holds",
    tests=("tests/laws/test_projection.py",),
    rules=table("""
      statement:
        projection_gap ≤ 1e-6: log parameters against those of the least KL found
        moments_gap ≤ 1e-11: Gaussian projection against moments by quadrature
        excess ≥ 0.0001: KL lost by matching mean and variance
        prior_gap ≤ 1e-10: E[∇G] under conjugate priors against χ/ν
        update_gap ≤ 1e-11: gamma posterior of counts against Bayes' rule
    """),
    finding="The projection minimizes KL to {projection_gap:.0e}; matching mean and variance "
    "instead of the family's own statistics loses {excess:.3f} nats. Under conjugate priors E[∇G] "
    "is χ/ν to {prior_gap:.0e}.",
    caption="A mixture of two gamma laws and its M-projection, which matches E[x] and E[log x]. "
    "It has the least KL of all gamma laws; the one with the same mean and variance has more.",
)


# Sums over a grid in log x are as good as exact for gamma densities.
X = torch.linspace(-20, 4.5, 2001, dtype=torch.float64).exp()
MASS = X * (24.5 / 2000)
ONE = torch.tensor(1.0, dtype=torch.float64)


def log_gamma(shape: Tensor, rate: Tensor) -> Tensor:
    """The log density of a gamma law on the grid."""
    return shape * rate.log() - torch.lgamma(shape) + (shape - 1) * X.log() - rate * X


def divergence(mixture: Tensor, law: Tensor) -> float:
    """KL of the mixture from the gamma law with this shape and rate."""
    return float((MASS * mixture * (mixture.log() - log_gamma(*law))).sum())


def projected(mixture: Tensor) -> Tensor:
    """Logarithms of the shape and rate with the least KL, by a search without derivatives."""

    def distance(v: Any) -> float:
        return divergence(mixture, torch.tensor(v, dtype=torch.float64).exp())

    options = {"xatol": 1e-9, "fatol": 1e-15, "maxiter": 2000}
    return torch.tensor(minimized(distance, [0.0, 0.0], method="Nelder-Mead", options=options).x)


def moments_gap() -> float:
    """Mean and variance of three Gaussians' projection, against quadrature."""
    centers, spreads = torch.tensor([[-2.0, 0.5, 3.0], [0.3, 1.0, 0.5]], dtype=torch.float64)
    many = cm.project(cm.GaussianMixture(centers[:, None], spreads), cm.MeanCovarianceGaussian)
    line = torch.linspace(-15, 15, 6001, dtype=torch.float64)
    bells = torch.exp(-((line - centers[:, None]) ** 2) / (2 * spreads[:, None]))
    density = (bells / (2 * torch.pi * spreads[:, None]).sqrt()).mean(0)
    first = torch.trapezoid(density * line, line)
    second = torch.trapezoid(density * (line - first) ** 2, line)
    return max(gap(many.loc[0], first), gap(many.covariance_matrix[0, 0], second))


def prior_gap(trial: Trial) -> float:
    """The mean of ∇G under exp(χη - νG(η)), with the library's G, by quadrature against χ/ν."""
    wide = torch.linspace(-60, 60, 6001, dtype=torch.float64)
    # The exponential law ends at η = 1: over the logarithm of 1 - η.
    log_rate = torch.linspace(-16, 4, 4001, dtype=torch.float64)
    priors = (
        (cm.Poisson(ONE), wide[wide < 6], torch.ones(())),
        (cm.Bernoulli(ONE / 2), wide, torch.ones(())),
        (cm.Exponential(ONE), 1 - log_rate.exp(), log_rate.exp()),
    )
    chi, more = (2 + 3 * trial.uniform(2, trial.size(30, 8), 1)).unbind()
    worst = 0.0
    for h, eta, slope in priors:
        nu = chi + more if isinstance(h, cm.Bernoulli) else more  # its means lie between 0 and 1
        weight = (chi * eta - nu * h.log_normalizer(eta[:, None])).softmax(-1) * slope
        average = weight @ h.mean(eta[:, None])[:, 0] / weight.sum(-1)
        worst = max(worst, gap(average, (chi / nu)[:, 0]))
    return worst


def update_gap() -> float:
    """Expected statistics of a gamma posterior of counts, against Bayes' rule on the grid."""
    counts = torch.tensor([3.0, 5.0, 2.0], dtype=torch.float64)
    bayes = log_gamma(2 * ONE, ONE) + (counts[:, None] * X.log() - X).sum(0)
    after = cm.posterior(cm.Gamma(2 * ONE, ONE), cm.Poisson, counts).measure
    share = (bayes.exp() * MASS) / (bayes.exp() * MASS).sum()
    return gap(after.expectation, torch.stack([(share * X).sum(), (share * X.log()).sum()]))


def measure(trial: Trial) -> Found:
    """A gamma mixture projected, by the library and by an optimizer; priors by quadrature."""
    shapes, rates = torch.tensor([[2.0, 20.0], [2.0, 4.0]], dtype=torch.float64)
    weights = torch.tensor([0.6, 0.4], dtype=torch.float64)
    mixture = weights @ log_gamma(shapes[:, None], rates[:, None]).exp()
    ours = cm.project(cm.Mixture(cm.Gamma(shapes, rates), weights.log()), cm.Gamma)
    both = torch.stack([ours.concentration, ours.rate])
    # Matching mean and variance instead gives another member, farther away.
    mean = (MASS * mixture * X).sum()
    variance = (MASS * mixture * (X - mean) ** 2).sum()
    other = torch.stack([mean**2 / variance, mean / variance])
    numbers = {
        "projection_gap": gap(both.log(), projected(mixture)),
        "moments_gap": moments_gap(),
        "excess": divergence(mixture, other) - divergence(mixture, both),
        "prior_gap": prior_gap(trial),
        "update_gap": update_gap(),
    }
    return Found(numbers, both=both, other=other, mean=mean, mixture=mixture)


def draw(figure: Any, seen: Any) -> None:
    """The mixture with two gamma laws near it; KL over gamma laws of the same mean."""
    left, right = figure.subplots(1, 2)
    show = X < 12
    left.plot(X[show], seen.mixture[show], color=INK, label="mixture of two gammas")
    laws = {"M-projection": seen.both, "mean and variance": seen.other}
    for i, (name, law) in enumerate(laws.items()):
        left.plot(X[show], log_gamma(*law).exp()[show], color=series_color(i), label=name)
    left.set(xlabel="x", ylabel="density")
    left.legend()
    alphas = torch.linspace(0.8, 2.1, 60, dtype=torch.float64)
    line = [divergence(seen.mixture, torch.stack([a, a / seen.mean])) for a in alphas]
    right.plot(alphas, line, color=INK)
    for i, law in enumerate(laws.values()):
        right.plot([law[0]], [divergence(seen.mixture, law)], "o", color=series_color(i))
    right.set(xlabel="shape of the gamma law", ylabel="KL(mixture ‖ gamma), nats")

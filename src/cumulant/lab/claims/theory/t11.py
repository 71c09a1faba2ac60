"""T11: M-projection matches expected statistics, which also parametrize conjugate priors."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

import cumulant as cm
from cumulant.figures import INK, series_color
from cumulant.lab.claims.claim import HOLDS, Claim, Evidence, Picture, Trial, at_least, at_most


def experiment(trial: Trial) -> Evidence:
    """A gamma mixture projected, by the library and by an optimizer; priors by quadrature."""
    minimize: Any = import_module("scipy.optimize").minimize
    double = torch.float64
    shapes, rates = torch.tensor([[2.0, 20.0], [2.0, 4.0]], dtype=double)
    weights = torch.tensor([0.6, 0.4], dtype=double)
    # Two gamma laws; sums over a grid in log x, which is as good as exact for such densities.
    x = torch.linspace(-20, 4.5, 2001, dtype=double).exp()
    mass = x * (24.5 / 2000)
    logs = _log_gamma(x, shapes[:, None], rates[:, None])
    mixture = weights @ logs.exp()

    def divergence(log_a: float, log_b: float) -> float:
        log_q = _log_gamma(x, *torch.tensor([log_a, log_b], dtype=double).exp())
        return float((mass * mixture * (mixture.log() - log_q)).sum())

    def objective(v: Any) -> float:
        return divergence(float(v[0]), float(v[1]))

    options = {"xatol": 1e-9, "fatol": 1e-15, "maxiter": 2000}
    found = minimize(objective, [0.0, 0.0], method="Nelder-Mead", options=options)
    ours = cm.project(cm.Mixture(cm.Gamma(shapes, rates), weights.log()), cm.Gamma)
    both = torch.stack([ours.concentration, ours.rate])
    projected = (both.log() - torch.tensor(found.x)).abs().max()
    # Matching mean and variance instead gives another member, farther away.
    mean = (mass * mixture * x).sum()
    variance = (mass * mixture * (x - mean) ** 2).sum()
    other = torch.stack([mean**2 / variance, mean / variance])
    nearest, farther = divergence(*both.log().tolist()), divergence(*other.log().tolist())

    centers, spreads = torch.tensor([[-2.0, 0.5, 3.0], [0.3, 1.0, 0.5]], dtype=double)
    many = cm.project(cm.GaussianMixture(centers[:, None], spreads), cm.Normal)
    line = torch.linspace(-15, 15, 6001, dtype=double)
    bells = torch.exp(-((line - centers[:, None]) ** 2) / (2 * spreads[:, None]))
    density = (bells / (2 * torch.pi * spreads[:, None]).sqrt()).mean(0)
    first = torch.trapezoid(density * line, line)
    second = torch.trapezoid(density * (line - first) ** 2, line)
    moments = torch.stack([many.loc[0] - first, many.covariance_matrix[0, 0] - second]).abs().max()

    # Conjugate priors exp(χη - νG(η)) with the library's G: the mean of ∇G by quadrature. For the
    # exponential law, which ends at η = 1, over the logarithm of 1 - η.
    one = torch.tensor(1.0, dtype=double)
    wide = torch.linspace(-60, 60, 6001, dtype=double)
    log_rate = torch.linspace(-16, 4, 4001, dtype=double)
    priors = (
        (cm.Poisson(one), wide[wide < 6], torch.ones(())),
        (cm.Bernoulli(one / 2), wide, torch.ones(())),
        (cm.Exponential(one), 1 - log_rate.exp(), log_rate.exp()),
    )
    chi, more = (2 + 3 * trial.uniform(2, trial.size(30, 8), 1)).unbind()
    conjugate = 0.0
    for h, eta, slope in priors:
        nu = chi + more if isinstance(h, cm.Bernoulli) else more  # its means lie between 0 and 1
        log_prior = chi * eta - nu * h.log_normalizer(eta[:, None])
        weight = log_prior.softmax(-1) * slope
        average = weight @ h.mean(eta[:, None])[:, 0] / weight.sum(-1)
        conjugate = max(conjugate, float((average - (chi / nu)[:, 0]).abs().max()))

    counts = torch.tensor([3.0, 5.0, 2.0], dtype=double)
    bayes = _log_gamma(x, 2 * one, one) + (counts[:, None] * x.log() - x).sum(0)
    after = cm.posterior(cm.Gamma(2 * one, one), cm.Poisson, counts).measure
    share = (bayes.exp() * mass) / (bayes.exp() * mass).sum()
    seen = torch.stack([(share * x).sum(), (share * x.log()).sum()])
    update = (after.expectation - seen).abs().max()

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        show = x < 12
        left.plot(x[show], mixture[show], color=INK, label="mixture of two gammas")
        laws = {"M-projection": both, "mean and variance": other}
        for i, (name, law) in enumerate(laws.items()):
            curve = _log_gamma(x, *law).exp()[show]
            left.plot(x[show], curve, color=series_color(i), label=name)
        left.set(xlabel="x", ylabel="density")
        left.legend()
        alphas = torch.linspace(0.8, 2.1, 60, dtype=double)
        line = [divergence(float(a.log()), float((a / mean).log())) for a in alphas]
        right.plot(alphas, line, color=INK)
        for i, law in enumerate(laws.values()):
            right.plot([law[0]], [divergence(*law.log().tolist())], "o", color=series_color(i))
        right.set(xlabel="shape of the gamma law", ylabel="KL(mixture ‖ gamma), nats")

    return Evidence(
        [
            at_most("projection_gap", projected, 1e-6, "log parameters against the least KL found"),
            at_most(
                "moments_gap", moments, 1e-11, "Gaussian projection against moments by quadrature"
            ),
            at_least("excess", farther - nearest, 1e-4, "KL lost by matching mean and variance"),
            at_most("prior_gap", conjugate, 1e-10, "E[∇G] under conjugate priors against χ/ν"),
            at_most("update_gap", update, 1e-11, "gamma posterior of counts against Bayes' rule"),
        ],
        f"The projection is the least KL to {projected:.0e}; mean and variance instead of the "
        f"family's own statistics lose {farther - nearest:.3f} nats. Under conjugate priors E[∇G] "
        f"is χ/ν to {conjugate:.0e}.",
        Picture(
            draw,
            "A mixture of two gamma laws and its M-projection, which matches E[x] and E[log x]. It "
            "has the least KL of all gamma laws; the one with the same mean and variance has more.",
        ),
    )


def _log_gamma(x: Tensor, shape: Tensor, rate: Tensor) -> Tensor:
    """The log density of a gamma law."""
    return shape * rate.log() - torch.lgamma(shape) + (shape - 1) * x.log() - rate * x


CLAIM = Claim(
    id="T11",
    title="M-projection and conjugate priors",
    statement=(
        "The member of a family closest to a law in KL(law‖member) has the law's expected "
        "statistics. The conjugate prior of a family is parametrized by expected statistics too: "
        "under exp(⟨χ,η⟩ − νG(η)) the mean of ∇G is χ/ν."
    ),
    source="message passing draft, sections 3 and 3.2",
    formula=r"\operatorname{argmin}_\theta \operatorname{KL}(p \| q_\theta): \ E_{q_\theta}[u] = "
    r"E_p[u], \qquad \pi(\eta) \propto e^{\langle\chi, \eta\rangle - \nu G(\eta)} \Rightarrow "
    r"E_\pi[\nabla G(\eta)] = \chi / \nu",
    recorded=HOLDS,
    experiment=experiment,
    tests=("tests/laws/test_projection.py",),
)

"""T6: other families in which x is a statistic, where G is finite and where it is not."""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

import cumulant as cm
from cumulant.figures import MUTED, series_color
from cumulant.lab.claims.claim import HOLDS, Claim, Evidence, Picture, Trial, at_most


def experiment(trial: Trial) -> Evidence:
    """Each family against sums or quadrature; the sphere against random keys on it."""
    ive: Any = import_module("scipy.special").ive
    double = torch.float64
    p, rate, shape = torch.tensor([0.3, 2.0, 2.5], dtype=double)
    k, few = torch.arange(3000, dtype=double), torch.arange(7, dtype=double)
    # Waiting times up to 120 in s = √x, which makes the density of a half-integer shape smooth.
    node, weight = (torch.tensor(x) for x in np.polynomial.legendre.leggauss(200))
    root = math.sqrt(120) * (node + 1) / 2
    x, log_w = root**2, (weight * math.sqrt(120) * root).log()
    log_gamma = 2.5 * rate.log() - math.lgamma(2.5) + 1.5 * x.log() - rate * x
    log_choose = math.lgamma(7) - torch.lgamma(few + 1) - torch.lgamma(7 - few)
    log_binomial = log_choose + few * p.log() + (6 - few) * (1 - p).log()
    edge, never = -math.log(0.7), math.inf
    # Name: measure, where G ends, nodes, log masses as textbooks have them.
    families: dict[str, tuple[cm.Measure, float, Tensor, Tensor]] = {
        "Bernoulli": (cm.Bernoulli(p), never, k[:2], torch.stack([1 - p, p]).log()),
        "binomial": (cm.Binomial(6, p), never, few, log_binomial),
        "Poisson": (cm.Poisson(rate), never, k, k * rate.log() - rate - torch.lgamma(k + 1)),
        "geometric": (cm.Geometric(p), edge, k, k * (1 - p).log() + p.log()),
        "exponential": (cm.Exponential(rate), 2.0, x, log_w + rate.log() - rate * x),
        "gamma, a = 2.5": (cm.FixedShapeGamma(shape, rate), 2.0, x, log_w + log_gamma),
    }
    values, means, beyond = list[Tensor](), list[Tensor](), list[Tensor]()
    curves: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    for name, (h, end, at, log_mass) in families.items():
        eta = torch.linspace(-2, min(1.7, 0.85 * end), trial.size(71, 15), dtype=double)
        scores = log_mass + torch.outer(eta, at)
        curves[name] = eta, h.log_normalizer(eta[:, None]), scores.logsumexp(-1)
        values.append(curves[name][1] - curves[name][2])
        means.append(h.mean(eta[:, None])[:, 0] - scores.softmax(-1) @ at)
        if end < never:
            outside = torch.tensor([[end + 1e-9], [end + 0.1], [1e6]], dtype=double)
            beyond += [h.log_normalizer(outside), h.mean(outside).flatten()]
    probs, logits = trial.normal(5).softmax(0), trial.normal(20, 5)
    one_hot, scores = cm.Categorical(probs), logits + probs.log()
    values.append(one_hot.log_normalizer(logits) - scores.logsumexp(-1))
    means.append((one_hot.mean(logits) - scores.softmax(-1)).flatten())
    value_gap, mean_gap = (float(torch.cat(gaps).abs().max()) for gaps in (values, means))
    finite_outside = int((torch.cat(beyond) != math.inf).sum())

    def bessel(kappa: Tensor, d: int) -> Tensor:
        """log of I_v(κ) / κ^v, v = d/2 - 1: what the sphere's integral is up to a constant."""
        v = d / 2 - 1
        return torch.tensor(ive(v, kappa.numpy())).log() + kappa - v * kappa.log()

    sphere_gap = 0.0
    for d in (2, 3, 10):
        eta, theta = 3 * trial.normal(20, d), trial.normal(d)
        h = cm.VonMisesFisher(theta, theta.norm())
        truth = bessel((theta + eta).norm(dim=-1), d) - bessel(theta.norm(), d)
        sphere_gap = max(sphere_gap, float((h.log_normalizer(eta) - truth).abs().max()))

    # Keys drawn on the sphere: e^G is a mean, whose variance is known from G itself.
    query = torch.tensor([[0.0, 0.0, 3.0]], dtype=double)
    uniform = cm.VonMisesFisher(query[0], 0.0)
    limit, twice = uniform.log_normalizer(query), uniform.log_normalizer(2 * query)
    sizes, repeats = (30, 300, 3000), trial.size(400, 200)
    spread: list[float] = []
    for n in sizes:
        keys = torch.nn.functional.normalize(trial.normal(repeats, n, 3), dim=-1)
        weights = torch.full((n,), -math.log(n), dtype=double)
        ratio = (cm.Empirical(keys, weights).log_normalizer(query)[:, 0] - limit).exp()
        spread.append(float((ratio - 1).square().mean().sqrt()))
    # sinh(κ)/κ is the integral over the sphere in three dimensions.
    law = math.sqrt(math.sinh(6) / 6 / (math.sinh(3) / 3) ** 2 - 1)
    contrast = max(abs(s * math.sqrt(n) / law - 1) for s, n in zip(spread, sizes, strict=True))
    closed = abs(float(twice) - math.log(math.sinh(6) / 6))

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        for i, (name, (eta, ours, truth)) in enumerate(curves.items()):
            left.plot(eta, ours, color=series_color(i), label=name)
            left.plot(
                eta[:: len(eta) // 7], truth[:: len(eta) // 7], "o", ms=3, color=series_color(i)
            )
        for end in (edge, 2.0):
            left.axvline(end, color=MUTED, linestyle=":", linewidth=1.2)
        left.set(xlabel="η", ylabel="G(η)", xlim=(-2.1, 2.2), ylim=(-3, 9))
        left.legend(loc="upper left")
        right.loglog(sizes, spread, "o", color=series_color(0), label="random keys")
        predicted = [law / math.sqrt(n) for n in sizes]
        right.loglog(sizes, predicted, color=series_color(1), label="predicted, ∝ 1/√N")
        right.set(xlabel="keys on the sphere", ylabel="relative error of exp G")
        right.legend()

    return Evidence(
        [
            at_most(
                "normalizer_gap", value_gap, 1e-11, "G of seven families against sums, quadrature"
            ),
            at_most("mean_gap", mean_gap, 1e-9, "their means against sums and quadrature"),
            at_most(
                "sphere_gap", sphere_gap, 1e-12, "G of von Mises–Fisher against scipy's Bessel"
            ),
            at_most(
                "sphere_closed_gap", closed, 1e-12, "in three dimensions, against log(sinh κ/κ)"
            ),
            at_most(
                "finite_outside", finite_outside, 0, "answers beyond the domain that are not +∞"
            ),
            at_most(
                "contrast_gap",
                contrast,
                0.25,
                "spread of e^G over random keys on the sphere, against its limit law",
                error=1 / math.sqrt(2 * repeats),
            ),
        ],
        f"G of seven families agrees with sums and quadrature to {value_gap:.0e}, of the sphere "
        f"to {sphere_gap:.0e}; beyond the domain every answer is +∞. Random keys approach the "
        f"sphere's G as 1/√N, within {contrast:.0%} of the predicted constant.",
        Picture(
            draw,
            "Left: G of six families (lines) against sums and quadrature (dots); three of them end "
            "at a dotted line. Right: G over N random keys on the sphere approaches von "
            "Mises–Fisher's as theory says.",
            (7.0, 3.3),
        ),
    )


CLAIM = Claim(
    id="T6",
    title="Other natural families",
    statement=(
        "Wherever x is a statistic, the same calculus holds: Bernoulli, binomial, Poisson, "
        "geometric, exponential, gamma with fixed shape, categorical, von Mises–Fisher. Outside "
        "the domain G is +∞. On the sphere it is the limit of contrast by cosine similarity."
    ),
    source="exponential family draft, eq. (1) to (3); proofs draft, Theorem 1b",
    formula=r"G(\eta) = A(\theta + \eta) - A(\theta), \qquad "
    r"G(\eta) = +\infty \ \text{outside the domain}",
    recorded=HOLDS,
    experiment=experiment,
    tests=(
        "tests/laws/test_tilted_measures.py",
        "tests/laws/test_sphere.py",
        "tests/measures/test_families.py",
    ),
)

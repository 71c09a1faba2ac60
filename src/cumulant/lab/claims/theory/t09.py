"""T9: the log-normalizer as evidence, and the bound that touches it at the tilted law."""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cumulant import Empirical, Gamma, Poisson, posterior
from cumulant.figures import INK, MUTED, series_color
from cumulant.lab.claims.claim import CORRECTED, Claim, Evidence, Picture, Trial, at_most


def experiment(trial: Trial) -> Evidence:
    """Random laws q on points, a Bayesian model on a line, unnormalized measures."""
    special: Any = import_module("scipy.special")
    minimize: Any = import_module("scipy.optimize").minimize
    n, m = trial.size(50, 20), trial.size(2000, 300)
    x, log_h, eta = trial.normal(n, 3), trial.normal(n).log_softmax(0), trial.normal(3)
    h = Empirical(x, log_h)
    value = h.log_normalizer(eta)

    def elbo(q: Tensor) -> Tensor:
        """E_q<x, η> - KL(q || h), by scipy's terms."""
        terms = special.rel_entr(q.numpy(), log_h.exp().numpy())
        return q @ (x @ eta) - torch.tensor(terms.sum(-1))

    # Laws far from p_η and near it.
    p = (x @ eta + log_h).softmax(0)
    q = torch.cat(
        [(2 * trial.normal(m, n)).softmax(-1), (p.log() + 0.1 * trial.normal(m, n)).softmax(-1)]
    )
    excess = (elbo(q) - value).max()
    touching = (elbo(h.probabilities(eta)) - value).abs()
    kl = torch.tensor(special.rel_entr(q.numpy(), p.numpy()).sum(-1))
    shortfall_gap = (value - elbo(q) - kl).abs().max()
    shortfall = (value - elbo(q[:m])).median()

    # Evidence: counts with a gamma prior on their rate; the joint is the unnormalized law.
    counts = torch.tensor([3.0, 5.0, 2.0], dtype=torch.float64)
    node, weight = (torch.tensor(v) for v in np.polynomial.legendre.leggauss(200))
    rate, weight = 20 * (node + 1), 20 * weight
    joint = 2 * rate.log() - rate + math.log(1 / 2)  # gamma with shape 3 and rate 1
    joint = joint + (counts[:, None] * rate.log() - rate - torch.lgamma(counts + 1)[:, None]).sum(0)
    evidence = torch.logsumexp(joint + weight.log(), 0)
    prior = Gamma(torch.tensor(3.0).double(), torch.tensor(1.0).double())
    evidence_gap = (posterior(prior, Poisson, counts).log_evidence - evidence).abs()
    shapes = torch.linspace(4, 30, 100, dtype=torch.float64)
    log_q = 4 * shapes[:, None].log() + (shapes[:, None] - 1) * rate.log() - 4 * rate
    log_q = log_q - torch.logsumexp(log_q + weight.log(), -1, keepdim=True)
    bayes = ((log_q.exp() * (joint - log_q)) @ weight).max() - evidence

    # Unnormalized q: the least of KL(q || h) - <η, E_q x> is the mass of h less e^G.
    base, scores = log_h.exp().numpy(), (x @ eta).numpy()

    def objective(q: Any) -> tuple[float, Any]:
        return float(special.kl_div(q, base).sum() - q @ scores), np.log(q / base) - scores

    options = {"ftol": 1e-15, "gtol": 1e-10, "maxiter": 2000, "maxfun": 4000}
    bounds = [(1e-12, None)] * n
    least = minimize(objective, base, jac=True, bounds=bounds, method="L-BFGS-B", options=options)
    boost_gap = (1 - value.exp() - float(least.fun)).abs()

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        line = torch.linspace(-1, 3, 161, dtype=torch.float64)
        members = h.probabilities(line[:, None] * eta)
        axes.axhline(float(value), color=INK, linestyle="--", linewidth=1.2, label="G(η)")
        axes.plot(line, elbo(members), color=series_color(0), label="ELBO, q = p at tη")
        mixed = elbo((members + log_h.exp()) / 2)
        axes.plot(line, mixed, color=series_color(1), label="ELBO, half of it h")
        axes.plot([1], [float(value)], "o", color=series_color(0))
        ends = [float(elbo(members[10])), float(value)]
        axes.plot([line[10], line[10]], ends, color=MUTED, linewidth=1.2)
        axes.annotate("KL(q‖p)", (line[10], ends[1]), (6, -20), textcoords="offset points")
        axes.set(xlabel="t", ylabel="nats")
        axes.legend(loc="lower center")

    mended: Any = {"form": "correction"}
    return Evidence(
        [
            at_most(
                "elbo_shortfall", shortfall, 1e-8, "nats by which the ELBO of a random q is below G"
            ),
            at_most("elbo_excess", excess, 1e-12, "how far the ELBO of any q exceeds G", **mended),
            at_most("touching_gap", touching, 1e-12, "G less the ELBO at q = p_η", **mended),
            at_most("shortfall_gap", shortfall_gap, 1e-11, "G − ELBO against KL(q‖p_η)", **mended),
            at_most(
                "evidence_gap", evidence_gap, 1e-10, "log evidence against quadrature", **mended
            ),
            at_most("bayes_excess", bayes, 1e-10, "how far gamma laws q exceed that", **mended),
            at_most(
                "unnormalized_gap", boost_gap, 1e-7, "Σh − e^G against L-BFGS-B's minimum", **mended
            ),
        ],
        f"No ELBO exceeds G, that of p_η meets it to rounding, and the rest is KL(q‖p_η) to "
        f"{shortfall_gap:.0e}. A random q stays {shortfall:.1f} nats below.",
        Picture(
            draw,
            "The ELBO along a line of tilted laws, and of laws that keep half of h: it touches the "
            "log-normalizer where q = p_η, at t = 1, and lies below it by KL(q‖p_η) elsewhere.",
        ),
    )


CLAIM = Claim(
    id="T9",
    title="The log-normalizer as evidence",
    statement=(
        "Seen as an unnormalized law, a joint has a log-normalizer that is known as the evidence "
        "lower bound. With KL between unnormalized measures the same problem ends in e^G, the sum "
        "of exponentials."
    ),
    source="main draft, section 2.3",
    formula=r"G(\eta) \;\ge\; E_q \langle x, \eta\rangle - \operatorname{KL}(q \| h) \;=\; "
    r"G(\eta) - \operatorname{KL}(q \| p_\eta)",
    recorded=CORRECTED,
    experiment=experiment,
    correction=(
        "The log-normalizer is the log-evidence itself. The ELBO of any q bounds it from below, "
        "with gap KL(q‖p_η), and reaches it at q = p_η alone."
    ),
    systems=("variational free energy (ELBO)",),
    tests=("tests/laws/test_duality.py",),
)

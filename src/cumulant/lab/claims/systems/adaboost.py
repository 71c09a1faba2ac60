"""AdaBoost: its loss is e^G over margins, and its dual a KL of unnormalized measures."""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cumulant import Empirical
from cumulant.core.typed import linalg
from cumulant.figures import series_color
from cumulant.lab.claims.claim import Claim, Found, Trial, table
from cumulant.lab.claims.measuring import gap, minimized

CLAIM = Claim(
    id="adaboost",
    title="AdaBoost's exponential loss",
    evidence="identity",
    statement="AdaBoost's sum of exponentials is the normalizer e^G of the measure on its "
    "margins, its weights on examples are the tilted measure, and the dual problem is the least "
    "generalized KL to the uniform measure under which every weak learner is worthless.",
    theory="T9",
    source="main draft, section 2.3; Collins, Schapire and Singer (2002)",
    formula=r"\prod_{t \le T} Z_t = \frac1m \sum_i e^{-y_i f_T(x_i)} = e^{G(\alpha)}, \qquad "
    r"\min_{\alpha} e^{G(\alpha)} = 1 - \min_{q \ge 0,\ M^\top q = 0} "
    r"\sum_i \left(q_i \log \frac{q_i}{h_i} - q_i + h_i\right)",
    recorded="holds",
    systems=("AdaBoost",),
    tests=("tests/laws/test_duality.py",),
    rules=table("""
      statement:
        product_gap ≤ 1e-10: e^G against normalizers' product and loss
        weights_gap ≤ 1e-11: tilted masses against AdaBoost's weights
        round_slope ≤ 1e-10: ∂G along the stump just added
        optimum_gap ≤ 1e-8: e^(−G*(0)) against the least loss by BFGS
        worthless_gap ≤ 1e-8: edges of the stumps under the dual's q
        duality_gap ≤ 1e-8: generalized KL(q‖h) against 1 − least loss
        closer ≤ 1e-10: KL saved by 200 other q under which the stumps are worthless
      noted:
        left: loss above the optimum at the end
    """),
    finding="Over {rounds} rounds the product of normalizers is e^G to {product_gap:.0e}. The "
    "least loss is {least:.4f} by the library's dual, within {optimum_gap:.0e} of scipy's, and 1 "
    "minus it is the generalized KL to {duality_gap:.0e}; boosting ends {left:.0e} above.",
    caption="Boosting stumps: the product of AdaBoost's normalizers (line) is e^G over the margins "
    "(dots) in every round, and both fall to the optimum given by the dual.",
)


special: Any = import_module("scipy.special")


def boost(margins: Tensor, rounds: int) -> dict[str, Tensor]:
    """AdaBoost after Freund and Schapire, in plain torch, with the state after each round."""
    n, stumps = margins.shape
    weights, alpha = torch.full((n,), 1 / n, dtype=torch.float64), margins.new_zeros(stumps)
    product, kept = 1.0, dict[str, list[Any]](alpha=[], weights=[], product=[], chosen=[])
    for _ in range(rounds):
        edge = weights @ margins
        j = int(edge.abs().argmax())
        error = (1 - edge[j]) / 2  # a stump that is mostly wrong counts backwards
        step = torch.log((1 - error) / error) / 2
        weights = weights * torch.exp(-step * margins[:, j])
        product, weights = product * float(weights.sum()), weights / weights.sum()
        alpha = alpha.clone()
        alpha[j] += step
        row = {"alpha": alpha, "weights": weights, "product": product, "chosen": j}
        for name, value in row.items():
            kept[name].append(
                torch.as_tensor(value, dtype=None if name == "chosen" else torch.float64)
            )
    return {name: torch.stack(rows) for name, rows in kept.items()}


def stumps(trial: Trial, n: int) -> Tensor:
    """Margins of eight stumps on noisy labels, so that no vote is perfect, ``(n, 8)``."""
    x = trial.normal(n, 2)
    label = torch.sign(x[:, 0] + x[:, 1] / 2)
    label = torch.where(trial.uniform(n) < 0.1, -label, label)
    cuts = torch.tensor([-1.0, -0.3, 0.3, 1.0], dtype=torch.float64)
    return label[:, None] * torch.sign(x[:, :, None] - cuts).flatten(1)


def least_loss(margins: Any) -> float:
    """The least mean of exp(-margin), by BFGS."""

    def loss(a: Any) -> tuple[float, Any]:
        terms = np.exp(-margins @ a) / len(margins)
        return float(terms.sum()), -terms @ margins

    start = np.zeros(margins.shape[1])
    return float(minimized(loss, start, jac=True, options={"gtol": 1e-10}).fun)


def dual(trial: Trial, h: Empirical, margins: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """The measure q >= 0 closest to uniform under which every stump is worthless."""
    zero = torch.zeros(margins.shape[1], dtype=torch.float64)
    least = (-h.dual(zero)).exp()
    best, base = least * h.probabilities(h.link(zero)), np.full(len(margins), 1 / len(margins))
    divergence = float(special.kl_div(best.numpy(), base).sum())
    # No other measure with worthless stumps is closer: steps in the null space of the margins.
    null = linalg.svd(margins.T, full_matrices=True).Vh[linalg.matrix_rank(margins) :]
    away = trial.normal(200, len(null)) @ null
    reach = (best / away.abs()).amin(-1, keepdim=True)
    others = best + trial.uniform(200, 1) * reach * away
    return least, {
        "optimum_gap": gap(least / least_loss(margins.numpy()), 1),
        "worthless_gap": gap(best @ margins, 0),
        "duality_gap": gap(divergence, 1 - least),
        "closer": divergence - special.kl_div(others.numpy(), base).sum(-1).min(),
    }


def measure(trial: Trial) -> Found:
    """Boosting with stumps, round by round; its limit by the library's dual and by scipy."""
    n, rounds = trial.size(300, 150), trial.size(150, 60)
    margins = stumps(trial, n)
    run = boost(margins, rounds)
    # The library: uniform weights on the points -margins, tilted by the votes' weights.
    h = Empirical(-margins, torch.full((n,), -math.log(n), dtype=torch.float64))
    loss = h.log_normalizer(run["alpha"]).exp()
    written = torch.exp(-run["alpha"] @ margins.T).mean(-1)
    least, numbers = dual(trial, h, margins)
    numbers |= {
        "product_gap": gap(loss / torch.stack([run["product"], written]), 1),
        "weights_gap": gap(h.probabilities(run["alpha"]), run["weights"]),
        # A round ends where the new weights make its stump worthless: one coordinate of ∇G is 0.
        "round_slope": gap(h.mean(run["alpha"]).gather(1, run["chosen"][:, None]), 0),
        "left": run["product"][-1] - least,
    }
    return Found(numbers, rounds=rounds, least=least, loss=loss, product=run["product"])


def draw(figure: Any, seen: Any) -> None:
    """How far above the dual's optimum each round ends."""
    axes = figure.subplots()
    rounds: int = seen.rounds
    count = torch.arange(1, rounds + 1)
    product, loss = seen.product - seen.least, seen.loss - seen.least
    axes.semilogy(count, product, color=series_color(0), label="product of normalizers")
    some = np.arange(0, rounds, max(1, rounds // 25))
    axes.semilogy(count[some], loss[some], "o", ms=4, color=series_color(1), label="exp G(α)")
    axes.set(xlabel="round", ylabel="above the dual's optimum")
    axes.legend()

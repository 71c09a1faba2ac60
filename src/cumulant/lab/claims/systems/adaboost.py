"""AdaBoost: its loss is e^G over margins, and its dual a KL of unnormalized measures."""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cumulant import Empirical
from cumulant.figures import series_color
from cumulant.lab.claims.claim import HOLDS, Claim, Evidence, Picture, Trial, at_most, noted


def experiment(trial: Trial) -> Evidence:
    """Boosting with stumps, round by round; its limit by the library's dual and by scipy."""
    minimize: Any = import_module("scipy.optimize").minimize
    special: Any = import_module("scipy.special")
    n, rounds = trial.size(300, 150), trial.size(150, 60)
    x = trial.normal(n, 2)
    label = torch.sign(x[:, 0] + x[:, 1] / 2)
    label = torch.where(trial.uniform(n) < 0.1, -label, label)  # noise, so no vote is perfect
    cuts = torch.tensor([-1.0, -0.3, 0.3, 1.0], dtype=torch.float64)
    votes = torch.sign(x[:, :, None] - cuts).flatten(1)  # (n, 8) stumps
    margins = label[:, None] * votes
    run = _boost(margins, rounds)

    # The library: uniform weights on the points -margins, tilted by the votes' weights.
    h = Empirical(-margins, torch.full((n,), -math.log(n), dtype=torch.float64))
    loss = h.log_normalizer(run["alpha"]).exp()
    written = torch.exp(-run["alpha"] @ margins.T).mean(-1)
    product = (loss / torch.stack([run["product"], written]) - 1).abs().max()
    weights = (h.probabilities(run["alpha"]) - run["weights"]).abs().max()
    # A round ends where the new weights make its stump worthless: one coordinate of ∇G is 0.
    slope = h.mean(run["alpha"]).gather(1, run["chosen"][:, None]).abs().max()

    # The dual: the measure q >= 0 closest to uniform under which every stump is worthless.
    zero = torch.zeros(margins.shape[1], dtype=torch.float64)
    least = (-h.dual(zero)).exp()
    best = least * h.probabilities(h.link(zero))
    base = np.full(n, 1 / n)

    def exponential(a: Any) -> tuple[float, Any]:
        terms = np.exp(-margins.numpy() @ a) / n
        return float(terms.sum()), -terms @ margins.numpy()

    primal = minimize(exponential, zero.numpy(), jac=True, options={"gtol": 1e-10})
    optimum = (least / float(primal.fun) - 1).abs()
    divergence = float(special.kl_div(best.numpy(), base).sum())
    duality = (divergence - (1 - least)).abs()
    worthless = (best @ margins).abs().max()
    # No other measure with worthless stumps is closer: steps in the null space of the margins.
    null = torch.linalg.svd(margins.T, full_matrices=True).Vh[torch.linalg.matrix_rank(margins) :]
    away = trial.normal(200, len(null)) @ null
    reach = (best / away.abs()).amin(-1, keepdim=True)
    others = best + trial.uniform(200, 1) * reach * away
    closer = divergence - special.kl_div(others.numpy(), base).sum(-1).min()

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        count = torch.arange(1, rounds + 1)
        excess = run["product"] - least
        axes.semilogy(count, excess, color=series_color(0), label="product of normalizers")
        some = np.arange(0, rounds, max(1, rounds // 25))
        axes.semilogy(
            count[some], (loss - least)[some], "o", ms=4, color=series_color(1), label="exp G(α)"
        )
        axes.set(xlabel="round", ylabel="above the dual's optimum")
        axes.legend()

    return Evidence(
        [
            at_most("product_gap", product, 1e-10, "e^G against normalizers' product and loss"),
            at_most("weights_gap", weights, 1e-11, "tilted masses against AdaBoost's weights"),
            at_most("round_slope", slope, 1e-10, "∂G along the stump just added"),
            at_most("optimum_gap", optimum, 1e-8, "e^(−G*(0)) against the least loss by BFGS"),
            at_most("worthless_gap", worthless, 1e-8, "edges of the stumps under the dual's q"),
            at_most("duality_gap", duality, 1e-8, "generalized KL(q‖h) against 1 − least loss"),
            at_most("closer", closer, 1e-10, "KL saved by 200 other q with worthless stumps"),
            noted("left", run["product"][-1] - least, "loss above the optimum at the end"),
        ],
        f"Over {rounds} rounds the product of normalizers is e^G to {product:.0e}. The least loss "
        f"is {float(least):.4f} by the library's dual, {optimum:.0e} from scipy's, and 1 − that is "
        f"the generalized KL to {duality:.0e}; boosting ends "
        f"{float(run['product'][-1] - least):.0e} above.",
        Picture(
            draw,
            "Boosting stumps: the product of AdaBoost's normalizers (line) is e^G over the margins "
            "(dots), round after round, and both fall to the optimum that the dual gives.",
        ),
    )


def _boost(margins: Tensor, rounds: int) -> dict[str, Tensor]:
    """AdaBoost as Freund and Schapire have it, in plain torch, with what each round leaves."""
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


CLAIM = Claim(
    id="adaboost",
    title="AdaBoost's exponential loss",
    statement=(
        "AdaBoost's sum of exponentials is the normalizer e^G of the measure on its margins, its "
        "weights on examples are the tilted measure, and the dual problem is the least generalized "
        "KL to the uniform measure under which every weak learner is worthless."
    ),
    source="main draft, section 2.3; Collins, Schapire and Singer (2002)",
    formula=r"\prod_{t \le T} Z_t = \frac1m \sum_i e^{-y_i f_T(x_i)} = e^{G(\alpha)}, \qquad "
    r"\min_{\alpha} e^{G(\alpha)} = 1 - \min_{q \ge 0,\ M^\top q = 0} "
    r"\sum_i \left(q_i \log \frac{q_i}{h_i} - q_i + h_i\right)",
    recorded=HOLDS,
    experiment=experiment,
    systems=("AdaBoost",),
    tests=("tests/laws/test_duality.py",),
)

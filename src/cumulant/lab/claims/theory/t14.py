"""T14: attention moves the points of a cloud apart if they see the same measure."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from cumulant import dynamics
from cumulant.core.typed import linalg
from cumulant.figures import INK, series_color
from cumulant.lab.claims.claim import Claim, Found, Trial, table
from cumulant.lab.claims.measuring import gap, pair_ratios

CLAIM = Claim(
    id="T14",
    title="Expansion",
    evidence="identity",
    statement="Weights aside, the attention step moves the points of a cloud apart, and repeated "
    "without contraction it drives them to infinity.",
    source="abstract; exponential family draft, §3.1",
    formula=r"1 \le \frac{\|x' - y'\|}{\|x - y\|} \le "
    r"1 + \frac{\tau\beta}{4} \operatorname{diam}^2, \qquad "
    r"x' = x + \tau\nabla_x\, \beta^{-1}G(\beta x)",
    recorded="holds",
    tests=("tests/laws/test_expansion.py",),
    rules=table("""
      statement:
        one_measure_ratio ≥ 0.999999999: least ratio of two points that see the same measure
        bound_share ≤ 1.000000001: largest ratio minus 1, as a share of τβ diam²/4
        growth ≥ 1.9: growth in the last of 60 steps without contraction (limit 2: x ← x + x)
      control:
        step_gap ≤ 1e-11: library against the sublayer and the bound written out
      noted:
        tied_ratio: least ratio with weights whose value map is the score matrix
        causal_ratio: least ratio under a causal mask, where points see different measures
        weights_ratio: least ratio with random weights
        configurations_ratio: least ratio for two clouds that differ a little (singular value of
            the whole map)
    """),
    bounds="G is convex, so a ratio below 1 by more than rounding would refute the claim. The "
    "draft ignores weights and masks, so what they do is noted and decides nothing. At first it "
    "counted as part of the statement, which failed and had a correction: the rule was changed "
    "after its numbers were seen.",
    finding="Points under one measure never move closer (least ratio {one_measure_ratio:.3f}; "
    "clouds of {fewest} to {most} points in 1 to 16 dimensions, β to 4, τ to 2.1). Outside the "
    "claim: a causal mask lets the ratio fall to {causal_ratio:.2f}, general weights to "
    "{weights_ratio:.2f}, unless the value map is the score matrix ({tied_ratio:.2f}), and two "
    "clouds can approach each other by a factor {configurations_ratio:.2f}.",
    caption="Ratios of distances in one step, over all pairs of many clouds. Where all points see "
    "one measure none is below 1; with a causal mask {causal_below:.1%} are, with general weights "
    "{general_below:.0%}.",
)


CASES = ("one", "causal", "general", "tied")


def written_out(
    x: Tensor, beta: float, tau: float, weights: dict[str, Tensor], causal: bool
) -> Tensor:
    """The sublayer in plain torch."""
    q, k, v = (x @ W for W in weights.values()) if weights else (x, x, x)
    scores = beta * q @ k.mT
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return x + tau * scores.softmax(-1) @ v


SHAPES = ((24, 4), (4, 1), (60, 2), (12, 16))  # N, d


def one_cloud(trial: Trial, n: int, d: int) -> tuple[dict[str, Tensor], Tensor, float]:
    """A random cloud, temperature and step size.

    Returns:
        Ratios of distances over all pairs, for each case; the largest of the first minus 1, as a
        share of τβ diam²/4; the largest error of the library's steps and bound.
    """
    gaps = list[float]()
    beta, tau = 4.0 * float(trial.uniform(1)), 2.0 * float(trial.uniform(1)) + 0.1
    x = (0.2 + float(trial.uniform(1))) * trial.normal(n, d) + trial.normal(1, d)
    Q, K, V = trial.normal(3, d, d) / d**0.5
    names = ("query_weight", "key_weight", "value_weight")
    general: dict[str, Any] = dict(zip(names, (Q, K, V), strict=True))
    tied: dict[str, Any] = {**general, "value_weight": K @ Q.mT}  # value map = score matrix
    cases: tuple[dict[str, Any], ...] = ({}, {}, general, tied)
    found: dict[str, Tensor] = {}
    for case, weights in zip(CASES, cases, strict=True):
        causal = case == "causal"
        y = dynamics.step(x, beta=beta, step_size=tau, is_causal=causal, **weights)
        gaps.append(gap(y, written_out(x, beta, tau, weights, causal)))
        found[case] = pair_ratios(x, y)
    most = tau * beta * float(torch.cdist(x, x).max()) ** 2 / 4
    bound = dynamics.expansion_bounds(x, beta=beta, step_size=tau).pairs
    gaps.append(float((bound - 1 - most).abs() / bound))
    return found, (found["one"].max() - 1) / most, max(gaps)


def between_clouds(trial: Trial) -> Tensor:
    """Least ratio of two clouds that differ a little: where the joint map shrinks most."""
    x = 2 * trial.normal(trial.size(60, 20), 3, 2)

    def sublayer(z: Tensor) -> Tensor:
        return dynamics.step(z.reshape(3, 2), beta=2.0).flatten()

    jacobian: Any = torch.stack([torch.func.jacrev(sublayer)(z.flatten()) for z in x])
    return linalg.svdvals(jacobian)[:, -1].min()


def measure(trial: Trial) -> Found:
    """Ratios of distances over many clouds, temperatures and step sizes."""
    shapes = [SHAPES[i % len(SHAPES)] for i in range(trial.size(80, 16))]
    found, shares, gaps = zip(*(one_cloud(trial, n, d) for n, d in shapes), strict=True)
    ratios = {case: torch.cat([x[case] for x in found]) for case in CASES}
    between = between_clouds(trial)
    norms = dynamics.simulate(trial.normal(6, 8, 3), 60).observables["norm"]
    numbers = {
        "causal_ratio": ratios["causal"].min(),
        "weights_ratio": ratios["general"].min(),
        "configurations_ratio": between,
        "one_measure_ratio": ratios["one"].min(),
        "bound_share": max(shares),
        "tied_ratio": ratios["tied"].min(),
        "growth": (norms[-1] / norms[-2]).min(),
        "step_gap": max(gaps),
    }
    below = {f"{case}_below": (x < 1).double().mean() for case, x in ratios.items()}
    sizes = [n for n, _ in SHAPES]
    return Found(numbers, ratios=ratios, fewest=min(sizes), most=max(sizes), **below)


def draw(figure: Any, seen: Any) -> None:
    """The share of pairs below each ratio, for each case."""
    axes = figure.subplots()
    named = (
        ("one", "one measure", "-"),
        ("tied", "weights with V = Aᵀ", "--"),
        ("causal", "causal mask", "-."),
        ("general", "general weights", ":"),
    )
    for i, (case, label, dash) in enumerate(named):
        value = seen.ratios[case].flatten().sort().values
        keep = torch.linspace(0, len(value) - 1, 400).long()
        share = torch.linspace(0, 1, 400)
        axes.plot(value[keep], share, dash, color=series_color(i), label=label)
    axes.axvline(1, color=INK, linewidth=0.8)
    axes.set(xscale="log", xlabel="distance after / before", ylabel="share of pairs below")
    axes.set(xlim=(0.2, 20))
    ticks = (0.2, 0.5, 1, 2, 5, 10, 20)
    axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axes.minorticks_off()
    axes.legend(loc="lower right")

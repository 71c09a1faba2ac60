"""T14: attention moves the points of one cloud apart, if they see the same measure."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from cumulant import dynamics
from cumulant.figures import INK, series_color
from cumulant.lab.claims.claim import CORRECTED, Claim, Evidence, Picture, Trial, at_least, at_most


def written_out(
    x: Tensor, beta: float, tau: float, weights: tuple[Tensor, ...] | None, causal: bool
) -> Tensor:
    """The sublayer in plain torch."""
    q, k, v = (x, x, x) if weights is None else (x @ W for W in weights)
    scores = beta * q @ k.mT
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return x + tau * scores.softmax(-1) @ v


def ratios(before: Tensor, after: Tensor) -> Tensor:
    """Distances after over distances before, over all pairs of a cloud."""
    i, j = torch.triu_indices(before.shape[-2], before.shape[-2], 1)
    return ((after[..., i, :] - after[..., j, :]).norm(dim=-1)) / (
        (before[..., i, :] - before[..., j, :]).norm(dim=-1)
    )


def experiment(trial: Trial) -> Evidence:
    """Ratios of distances over many clouds, temperatures and step sizes."""
    clouds, n, d = trial.size(60, 12), 24, 4
    one: list[Tensor] = []
    shares: list[Tensor] = []
    causal: list[Tensor] = []
    general: list[Tensor] = []
    tied: list[Tensor] = []
    gaps: list[Tensor] = []
    for k in range(clouds):
        beta, tau = 4.0 * float(trial.uniform(1)), 2.0 * float(trial.uniform(1)) + 0.1
        x = (0.2 + float(trial.uniform(1))) * trial.normal(n, d) + trial.normal(1, d)
        W = tuple(trial.normal(3, d, d) / d**0.5)
        same = (W[0], W[1], W[1] @ W[0].mT)  # the value map is the score matrix
        diameter = float(torch.cdist(x, x).max())
        cases = (
            (one, None, False),
            (causal, None, True),
            (general, W, False),
            (tied, same, False),
        )
        for found, weights, masked in cases:
            names = ("query_weight", "key_weight", "value_weight")
            given = dict(zip(names, weights, strict=True)) if weights else {}
            y = dynamics.step(x, beta=beta, step_size=tau, is_causal=masked, **given)
            gaps.append((y - written_out(x, beta, tau, weights, masked)).abs().max())
            found.append(ratios(x, y))
        shares.append((one[k].max() - 1) / (tau * beta * diameter**2 / 4))
        bound = dynamics.bounds(x, beta=beta, step_size=tau).pairs
        gaps.append((bound - 1 - tau * beta * diameter**2 / 4).abs() / bound)
    # Two clouds that differ a little: the direction in which the joint map shrinks most.
    x = 2 * trial.normal(trial.size(60, 20), 3, 2)

    def sublayer(z: Tensor) -> Tensor:
        return dynamics.step(z.reshape(3, 2), beta=2.0).flatten()

    jacobian: Any = torch.stack([torch.func.jacrev(sublayer)(z.flatten()) for z in x])
    between = torch.linalg.svdvals(jacobian)[:, -1].min()
    norms = dynamics.simulate(trial.normal(6, 8, 3), 60).observables["norm"]
    apart, masked, weighted, again = (torch.stack(r) for r in (one, causal, general, tied))

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        named = (
            (apart, "one measure", "-"),
            (again, "weights with V = Aᵀ", "--"),
            (masked, "causal mask", "-."),
            (weighted, "general weights", ":"),
        )
        for i, (found, label, dash) in enumerate(named):
            value = found.flatten().sort().values
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

    return Evidence(
        [
            at_least("causal_ratio", masked.min(), 1, "least ratio under a causal mask"),
            at_least("weights_ratio", weighted.min(), 1, "least ratio with random weights"),
            at_least(
                "configurations_ratio",
                between,
                1,
                "least ratio for two clouds that differ a little (singular value of the whole map)",
            ),
            at_least(
                "one_measure_ratio",
                apart.min(),
                1 - 1e-9,
                "least ratio of two points that see the same measure",
                form="correction",
            ),
            at_most(
                "bound_share",
                torch.stack(shares).max(),
                1 + 1e-9,
                "largest ratio minus 1, as a share of τβ diam²/4",
                form="correction",
            ),
            at_least(
                "tied_ratio",
                again.min(),
                1 - 1e-9,
                "least ratio with weights whose value map is the score matrix",
                form="correction",
            ),
            at_least(
                "growth",
                (norms[-1] / norms[-2]).min(),
                1.9,
                "growth in the last of 60 steps without contraction (2 at last: x ← x + x)",
                form="correction",
            ),
            at_most(
                "step_gap",
                torch.stack(gaps).max(),
                1e-11,
                "library against the sublayer and the bound written out",
                form="control",
            ),
        ],
        f"Points under one measure never come closer (least ratio {float(apart.min()):.3f}). "
        f"A causal mask lets the ratio fall to {float(masked.min()):.2f}, general weights to "
        f"{float(weighted.min()):.2f}, and two clouds can approach each other by a factor "
        f"{float(between):.2f}.",
        Picture(
            draw,
            "Ratios of distances in one step, over all pairs of many clouds. Where all points see "
            "one measure none is below 1; with a causal mask "
            f"{float((masked < 1).double().mean()):.1%} are, with general weights "
            f"{float((weighted < 1).double().mean()):.0%}.",
        ),
    )


CLAIM = Claim(
    id="T14",
    title="Expansion",
    statement=(
        "The attention step moves points apart, and repeated it drives them to infinity. (The "
        "draft ignores weights; this is read as being about sublayers as they are.)"
    ),
    source="abstract; exponential family draft, §3.1",
    formula=r"1 \le \frac{\|x' - y'\|}{\|x - y\|} \le "
    r"1 + \frac{\tau\beta}{4} \operatorname{diam}^2, \qquad "
    r"x' = x + \tau\nabla_x\, \beta^{-1}G(\beta x)",
    recorded=CORRECTED,
    experiment=experiment,
    correction=(
        "It is true of two points under the same measure, since G is convex. It fails with causal "
        "masks, with general weights (unless the value map is the score matrix), and between two "
        "configurations of the whole cloud."
    ),
    tests=("tests/laws/test_expansion.py",),
)

"""T29: whether trained queries and keys are a linear approximation of the canonical link."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cumulant import Empirical, Gaussian, GaussianMixture
from cumulant.attention.calls import AttentionCall
from cumulant.core.typed import linalg
from cumulant.figures import MUTED, series_color
from cumulant.lab.claims.claim import Claim, Found, Trial, table
from cumulant.lab.claims.measuring import gap, median
from cumulant.lab.claims.real import NEEDS, Sublayer, split, sublayers
from cumulant.lens.heads import Link, link

CLAIM = Claim(
    id="T29",
    title="The link conjecture",
    evidence="empirical",
    statement="The query and key matrices provide a linear approximation of the canonical link, "
    "which takes the expected statistic of a token to its natural parameter.",
    slips=("Eq. (15) writes f(η) for f(μ): the link takes means to natural parameters.",),
    bounds="The link exists only inside the hull of the keys, so it is evaluated at attention "
    "outputs. The trained map counts as an approximation of the link if its R² exceeds by at least "
    "0.5 that of queries never trained for these keys; the claim is refuted if it explains no more "
    "than those.",
    source="message passing draft, eq. (15)",
    formula=r"\eta_i = f(\mu_i) = (\nabla G)^{-1}(\mu_i) \approx \mu_i W_q W_k^\top",
    recorded="open",
    systems=("link conjecture",),
    tests=("tests/lens/test_head_measures.py", "tests/measures/test_link.py"),
    needs=NEEDS,
    rules=table("""
      statement:
        trained_excess ≥ 0.5 (refuted at 0): R² of the trained map, beyond that of random queries
            and of another head's, medians over heads
      control:
        gaussian_link ≤ 1e-10: the link of a Gaussian against Σ⁻¹(μ − m)
        query_link ≤ 1e-7: the link solved at outputs of a real head, and at smoothed ones, against
            its queries, relative
        gaussian_keys ≥ 0.98: R² of the affine map in a head with Gaussian keys
      noted:
        trained_map: R² of the trained map, median over heads
        trained_null: the same with other queries, the better of the two
        affine_map: R² of the best affine map from means to natural parameters, median over heads
        affine_null: the same with other queries, the better of the two
    """),
    finding="In {heads} heads of MiniLM the trained map explains R² = {trained_map:.2f} of the "
    "link (median; {tokens} tokens), {trained_excess:.2f} more than random queries or another "
    "head's: above zero, but too little to decide. The best affine map explains {affine_map:.2f}, "
    "which says little: other queries give {affine_null:.2f}, and it is {half:.2f} with {fewer} "
    "tokens and rises with their number.",
    caption="Every head of MiniLM: how much of the true link an affine map of the mean explains at "
    "its best, and as trained. Dashed: medians with random queries or another head's, the better "
    "of the two. An affine map fits those equally well; the trained weights do slightly better "
    "than they do, except in the last block.",
    size=(7.0, 3.2),
)


def gaussian_gap(trial: Trial) -> float:
    """The library's link of a Gaussian against Σ⁻¹(μ − m)."""
    d = 8
    root, mean, mu = trial.normal(d, d), trial.normal(d), trial.normal(20, d)
    covariance = root @ root.mT + torch.eye(d, dtype=torch.float64)
    truth = linalg.solve(covariance, (mu - mean).mT).mT
    return gap(Gaussian(mean, covariance).link(mu), truth)


def linear_score(trial: Trial) -> float:
    """R² of the affine map for a head with Gaussian keys, where the link is linear."""
    n, d = 1500, 3
    mix = trial.normal(d, d)
    key = trial.normal(n, d) @ mix + 5
    query = 0.3 * trial.normal(n, d) @ linalg.inv(mix).mT
    call = AttentionCall(query[None, None], key[None, None], key[None, None])
    found = link(call, torch.ones(1, n, dtype=torch.bool), seed=trial.seed)
    return float(found.linear[0]) if found else float("nan")


def query_gap(layer: Sublayer, trial: Trial, count: int) -> float:
    """The link solved at attention outputs of a real head against scale · q, on the keys' span.

    The same at keys smoothed by a Gaussian, where the mean at η is s η + attention(η).
    """
    head = int(trial.uniform(1) * len(layer.query))
    key, query = layer.key[head].double(), layer.query[head].double()
    chosen = torch.randperm(len(query), generator=trial.generator)[:count]
    eta = layer.scale * query[chosen]
    mean = (eta @ key.mT).softmax(-1) @ key
    away = key - key.mean(0)
    truth = eta @ linalg.pinv(away) @ away
    found = Empirical(key).link(mean, throw=False)
    there = found.status.converged
    if int(there.sum()) < count // 2:
        return float("nan")
    worst = float((found.value - truth)[there].abs().max() / truth.abs().max())
    spread = float(away.square().mean()) / 4
    smooth = GaussianMixture(key, spread * torch.eye(key.shape[1], dtype=torch.float64))
    back = smooth.link(mean + spread * eta)
    return max(worst, float(gap(back, eta) / eta.abs().max()))


def of_head(layer: Sublayer, seed: int, means: int) -> Link:
    """The lens' figures for all heads of a block."""
    call = AttentionCall(layer.query[None], layer.key[None], layer.value[None], scale=layer.scale)
    found = link(
        call, torch.ones(1, layer.query.shape[1], dtype=torch.bool), means=means, seed=seed
    )
    return found or Link(*(torch.full((len(layer.query),), torch.nan),) * 3)


def random_queries(layer: Sublayer, trial: Trial) -> Tensor:
    """Queries of random weights on the same states, of the same size as the head's own."""
    weights = trial.normal(layer.state.shape[1], layer.state.shape[1]).to(layer.state)
    query = split(layer.state @ weights)
    size = (
        linalg.vector_norm(layer.query, dim=(-2, -1)) / linalg.vector_norm(query, dim=(-2, -1))
    )[:, None, None]
    return size * query


def flat(columns: list[Tensor]) -> Tensor:
    """All heads, skipping those without a figure."""
    x = torch.cat(columns)
    return x[x.isfinite()]


def median_error(x: Tensor) -> float:
    """The standard error of a median, for numbers that are roughly normal."""
    return float(x.std() * (torch.pi / 2 / len(x)) ** 0.5)


@torch.no_grad()
def measure(trial: Trial) -> Found:
    """All heads of MiniLM on one passage: means μᵢ = Eᵢ[k], natural parameters scale · qᵢ."""
    step = trial.size(1, 3)
    layers = sublayers()[::step]
    tokens = trial.size(layers[0].query.shape[1], 64)
    found = [of_head(layer, trial.seed, tokens) for layer in layers]
    linear, trained = flat([x.linear for x in found]), flat([x.trained for x in found])
    half = flat([of_head(layer, trial.seed, tokens // 2).linear for layer in layers])
    # What queries give that were not trained for these keys: random ones, and another head's.
    others = [
        [of_head(layer._replace(query=query), trial.seed, tokens) for layer, query in pairs]
        for pairs in (
            [(layer, random_queries(layer, trial)) for layer in layers],
            [(layer, layer.query.roll(1, 0)) for layer in layers],
        )
    ]
    affine_null, trained_null = (
        max(median(flat([getattr(x, kind) for x in other])) for other in others)
        for kind in ("linear", "trained")
    )
    solved = query_gap(layers[len(layers) // 2], trial, trial.size(48, 12))
    numbers = {
        "gaussian_link": gaussian_gap(trial),
        "query_link": solved,
        "gaussian_keys": linear_score(trial),
        "trained_excess": (median(trained) - trained_null, median_error(trained)),
        "trained_map": median(trained),
        "trained_null": trained_null,
        "affine_map": (median(linear), median_error(linear)),
        "affine_null": affine_null,
    }
    counts = {"heads": len(linear), "tokens": tokens, "fewer": tokens // 2}
    return Found(numbers, **counts, half=median(half), found=found, trained=trained, step=step)


def draw(figure: Any, seen: Any) -> None:
    """R² of both maps, head by head, with the medians of other queries."""
    axes = figure.subplots()
    blocks = range(1, len(seen.found) + 1)
    for value, name, which in (
        (seen.affine_null, "affine, other queries", 0),
        (seen.trained_null, "trained, other queries", 1),
    ):
        axes.axhline(value, color=series_color(which), lw=1, ls="--")
        axes.text(len(seen.found) + 0.45, value + 0.03, name, fontsize=8.5, color=MUTED)
    for i, link_ in enumerate(seen.found):
        for x, shift, which in ((link_.linear, -0.15, 0), (link_.trained, 0.15, 1)):
            place = i + 1 + shift + torch.linspace(-0.08, 0.08, len(x))
            axes.plot(place, x, "o", ms=3.5, color=series_color(which))
    for which, label in ((0, "best affine map"), (1, "trained weights")):
        axes.plot([], [], "o", ms=4, color=series_color(which), label=label)
    axes.set(xlabel="layer", ylabel="R² of the link", xlim=(0.5, len(seen.found) + 2.2))
    axes.set_xticks(blocks, [str((n - 1) * seen.step) for n in blocks])
    axes.set_ylim(min(-0.6, float(seen.trained.min()) - 0.1), 1.05)
    axes.legend(loc="lower left")

"""T18: attention as alternation between natural parameters and means."""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cumulant import Empirical, Gaussian, dynamics
from cumulant.core.typed import functions, linalg
from cumulant.figures import series_color
from cumulant.lab.claims.claim import Claim, Found, Trial, table
from cumulant.lab.claims.measuring import gap

CLAIM = Claim(
    id="T18",
    title="Approximate Gibbs alternation",
    evidence="identity",
    statement="Attention draws natural parameters given means, P(η|μ) ∝ exp⟨η, μ⟩, and takes means "
    "given natural parameters: an alternation like Gibbs sampling, with a stationary law. With a "
    "linear link and the skip connection the normalizer blows up.",
    correction="The draft drops −G(η); without it the conditional is not the posterior and the "
    "stationary law is different. The blow-up comes from the skip connection, not from the linear "
    "link.",
    source="message passing draft, §4.1 and eq. (15)",
    formula=r"P(\eta_i \mid \mu) \propto \rho_i\, e^{\langle \eta_i, \mu \rangle - G(\eta_i)}, "
    r"\qquad \mu = \operatorname{E}[x \mid \eta_i]",
    bounds="Five standard errors, the worst of 36 counts, come by chance once in 50,000 runs. "
    "The longest point is the farthest that any mean can be inside the hull, 1; five "
    "times as far is outside by any account. A normalizer that doubles at every step has "
    "no bound.",
    recorded="holds with a correction",
    systems=("Gibbs alternation",),
    tests=("tests/laws/test_gibbs.py",),
    rules=table("""
      statement:
        drafted_gap ≤ 1e-8: P(η|μ) without −G against Bayes' rule
      correction:
        posterior_gap ≤ 1e-9: P(η|μ) with −G against Bayes' rule from scipy's densities
        law_gap ≤ 1e-8: stationary law against the eigenvector of Bayes' matrix
        moves_off ≤ 5: moves of the alternation against Bayes' rule, worst count in standard errors
        skip_reach ≥ 5: the same with the skip connection: it leaves, and G blows up
        skip_doublings ≥ 1: doublings of G a step for Gaussian h, whose linear link is exact, with
            the skip
      noted:
        visited_gap: total variation between that law and the states the alternation visited
        linear_reach: longest mean with a linear link alone, over the longest point: it stays inside
    """),
    finding="Dropping −G misses Bayes' rule by up to {drafted_gap:.2f} and shifts the stationary "
    "law by {shift:.2f} in total variation; with −G both are exact. The blow-up comes from the "
    "skip connection: a linear link alone stays inside the hull.",
    caption="Left: the alternation visits the means according to the stationary law with −G; "
    "without it the law is different. Right: G stays bounded with the exact link and with a linear "
    "one, and grows without bound once the skip connection is added.",
)


def posterior(means: Tensor, covariance: Tensor, log_prior: Tensor) -> Tensor:
    """P(j | mu_i) by Bayes' rule from scipy's densities: p(x | eta_j) is N(mu_j, S)."""
    density = import_module("scipy.stats").multivariate_normal
    rows = [density(m.numpy(), covariance.numpy()).logpdf(means.numpy()) for m in means]
    return (functions.from_numpy(np.array(rows)).mT + log_prior).softmax(-1)


def invariant(transition: Tensor) -> Tensor:
    """The left eigenvector of eigenvalue 1, by numpy."""
    values, vectors = np.linalg.eig(transition.mT.numpy())
    law = np.real(vectors[:, np.argmax(np.real(values))])
    return functions.from_numpy(law / law.sum())


def moves_off(index: Tensor, exact: Tensor) -> Tensor:
    """Counts of moves against a transition, the worst in standard errors.

    Slow chains take long to reveal their law; their single moves reveal the transition at once.
    """
    n = len(exact)
    before, after = index[:-1].flatten(), index[1:].flatten()
    moves = torch.bincount(n * before + after, minlength=n * n).reshape(n, n).double()
    expected = moves.sum(1, keepdim=True) * exact
    off = (moves - expected) / (expected * (1 - exact)).sqrt()
    return off[expected > 5].abs().max()


def three_links(trial: Trial, n: int) -> tuple[dict[str, Any], dict[str, float]]:
    """Alternations over points by each link; the longest mean, over the longest point."""
    points = trial.normal(12, 2)
    h = Empirical(points, torch.full((12,), -math.log(12), dtype=torch.float64))
    inside, steps = h.mean(0.8 * trial.normal(n, 2)), trial.size(100, 40)
    runs = {
        link: dynamics.alternate(h, inside, steps, link=link, generator=trial.generator)
        for link in ("exact", "linear", "linear+skip")
    }
    longest = linalg.vector_norm(points, dim=-1).max()
    return runs, {
        k: float(linalg.vector_norm(r.means, dim=-1).max() / longest) for k, r in runs.items()
    }


def measure(trial: Trial) -> Found:
    """A Gaussian family against Bayes' rule; then the three links on an empirical one."""
    n, steps = 6, trial.size(3000, 300)
    factor = trial.normal(2, 2)
    covariance = factor @ factor.mT + 0.3 * torch.eye(2, dtype=torch.float64)
    h = Gaussian(trial.normal(2), covariance)
    means, log_prior = trial.normal(n, 2), 0.5 * trial.normal(n)
    exact = posterior(means, covariance, log_prior)
    drafted, kept = (
        dynamics.alternation_matrix(h, means, log_prior=log_prior, drop_normalizer=drop)
        for drop in (True, False)
    )
    law, other = dynamics.stationary(kept), dynamics.stationary(drafted)
    run = dynamics.alternate(h, means, steps, log_prior=log_prior, generator=trial.generator)
    # Each walker's index is the mean it then has; the first tenth is forgotten.
    visits = torch.nn.functional.one_hot(run.index[steps // 10 :], n).double().mean(0)
    runs, reach = three_links(trial, n)
    # For a Gaussian h the linear link is the exact one: what grows here grows by the skip.
    skipped = dynamics.alternate(h, means, 40, link="linear+skip", generator=trial.generator)
    doubling = skipped.log_normalizer.amax(-1)
    error = 0.5 * float(visits.std(0).sum()) / n**0.5
    numbers = {
        "drafted_gap": gap(drafted, exact),
        "posterior_gap": gap(kept, exact),
        "law_gap": gap(law, invariant(exact)),
        "moves_off": (moves_off(run.index, exact), 1.0),
        "visited_gap": (0.5 * (visits.mean(0) - law).abs().sum(), error),
        "linear_reach": reach["linear"],
        "skip_reach": reach["linear+skip"],
        "skip_doublings": (doubling[-1] / doubling[-2]).log2(),
    }
    shift = 0.5 * float((law - other).abs().sum())
    return Found(numbers, shift=shift, laws=(law, visits.mean(0), other), runs=runs)


def draw(figure: Any, seen: Any) -> None:
    """The stationary law with −G, visited, and without; the largest G by each link."""
    left, right = figure.subplots(1, 2)
    spots = np.arange(len(seen.laws[0]))
    looks = ((-0.27, 0, "with −G"), (0, 2, "visited"), (0.27, 1, "−G dropped"))
    for law, (shift, color, label) in zip(seen.laws, looks, strict=True):
        left.bar(spots + shift, law, 0.25, zorder=3, color=series_color(color), label=label)
    left.set(xlabel="mean", ylabel="stationary probability", xticks=spots)
    left.legend()
    named = (("exact", "-", 0), ("linear", "--", 2), ("linear+skip", ":", 1))
    for link, dash, color in named:
        height = seen.runs[link].log_normalizer.amax(-1)
        label = f"{link.removesuffix('+skip')} link" + (" and skip" if "+" in link else "")
        right.plot(height, dash, color=series_color(color), label=label)
    right.set(xlabel="step", ylabel="largest G in use", yscale="symlog")
    right.legend()

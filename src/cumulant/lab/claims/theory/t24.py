"""T24: contrastive loss as a likelihood, what sampling its normalizer costs, and a wrong name."""

from __future__ import annotations

import math
from itertools import combinations, product
from typing import Any

import torch
from torch import Tensor

from cumulant import Empirical, contrastive
from cumulant.figures import series_color
from cumulant.lab.claims.claim import CORRECTED, Claim, Evidence, Picture, Trial, at_most, noted

SAMPLES = (2, 8, 32)


def likelihood(trial: Trial) -> tuple[Tensor, Tensor]:
    """Errors of loss and gradient against the log-likelihood and (E[k] − k⁺)/τ, written out."""
    query, key, tau = trial.normal(30, 6).requires_grad_(), trial.normal(30, 6), 0.7
    scores = query.detach() @ key.mT / tau
    written = scores.logsumexp(-1) - scores.diagonal()
    slope = (scores.softmax(-1) @ key - key) / tau
    loss = contrastive.info_nce(query, key, temperature=tau, similarity="dot", reduction="none")
    (ours,) = torch.autograd.grad(loss.sum(), query)
    family = Empirical(key)
    own = family.log_normalizer(query.detach() / tau) - scores.diagonal()
    gap = torch.maximum((loss.detach() - written).abs().max(), (own - written).abs().max())
    return gap, (ours - slope).abs().max()


def divergence(trial: Trial, steps: int) -> tuple[Tensor, Tensor]:
    """Errors of contrastive divergence after 1 to `steps` sweeps, and of the loss' gradient.

    Hinton's own family: a Boltzmann machine of four spins, its 16 states the keys, the products of
    two spins their coordinates. All against the gradient of the log-likelihood by enumeration.
    """
    spins = torch.tensor(list(product((-1.0, 1.0), repeat=4)), dtype=torch.float64)
    keys = torch.stack([spins[:, a] * spins[:, b] for a, b in combinations(range(4), 2)], -1)
    weights = 0.7 * trial.normal(6)
    data = trial.normal(16).softmax(-1)
    law = (keys @ weights).softmax(-1)
    exact = (law - data) @ keys
    sweep = torch.eye(16, dtype=torch.float64)
    for unit in range(4):  # each spin drawn anew, given the others
        flip = torch.arange(16) ^ (8 >> unit)
        stay = law / (law + law[flip])
        move = torch.diag(stay)
        move[torch.arange(16), flip] = 1 - stay
        sweep = sweep @ move
    after, gaps = data, list[Tensor]()
    for _ in range(steps):
        after = after @ sweep
        gaps.append(((after - data) @ keys - exact).norm() / exact.norm())
    natural = weights.expand(16, 6).clone().requires_grad_()
    loss = contrastive.info_nce(
        natural, keys, temperature=1.0, similarity="dot", reduction="none"
    )  # row i: the likelihood of state i
    (slope,) = torch.autograd.grad(loss @ data, natural)
    return torch.stack(gaps), (slope.sum(0) - exact).norm() / exact.norm()


def sampled(trial: Trial, runs: int) -> Tensor:
    """Sampled softmax for growing samples, mean over queries, ``(samples, 5)``.

    Relative bias of e^G and its standard error, bias of G and its, and what the second order of
    the logarithm predicts for that.
    """
    query, table = (trial.normal(n, 3) for n in (32, 60))
    query, target = 1.5 * query / query.norm(dim=-1, keepdim=True), torch.arange(32)
    weights = trial.uniform(60) + 0.2
    sampler, proposal = contrastive.AliasSampler(weights), weights / weights.sum()
    scores = query @ table.mT
    total, positive = scores.exp().sum(-1), (query * table[target]).sum(-1)
    terms = scores.exp() / proposal
    terms[target, target] = 0.0  # the positive counts in full
    variance = terms**2 @ proposal - (terms @ proposal) ** 2

    def estimate(count: int) -> Tensor:
        random = trial.generator
        loss = contrastive.sampled_softmax(query, table, target, sampler, count, generator=random)
        return loss + positive

    rows: list[list[float]] = []
    for count in SAMPLES:
        G = torch.stack([estimate(count) for _ in range(runs)])
        row: list[float] = []
        for bias in (G.exp() / total - 1, G - total.log()):
            over = bias.mean(-1)
            row += [float(over.mean()), float(over.std()) / math.sqrt(runs)]
        rows.append([*row, -float((variance / (2 * count * total**2)).mean())])
    return torch.tensor(rows)


def experiment(trial: Trial) -> Evidence:
    """Likelihood and gradient written out; a Boltzmann machine enumerated; many samples of G."""
    value, slope = likelihood(trial)
    # Random couplings and random data: how far off it is varies, so many machines are asked.
    machines = [divergence(trial, 12) for _ in range(trial.size(100, 20))]
    gaps = torch.stack([x for x, _ in machines])
    own, typical = torch.stack([x for _, x in machines]).max(), gaps[:, 0].median()
    drawn, spread, low, error, predicted = sampled(trial, trial.size(400, 60)).mT
    unbiased, significance = (drawn / spread).abs().max(), low[0] / error[0]

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        left.semilogy(range(1, 13), gaps[:15].mT, color=series_color(1), linewidth=0.6, alpha=0.5)
        left.semilogy(range(1, 13), gaps.median(0).values, "o-", color=series_color(1), ms=4)
        left.set(xlabel="Gibbs sweeps", ylabel="relative error of the gradient")
        left.set_title("contrastive divergence")
        right.errorbar(SAMPLES, -low, 2 * error, fmt="o", color=series_color(0), label="measured")
        right.loglog(SAMPLES, -predicted, color=series_color(2), label="Var/(2 e²ᴳ)")
        right.set(xlabel="samples", ylabel="how low G comes out", title="sampled softmax")
        right.set_xticks(SAMPLES, [str(n) for n in SAMPLES])
        right.minorticks_off()
        right.legend()

    mended: Any = {"form": "correction"}
    return Evidence(
        [
            at_most("divergence_gap", typical, 1e-6, "CD-1 against ∇ of the likelihood, median"),
            at_most("contrast_gap", own, 1e-12, "InfoNCE's gradient against the same", **mended),
            at_most("value_gap", value, 1e-12, "InfoNCE against −log-likelihood", **mended),
            at_most("gradient_gap", slope, 1e-12, "its gradient against (E[k] − k⁺)/τ", **mended),
            at_most(
                "unbiased",
                unbiased.max(),
                5.0,
                "error of sampled e^G, in s.e.",
                error=1.0,
                **mended,
            ),
            at_most("low", significance, -3.0, "bias of sampled G, in s.e.", error=1.0, **mended),
            noted("low_by", low[0], "bias of G with 2 samples", error=float(error[0])),
            noted("divergence_least", gaps[:, 0].min(), "the least of those gaps"),
        ],
        f"InfoNCE is the negative log-likelihood to {float(value):.0e}, its gradient to "
        f"{float(slope):.0e}. Contrastive divergence after one sweep misses that gradient by "
        f"{float(typical):.0%} in the median machine. Sampling leaves e^G unbiased and G low, by "
        f"{-float(low[0]):.2f} with two samples.",
        Picture(
            draw,
            "Left: contrastive divergence, machine by machine and in the median, reaches the "
            "gradient of the likelihood only as its chain gets long; InfoNCE has it at once. "
            "Right: G of a sampled softmax is low, as second order predicts once samples are many.",
        ),
    )


CLAIM = Claim(
    id="T24",
    title="Contrastive learning is maximum likelihood",
    statement=(
        "The family generated by an empirical distribution is the functional form of contrastive "
        "divergence: its negative log-likelihood is the contrastive loss, with gradient "
        "(E[k] − k⁺)/τ. A sampled softmax is unbiased for e^G and low for G."
    ),
    source="exponential family draft, eqs. (4) and (5); main draft, section 1",
    formula=r"\ell(q) = -\langle q, k^+\rangle/\tau + G(q/\tau), \qquad"
    r" \nabla_q \ell = \left(\operatorname{E}[k] - k^+\right)/\tau",
    recorded=CORRECTED,
    experiment=experiment,
    correction=(
        "What the draft calls contrastive divergence is contrastive learning. Contrastive "
        "divergence (Hinton, 2002) replaces E[k] by a short Markov chain from the data, which is "
        "another gradient."
    ),
    systems=("InfoNCE", "sampled softmax"),
    tests=("tests/contrastive/test_info_nce.py", "tests/contrastive/test_sampled.py"),
)

"""T27: attention is a mixing probability of the IMM filter, not its transition."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cumulant import attend
from cumulant.core.typed import linalg
from cumulant.figures import INK, series_color
from cumulant.filtering import (
    SwitchingLinearGaussian,
    attention_as_imm,
    filter,
    sinkhorn,
    transition_from_mixing,
)
from cumulant.lab.claims.claim import Claim, Found, Trial, table
from cumulant.lab.claims.measuring import gap

CLAIM = Claim(
    id="T27",
    title="Attention as a filter without observation",
    evidence="identity",
    statement="Attention is a step of GPB2 or IMM without an observation: tokens are modes, "
    "hidden states their expected statistics, the value matrix the linear transition. The modes "
    "are uniform and attention gives their transition.",
    correction="Eq. (12) normalizes over the previous index i, so it is IMM's mixing probability "
    "P(i|j), not the transition P(j|i). Uniform modes require doubly stochastic weights; in "
    "general π is A's Perron vector, and π ∝ eᴳ if the scores are symmetric.",
    slips=("Eq. (12) prints an extra factor σ̃ = 1/M; with it nothing sums to one.",),
    source="message passing draft, eqs. (12) to (14)",
    formula=r"p(i \mid j) = \frac{e^{\langle \mu_i, \eta_j\rangle}}{\sum_{i'} "
    r"e^{\langle \mu_{i'}, \eta_j\rangle}} = P(A_t = i \mid A_{t+1} = j), \qquad "
    r"T_{ij} = \frac{A_{ij}\, c_j}{\pi_i}, \quad \sum_j T_{ij} = 1 \iff A c = \pi",
    recorded="holds with a correction",
    systems=("message passing view of attention",),
    tests=("tests/laws/test_message_passing.py", "tests/filtering/test_attention_as_imm.py"),
    rules=table("""
      statement:
        row_sums ≤ 1e-9: how far Σⱼ P(j|i) is from one, by eq. (12)
        transition_gap ≤ 1e-9: filter with A for its transition and uniform modes, against attention
        negative_mode ≤ 1e-9: how negative the only c with A c uniform is
        uniform_residual ≤ 1e-9: residual of A c = π for uniform π and the best c ≥ 0
      correction:
        mixing_gap ≤ 1e-10: attention as one IMM step with A for its mixing, against plain softmax
        perron_gap ≤ 1e-8: filter with A's Perron vector for modes, against attention and an
            eigensolver
        sinkhorn_gap ≤ 1e-8: doubly stochastic weights with uniform modes, filter against weighted
            mean
        symmetric_gap ≤ 1e-10: symmetric scores: π against eᴳ, T against the transpose of A
    """),
    finding="Read as a transition, A has rows whose sums miss one by up to {row_sums:.2f}, and a "
    "filter with it misses attention by {transition_gap:.2f}. Uniform modes would need a next mode "
    "with probability −{negative_mode:.2f}. As mixing probabilities, with the Perron vector or "
    "doubly stochastic weights, the filter is attention to rounding.",
    caption="Left: for uniform current modes, eq. (12) needs next modes of negative probability; "
    "the Perron vector of A needs none. Right: with symmetric scores that vector is e^G; "
    "with general scores it is not.",
)


def imm(tokens: Tensor, value: Tensor, transition: Tensor, modes: Tensor) -> Tensor:
    """E[x₁ | A₁ = j] by an IMM filter with tokens for modes whose observation says nothing."""
    n, d = tokens.shape
    zero = torch.zeros(d, d, dtype=tokens.dtype)
    model = SwitchingLinearGaussian(
        transition=transition,
        initial=modes,
        dynamics=value,
        dynamics_noise=zero,
        emission=zero[:1],
        emission_noise=torch.ones(1, 1, dtype=tokens.dtype),
        initial_mean=tokens,
        initial_covariance=zero.expand(n, d, d),
    )
    return filter(model, zero[:1, :1], collapse="imm").mode_means[0]


def perron(mixing: Tensor) -> Tensor:
    """The eigenvector of A at 1, as probabilities."""
    values, vectors = linalg.eig(mixing)
    vector = vectors.real[:, int(values.real.argmax())]
    return vector / vector.sum()


def measure(trial: Trial) -> Found:
    """Random heads: plain softmax attention against the library's filter."""
    n, d = 8, 4
    x = trial.normal(n, d)
    query, key, value = (trial.normal(d, d) / 2 for _ in range(3))
    scores = (x @ query.mT) @ (x @ key.mT).mT / d**0.5  # [query j, key i]
    weights = scores.softmax(-1)
    attention, mixing = weights @ x @ value.mT, weights.mT  # A[i, j]: columns sum to one
    even = torch.full((n,), 1 / n, dtype=torch.float64)

    # As drafted: A is the transition, all modes are equally likely.
    rows = mixing.sum(1)
    as_transition = imm(x, value, mixing / rows[:, None], even)
    needed = linalg.solve(mixing, even)  # the only c with A c uniform
    uniform = transition_from_mixing(mixing, even)

    # As mixing probabilities: with A's Perron vector, or doubly stochastic weights.
    step = attention_as_imm(x, query_weight=query, key_weight=key, value_weight=value)
    found, vector = transition_from_mixing(mixing), perron(mixing)
    by_filter = imm(x, value, found.transition, found.current)
    double = sinkhorn(scores).mT
    doubly = transition_from_mixing(double, even)
    by_sinkhorn = imm(x, value, doubly.transition, even)
    # Symmetric scores: π is e^G, and T the transpose of A.
    same = x @ query.mT
    G = attend(same, same).log_normalizer
    twin = (same @ same.mT / d**0.5).softmax(-1).mT
    reversible = transition_from_mixing(twin)
    numbers = {
        "row_sums": gap(rows, 1),
        "transition_gap": gap(as_transition, attention),
        "negative_mode": -needed.min(),
        "uniform_residual": uniform.residual,
        "mixing_gap": max(gap(step.mean, attention), gap(step.mixing, mixing)),
        "perron_gap": max(
            gap(by_filter, attention),
            gap(found.current, vector),
            gap(found.transition, mixing * vector / vector[:, None]),
        ),
        "sinkhorn_gap": max(gap(by_sinkhorn, double.mT @ x @ value.mT), gap(double.sum(1), 1)),
        "symmetric_gap": max(
            gap(reversible.current, G.softmax(-1)), gap(reversible.transition, twin.mT)
        ),
    }
    # e^G, normalized, against the Perron vector, by the kind of scores.
    pairs = {
        "symmetric": (G.softmax(-1), reversible.current),
        "general": (scores.logsumexp(-1).softmax(-1), found.current),
    }
    return Found(numbers, needed=needed, current=found.current, pairs=pairs)


def draw(figure: Any, seen: Any) -> None:
    """Modes that uniform ones would need next; Perron vectors against e to the G."""
    left, right = figure.subplots(1, 2)
    place = torch.arange(1, len(seen.needed) + 1)
    left.axhline(0, color=INK, lw=0.8)
    left.bar(place - 0.2, seen.needed, 0.4, color=series_color(1), label="next, if uniform now")
    left.bar(place + 0.2, seen.current, 0.4, color=series_color(2), label="Perron vector")
    left.set(xlabel="token", ylabel="probability of a mode", xticks=place)
    left.set_axisbelow(True)
    left.set_ylim(top=left.get_ylim()[1] + 0.3 * float(seen.needed.max() - seen.needed.min()))
    left.legend(loc="upper left")
    every = torch.cat([x for both in seen.pairs.values() for x in both])
    ends = [float(every.min()) / 1.5, float(every.max()) * 1.5]
    right.loglog(ends, ends, color=INK, lw=0.8)
    for which, (kind, both) in zip((2, 4), seen.pairs.items(), strict=True):
        right.plot(*both, "o", ms=5, color=series_color(which), label=f"{kind} scores")
    right.set(xlabel="eᴳ, normalized", ylabel="Perron vector")
    right.legend(loc="lower right")

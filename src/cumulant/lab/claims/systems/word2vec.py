"""word2vec: the softmax keeps G, negative sampling drops it and finds PMI − log k."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from cumulant import contrastive
from cumulant.figures import MUTED, series_color
from cumulant.lab.claims.claim import Claim, Found, Trial, table
from cumulant.lab.claims.measuring import fitted, gap, standard_error

K = 5

CLAIM = Claim(
    id="word2vec",
    title="word2vec",
    evidence="identity",
    statement="word2vec's softmax is the family over contexts tilted by a word, and its optimum is "
    "log P(c | w). Negative sampling drops G, and its optimum is the pointwise mutual information "
    "minus log k.",
    theory="T24",
    source="main draft, section 1; Mikolov et al. (2013); Levy and Goldberg (2014)",
    formula=r"\langle w, c \rangle = \log \frac{P(c \mid w)}{P(c)} - \log k",
    bounds="Five standard errors do not come by chance.",
    recorded="holds",
    systems=("word2vec",),
    tests=("tests/contrastive/test_sampled.py",),
    rules=table("""
      statement:
        pmi_gap ≤ 1e-5: negative sampling's optimum against PMI − log k
        softmax_gap ≤ 1e-6: softmax's optimum against P(c | w)
        drawn ≤ 5: error of the mean loss with real draws, in s.e.
      noted:
        dropped: distance of negative sampling's softmax from P(c | w)
    """),
    finding="The optimum of negative sampling is PMI − log k to {pmi_gap:.0e}, that of the "
    "softmax log P(c | w) to {softmax_gap:.0e}. Normalized afterwards, the scores of negative "
    "sampling are up to {dropped:.2f} in total variation from P(c | w).",
    caption="Left: without G the scores at the optimum are PMI − log k; they are not the log "
    "probabilities (red). Right: with G, after normalizing, they are.",
)


def measure(trial: Trial) -> Found:
    """A small vocabulary with a known joint law; both losses in expectation, at their least.

    Words are unit vectors, so the scores are the free entries of the contexts' table.
    """
    words, contexts = trial.size(6, 4), trial.size(8, 6)
    joint = (0.8 * trial.normal(words, contexts)).flatten().softmax(-1).reshape(words, contexts)
    margin, conditional = joint.sum(0), joint / joint.sum(1, keepdim=True)
    eye = torch.eye(words, dtype=torch.float64)
    rows = torch.arange(words).repeat_interleave(contexts)
    targets = torch.arange(contexts).repeat(words)
    # A sampler that knows one context only makes its draws certain: the sum over samplers, by
    # their chance, is the expected loss, without noise.
    certain = [contrastive.AliasSampler(x) for x in torch.eye(contexts, dtype=torch.float64)]

    def sampling(table: Tensor) -> Tensor:
        parts = [
            contrastive.negative_sampling(eye[rows], table, targets, sampler, K) @ joint.flatten()
            for sampler in certain
        ]
        return torch.stack(parts) @ margin

    def softmax(table: Tensor) -> Tensor:
        loss = contrastive.info_nce(
            eye[rows], table, positives=targets, temperature=1.0, similarity="dot", reduction="none"
        )
        return loss @ joint.flatten()

    how = {"max_iter": trial.size(150, 100), "tolerance_grad": 1e-10, "tolerance_change": 0.0}
    start = torch.zeros(contexts, words, dtype=torch.float64)
    free, full = (fitted(loss, start, **how).mT for loss in (sampling, softmax))
    pmi = (conditional / margin).log()
    # With real draws: the mean loss at the optimum against its closed form.
    at = (pmi - math.log(K)).mT
    expected = (joint * (1 + (-at.mT).exp()).log()).sum() + K * (
        torch.outer(joint.sum(1), margin) * (1 + at.mT.exp()).log()
    ).sum()
    pairs = torch.multinomial(joint.flatten(), 20000, True, generator=trial.generator)
    query, sampler = eye[rows[pairs]], contrastive.AliasSampler(margin)
    drawn = contrastive.negative_sampling(
        query, at, targets[pairs], sampler, K, generator=trial.generator
    )
    numbers = {
        "pmi_gap": gap(free, pmi - math.log(K)),
        "softmax_gap": gap(full.softmax(-1), conditional),
        "drawn": (gap(drawn.mean(), expected) / standard_error(drawn), 1.0),
        "dropped": (free.softmax(-1) - conditional).abs().sum(-1).max() / 2,
    }
    return Found(numbers, conditional=conditional, free=free, full=full, pmi=pmi)


def draw(figure: Any, seen: Any) -> None:
    """Scores at the optimum of each loss against what they should be."""
    left, right = figure.subplots(1, 2)
    for axes, x, y, name in (
        (left, seen.pmi - math.log(K), seen.free, "PMI − log k"),
        (right, seen.conditional.log(), seen.full.log_softmax(-1), "log P(context | word)"),
    ):
        ends = [float(x.min()), float(x.max())]
        axes.plot(ends, ends, color=MUTED, linewidth=1)
        axes.plot(x.flatten(), y.flatten(), "o", color=series_color(0), markersize=4)
        axes.set(xlabel=name, ylabel="score at the optimum")
    pmi, log_p = (seen.pmi - math.log(K)).flatten(), seen.conditional.log().flatten()
    look = {"color": series_color(1), "markersize": 4, "label": "log P(context | word)"}
    left.plot(pmi, log_p, "x", **look)
    left.set_title("negative sampling")
    left.legend()
    right.set_title("softmax, with G")

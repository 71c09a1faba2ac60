"""word2vec: the softmax keeps G, negative sampling drops it and finds PMI − log k."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cumulant import contrastive
from cumulant.figures import MUTED, series_color
from cumulant.lab.claims.claim import HOLDS, Claim, Evidence, Picture, Trial, at_most, noted

K = 5


def fitted(loss: Callable[[Tensor], Tensor], shape: tuple[int, ...], steps: int) -> Tensor:
    """Where a convex loss is least."""
    table = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [table], max_iter=steps, tolerance_grad=1e-10, tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(table)
        value.backward()
        return value

    optimizer.step(closure)  # pyright: ignore[reportArgumentType]
    return table.detach()


def experiment(trial: Trial) -> Evidence:
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

    steps = trial.size(150, 100)
    free = fitted(sampling, (contexts, words), steps).mT
    full = fitted(softmax, (contexts, words), steps).mT
    pmi = (conditional / margin).log()
    pmi_gap = (free - (pmi - math.log(K))).abs().max()
    softmax_gap = (full.softmax(-1) - conditional).abs().max()
    # With real draws: the mean loss at the optimum against its closed form.
    at = (pmi - math.log(K)).mT
    expected = (joint * (1 + (-at.mT).exp()).log()).sum() + K * (
        torch.outer(joint.sum(1), margin) * (1 + at.mT.exp()).log()
    ).sum()
    pairs = torch.multinomial(joint.flatten(), 20000, True, generator=trial.generator)
    drawn = contrastive.negative_sampling(
        eye[rows[pairs]], at, targets[pairs], contrastive.AliasSampler(margin), K,
        generator=trial.generator,
    )  # fmt: skip
    error = drawn.std() / math.sqrt(len(drawn))
    z = (drawn.mean() - expected).abs() / error
    dropped = (free.softmax(-1) - conditional).abs().sum(-1).max() / 2

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        for axes, x, y, name in (
            (left, pmi - math.log(K), free, "PMI − log k"),
            (right, conditional.log(), full.log_softmax(-1), "log P(context | word)"),
        ):
            ends = [float(x.min()), float(x.max())]
            axes.plot(ends, ends, color=MUTED, linewidth=1)
            axes.plot(x.flatten(), y.flatten(), "o", color=series_color(0), markersize=4)
            axes.set(xlabel=name, ylabel="score at the optimum")
        left.plot(
            (pmi - math.log(K)).flatten(), conditional.log().flatten(), "x",
            color=series_color(1), markersize=4, label="log P(context | word)",
        )  # fmt: skip
        left.set_title("negative sampling")
        left.legend()
        right.set_title("softmax, with G")

    return Evidence(
        [
            at_most("pmi_gap", pmi_gap, 1e-5, "negative sampling's optimum against PMI − log k"),
            at_most("softmax_gap", softmax_gap, 1e-6, "softmax's optimum against P(c | w)"),
            at_most("drawn", z, 5.0, "mean loss with real draws, in s.e.", error=1.0),
            noted("dropped", dropped, "distance of negative sampling's softmax from P(c | w)"),
        ],
        f"The optimum of negative sampling is PMI − log k to {float(pmi_gap):.0e}, that of the "
        f"softmax log P(c | w) to {float(softmax_gap):.0e}. Normalized afterwards, the scores of "
        f"negative sampling are up to {float(dropped):.2f} in total variation from P(c | w).",
        Picture(
            draw,
            "Left: without G the scores at the optimum are PMI − log k; they are not the log "
            "probabilities (red). Right: with G, after normalizing, they are.",
        ),
    )


CLAIM = Claim(
    id="word2vec",
    title="word2vec",
    statement=(
        "word2vec's softmax is the family over contexts tilted by a word, and its optimum is "
        "log P(c | w). Negative sampling drops G, and its optimum is the pointwise mutual "
        "information less log k."
    ),
    source="main draft, section 1; Mikolov et al. (2013); Levy and Goldberg (2014)",
    formula=r"\langle w, c \rangle = \log \frac{P(c \mid w)}{P(c)} - \log k",
    recorded=HOLDS,
    experiment=experiment,
    systems=("word2vec",),
    tests=("tests/contrastive/test_sampled.py",),
)

"""Noise-contrastive estimation: a classifier that learns the log-normalizer."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from cumulant import contrastive
from cumulant.figures import MUTED, series_color
from cumulant.lab.claims.claim import HOLDS, Claim, Evidence, Picture, Trial, at_most, noted
from cumulant.lab.claims.systems.word2vec import fitted

NOISE = (1, 4, 16)


def experiment(trial: Trial) -> Evidence:
    """Scores with a known normalizer stay as they are; its parameter is fitted to samples.

    Words are unit vectors, so the scores are entries of the table. Every fit is repeated on fresh
    data, all repetitions at once: c is one number for each repetition and word.
    """
    words, contexts, pairs = 4, 7, 500
    repeats = trial.size(60, 16)
    joint = (0.7 * trial.normal(words, contexts)).flatten().softmax(-1)
    conditional = joint.reshape(words, contexts)
    conditional = conditional / conditional.sum(1, keepdim=True)
    truth = 2 * trial.normal(words)
    table = (conditional.log() + truth[:, None]).mT  # so G of word w is truth[w]
    sampler = contrastive.AliasSampler(trial.uniform(contexts) + 0.3)
    eye = torch.eye(words, dtype=torch.float64)
    drawn = torch.multinomial(joint, repeats * pairs, True, generator=trial.generator)
    word, context = drawn // contexts, drawn % contexts
    own = torch.arange(repeats).repeat_interleave(pairs)

    def loss(c: Tensor, samples: int) -> Tensor:
        # The same noise in every call, so that there is one function to minimize.
        noise = torch.Generator().manual_seed(trial.seed + samples)
        return contrastive.nce(
            eye[word], table, context, sampler, samples, log_normalizer=c[own, word],
            generator=noise,
        )  # fmt: skip

    found = torch.stack([
        fitted(lambda c, k=k: loss(c, k).sum() / pairs, (repeats, words), 25) for k in NOISE
    ])  # fmt: skip
    mean, error = found.mean(1), found.std(1) / math.sqrt(repeats)
    z, off = ((mean - truth) / error).abs().max(), float((mean - truth).abs().max())
    spread = found.std(1).mean(-1)

    # The loss itself: which of 1 + k came from the data, written out with the same draws.
    at = torch.cat([context[:, None], sampler.sample(
        len(word), 4, generator=torch.Generator().manual_seed(trial.seed + 4)
    )], -1)  # fmt: skip
    noise = sampler.log_probability.exp()
    model = (table[at, word[:, None]] - truth[word][:, None]).exp()
    real = model / (model + 4 * noise[at])
    written = -real[:, 0].log() - (1 - real[:, 1:]).log().sum(-1)
    loss_gap = (loss(truth.expand(repeats, words), 4) - written).abs().max()

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        left.axhline(0, color=MUTED, linewidth=1)
        for i, (word_truth, fits) in enumerate(zip(truth, found[1].mT, strict=True)):
            sideways = i + torch.linspace(-0.25, 0.25, repeats)
            left.plot(sideways, fits - word_truth, ".", color=series_color(0), markersize=4)
        left.set_xticks(range(words), [f"G = {float(g):.2f}".replace("-", "−") for g in truth])
        left.set(ylabel="fitted c less G", title="four words, 4 noise samples each")
        right.plot(NOISE, spread, "o-", color=series_color(0))
        right.set(xlabel="noise samples for a pair", ylabel="spread of fitted c", xticks=NOISE)
        right.set_ylim(bottom=0)
        right.set_title("more noise, a better estimate")

    return Evidence(
        [
            at_most("loss_gap", loss_gap, 1e-12, "loss against the classifier written out"),
            at_most("normalizer", z, 6.0, "error of the fitted c against G, in s.e.", error=1.0),
            at_most("largest", off, 0.1, "error of c against G, nats", error=float(error.max())),
            noted("spread", spread[0], "spread of c over data sets, 1 noise sample for a pair"),
            noted("spread_16", spread[-1], "the same with 16"),
        ],
        f"Over {repeats} data sets of {pairs} pairs the mean of the fitted parameter is G within "
        f"{float(z):.1f} standard errors, {off:.3f} nats at the most. Its spread falls from "
        f"{float(spread[0]):.2f} with one noise sample for a pair to {float(spread[-1]):.2f} "
        f"with 16.",
        Picture(
            draw,
            "Left: the fitted parameter of each word, one dot a data set of 500 pairs, scatters "
            "around its true log-normalizer. Right: how much, for growing noise.",
        ),
    )


CLAIM = Claim(
    id="nce",
    title="Noise-contrastive estimation",
    statement=(
        "Noise-contrastive estimation treats the log-normalizer as one more parameter of a "
        "classifier between data and noise. Where the scores are right, it is fitted to G."
    ),
    source="main draft, section 1; Gutmann and Hyvärinen (2010)",
    formula=r"P(\mathrm{data} \mid x) = \frac{e^{\langle q, x\rangle - c}}"
    r"{e^{\langle q, x\rangle - c} + k\, p_{\mathrm{noise}}(x)}, \qquad c \to G(q)",
    recorded=HOLDS,
    experiment=experiment,
    systems=("noise-contrastive estimation",),
    tests=("tests/contrastive/test_sampled.py",),
)

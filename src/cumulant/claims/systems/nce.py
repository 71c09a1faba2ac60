"""Noise-contrastive estimation: a classifier that learns the log-normalizer."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from cumulant import contrastive
from cumulant.claims.claim import HOLDS, Claim, Evidence, Picture, Trial, at_most, noted
from cumulant.claims.systems.word2vec import fitted
from cumulant.figures import MUTED, series_color

NOISE = (1, 5, 25)


def experiment(trial: Trial) -> Evidence:
    """Scores with a known normalizer stay as they are; its parameter is fitted to samples.

    Words are unit vectors, so the scores are entries of the table. Every fit is repeated on fresh
    data, all repetitions at once: c is one number for each repetition and word.
    """
    words, contexts, pairs = 4, 7, 1000
    repeats = trial.size(40, 12)
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
        fitted(lambda c, k=k: loss(c, k).sum() / pairs, (repeats, words), 40) for k in NOISE
    ])  # fmt: skip
    mean, error = found.mean(1), found.std(1) / math.sqrt(repeats)
    z = ((mean - truth) / error).abs().max()
    spread = found.std(1).mean(-1)

    # The loss itself: which of 1 + k came from the data, written out with the same draws.
    at = torch.cat([context[:, None], sampler.sample(
        len(word), 5, generator=torch.Generator().manual_seed(trial.seed + 5)
    )], -1)  # fmt: skip
    noise = sampler.log_probability.exp()
    model = (table[at, word[:, None]] - truth[word][:, None]).exp()
    real = model / (model + 5 * noise[at])
    written = -real[:, 0].log() - (1 - real[:, 1:]).log().sum(-1)
    loss_gap = (loss(truth.expand(repeats, words), 5) - written).abs().max()

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        ends = [float(truth.min()) - 0.3, float(truth.max()) + 0.3]
        left.plot(ends, ends, color=MUTED, linewidth=1)
        for repeat in found[1]:
            left.plot(truth, repeat, ".", color=series_color(0), markersize=4)
        left.set(xlabel="log-normalizer G", ylabel="fitted c", title="5 noise samples for a pair")
        right.loglog(NOISE, spread, "o-", color=series_color(0))
        right.set(xlabel="noise samples for a pair", ylabel="spread of fitted c")
        right.set_xticks(NOISE, [str(k) for k in NOISE])
        right.minorticks_off()
        right.set_title("more noise, a better estimate")

    return Evidence(
        [
            at_most("loss_gap", loss_gap, 1e-10, "loss against the classifier written out"),
            at_most("normalizer", z, 5.0, "error of the fitted c against G, in s.e.", error=1.0),
            at_most("largest", (mean - truth).abs().max(), 0.1, "error of c against G, in nats"),
            noted("spread", spread[0], "spread of c over data sets, 1 noise sample for a pair"),
            noted("spread_25", spread[-1], "the same with 25"),
        ],
        f"Over {repeats} data sets of {pairs:,} pairs the fitted parameter is G within "
        f"{float(z):.1f} standard errors, {float((mean - truth).abs().max()):.3f} nats at the "
        f"most. Its spread falls from {float(spread[0]):.2f} with one noise sample for a pair to "
        f"{float(spread[-1]):.2f} with 25.",
        Picture(
            draw,
            "Left: the fitted parameter of each word, 1,000 pairs a data set, lies on its true "
            "log-normalizer. Right: its spread over data sets.",
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
    formula=r"P(\text{data} \mid x) = \frac{e^{\langle q, x\rangle - c}}"
    r"{e^{\langle q, x\rangle - c} + k\, p_{\mathrm{noise}}(x)}, \qquad c \to G(q)",
    recorded=HOLDS,
    experiment=experiment,
    systems=("noise-contrastive estimation",),
    tests=("tests/contrastive/test_sampled.py",),
)

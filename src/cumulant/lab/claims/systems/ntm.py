"""Neural Turing Machines: content addressing is the tilted family, sharpened by its strength."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from cumulant import Attended, attend, contrastive
from cumulant.figures import series_color
from cumulant.lab.claims.claim import HOLDS, Claim, Evidence, Picture, Trial, at_most, noted


def published(key: Tensor, rows: Tensor, strength: Tensor) -> Tensor:
    """Graves et al. (2014), eqs. 5 and 6: weights over the memory's rows."""
    similarity = (key @ rows.mT) / (key.norm(dim=-1)[..., None] * rows.norm(dim=-1))
    raised = (strength[..., None] * similarity).exp()
    return raised / raised.sum(-1, keepdim=True)


def entropy(weights: Tensor) -> Tensor:
    """In nats, by its definition."""
    return torch.special.entr(weights).sum(-1)


def experiment(trial: Trial) -> Evidence:
    """Keys against a memory at strengths from blurred to sharp."""
    n, rows = trial.size(40, 12), trial.normal(20, 8)
    key = 3 * trial.normal(n, 8)
    strength = torch.logspace(-1, 2, 61, dtype=torch.float64)[:, None]  # against (n,) keys
    weights = published(key, rows, strength.expand(-1, n))

    def addressed(strength: Tensor) -> Attended:
        eta = strength[..., None] * normalize(key, dim=-1)
        return attend(eta, normalize(rows, dim=-1).expand(len(eta), -1, -1), rows, scale=1.0)

    ours = addressed(strength)
    read_gap = (ours.mean - weights @ rows).abs().max()
    # One weight is the likelihood of one row: what a contrastive loss is made of.
    first = torch.zeros(n, dtype=torch.long)
    losses = [
        contrastive.info_nce(key, rows, positives=first, temperature=1 / float(b), reduction="none")
        for b in strength[::20, 0]
    ]
    weight_gap = (torch.stack(losses) + weights[::20, :, 0].log()).abs().max()

    # dH/d log β by a central difference of the entropy written out.
    step = 1e-4
    up, down = (
        entropy(published(key, rows, (strength * math.exp(s)).expand(-1, n))) for s in (step, -step)
    )
    slope_gap = ((up - down) / (2 * step) + ours.score_variance).abs().max()
    rise = ours.entropy.diff(dim=0).max()
    # Eq. 9 raises weights to a power γ and normalizes again: the same family at strength γβ.
    gamma, at = 3.0, slice(0, 40)
    power = weights[at] ** gamma
    sharper = addressed(gamma * strength[at])
    power_gap = (sharper.mean - power / power.sum(-1, keepdim=True) @ rows).abs().max()
    spent = ours.entropy[[0, -1]].mean(-1)

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        for i in range(4):
            left.semilogx(strength[:, 0], ours.entropy[:, i], color=series_color(i), linewidth=1.4)
            right.semilogx(
                strength[:, 0], ours.score_variance[:, i], color=series_color(i), linewidth=1.4
            )
            slope = -(up - down)[::4, i] / (2 * step)
            right.plot(strength[::4, 0], slope, "o", color=series_color(i), markersize=3)
        left.set(xlabel="key strength β", ylabel="entropy, nats", title="sharpening, four keys")
        right.set(xlabel="key strength β", ylabel="variance of the score")
        right.set_title("lines: Var; dots: −dH/d log β")

    return Evidence(
        [
            at_most("read_gap", read_gap, 1e-12, "what is read, against the published formula"),
            at_most("weight_gap", weight_gap, 1e-12, "log of a weight against minus the loss"),
            at_most("power_gap", power_gap, 1e-12, "weights to the power γ against strength γβ"),
            at_most("rise", rise, 1e-12, "largest rise of the entropy as β grows"),
            at_most("slope_gap", slope_gap, 1e-6, "dH/d log β against minus the score's variance"),
            noted("entropy_blurred", spent[0], "mean entropy at β = 0.1, log 20 = 3.00 at most"),
            noted("entropy_sharp", spent[1], "mean entropy at β = 100"),
        ],
        f"Content addressing is attention between unit vectors to {float(read_gap):.0e}. As β "
        f"grows from 0.1 to 100 the entropy falls from {float(spent[0]):.2f} to "
        f"{float(spent[1]):.2f} nats and never rises; its slope in log β is minus the variance of "
        f"the score, to {float(slope_gap):.0e}.",
        Picture(
            draw,
            "Left: the entropy of the weights falls with the key strength. Right: its slope in "
            "log β, by differences, is minus the variance of the score, the heat capacity.",
        ),
    )


CLAIM = Claim(
    id="ntm",
    title="Neural Turing Machines",
    statement=(
        "Content addressing in Neural Turing Machines, a softmax of cosine similarities times a "
        "key strength β, is the family over memory rows tilted by the key. Sharpening moves its "
        "natural parameter outward: the entropy falls, at the rate of the score's variance."
    ),
    source="main draft, section 1; Graves et al. (2014), eqs. (5), (6) and (9)",
    formula=r"w_i = \frac{\exp\left(\beta \cos(k, m_i)\right)}{\sum_j \exp\left(\beta"
    r" \cos(k, m_j)\right)}, \qquad \frac{dH}{d\log\beta}"
    r" = -\operatorname{Var}\left[\beta \cos(k, m)\right]",
    recorded=HOLDS,
    experiment=experiment,
    systems=("Neural Turing Machines",),
    tests=("tests/attention/test_attend.py", "tests/laws/test_attention_calculus.py"),
)

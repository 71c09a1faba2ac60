"""T20: patterns that stay and patterns that move, under the same step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cumulant import memory
from cumulant.figures import series_color
from cumulant.lab.claims.claim import (
    HOLDS,
    Claim,
    Evidence,
    Picture,
    Trial,
    at_least,
    at_most,
    noted,
)

BETA = 0.7


def by_hand(x: Tensor, patterns: Tensor | None, steps: int) -> Tensor:
    """Attention without skip connection, to fixed patterns or to the states themselves."""
    for _ in range(steps):
        y = x if patterns is None else patterns
        x = (BETA * x @ y.mT).softmax(-1) @ y
    return x


def energy(x: Tensor, patterns: Tensor) -> Tensor:
    """Ramsauer et al.'s, written out."""
    scores = torch.logsumexp(BETA * x @ patterns.mT, -1)
    largest = patterns.square().sum(-1).amax(-1, keepdim=True)
    count = torch.tensor(float(patterns.shape[-2]), dtype=x.dtype)
    return -scores / BETA + 0.5 * x.square().sum(-1) + count.log() / BETA + 0.5 * largest


def experiment(trial: Trial) -> Evidence:
    """Noisy patterns, run with the patterns fixed and with the states as patterns."""
    sets, n, d, steps = trial.size(40, 10), 12, 32, 60
    patterns = trial.normal(sets, n, d)
    patterns = 3 * patterns / patterns.norm(dim=-1, keepdim=True)
    state = patterns + 0.3 * trial.normal(sets, n, d)
    both = memory.compare(state, steps, beta=BETA, patterns=patterns)
    fixed, changing = both.fixed, both.changing
    early = 5
    gap = torch.stack(
        [
            (fixed.states[early] - by_hand(state, patterns, early)).abs().max(),
            (changing.states[early] - by_hand(state, None, early)).abs().max(),
            (fixed.energy[early] - energy(fixed.states[early], patterns)).abs().max(),
            (changing.energy[early] - energy(changing.states[early], changing.states[early]))
            .abs()
            .max(),
        ]
    ).max()
    same = memory.compare(patterns, 1, beta=BETA)
    first = (same.fixed.states[1] - same.changing.states[1]).abs().max()
    recalled = {
        name: (run.index == torch.arange(n)).double().mean(-1)
        for name, run in (("fixed", fixed), ("changing", changing))
    }
    share = {name: float(x[-1].mean()) for name, x in recalled.items()}
    error = {name: float(x[-1].std()) / sets**0.5 for name, x in recalled.items()}

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        for i, (name, run) in enumerate((("fixed", fixed), ("changing", changing))):
            dash, color = ("-", "--")[i], series_color(i)
            for k in range(n):
                label = f"{name} patterns" if k == 0 else None
                left.plot(run.energy[:, 0, k], dash, color=color, linewidth=0.9, label=label)
            right.plot(recalled[name].mean(-1), dash, color=color, label=f"{name} patterns")
        left.set(xlabel="step", ylabel="energy of each state")
        right.set(xlabel="step", ylabel="share recalled", ylim=(0, 1.08))
        left.legend()
        right.legend()

    return Evidence(
        [
            at_most("by_hand_gap", gap, 1e-9, "both runs and their energies against plain torch"),
            at_most("first_step_gap", first, 1e-12, "the two first steps from the same patterns"),
            at_most(
                "fixed_rise",
                fixed.energy.diff(dim=0).max(),
                1e-9,
                "largest rise of the energy with fixed patterns",
            ),
            at_least(
                "changing_rise",
                changing.energy.diff(dim=0).amax((0, 2)).min(),
                1e-3,
                "largest rise of the energy with changing patterns, least over the sets",
            ),
            at_least(
                "fixed_recalled",
                share["fixed"],
                0.8,
                "share of patterns recalled after 60 steps with fixed patterns",
                error=error["fixed"],
            ),
            at_most(
                "changing_recalled",
                share["changing"],
                0.5,
                "the same with changing patterns",
                error=error["changing"],
            ),
            noted(
                "fixed_change",
                fixed.change[-1].max(),
                "largest move in the last step, patterns fixed",
            ),
            noted(
                "changing_change",
                changing.change[-1].max(),
                "largest move in the last step, patterns changing",
            ),
        ],
        f"The first step is the same. With fixed patterns the energy never rises and "
        f"{share['fixed']:.0%} of the noisy patterns are recalled; with changing ones it rises, "
        f"the states run together, and {share['changing']:.0%} still stand for their own pattern.",
        Picture(
            draw,
            "The same step from the same noisy patterns. With fixed patterns each state descends "
            "one energy and is recalled; with changing patterns the energy moves under the states, "
            "and they merge.",
        ),
    )


CLAIM = Claim(
    id="T20",
    title="Fixed against changing patterns",
    statement=(
        "In Hopfield networks and cross-attention the patterns are fixed, in self-attention they "
        "are the changing hidden states. The step is the same, the dynamics are not."
    ),
    source="proofs draft, §B",
    formula=r"\xi \leftarrow X^{\top} \operatorname{softmax}(\beta X \xi), \; "
    r"X \; \mathrm{fixed}, \qquad \mathrm{against} \qquad "
    r"X \leftarrow \operatorname{softmax}(\beta X X^{\top}) X",
    recorded=HOLDS,
    experiment=experiment,
    tests=("tests/laws/test_hopfield.py",),
)

"""T20: patterns that stay and patterns that move, under the same step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cumulant import memory
from cumulant.figures import series_color
from cumulant.lab.claims.claim import Claim, Found, Trial, table
from cumulant.lab.claims.measuring import gap, standard_error

BETA = 0.7

CLAIM = Claim(
    id="T20",
    title="Fixed against changing patterns",
    evidence="simulation",
    statement="In Hopfield networks and cross-attention the patterns are fixed, in self-attention "
    "they are the changing hidden states. The step is the same, the dynamics are not.",
    source="proofs draft, §B",
    formula=r"\xi \leftarrow X^{\top} \operatorname{softmax}(\beta X \xi), \; "
    r"X \; \mathrm{fixed}, \qquad \mathrm{against} \qquad "
    r"X \leftarrow \operatorname{softmax}(\beta X X^{\top}) X",
    recorded="holds",
    tests=("tests/laws/test_hopfield.py",),
    rules=table("""
      statement:
        by_hand_gap ≤ 1e-9: both runs and their energies against plain torch
        first_step_gap ≤ 1e-12: the two first steps from the same patterns
        fixed_rise ≤ 1e-9: largest rise of the energy with fixed patterns
        changing_rise ≥ 0.001: largest rise of the energy with changing patterns, least over the
            sets
        fixed_recalled ≥ 0.8: share of patterns recalled after 60 steps with fixed patterns
        changing_recalled ≤ 0.5: the same with changing patterns
      noted:
        fixed_change: largest move in the last step, patterns fixed
        changing_change: largest move in the last step, patterns changing
    """),
    finding="The first step is the same. With fixed patterns the energy never rises and "
    "{fixed_recalled:.0%} of the noisy patterns are recalled; with changing ones it rises, the "
    "states run together, and {changing_recalled:.0%} still stand for their own pattern.",
    caption="The same step from the same noisy patterns. With fixed patterns each state descends "
    "one energy and is recalled; with changing patterns the energy moves under the states, and "
    "they merge.",
)


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


def measure(trial: Trial) -> Found:
    """Noisy patterns, run with the patterns fixed and with the states as patterns."""
    sets, n, d, steps = trial.size(40, 10), 12, 32, 60
    patterns = trial.normal(sets, n, d)
    patterns = 3 * patterns / patterns.norm(dim=-1, keepdim=True)
    state = patterns + 0.3 * trial.normal(sets, n, d)
    both = memory.compare(state, steps, beta=BETA, patterns=patterns)
    fixed, changing, early = both.fixed, both.changing, 5
    first, moved = fixed.states[early], changing.states[early]
    same = memory.compare(patterns, 1, beta=BETA)
    recalled = {
        name: (run.index == torch.arange(n)).double().mean(-1)
        for name, run in (("fixed", fixed), ("changing", changing))
    }
    last = {name: (x[-1].mean(), standard_error(x[-1])) for name, x in recalled.items()}
    numbers = {
        "by_hand_gap": max(
            gap(first, by_hand(state, patterns, early)),
            gap(moved, by_hand(state, None, early)),
            gap(fixed.energy[early], energy(first, patterns)),
            gap(changing.energy[early], energy(moved, moved)),
        ),
        "first_step_gap": gap(same.fixed.states[1], same.changing.states[1]),
        "fixed_rise": fixed.energy.diff(dim=0).max(),
        "changing_rise": changing.energy.diff(dim=0).amax((0, 2)).min(),
        "fixed_recalled": last["fixed"],
        "changing_recalled": last["changing"],
        "fixed_change": fixed.change[-1].max(),
        "changing_change": changing.change[-1].max(),
    }
    return Found(numbers, changing=changing, fixed=fixed, n=n, recalled=recalled)


def draw(figure: Any, seen: Any) -> None:
    """Energy of each state, and the share recalled, with fixed and with changing patterns."""
    left, right = figure.subplots(1, 2)
    for i, (name, run) in enumerate((("fixed", seen.fixed), ("changing", seen.changing))):
        dash, color = ("-", "--")[i], series_color(i)
        for k in range(seen.n):
            label = f"{name} patterns" if k == 0 else None
            left.plot(run.energy[:, 0, k], dash, color=color, linewidth=0.9, label=label)
        right.plot(seen.recalled[name].mean(-1), dash, color=color, label=f"{name} patterns")
    left.set(xlabel="step", ylabel="energy of each state")
    right.set(xlabel="step", ylabel="share recalled", ylim=(0, 1.08))
    left.legend()
    right.legend()

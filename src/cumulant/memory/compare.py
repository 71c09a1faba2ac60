"""Fixed patterns against changing patterns: Hopfield retrieval and self-attention.

See docs/theory.md, T20.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cumulant.core.checks import real, whole
from cumulant.core.describing import described_fields
from cumulant.core.typed import linalg
from cumulant.memory.dense import Memory

__all__ = ["Comparison", "Run", "compare"]


@dataclass(frozen=True)
class Run:
    """One of the two runs.

    Attributes:
        states: ``(steps + 1, *batch, Q, d)``.
        energy: ``(steps + 1, *batch, Q)``, each with the patterns of its moment.
        change: ``(steps, *batch, Q)``, how far each update moved a state.
        index: ``(steps + 1, *batch, Q)``, the *original* pattern of the largest weight.
    """

    states: Tensor
    energy: Tensor
    change: Tensor
    index: Tensor

    __repr__ = described_fields

    @property
    def distinct(self) -> Tensor:
        """How many different original patterns the states stand for, ``(steps + 1, *batch)``."""
        ordered = self.index.sort(-1).values
        return 1 + (ordered[..., 1:] != ordered[..., :-1]).sum(-1)


@dataclass(frozen=True)
class Comparison:
    """The same states under the same step: patterns that stay, and patterns that move along."""

    fixed: Run
    changing: Run

    __repr__ = described_fields


def compare(
    state: Tensor,
    steps: int,
    *,
    beta: float | Tensor = 1.0,
    patterns: Tensor | None = None,
    step_size: float = 1.0,
) -> Comparison:
    """Run the same step with fixed and with changing patterns (T20).

    Fixed patterns are a Hopfield memory, or cross-attention: every state falls into a minimum of
    one energy. Changing patterns are self-attention without skip connection: the states are the
    patterns, the energy moves under them, and they run together.

    Args:
        state: ``(*batch, Q, d)``, where both runs start.
        steps: number of updates.
        beta: inverse temperature, as in `Memory`.
        patterns: ``(*batch, N, d)`` for the fixed run; default: the states.
        step_size: in (0, 1].

    >>> import torch, cumulant as cm
    >>> both = cm.memory.compare(torch.randn(20, 2), 30, beta=2.0)
    >>> both.fixed.energy.shape, bool(both.changing.distinct[-1] <= both.fixed.distinct[0])
    (torch.Size([31, 20]), True)
    """
    count = whole("compare", "steps", steps, 0)
    size = real("compare", "step_size", step_size, least=0.0, most=1.0, open_at_least=True)
    stored = Memory(state if patterns is None else patterns, beta)
    start, restore = stored._states("compare", state)
    start = restore(start)

    def run(changing: bool) -> Run:
        x, memory = start, Memory(start, beta) if changing else stored
        states, energies, changes = [x], [memory.energy(x)], list[Tensor]()
        for _ in range(count):
            new = memory.retrieve(x, 1, step_size=size).state
            changes.append(linalg.vector_norm(new - x, dim=-1))
            x = new
            memory = Memory(x, beta) if changing else stored
            states.append(x)
            energies.append(memory.energy(x))
        index = [stored.retrieve(y, 0).index for y in states]
        empty = start.new_zeros(0, *start.shape[:-1])
        return Run(
            torch.stack(states),
            torch.stack(energies),
            torch.stack(changes) if changes else empty,
            torch.stack(index),
        )

    return Comparison(run(False), run(True))

"""The binary Hopfield network as a restricted Boltzmann machine with Gaussian hidden units."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cumulant.core.typed import functions
from cumulant.figures import series_color
from cumulant.lab.claims.claim import Claim, Found, Trial, table
from cumulant.lab.claims.measuring import gap
from cumulant.memory import ClassicalMemory

CLAIM = Claim(
    id="rbm",
    title="Binary Hopfield networks and Boltzmann machines",
    evidence="identity",
    statement="A binary Hopfield network at temperature 1/β is a restricted Boltzmann machine with "
    "one Gaussian hidden unit for each pattern: its law is that of the visible units, and "
    "alternating the two layers samples it.",
    theory="T42",
    source="proofs draft, §B, after Barra et al. (2012)",
    formula=r"\int e^{-\frac12 \|z\|^2 + \sqrt{\beta}\, \langle z, X s \rangle}\, dz \propto "
    r"e^{\frac{\beta}{2} \|X s\|^2}",
    recorded="holds",
    systems=("restricted Boltzmann machine",),
    tests=("tests/laws/test_neighbors.py",),
    rules=table("""
      statement:
        marginal_gap ≤ 1e-10: law of the visible units by Gauss-Hermite quadrature against the
            network's Boltzmann law by enumeration, largest over β from 0.05 to 0.5
        gibbs_gap ≤ 1e-10: one sweep of both layers applied to that law, against the law
      noted:
        temperatures: how many β were tried
    """),
    finding="Over all 64 states the two laws agree to {marginal_gap:.0e}, and a sweep of the "
    "machine leaves the network's law as it is to {gibbs_gap:.0e}.",
    caption="The probability of each of the 64 states, by the network's energy and by integrating "
    "the machine's hidden units.",
)

BETAS = (0.05, 0.1, 0.2, 0.5)


def states(n: int) -> Tensor:
    """All rows of n signs."""
    return torch.tensor(list(product((-1.0, 1.0), repeat=n)), dtype=torch.float64)


def machine(s: Tensor, patterns: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Law of the visible units, and the matrix of one sweep, by quadrature over two hidden ones."""
    node, weight = (functions.from_numpy(x) for x in np.polynomial.hermite_e.hermegauss(80))
    z = torch.cartesian_prod(node, node)
    mass = torch.outer(weight, weight).flatten().log() - torch.log(weight.sum()) * 2
    pull = beta**0.5 * s @ patterns.mT  # the mean of the hidden units, (states, 2)
    joint = mass + pull @ z.mT
    hidden = joint.softmax(-1)  # P(z | s) on the nodes
    fields = beta**0.5 * z @ patterns
    chances = torch.sigmoid(2 * fields[:, None] * s).prod(-1)  # P(s | z), (nodes, states)
    return joint.logsumexp(-1).softmax(0), hidden @ chances


def measure(trial: Trial) -> Found:
    """Six visible units and two patterns, at several temperatures."""
    s, gaps, sweeps = states(6), list[float](), list[float]()
    patterns = torch.where(trial.uniform(2, 6) < 0.5, -1.0, 1.0).double()
    shown: dict[str, Tensor] = {}
    for beta in BETAS:
        # The network's energy leaves out the diagonal, a constant for signs.
        energy = ClassicalMemory(patterns).energy(s)
        law = (-beta * energy * scale(patterns, s, energy)).softmax(0)
        visible, sweep = machine(s, patterns, beta)
        gaps.append(gap(visible, law))
        sweeps.append(gap(law @ sweep, law))
        shown = {"network": law, "machine": visible}
    numbers = {"marginal_gap": max(gaps), "gibbs_gap": max(sweeps), "temperatures": len(BETAS)}
    return Found(numbers, shown=shown)


def scale(patterns: Tensor, s: Tensor, energy: Tensor) -> float:
    """What the library divides the weights by: its energies against −|Xs|²/2, up to a constant."""
    plain = -0.5 * (s @ patterns.mT).square().sum(-1)
    a, b = plain - plain.mean(), energy - energy.mean()
    return float((a * b).sum() / b.square().sum())


def draw(figure: Any, seen: Any) -> None:
    """Both laws, states sorted by probability."""
    axes = figure.subplots()
    order = seen.shown["network"].argsort(descending=True)
    axes.plot(seen.shown["network"][order], color=series_color(0), label="Hopfield network")
    axes.plot(seen.shown["machine"][order], "o", ms=3, color=series_color(1), label="machine")
    axes.set(xlabel="state", ylabel="probability", yscale="log")
    axes.legend()

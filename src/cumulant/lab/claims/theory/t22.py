"""T22: the classical Hopfield network as linear attention, and feed-forward layers as networks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from cumulant import Memory, memory
from cumulant.core.typed import functional, linalg
from cumulant.figures import series_color
from cumulant.lab.claims.claim import Claim, Found, Trial, table
from cumulant.lab.claims.measuring import gap

LOADS = (0.04, 0.08, 0.12, 0.16, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0)

CLAIM = Claim(
    id="T22",
    title="Classical networks, linear attention, feed-forward layers",
    evidence="identity",
    statement="The classical Hopfield network, with its patterns stored in the weights, is "
    "unnormalized linear attention followed by the sign; the dense network is exponential "
    "attention. The feed-forward layer may be a classical Hopfield layer too.",
    correction="A feed-forward layer is an update of a Hopfield network only if its second "
    "weights are the transpose of the first; with an increasing activation it then descends the "
    "energy. With untied weights, as transformers have, it is not the gradient of any energy.",
    source="proofs draft, section B; Hopfield (1982); Krotov and Hopfield (2021)",
    formula=r"\operatorname{sign}(W\xi) = \operatorname{sign}\left(\sum_i x_i"
    r" \langle x_i, \xi\rangle - N\xi\right), \qquad"
    r" W_1^\top \varphi(W_1 \xi) = \nabla \sum_h \Phi\left((W_1 \xi)_h\right), \quad"
    r" \Phi' = \varphi",
    recorded="holds with a correction",
    systems=("classical Hopfield network",),
    tests=("tests/laws/test_hopfield.py",),
    rules=table("""
      statement:
        untied_asymmetry ≤ 1e-6: asymmetry of a layer's Jacobian, relative, W₂ and W₁ independent
      correction:
        tied_asymmetry ≤ 1e-12: asymmetry of a layer's Jacobian, relative, W₂ = W₁ᵀ
        tied_rise ≤ 1e-11: largest rise of E by a tied layer
      control:
        wrong_units ≤ 0: units that differ from sign(Wξ), W a matrix
        linear_gap ≤ 1e-12: linear memory against linear attention
        classical_lost ≤ 0.2: classical recall at 0.3 d
        dense_held ≥ 0.99: dense recall at 10 d
      noted:
        untied_rises: share of untied updates that raise the energy of W₁
    """),
    finding="Classical and linear memory agree with a weight matrix. At 0.3 d patterns the "
    "classical network recalls {classical_lost:.0%}, the dense one at 10 d {dense_held:.0%}. A "
    "feed-forward layer with W₂ = W₁ᵀ descends an energy; with independent weights its Jacobian "
    "has asymmetry {untied_asymmetry:.1f}, so it is not a gradient, and {untied_rises:.0%} of its "
    "updates raise the energy of W₁.",
    caption="Left: the classical network breaks down between 0.12 and 0.2 patterns per unit, the "
    "dense one holds ten. Right: a feed-forward layer applied repeatedly descends the energy of "
    "its first weights if the second are their transpose, and otherwise does not.",
)


def against_matrix(trial: Trial) -> tuple[int, float]:
    """(units unlike sign(W ξ), error of linear attention), W written out as a matrix."""
    wrong, off, d = 0, 0.0, 60
    for n in (1, 4, 9):
        x, xi = (2 * (trial.uniform(rows, d) < 0.5).double() - 1 for rows in (n, 40))
        W = torch.stack([torch.outer(pattern, pattern) for pattern in x]).sum(0)
        field = xi @ (W - n * torch.eye(d))
        expected = torch.where(field == 0, xi, field.sign())
        wrong += int((memory.ClassicalMemory(x).retrieve(xi).state != expected).sum())
        attended = (xi @ x.mT) @ x / d  # the scores are the weights: no softmax, no normalizer
        ours = memory.LinearMemory(x).retrieve(xi).state
        off = max(off, gap(ours, attended), gap(ours, xi @ W / d))
    return wrong, off


def layer(trial: Trial, first: Tensor, second: Tensor) -> tuple[float, Tensor]:
    """(asymmetry of the Jacobian, energies along paths) of x ← W₂ tanh(W₁ x).

    The energy is that of W₁: ½‖x‖² less the sum over hidden units of log cosh, tanh's integral.
    """

    def apply(x: Tensor) -> Tensor:
        return torch.tanh(x @ first.mT) @ second.mT

    asymmetry, d = 0.0, first.shape[-1]
    for x in trial.normal(5, d):
        J = functional.jacobian(apply, x)
        asymmetry = max(asymmetry, float(linalg.vector_norm(J - J.mT) / linalg.vector_norm(J)))
    x, energies = 0.3 * trial.normal(200, d), list[Tensor]()
    for _ in range(12):
        z = x @ first.mT
        log_cosh = softplus(2 * z) - z - math.log(2)
        energies.append((x * x).sum(-1) / 2 - log_cosh.sum(-1))
        x = apply(x)
    return asymmetry, torch.stack(energies)


def measure(trial: Trial) -> Found:
    """Against a weight matrix; capacity beside the dense network; layers with and without tie."""
    wrong, off = against_matrix(trial)
    d, seeds = trial.size(400, 200), range(1000 * trial.seed, 1000 * trial.seed + trial.size(4, 2))

    def recall(make: Callable[[Tensor], Any]) -> Tensor:
        how: dict[str, Any] = {"flips": 0.05, "steps": 10, "queries": 100}
        counts = [int(load * d) for load in LOADS]
        rates = [memory.recall(make, d, counts, seed=seed, **how).rate for seed in seeds]
        return torch.tensor(rates).mean(0)

    classical, dense = recall(memory.ClassicalMemory), recall(lambda x: Memory(x, beta=0.5))
    first, other = (trial.normal(32, 8) / math.sqrt(8) for _ in range(2))
    tied, falling = layer(trial, first, first.mT)
    untied, wandering = layer(trial, first, other.mT)
    numbers = {
        "wrong_units": wrong,
        "linear_gap": off,
        "classical_lost": classical[5],
        "dense_held": dense[-1],
        "untied_asymmetry": untied,
        "tied_asymmetry": tied,
        "tied_rise": falling.diff(dim=0).max(),
        "untied_rises": (wandering.diff(dim=0) > 0).double().mean(),
    }
    recalls, paths = {"classical": classical, "dense": dense}, (falling, wandering)
    return Found(numbers, d=d, recalls=recalls, paths=paths)


def draw(figure: Any, seen: Any) -> None:
    """Recall against the load of both networks; the energy along layers with and without tie."""
    left, right = figure.subplots(1, 2)
    for i, (name, rate) in enumerate(seen.recalls.items()):
        left.semilogx(LOADS, rate, "o-", color=series_color(i), markersize=4, label=name)
    left.set(xlabel="patterns per unit, N/d", ylabel="share recalled", title=f"d = {seen.d}")
    left.legend()
    for i, (name, path) in enumerate(zip(("tied, W₂ = W₁ᵀ", "untied"), seen.paths, strict=True)):
        lines = right.plot(path[:, :8], color=series_color(i), linewidth=1)
        lines[0].set_label(name)
    right.set(xlabel="update", ylabel="energy of W₁", title="feed-forward layers, φ = tanh")
    right.legend()

"""Deep equilibrium models: a layer iterated to its fixed point, and differentiated there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cumulant import dynamics, nn
from cumulant.core.typed import linalg
from cumulant.figures import series_color
from cumulant.lab.claims.claim import Claim, Found, Trial, table
from cumulant.lab.claims.measuring import gap

CLAIM = Claim(
    id="deq",
    title="Deep equilibrium models",
    evidence="identity",
    statement="A layer iterated to its equilibrium has the output and the gradients of infinitely "
    "many layers, without their memory.",
    theory="T16",
    source="main draft, §2.2, after Bai et al. (2019); exponential family draft, §3.1",
    formula=r"z = f(z, x; \theta), \qquad \frac{dL}{d\theta} = \frac{dL}{dz} "
    r"\left(I - \frac{\partial f}{\partial z}\right)^{-1} \frac{\partial f}{\partial \theta}",
    recorded="holds",
    systems=("deep equilibrium model",),
    tests=("tests/nn/test_equilibrium.py", "tests/dynamics/test_fixed_point.py"),
    rules=table("""
      statement:
        value_gap ≤ 1e-10: the equilibrium against 250 layers
        gradient_gap ≤ 1e-8: its gradient against that of 250 layers
        second_gap ≤ 1e-7: the second derivative, along one direction
        linear_gap ≤ 1e-9: a linear layer: value and gradient against (I − A)⁻¹
      noted:
        evaluations: evaluations of the layer until the equilibrium is found
        memory_ratio: numbers stored by 128 unrolled layers, over those of the equilibrium
    """),
    finding="The equilibrium's gradient is that of 250 unrolled layers to {gradient_gap:.0e}, its "
    "second derivative to {second_gap:.0e}. It takes {evaluations:.0f} evaluations; 128 unrolled "
    "layers would store {memory_ratio:.0f} times as much.",
    caption="The gradient of the unrolled layer approaches the one from the implicit function "
    "theorem at the equilibrium (left). Its memory for the backward pass grows with its length; "
    "the equilibrium's does not (right).",
)


ROUNDS = 250
LENGTHS = [2, 4, 8, 16, 32, 64, 128]


def unrolled(x: Tensor, W: Tensor, rounds: int) -> Tensor:
    """z <- tanh(z W + x), iterated in plain torch."""
    z = torch.zeros_like(x)
    for _ in range(rounds):
        z = torch.tanh(z @ W + x)
    return z


def stored(run: Any) -> int:
    """How many numbers a computation keeps for its backward pass."""
    kept: list[int] = []

    def pack(t: Tensor) -> Tensor:
        kept.append(t.numel())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run()
    return sum(kept)


def linear_gap(x: Tensor, A: Tensor, target: Tensor) -> float:
    """z = z A + x has the solution x (I - A)^-1, and so has its derivative."""
    inverse = linalg.inv(torch.eye(len(A), dtype=x.dtype) - A)
    source = x.clone().requires_grad_()
    solved = dynamics.fixed_point(
        lambda z: z @ A + source, torch.zeros_like(x), batch_dims=1, tol=1e-13
    ).value
    (pulled,) = torch.autograd.grad((target * solved).sum(), source)
    return max(gap(solved, x @ inverse), gap(pulled, target @ inverse.mT))


def measure(trial: Trial) -> Found:
    """`nn.Equilibrium` against the same layer unrolled, and a linear one against its inverse."""
    d = trial.size(16, 8)
    start = trial.normal(d, d)
    A = 0.85 * start / linalg.matrix_norm(start, 2)
    W = A.clone().requires_grad_()
    x, target = trial.normal(12, d), trial.normal(12, d)

    def layer(z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ W + x)

    deep = nn.Equilibrium(layer, tol=1e-13)

    def slope(z: Tensor, **how: Any) -> Tensor:
        """The gradient in W of a loss of z."""
        return torch.autograd.grad((target * z).sum() + z.pow(3).sum(), W, **how)[0]

    along = trial.normal(d, d)
    value, truth = deep(x), unrolled(x, W, ROUNDS)
    first = [slope(z, create_graph=True) for z in (value, truth)]
    second = [torch.autograd.grad((g * along).sum(), W)[0] for g in first]
    gradient, exact = (g.detach() for g in first)
    own = stored(lambda: deep(x))
    memory = [stored(lambda k=k: unrolled(x, W, k)) for k in LENGTHS]
    numbers = {
        "value_gap": gap(value, truth),
        "gradient_gap": gap(gradient, exact) / float(exact.abs().max()),
        "second_gap": gap(*second) / float(second[1].abs().max()),
        "linear_gap": linear_gap(x, A, target),
        "evaluations": 0 if deep.solution is None else int(deep.solution.steps.max()),
        "memory_ratio": memory[-1] / own,
    }
    short = [slope(unrolled(x, W, k)) for k in LENGTHS]
    truncated = [gap(g, gradient) / float(gradient.abs().max()) for g in short]
    return Found(numbers, truncated=truncated, memory=memory, own=own)


def draw(figure: Any, seen: Any) -> None:
    """Error of the gradient, and what is kept for it, against the layers unrolled."""
    left, right = figure.subplots(1, 2)
    left.plot(LENGTHS, seen.truncated, "o-", color=series_color(1), label="unrolled")
    left.set_title("Error of the gradient")
    right.plot(LENGTHS, seen.memory, "o-", color=series_color(1), label="unrolled")
    right.axhline(seen.own, color=series_color(0), linestyle="--", label="equilibrium")
    right.set_title("Numbers kept for the backward pass")
    right.legend()
    for axes in (left, right):
        axes.set(xscale="log", yscale="log", xlabel="layers unrolled")
        axes.set_xticks(LENGTHS, [str(k) for k in LENGTHS])
        axes.minorticks_off()

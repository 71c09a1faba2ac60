"""Deep equilibrium models: a layer repeated for ever, differentiated at its end."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cumulant import dynamics, nn
from cumulant.figures import series_color
from cumulant.lab.claims.claim import HOLDS, Claim, Evidence, Picture, Trial, at_most, noted


def unrolled(x: Tensor, W: Tensor, rounds: int) -> Tensor:
    """z <- tanh(z W + x), so many times, in plain torch."""
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


def experiment(trial: Trial) -> Evidence:
    """`nn.Equilibrium` against the same layer unrolled, and a linear one against its inverse."""
    d, rounds = trial.size(16, 8), 250
    start = trial.normal(d, d)
    W = (0.85 * start / torch.linalg.matrix_norm(start, 2)).requires_grad_()
    x, target = trial.normal(12, d), trial.normal(12, d)

    def layer(z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ W + x)

    deep = nn.Equilibrium(layer, tol=1e-13)

    def loss(z: Tensor) -> Tensor:
        return (target * z).sum() + z.pow(3).sum()

    def derivatives(z: Tensor, along: Tensor) -> tuple[Tensor, Tensor]:
        first = torch.autograd.grad(loss(z), W, create_graph=True)[0]
        return first.detach(), torch.autograd.grad((first * along).sum(), W)[0]

    along = trial.normal(d, d)
    value = deep(x)
    ours, theirs = derivatives(value, along), derivatives(unrolled(x, W, rounds), along)
    first, second = (
        float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs, strict=True)
    )

    # Linear: z = z A + x has the solution x (I - A)^-1, and so has its derivative.
    A = 0.85 * start / torch.linalg.matrix_norm(start, 2)
    inverse = torch.linalg.inv(torch.eye(d, dtype=x.dtype) - A)
    source = x.clone().requires_grad_()

    def linear_layer(z: Tensor) -> Tensor:
        return z @ A + source

    solved = dynamics.fixed_point(linear_layer, torch.zeros_like(x), batch_dims=1, tol=1e-13)
    pulled = torch.autograd.grad((target * solved.value).sum(), source)[0]
    linear = torch.stack(
        [(solved.value - x @ inverse).abs().max(), (pulled - target @ inverse.mT).abs().max()]
    ).max()

    lengths = [2, 4, 8, 16, 32, 64, 128]
    truncated = [
        float(
            (torch.autograd.grad(loss(unrolled(x, W, k)), W)[0] - ours[0]).abs().max()
            / ours[0].abs().max()
        )
        for k in lengths
    ]
    memory = [stored(lambda k=k: unrolled(x, W, k)) for k in lengths]
    own = stored(lambda: deep(x))
    solution = deep.solution
    steps = 0 if solution is None else int(solution.steps.max())

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        left.plot(lengths, truncated, "o-", color=series_color(1), label="unrolled")
        left.set(xscale="log", yscale="log", xlabel="layers unrolled")
        left.set_title("Error of the gradient")
        right.plot(lengths, memory, "o-", color=series_color(1), label="unrolled")
        right.axhline(own, color=series_color(0), linestyle="--", label="equilibrium")
        right.set(xscale="log", yscale="log", xlabel="layers unrolled")
        right.set_title("Numbers kept for the backward pass")
        right.legend()
        for axes in (left, right):
            axes.set_xticks(lengths, [str(k) for k in lengths])
            axes.minorticks_off()

    return Evidence(
        [
            at_most(
                "value_gap",
                (value - unrolled(x, W, rounds)).abs().max().detach(),
                1e-10,
                f"the equilibrium against {rounds} layers",
            ),
            at_most("gradient_gap", first, 1e-8, f"its gradient against that of {rounds} layers"),
            at_most("second_gap", second, 1e-7, "the second derivative, along one direction"),
            at_most(
                "linear_gap",
                linear.detach(),
                1e-9,
                "a linear layer: value and gradient against (I − A)⁻¹",
            ),
            noted("evaluations", steps, "of the layer until the equilibrium is found"),
            noted(
                "memory_ratio",
                memory[-1] / own,
                f"numbers kept by {lengths[-1]} unrolled layers, over those of the equilibrium",
            ),
        ],
        f"The equilibrium's gradient is that of {rounds} unrolled layers to {first:.0e}, its "
        f"second derivative to {second:.0e}. It takes {steps} evaluations, and "
        f"{lengths[-1]} unrolled layers would keep {memory[-1] / own:.0f} times as much.",
        Picture(
            draw,
            "The gradient of the unrolled layer approaches the one the implicit function theorem "
            "gives at the equilibrium (left), and what it keeps for the backward pass grows with "
            "its length, where the equilibrium's does not (right).",
        ),
    )


CLAIM = Claim(
    id="deq",
    title="Deep equilibrium models",
    statement=(
        "A layer repeated until nothing changes has, at the equilibrium point, the output and the "
        "gradients of infinitely many layers, without their memory."
    ),
    source="main draft, §2.2, after Bai et al. (2019); exponential family draft, §3.1",
    formula=r"z = f(z, x; \theta), \qquad \frac{dL}{d\theta} = \frac{dL}{dz} "
    r"\left(I - \frac{\partial f}{\partial z}\right)^{-1} \frac{\partial f}{\partial \theta}",
    recorded=HOLDS,
    experiment=experiment,
    systems=("deep equilibrium model",),
    tests=("tests/nn/test_equilibrium.py", "tests/dynamics/test_fixed_point.py"),
)

"""T16: a residual layer as a step of an ODE, a repeated one as a fixed point, a gate as a clock."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cumulant import dynamics
from cumulant.figures import MUTED, series_color
from cumulant.lab.claims.claim import HOLDS, Claim, Evidence, Picture, Trial, at_most, noted

BETA = 2.0


def exact(x: Tensor, patterns: Tensor | None, end: float) -> Tensor:
    """Attention on the unit sphere in continuous time, written out and integrated by scipy."""

    def rate(_: float, flat: Any) -> Any:
        z = flat.reshape(x.shape)
        y = z if patterns is None else patterns.numpy()
        weights = np.exp(BETA * z @ y.T)
        mean = weights @ y / weights.sum(-1, keepdims=True)
        return (mean - z * (z * mean).sum(-1, keepdims=True)).ravel()

    path = import_module("scipy.integrate").solve_ivp(
        rate, (0, end), x.numpy().ravel(), method="DOP853", rtol=1e-11, atol=1e-13
    )
    return torch.from_numpy(path.y[:, -1].reshape(x.shape))


def order(steps: list[int], errors: list[float]) -> float:
    """The power of the step size with which the error falls."""
    return -float(np.polyfit(np.log(steps), np.log(errors), 1)[0])


def unrolled(z: Tensor, patterns: Tensor, rounds: int) -> Tensor:
    """The same sublayer many times over, in plain torch."""
    for _ in range(rounds):
        z = z + (BETA * z @ patterns.mT).softmax(-1) @ patterns
        z = z / z.norm(dim=-1, keepdim=True)
    return z


def experiment(trial: Trial) -> Evidence:
    """Attention on the sphere: halved steps, many rounds, gates of each token."""
    sphere = dynamics.Sphere()
    x = sphere(trial.normal(8, 3))
    # Patterns on one side, so that the repeated layer has one fixed point and not several.
    patterns = 0.3 * trial.normal(6, 3) + torch.tensor([1.0, 0.0, 0.0], dtype=x.dtype)
    steps = [16, 32, 64, 128] if trial.quick else [64, 128, 256, 512, 1024]
    true = exact(x, None, 1.0)
    flow_gap = (dynamics.flow(x, [1.0], beta=BETA, contraction=sphere).final - true).abs().max()
    how: dict[str, Any] = {"beta": BETA, "contraction": sphere}

    def depth(k: int) -> float:
        run = dynamics.simulate(x, k, step_size=1 / k, every=k, observables={}, **how)
        return float((run.final - true).norm())

    errors = [depth(k) for k in steps]
    # A gate of its own for each token: with fixed patterns token i lives in the time g_i t.
    gate = 0.3 + 1.2 * trial.uniform(8, 1)
    own = torch.cat([exact(x[i : i + 1], patterns, float(gate[i])) for i in range(8)])

    def gated(k: int) -> float:
        size = gate / k
        run = dynamics.simulate(
            x, k, step_size=size, every=k, patterns=patterns, observables={}, **how
        )
        return float((run.final - own).norm())

    warped = [gated(k) for k in steps]

    given = patterns.clone().requires_grad_()
    found = dynamics.fixed_point(lambda z: dynamics.step(z, patterns=given, **how), x, batch_dims=1)
    weights = trial.normal(8, 3)
    ours = torch.autograd.grad((weights * found.value).sum(), given)[0]
    repeated = unrolled(x, given, 120)
    theirs = torch.autograd.grad((weights * repeated).sum(), given)[0]
    gradient_gap = (ours - theirs).abs().max() / theirs.abs().max()

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        sizes = 1 / np.array(steps)
        left.plot(sizes, errors, "o-", color=series_color(0), label="residual layers")
        left.plot(sizes, warped, "s--", color=series_color(1), label="gated layers, own time")
        left.plot(sizes, errors[0] * sizes / sizes[0] * 0.4, color=MUTED, label="slope 1")
        left.set(xscale="log", yscale="log", xlabel="step size τ", ylabel="distance from the ODE")
        left.legend()
        z, residual = x, list[float]()
        for _ in range(30):
            z, old = dynamics.step(z, patterns=patterns, **how), z
            residual.append(float((z - old).abs().max()))
        history = found.history.amax(-1)
        right.plot(residual, color=series_color(2), label="the layer repeated")
        right.plot(history.clamp_min(1e-16), "--", color=series_color(3), label="Anderson's solver")
        right.set(yscale="log", xlabel="evaluations of the layer", ylabel="change in a round")
        right.legend()

    return Evidence(
        [
            at_most("flow_gap", flow_gap, 1e-7, "the library's flow against scipy"),
            at_most(
                "order_error",
                abs(order(steps, errors) - 1),
                0.1,
                "measured order of convergence of residual layers to the flow, minus 1",
            ),
            at_most(
                "gate_order_error",
                abs(order(steps, warped) - 1),
                0.1,
                "the same for gated tokens against the flow at the time each has lived",
            ),
            at_most(
                "repeated_gap",
                (found.value - repeated).abs().max().detach(),
                1e-8,
                "the solver's fixed point against the layer repeated 120 times",
            ),
            at_most(
                "gradient_gap",
                gradient_gap,
                1e-7,
                "its gradient by the implicit function theorem against that of the 120 layers",
            ),
            noted("unit_error", depth(1), "distance from the flow of one layer of step 1"),
        ],
        f"Residual layers of step τ approach the flow with order {order(steps, errors):.2f}, "
        f"gated ones the flow in each token's own time with order {order(steps, warped):.2f}. "
        f"Repeated, the layer ends in the fixed point that the solver finds, with the same "
        f"gradient to {float(gradient_gap):.0e}.",
        Picture(
            draw,
            "Left: both the residual sublayer and the gated one are Euler steps; halving the step "
            "halves the error. Right: repeated, the sublayer is a fixed-point iteration, which a "
            "solver shortens.",
        ),
    )


CLAIM = Claim(
    id="T16",
    title="Layers as dynamics",
    statement=(
        "A residual layer is a discretized differential equation, the same layer repeated is a "
        "fixed-point iteration whose gradient the implicit function theorem gives, and a gate is "
        "a step size: a warp of time."
    ),
    source="main draft, §2.2; exponential family draft, §3.1",
    formula=r"x_{t+\tau} = x_t + \tau f(x_t) \to \dot{x} = f(x), \qquad "
    r"z = f(z; \theta) \Rightarrow \frac{dz}{d\theta} = "
    r"\left(I - \frac{\partial f}{\partial z}\right)^{-1} \frac{\partial f}{\partial \theta}",
    recorded=HOLDS,
    experiment=experiment,
    systems=("shortcut connections as dynamics",),
    tests=(
        "tests/laws/test_population.py",
        "tests/dynamics/test_fixed_point.py",
        "tests/dynamics/test_step.py",
    ),
)

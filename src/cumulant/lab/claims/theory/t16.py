"""T16: a residual layer as an ODE step, a repeated one as a fixed point, a gate as a clock."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from cumulant import dynamics
from cumulant.core.typed import linalg
from cumulant.figures import MUTED, series_color
from cumulant.lab.claims.claim import Claim, Found, Trial, table
from cumulant.lab.claims.measuring import gap, integrated, order

BETA, SPHERE = 2.0, dynamics.Sphere()
HOW: dict[str, Any] = {"beta": BETA, "contraction": SPHERE}

CLAIM = Claim(
    id="T16",
    title="Layers as dynamics",
    evidence="identity",
    statement="A residual layer is a discretized differential equation; the same layer repeated is "
    "a fixed-point iteration, with its gradient from the implicit function theorem; and a gate is "
    "a step size: a warp of time.",
    source="main draft, §2.2; exponential family draft, §3.1",
    formula=r"x_{t+\tau} = x_t + \tau f(x_t) \to \dot{x} = f(x), \qquad "
    r"z = f(z; \theta) \Rightarrow \frac{dz}{d\theta} = "
    r"\left(I - \frac{\partial f}{\partial z}\right)^{-1} \frac{\partial f}{\partial \theta}",
    bounds="The order is fitted to steps whose errors are not yet quite proportional to the step; "
    "a tenth still tells order 1 from 2.",
    recorded="holds",
    systems=("shortcut connections as dynamics",),
    tests=(
        "tests/laws/test_population.py",
        "tests/dynamics/test_fixed_point.py",
        "tests/dynamics/test_step.py",
    ),
    rules=table("""
      statement:
        flow_gap ≤ 1e-7: the library's flow against scipy
        order_error ≤ 0.1: measured order of convergence of residual layers to the flow, minus 1
        gate_order_error ≤ 0.1: the same for gated tokens against the flow at the time each has
            lived
        repeated_gap ≤ 1e-8: the solver's fixed point against the layer repeated 120 times
        gradient_gap ≤ 1e-7: its gradient by the implicit function theorem against that of the 120
            layers
      noted:
        unit_error: distance from the flow of one layer of step 1
    """),
    finding="Residual layers of step τ approach the flow with order {order:.2f}, gated ones the "
    "flow in each token's own time with order {gated_order:.2f}. Repeated, the layer converges to "
    "the fixed point that the solver finds, with the same gradient to {gradient_gap:.0e}.",
    caption="Left: both the residual sublayer and the gated one are Euler steps; halving the step "
    "halves the error. Right: repeated, the sublayer is a fixed-point iteration, which a solver "
    "shortens.",
)


def exact(x: Tensor, patterns: Tensor | None, end: float) -> Tensor:
    """Attention on the unit sphere in continuous time, written out and integrated by scipy."""

    def rate(z: Any) -> Any:
        y = z if patterns is None else patterns.numpy()
        weights = np.exp(BETA * z @ y.T)
        mean = weights @ y / weights.sum(-1, keepdims=True)
        return mean - z * (z * mean).sum(-1, keepdims=True)

    return integrated(rate, x, end, method="DOP853", rtol=1e-11, atol=1e-13)


def layered(x: Tensor, k: int, size: Any, **how: Any) -> Tensor:
    """The states after k layers with this total step size."""
    how = {"step_size": size / k, "every": k, "observables": {}, **HOW, **how}
    return dynamics.simulate(x, k, **how).final


def unrolled(z: Tensor, patterns: Tensor, rounds: int) -> Tensor:
    """The same sublayer many times over, in plain torch."""
    for _ in range(rounds):
        z = z + (BETA * z @ patterns.mT).softmax(-1) @ patterns
        z = z / linalg.vector_norm(z, dim=-1, keepdim=True)
    return z


def repeated(trial: Trial, x: Tensor, patterns: Tensor) -> tuple[Any, float, float]:
    """The solver's fixed point; its distance from 120 layers, and that of its gradient."""
    given = patterns.clone().requires_grad_()
    found = dynamics.fixed_point(lambda z: dynamics.step(z, patterns=given, **HOW), x, batch_dims=1)
    end, weights = unrolled(x, given, 120), trial.normal(8, 3)
    ours, theirs = (torch.autograd.grad((weights * z).sum(), given)[0] for z in (found.value, end))
    return found, gap(found.value, end), gap(ours, theirs) / float(theirs.abs().max())


def measure(trial: Trial) -> Found:
    """Attention on the sphere: halved steps, many rounds, gates of each token."""
    x = SPHERE(trial.normal(8, 3))
    # Patterns on one side, so that the repeated layer has one fixed point and not several.
    patterns = 0.3 * trial.normal(6, 3) + torch.tensor([1.0, 0.0, 0.0], dtype=x.dtype)
    steps = [16, 32, 64, 128] if trial.quick else [64, 128, 256, 512, 1024]
    true = exact(x, None, 1.0)
    errors = [float(linalg.vector_norm(layered(x, k, 1) - true)) for k in steps]
    # One gate per token: with fixed patterns token i runs in its own time g_i t.
    gate = 0.3 + 1.2 * trial.uniform(8, 1)
    own = torch.cat([exact(x[i : i + 1], patterns, float(gate[i])) for i in range(8)])
    warped = [
        float(linalg.vector_norm(layered(x, k, gate, patterns=patterns) - own)) for k in steps
    ]
    found, value_gap, gradient_gap = repeated(trial, x, patterns)
    orders = {"order": order(steps, errors), "gated_order": order(steps, warped)}
    numbers = {
        "flow_gap": gap(dynamics.flow(x, [1.0], **HOW).final, true),
        "order_error": abs(orders["order"] - 1),
        "gate_order_error": abs(orders["gated_order"] - 1),
        "repeated_gap": value_gap,
        "gradient_gap": gradient_gap,
        "unit_error": linalg.vector_norm(layered(x, 1, 1) - true),
    }
    lines = {"steps": steps, "errors": errors, "warped": warped}
    return Found(numbers, x=x, patterns=patterns, found=found, **orders, **lines)


def draw(figure: Any, seen: Any) -> None:
    """Distance from the ODE against the step; change in a round of layer and solver."""
    left, right = figure.subplots(1, 2)
    sizes = 1 / np.array(seen.steps)
    left.plot(sizes, seen.errors, "o-", color=series_color(0), label="residual layers")
    left.plot(sizes, seen.warped, "s--", color=series_color(1), label="gated layers, own time")
    left.plot(sizes, seen.errors[0] * sizes / sizes[0] * 0.4, color=MUTED, label="slope 1")
    left.set(xscale="log", yscale="log", xlabel="step size τ", ylabel="distance from the ODE")
    left.legend()
    z, residual = seen.x, list[float]()
    for _ in range(30):
        z, old = dynamics.step(z, patterns=seen.patterns, **HOW), z
        residual.append(gap(z, old))
    history = seen.found.history.amax(-1)
    right.plot(residual, color=series_color(2), label="the layer repeated")
    right.plot(history.clamp_min(1e-16), "--", color=series_color(3), label="Anderson's solver")
    right.set(yscale="log", xlabel="evaluations of the layer", ylabel="change in a round")
    right.legend()

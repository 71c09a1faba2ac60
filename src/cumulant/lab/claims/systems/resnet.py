"""Residual networks as Euler's method."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from cumulant import dynamics
from cumulant.core.typed import linalg
from cumulant.figures import INK, series_color
from cumulant.lab.claims.claim import Claim, Found, Trial, table
from cumulant.lab.claims.measuring import gap, integrated, order

KINDS: dict[str, dynamics.Contraction | None] = {
    "none": None,
    "sphere": dynamics.Sphere(),
    "layer norm": dynamics.LayerNorm(),
}

CLAIM = Claim(
    id="resnet",
    title="Residual networks as Euler's method",
    evidence="identity",
    statement="A residual layer is a step of Euler's method: with more layers and smaller steps "
    "the network follows a differential equation.",
    theory="T16",
    source="main draft, §2.2, after E (2017) and Lu et al. (2020)",
    formula=r"x_{l+1} = c\left(x_l + \frac{1}{L} f(x_l)\right), \qquad "
    r"\|x_L - x(1)\| = O(1/L), \quad \dot{x} = Dc(x) f(x)",
    bounds="The order is fitted to steps whose errors are not yet quite proportional to the step; "
    "0.15 still tells order 1 from 2.",
    recorded="holds",
    systems=("residual network", "neural ordinary differential equation"),
    tests=("tests/laws/test_population.py",),
    rules=table("""
      statement:
        flow_gap ≤ 1e-6: the library's flow against scipy, worst of three
        order_error_none ≤ 0.15: order of convergence minus 1, without normalization
        order_error_sphere ≤ 0.15: order of convergence minus 1, on the sphere
        order_error_layer_norm ≤ 0.15: order of convergence minus 1, with layer norm
      noted:
        single_layer_error: error of one layer of step 1, relative to how far the flow moves
    """),
    finding="With weights and with each normalization, L layers of step 1/L approach the "
    "differential equation with order {order}. A single layer of step 1 is an Euler step too, but "
    "a coarse one: it is off by up to {single_layer_error:.0%} of the way.",
    caption="A residual attention network of L layers with shared weights against its "
    "differential equation: twice the layers, half the error, as in Euler's method.",
)


def along(kind: str, x: Any, v: Any) -> Any:
    """What a contraction leaves of a velocity at a point it has contracted."""
    if kind == "layer norm":
        v = v - v.mean(-1, keepdims=True)
    if kind == "none":
        return v
    return v - x * (x * v).sum(-1, keepdims=True) / (x * x).sum(-1, keepdims=True)


def exact(kind: str, x: Tensor, weights: Tensor) -> Tensor:
    """The differential equation at time 1, written out and integrated by scipy."""
    Wq, Wk, Wv = weights.numpy()

    def rate(z: Any) -> Any:
        p = np.exp(z @ Wq @ (z @ Wk).T)
        return along(kind, z, p @ (z @ Wv) / p.sum(-1, keepdims=True))

    return integrated(rate, x, 1, method="DOP853", rtol=1e-11, atol=1e-13)


def measure(trial: Trial) -> Found:
    """A residual attention network of L layers, shared weights, step 1/L, for growing L."""
    depths = [16, 32, 64, 128] if trial.quick else [16, 32, 64, 128, 256, 512]
    d = 4
    weights = 0.5 * trial.normal(3, d, d)
    names = ("query_weight", "key_weight", "value_weight")
    given: dict[str, Any] = dict(zip(names, weights, strict=True))
    cloud = trial.normal(10, d)
    gaps: list[float] = []
    lines: dict[str, list[float]] = {}
    for kind, contraction in KINDS.items():
        x = cloud if contraction is None else contraction(cloud)
        true, how = exact(kind, x, weights), dict[str, Any](contraction=contraction, **given)
        gaps.append(gap(dynamics.flow(x, [1.0], **how).final, true))
        runs = [dynamics.simulate(x, k, step_size=1 / k, every=k, **how) for k in (1, *depths)]
        lines[kind] = [
            float(linalg.vector_norm(run.final - true) / linalg.vector_norm(true - x))
            for run in runs
        ]
    orders = {kind: order(depths, errors[1:]) for kind, errors in lines.items()}
    low, high = f"{min(orders.values()):.2f}", f"{max(orders.values()):.2f}"
    numbers = {
        "flow_gap": max(gaps),
        "order_error_none": abs(orders["none"] - 1),
        "order_error_sphere": abs(orders["sphere"] - 1),
        "order_error_layer_norm": abs(orders["layer norm"] - 1),
        "single_layer_error": max(errors[0] for errors in lines.values()),
    }
    told = low if low == high else f"{low} to {high}"
    return Found(numbers, order=told, depths=depths, lines=lines)


def draw(figure: Any, seen: Any) -> None:
    """Distance from the ODE against the number of layers."""
    axes = figure.subplots()
    for i, (kind, line) in enumerate(seen.lines.items()):
        label = kind if kind != "none" else "no normalization"
        axes.plot(seen.depths, line[1:], "os^"[i] + "-", color=series_color(i), label=label)
    falling = 0.4 * seen.lines["none"][1] * seen.depths[0] / np.array(seen.depths)
    axes.plot(seen.depths, falling, ":", color=INK, label="1 / L")
    axes.set(xscale="log", yscale="log", xlabel="layers L")
    axes.set_ylabel("distance from the ODE, relative")
    axes.set_xticks(seen.depths, [str(k) for k in seen.depths])
    axes.minorticks_off()
    axes.legend(loc="lower left")

"""Residual networks as Euler's method."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cumulant import dynamics
from cumulant.figures import INK, series_color
from cumulant.lab.claims.claim import HOLDS, Claim, Evidence, Picture, Trial, at_most, noted

KINDS: dict[str, dynamics.Contraction | None] = {
    "none": None,
    "sphere": dynamics.Sphere(),
    "layer norm": dynamics.LayerNorm(),
}


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

    def rate(_: float, flat: Any) -> Any:
        z = flat.reshape(x.shape)
        p = np.exp(z @ Wq @ (z @ Wk).T)
        return along(kind, z, p @ (z @ Wv) / p.sum(-1, keepdims=True)).ravel()

    path = import_module("scipy.integrate").solve_ivp(
        rate, (0, 1), x.numpy().ravel(), method="DOP853", rtol=1e-11, atol=1e-13
    )
    return torch.from_numpy(path.y[:, -1].reshape(x.shape))


def experiment(trial: Trial) -> Evidence:
    """A residual attention network of L layers, shared weights, step 1/L, for growing L."""
    depths = [16, 32, 64, 128] if trial.quick else [16, 32, 64, 128, 256, 512]
    d = 4
    weights = 0.5 * trial.normal(3, d, d)
    names = ("query_weight", "key_weight", "value_weight")
    given: dict[str, Any] = dict(zip(names, weights, strict=True))
    cloud = trial.normal(10, d)
    slopes: list[float] = []
    gaps: list[float] = []
    single: list[float] = []
    lines: dict[str, list[float]] = {}
    for kind, contraction in KINDS.items():
        x = cloud if contraction is None else contraction(cloud)
        true = exact(kind, x, weights)
        flowed = dynamics.flow(x, [1.0], contraction=contraction, **given).final
        gaps.append(float((flowed - true).abs().max()))

        def error(
            layers: int,
            x: Tensor = x,
            true: Tensor = true,
            contraction: dynamics.Contraction | None = contraction,
        ) -> float:
            run = dynamics.simulate(
                x, layers, step_size=1 / layers, contraction=contraction, every=layers, **given
            )
            return float((run.final - true).norm() / (true - x).norm())

        lines[kind] = [error(k) for k in depths]
        slopes.append(-float(np.polyfit(np.log(depths), np.log(lines[kind]), 1)[0]))
        single.append(error(1))

    low, high = f"{min(slopes):.2f}", f"{max(slopes):.2f}"
    order = low if low == high else f"{low} to {high}"

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for i, (kind, line) in enumerate(lines.items()):
            label = kind if kind != "none" else "no normalization"
            axes.plot(depths, line, "os^"[i] + "-", color=series_color(i), label=label)
        axes.plot(
            depths,
            0.4 * lines["none"][0] * depths[0] / np.array(depths),
            ":",
            color=INK,
            label="1 / L",
        )
        axes.set(xscale="log", yscale="log", xlabel="layers L")
        axes.set_ylabel("distance from the ODE, relative")
        axes.set_xticks(depths, [str(k) for k in depths])
        axes.minorticks_off()
        axes.legend(loc="lower left")

    return Evidence(
        [
            at_most(
                "flow_gap", max(gaps), 1e-6, "the library's flow against scipy, worst of three"
            ),
            *(
                at_most(
                    f"order_error_{kind.replace(' ', '_')}",
                    abs(slope - 1),
                    0.15,
                    f"order of convergence minus 1, {says}",
                )
                for (kind, slope), says in zip(
                    zip(KINDS, slopes, strict=True),
                    ("without normalization", "on the sphere", "with layer norm"),
                    strict=True,
                )
            ),
            noted(
                "single_layer_error",
                max(single),
                "error of one layer of step 1, relative to how far the equation moves",
            ),
        ],
        f"With weights and with each normalization, L layers of step 1/L approach the differential "
        f"equation with order {order}. A single layer of step 1 is an Euler step too, but a "
        f"coarse one: it is off by up to {max(single):.0%} of the way.",
        Picture(
            draw,
            "A residual attention network of L layers with shared weights against its differential "
            "equation: twice the layers, half the error, as Euler's method has it.",
        ),
    )


CLAIM = Claim(
    id="resnet",
    title="Residual networks as Euler's method",
    statement=(
        "A residual layer is a step of Euler's method: with more layers and smaller steps the "
        "network follows a differential equation."
    ),
    source="main draft, §2.2, after E (2017) and Lu et al. (2020)",
    formula=r"x_{l+1} = c\left(x_l + \frac{1}{L} f(x_l)\right), \qquad "
    r"\|x_L - x(1)\| = O(1/L), \quad \dot{x} = Dc(x) f(x)",
    recorded=HOLDS,
    experiment=experiment,
    systems=("residual network", "neural ordinary differential equation"),
    tests=("tests/laws/test_population.py",),
)

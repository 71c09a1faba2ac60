"""Leaky echo-state networks as Euler steps of a differential equation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cumulant.core.typed import functions, linalg
from cumulant.figures import series_color
from cumulant.lab.claims.claim import Claim, Found, Trial, table
from cumulant.lab.claims.measuring import gap, integrated, order

CLAIM = Claim(
    id="esn",
    title="Leaky echo-state networks",
    evidence="identity",
    statement="The leaky integrator unit x ← (1 − a)x + a tanh(Wx + u) is an Euler step of "
    "x' = −x + tanh(Wx + u), the leak a its step size; where |W| < 1 the start is forgotten.",
    theory="T42",
    source="main draft, §2.2, after Jaeger et al. (2007)",
    formula=r"x_{n+1} = (1 - a)\, x_n + a \tanh(W x_n + u), \qquad \dot x = -x + \tanh(W x + u)",
    bounds="The order is fitted to leaks whose errors are not yet quite proportional to the leak; "
    "a tenth still tells order 1 from 2.",
    recorded="holds",
    systems=("echo-state network", "leaky integrator"),
    tests=("tests/laws/test_neighbors.py",),
    rules=table("""
      statement:
        order_error ≤ 0.1: order in which the network approaches the equation as a falls, minus 1
            (absolute value), largest over |W|
        forgetting ≤ 1.000000001: distance of two starts after a step over (1 − a + a|W|) times that
            before, largest over |W| < 1
      noted:
        first_error: largest error at a = 1/8
        kept: distance of two starts after 200 steps at |W| = 8, over that at the start
    """),
    finding="Errors fall with order {orders} in the leak. Two starts approach each other at every "
    "step where |W| < 1; at |W| = 8 they keep {kept:.2f} of their distance for 200 steps.",
    caption="Error of the network against the equation at t = 2, by leak.",
)

LEAKS = (8, 16, 32, 64)


def network(x: Tensor, W: Tensor, u: Tensor, leak: float, steps: int) -> Tensor:
    """The leaky update, repeated."""
    for _ in range(steps):
        x = (1 - leak) * x + leak * torch.tanh(x @ W.mT + u)
    return x


def measure(trial: Trial) -> Found:
    """Networks of twenty units with three norms of W."""
    n, end, errors = 20, 2, dict[float, list[float]]()
    ratio, kept = 0.0, 0.0
    for size in (0.5, 0.9, 8.0):
        free, u = trial.normal(n, n), trial.normal(n)
        W = size * free / linalg.svdvals(free)[0]
        x = trial.normal(2, n)

        def field(z: Any, W: Any = W.numpy(), u: Any = u.numpy()) -> Any:
            z = functions.from_numpy(z)
            return (-z + torch.tanh(z @ torch.as_tensor(W).mT + torch.as_tensor(u))).numpy()

        exact = integrated(field, x, end, rtol=1e-10, atol=1e-12)
        errors[size] = [gap(network(x, W, u, 1 / k, end * k), exact) for k in LEAKS]
        apart = linalg.vector_norm(x[0] - x[1])
        if size < 1:
            for leak in (0.1, 0.5, 1.0):
                y = network(x, W, u, leak, 1)
                bound = (1 - leak + leak * size) * apart
                ratio = max(ratio, float(linalg.vector_norm(y[0] - y[1]) / bound))
        else:
            y = network(x, W, u, 0.5, 200)
            kept = float(linalg.vector_norm(y[0] - y[1]) / apart)
    orders = [order(LEAKS, each) for each in errors.values()]
    numbers = {
        "order_error": max(abs(x - 1) for x in orders),
        "forgetting": ratio,
        "first_error": max(each[0] for each in errors.values()),
        "kept": kept,
    }
    return Found(numbers, orders=", ".join(f"{x:.2f}" for x in orders), errors=errors)


def draw(figure: Any, seen: Any) -> None:
    """Error against the leak."""
    axes = figure.subplots()
    for i, (size, each) in enumerate(seen.errors.items()):
        leaks = [1 / k for k in LEAKS]
        axes.loglog(leaks, each, "o-", ms=4, color=series_color(i), label=f"|W| = {size:g}")
    axes.set(xlabel="leak a", ylabel="error at t = 2")
    axes.set_xticks([1 / k for k in LEAKS], [f"1/{k}" for k in LEAKS])
    axes.minorticks_off()
    axes.legend()

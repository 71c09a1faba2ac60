"""T13: a self-attention sublayer is a step of gradient ascent on G, at every query at once."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cumulant import Empirical, dynamics
from cumulant.figures import INK, MUTED, series_color, tidy
from cumulant.lab.claims.claim import HOLDS, Claim, Evidence, Picture, Trial, at_least, at_most

BETA, STEP = 1.7, 0.4


def tangent_flow(x: Any, beta: float, end: float) -> Tensor:
    """Attention's part along the sphere, written out and integrated by scipy."""

    def rate(_: float, flat: Any) -> Any:
        z = flat.reshape(x.shape)
        weights = np.exp(beta * z @ z.T)
        mean = weights @ z / weights.sum(-1, keepdims=True)
        return (mean - z * (z * mean).sum(-1, keepdims=True)).ravel()

    path = import_module("scipy.integrate").solve_ivp(
        rate, (0, end), x.ravel(), rtol=1e-10, atol=1e-12
    )
    return torch.from_numpy(path.y[:, -1].reshape(x.shape))


def experiment(trial: Trial) -> Evidence:
    """One step against torch's attention, and against the gradient of a log-sum-exp."""
    x = trial.normal(trial.size(40, 20), 3)
    queries = trial.normal(9, 3)

    def potential(z: Tensor) -> Tensor:
        return torch.logsumexp(BETA * z @ x.mT, -1) / BETA

    def ascent(z: Tensor) -> Tensor:
        z = z.clone().requires_grad_()
        return torch.autograd.grad(potential(z).sum(), z)[0]

    moved = dynamics.step(x, beta=BETA, step_size=STEP)
    layer = torch.nn.functional.scaled_dot_product_attention(x, x, x, scale=BETA)
    crossed = dynamics.step(queries, beta=BETA, step_size=STEP, patterns=x)
    measure = Empirical(x)
    rise = (measure.log_normalizer(BETA * moved) - measure.log_normalizer(BETA * x)) / BETA

    def layered(z: Tensor) -> Tensor:
        return dynamics.step(z, beta=BETA, step_size=STEP)

    jacobian: Any = torch.func.jacrev(layered)(x)
    joint = jacobian.reshape(x.numel(), -1) - torch.eye(x.numel(), dtype=x.dtype)
    asymmetry = (joint - joint.mT).norm() / joint.norm()
    start = x / x.norm(dim=-1, keepdim=True)
    flowed = dynamics.flow(start, [0.5], beta=BETA, contraction=dynamics.Sphere()).final
    tangent = (flowed - tangent_flow(start.numpy(), BETA, 0.5)).abs().max()
    gap = (moved - x - STEP * ascent(x)).abs().max()

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        cloud = x[:, :2].contiguous()
        after = dynamics.step(cloud, beta=BETA, step_size=STEP)
        reach = 1.1 * float(after.abs().max())
        side = torch.linspace(-reach, reach, 81, dtype=x.dtype)
        grid = torch.cartesian_prod(side, side)
        height = Empirical(cloud).log_normalizer(BETA * grid).reshape(81, 81).mT / BETA
        left.contour(side, side, height, levels=14, colors=MUTED, linewidths=0.6)
        left.scatter(*cloud.mT, s=9, color=series_color(0), zorder=3)
        way = after - cloud
        left.quiver(
            *cloud.mT, *way.mT, angles="xy", scale_units="xy", scale=1, color=INK, width=0.005
        )
        left.set(aspect="equal", xticks=[], yticks=[], title="Each point climbs G")
        tidy(left)
        right.scatter(
            STEP * ascent(x).square().sum(-1), rise, s=12, color=series_color(2), zorder=3
        )
        top = float(rise.max()) * 1.05
        right.plot([0, top], [0, top], color=MUTED, linewidth=1)
        right.set(xlabel="first order, τ‖∇G‖²", ylabel="rise of β⁻¹G(βx)")
        right.set_title("No point rises less than its gradient says")

    return Evidence(
        [
            at_most("gradient_gap", gap, 1e-12, "step against autograd of a log-sum-exp"),
            at_most(
                "layer_gap",
                (moved - x - STEP * layer).abs().max(),
                1e-12,
                "step against torch's own attention with its residual",
            ),
            at_most(
                "cross_gap",
                (crossed - queries - STEP * ascent(queries)).abs().max(),
                1e-12,
                "the same for queries that attend to fixed points",
            ),
            at_least(
                "least_rise",
                (rise - STEP * ascent(x).square().sum(-1)).min(),
                -1e-12,
                "least rise of G at a point, beyond the first order",
            ),
            at_most(
                "tangent_gap",
                tangent,
                1e-6,
                "flow on the sphere against attention's tangent part, integrated by scipy",
            ),
            at_least(
                "joint_asymmetry",
                asymmetry,
                0.01,
                "asymmetry of the Jacobian in all points at once, relative: no joint potential",
            ),
        ],
        f"The step is the gradient of β⁻¹G(βx) to {float(gap):.0e}, with the measure frozen. "
        f"The field of all points together is no gradient: its Jacobian is asymmetric by "
        f"{float(asymmetry):.0%}.",
        Picture(
            draw,
            "Attention moves every point up the log-normalizer of the cloud as it was before the "
            "step (left, with level lines of G). G is convex, so each point rises by at least the "
            "first-order amount (right).",
        ),
    )


CLAIM = Claim(
    id="T13",
    title="Attention as parallel gradient ascent",
    statement=(
        "Weights aside, a self-attention sublayer with its residual is one step of gradient ascent "
        "on the log-normalizer of the cloud, taken at every query in parallel while the measure "
        "stands still. The field of all points together is not a gradient."
    ),
    source="exponential family draft, eq. (7) and the paragraph after it; abstract",
    formula=r"x_i \leftarrow x_i + \tau\, \nabla_{\eta}\, \frac{1}{\beta} G_X(\beta\eta)"
    r"\Big|_{\eta = x_i}, \qquad G_X(\eta) = \log \sum_j e^{\langle x_j, \eta \rangle}",
    recorded=HOLDS,
    experiment=experiment,
    tests=("tests/dynamics/test_step.py", "tests/kernels/test_derivatives.py"),
)

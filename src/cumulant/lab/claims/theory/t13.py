"""T13: a self-attention sublayer is a step of gradient ascent on G, at every query at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from cumulant import Empirical, dynamics
from cumulant.core.typed import linalg
from cumulant.figures import INK, MUTED, series_color, tidy
from cumulant.lab.claims.claim import Claim, Found, Trial, table
from cumulant.lab.claims.measuring import gap, integrated

CLAIM = Claim(
    id="T13",
    title="Attention as parallel gradient ascent",
    evidence="identity",
    statement="Without weight matrices, a self-attention sublayer with its residual is one step of "
    "gradient ascent on the log-normalizer of the cloud, taken at every query in parallel with the "
    "measure fixed. The joint field of all points is not a gradient.",
    source="exponential family draft, eq. (7) and the paragraph after it; abstract",
    formula=r"x_i \leftarrow x_i + \tau\, \nabla_{\eta}\, \frac{1}{\beta} G_X(\beta\eta)"
    r"\Big|_{\eta = x_i}, \qquad G_X(\eta) = \log \sum_j e^{\langle x_j, \eta \rangle}",
    bounds="A joint potential would make the Jacobian symmetric to rounding, about 1e-15; 0.01 "
    "is far above that.",
    recorded="holds",
    tests=("tests/dynamics/test_step.py", "tests/kernels/test_derivatives.py"),
    rules=table("""
      statement:
        gradient_gap ≤ 1e-12: step against autograd of a log-sum-exp
        layer_gap ≤ 1e-12: step against torch's own attention with its residual
        cross_gap ≤ 1e-12: the same for queries that attend to fixed points
        least_rise ≥ -1e-12: least rise of G at a point, beyond the first order
        tangent_gap ≤ 1e-6: flow on the sphere against attention's tangent part, integrated by scipy
        joint_asymmetry ≥ 0.01: asymmetry of the Jacobian in all points at once, relative: no joint
            potential
    """),
    finding="The step is the gradient of β⁻¹G(βx) to {gradient_gap:.0e}, with the measure frozen. "
    "The joint field of all points is not a gradient: its Jacobian is asymmetric by "
    "{joint_asymmetry:.0%}.",
    caption="Attention moves every point up the log-normalizer of the cloud as it was before the "
    "step (left, with level lines of G). G is convex, so each point rises by at least the "
    "first-order amount (right).",
)


BETA, STEP = 1.7, 0.4


def tangent_flow(x: Tensor, end: float) -> Tensor:
    """Attention's part along the sphere, written out and integrated by scipy."""

    def rate(z: Any) -> Any:
        weights = np.exp(BETA * z @ z.T)
        mean = weights @ z / weights.sum(-1, keepdims=True)
        return mean - z * (z * mean).sum(-1, keepdims=True)

    return integrated(rate, x, end, rtol=1e-10, atol=1e-12)


def ascent(x: Tensor, z: Tensor) -> Tensor:
    """∇ of β⁻¹ log Σ exp β⟨x, z⟩, by autograd."""
    z = z.clone().requires_grad_()
    potential = torch.logsumexp(BETA * z @ x.mT, -1) / BETA
    return torch.autograd.grad(potential.sum(), z)[0]


def layer(z: Tensor, **how: Any) -> Tensor:
    """The library's sublayer."""
    return dynamics.step(z, beta=BETA, step_size=STEP, **how)


def measure(trial: Trial) -> Found:
    """One step against torch's attention, and against the gradient of a log-sum-exp."""
    x, queries = trial.normal(trial.size(40, 20), 3), trial.normal(9, 3)
    moved, measure = layer(x), Empirical(x)
    attention = torch.nn.functional.scaled_dot_product_attention(x, x, x, scale=BETA)
    rise = (measure.log_normalizer(BETA * moved) - measure.log_normalizer(BETA * x)) / BETA
    first_order = STEP * ascent(x, x).square().sum(-1)
    jacobian: Any = torch.func.jacrev(layer)(x)
    joint = jacobian.reshape(x.numel(), -1) - torch.eye(x.numel(), dtype=x.dtype)
    start = x / linalg.vector_norm(x, dim=-1, keepdim=True)
    flowed = dynamics.flow(start, [0.5], beta=BETA, contraction=dynamics.Sphere()).final
    numbers = {
        "gradient_gap": gap(moved - x, STEP * ascent(x, x)),
        "layer_gap": gap(moved - x, STEP * attention),
        "cross_gap": gap(layer(queries, patterns=x) - queries, STEP * ascent(x, queries)),
        "least_rise": (rise - first_order).min(),
        "tangent_gap": gap(flowed, tangent_flow(start, 0.5)),
        "joint_asymmetry": (joint - joint.mT).norm() / joint.norm(),
    }
    return Found(numbers, cloud=x[:, :2].contiguous(), first_order=first_order, rise=rise)


def draw(figure: Any, seen: Any) -> None:
    """A step on the level lines of G; each point's rise against its first order."""
    left, right = figure.subplots(1, 2)
    cloud, after = seen.cloud, layer(seen.cloud)
    reach = 1.1 * float(after.abs().max())
    side = torch.linspace(-reach, reach, 81, dtype=cloud.dtype)
    grid = torch.cartesian_prod(side, side)
    height = Empirical(cloud).log_normalizer(BETA * grid).reshape(81, 81).mT / BETA
    left.contour(side, side, height, levels=14, colors=MUTED, linewidths=0.6)
    left.scatter(*cloud.mT, s=9, color=series_color(0), zorder=3)
    look = {"angles": "xy", "scale_units": "xy", "scale": 1, "color": INK, "width": 0.005}
    left.quiver(*cloud.mT, *(after - cloud).mT, **look)
    left.set(aspect="equal", xticks=[], yticks=[], title="Each point climbs G")
    tidy(left)
    right.scatter(seen.first_order, seen.rise, s=12, color=series_color(2), zorder=3)
    top = float(seen.rise.max()) * 1.05
    right.plot([0, top], [0, top], color=MUTED, linewidth=1)
    right.set(xlabel="first order, τ‖∇G‖²", ylabel="rise of β⁻¹G(βx)")
    right.set_title("No point rises less than its gradient says")

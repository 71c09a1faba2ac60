"""SimCLR: NT-Xent as it was published, and what it does to points on a sphere."""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from cumulant import contrastive
from cumulant.core.typed import backward, linalg, take_step
from cumulant.figures import MUTED, cycle, tidy
from cumulant.lab.claims.claim import Claim, Found, Trial, table
from cumulant.lab.claims.measuring import gap

CLAIM = Claim(
    id="simclr",
    title="SimCLR",
    evidence="simulation",
    statement="NT-Xent, with 2N views, each excluded from its own normalizer, is the negative "
    "log-likelihood of the tilted family on the sphere. It pulls views of one item together and "
    "spreads items evenly.",
    theory="T24",
    source="main draft, section 1; exponential family draft, after eq. (7); Chen et al. (2020)",
    formula=r"\ell_{ij} = -\log \frac{\exp\left(\operatorname{sim}(z_i, z_j)/\tau\right)}"
    r"{\sum_{k \ne i} \exp\left(\operatorname{sim}(z_i, z_k)/\tau\right)}",
    bounds="Two random points on the circle have a mean squared distance of 2: views count as "
    "aligned at a tenth of that, and as uniform if their uniformity is within 0.1 of the uniform "
    "law's.",
    recorded="holds",
    systems=("SimCLR",),
    tests=("tests/contrastive/test_info_nce.py",),
    rules=table("""
      statement:
        value_gap ≤ 1e-12: loss against NT-Xent written out pair by pair
        gradient_gap ≤ 1e-12: its gradient against torch's gradient of that
        alignment ≤ 0.2: mean squared distance of two views after training
        uniformity ≤ 0.1: uniformity minus that of the uniform law
      noted:
        alignment_before: mean squared distance before training
    """),
    finding="The loss is NT-Xent to {value_gap:.0e}, its gradient to {gradient_gap:.0e}. Training "
    "brings the squared distance of two views from {alignment_before:.2f} to {alignment:.2f}, and "
    "the uniformity to within {within:g} of that of the uniform law on the circle.",
    caption="Views on the circle, radii jittered, colored by their item's angle. Training orders "
    "the items by angle and spreads them evenly: aligned and uniform.",
)


def published(z: Tensor, temperature: float) -> Tensor:
    """Chen et al. (2020), eq. 1 and Algorithm 1, pair by pair: rows 2k and 2k + 1 are views."""
    total = z.new_zeros(())
    for i in range(len(z)):
        similarity = (
            (z @ z[i]) / (linalg.vector_norm(z, dim=-1) * linalg.vector_norm(z[i])) / temperature
        )
        others = torch.cat([similarity[:i], similarity[i + 1 :]])  # 1[k ≠ i]
        total = total - (similarity[i ^ 1] - others.exp().sum().log())
    return total / len(z)


def agreement(trial: Trial) -> tuple[float, float]:
    """Largest error of `nt_xent` and `info_nce`, in value and in gradient."""
    z = trial.normal(24, 8).requires_grad_()
    pairs = torch.arange(24) ^ 1
    losses = (
        published(z, 0.5),
        contrastive.nt_xent(z[0::2], z[1::2], 0.5),
        contrastive.info_nce(z, z, positives=pairs, exclude="self", temperature=0.5),
    )
    slopes = [torch.autograd.grad(loss, z)[0] for loss in losses]
    values = torch.stack(losses).detach()
    return gap(values, values[0]), gap(torch.stack(slopes), slopes[0])


def alignment(first: Tensor, second: Tensor) -> float:
    """Mean squared distance of two views of the same thing (Wang and Isola, 2020)."""
    return float(((first - second) ** 2).sum(-1).mean())


def uniformity(z: Tensor) -> float:
    """log of the mean of exp(−2‖z − z'‖²) over pairs."""
    squares = torch.cdist(z, z) ** 2
    off = ~torch.eye(len(z), dtype=torch.bool)
    return float((-2 * squares[off]).exp().mean().log())


def views(trial: Trial, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Angles of things, and two views of each.

    A view shows the thing's point on an ellipse beside six coordinates of noise, which are larger
    and differ from view to view.
    """
    angle = 2 * math.pi * trial.uniform(n)
    shared = torch.stack([angle.cos(), 0.5 * angle.sin()], -1)
    first, second = (
        torch.cat([shared + 0.05 * trial.normal(n, 2), trial.normal(n, 6)], -1) for _ in range(2)
    )
    return angle, first, second


def measure(trial: Trial) -> Found:
    """Value and gradient written out; then a linear encoder learns what two views share."""
    value, slope = agreement(trial)
    # Orthogonal columns: from nearly parallel ones training takes long to open the circle.
    encoder = linalg.qr(trial.normal(8, 2)).Q.clone().requires_grad_()
    angle, *held = views(trial, 500)

    def encoded() -> list[Tensor]:
        return [torch.nn.functional.normalize((x @ encoder).detach(), dim=-1) for x in held]

    start = encoded()
    optimizer = torch.optim.Adam([encoder], lr=0.1)
    for _ in range(120):
        _, first, second = views(trial, trial.size(512, 256))
        optimizer.zero_grad()
        backward(contrastive.nt_xent(first @ encoder, second @ encoder, 0.2))
        take_step(optimizer)
    end = encoded()
    # On the circle the mean of exp(−2‖z − z'‖²) under the uniform law is e⁻⁴ I₀(4).
    apart = uniformity(torch.cat(end)) - math.log(float(import_module("scipy.special").ive(0, 4.0)))
    numbers = {
        "value_gap": value,
        "gradient_gap": slope,
        "alignment": alignment(*end),
        "uniformity": apart,
        "alignment_before": alignment(*start),
    }
    radius, within = 1 + 0.12 * trial.normal(len(angle), 1), math.ceil(1e4 * abs(apart)) / 1e4
    return Found(numbers, within=within, angle=angle, radius=radius, start=start, end=end)


def draw(figure: Any, seen: Any) -> None:
    """Views on the circle before and after training."""
    axes = figure.subplots(1, 2)
    for axis, (z, _), title in zip(axes, (seen.start, seen.end), ("before", "after"), strict=True):
        axis.scatter(*(z * seen.radius).T, c=seen.angle, cmap=cycle(), s=6)
        axis.set(aspect="equal", xticks=[], yticks=[], xlim=(-1.5, 1.5), ylim=(-1.5, 1.5))
        axis.set_title(title, color=MUTED)
        tidy(axis)

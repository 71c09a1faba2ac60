"""SimCLR: NT-Xent as it was published, and what it does to points on a sphere."""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from cumulant import contrastive
from cumulant.figures import MUTED, cycle, tidy
from cumulant.lab.claims.claim import HOLDS, Claim, Evidence, Picture, Trial, at_most, noted


def published(z: Tensor, temperature: float) -> Tensor:
    """Chen et al. (2020), eq. 1 and Algorithm 1, pair by pair: rows 2k and 2k + 1 are views."""
    total = z.new_zeros(())
    for i in range(len(z)):
        similarity = (z @ z[i]) / (z.norm(dim=-1) * z[i].norm()) / temperature
        others = torch.cat([similarity[:i], similarity[i + 1 :]])  # 1[k ≠ i]
        total = total - (similarity[i ^ 1] - others.exp().sum().log())
    return total / len(z)


def agreement(trial: Trial) -> tuple[Tensor, Tensor]:
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
    return (values - values[0]).abs().max(), (torch.stack(slopes) - slopes[0]).abs().max()


def alignment(first: Tensor, second: Tensor) -> float:
    """Mean squared distance of two views of the same thing (Wang and Isola, 2020)."""
    return float(((first - second) ** 2).sum(-1).mean())


def uniformity(z: Tensor) -> float:
    """log of the mean of exp(−2‖z − z'‖²) over pairs."""
    squares = torch.cdist(z, z) ** 2
    off = ~torch.eye(len(z), dtype=torch.bool)
    return float((-2 * squares[off]).exp().mean().log())


def experiment(trial: Trial) -> Evidence:
    """Value and gradient written out; then a linear encoder learns what two views share.

    A thing is an angle. A view shows its point on an ellipse beside six coordinates of noise,
    which are larger, and differ from view to view.
    """
    value, slope = agreement(trial)
    count = trial.size(512, 256)

    def views(n: int) -> tuple[Tensor, Tensor, Tensor]:
        angle = 2 * math.pi * trial.uniform(n)
        shared = torch.stack([angle.cos(), 0.5 * angle.sin()], -1)
        first, second = (
            torch.cat([shared + 0.05 * trial.normal(n, 2), trial.normal(n, 6)], -1)
            for _ in range(2)
        )
        return angle, first, second

    # Orthogonal columns: from nearly parallel ones training takes long to open the circle.
    encoder = torch.linalg.qr(trial.normal(8, 2)).Q.clone().requires_grad_()
    angle, *held = views(500)

    def encoded() -> list[Tensor]:
        return [torch.nn.functional.normalize((x @ encoder).detach(), dim=-1) for x in held]

    start = encoded()
    optimizer = torch.optim.Adam([encoder], lr=0.1)
    for _ in range(120):
        _, first, second = views(count)
        optimizer.zero_grad()
        contrastive.nt_xent(first @ encoder, second @ encoder, 0.2).backward()
        optimizer.step()
    end = encoded()
    # On the circle the mean of exp(−2‖z − z'‖²) under the uniform law is e⁻⁴ I₀(4).
    uniform = math.log(float(import_module("scipy.special").ive(0, 4.0)))
    apart = uniformity(torch.cat(end)) - uniform
    before, after = alignment(*start), alignment(*end)
    radius = 1 + 0.12 * trial.normal(len(angle), 1)

    def draw(figure: Any) -> None:
        axes = figure.subplots(1, 2)
        for axis, (z, _), title in zip(axes, (start, end), ("before", "after"), strict=True):
            axis.scatter(*(z * radius).T, c=angle, cmap=cycle(), s=6)
            axis.set(aspect="equal", xticks=[], yticks=[], xlim=(-1.5, 1.5), ylim=(-1.5, 1.5))
            axis.set_title(title, color=MUTED)
            tidy(axis)

    return Evidence(
        [
            at_most("value_gap", value, 1e-12, "loss against NT-Xent written out pair by pair"),
            at_most("gradient_gap", slope, 1e-12, "its gradient against torch's of that"),
            at_most("alignment", after, 0.2, "mean squared distance of two views after training"),
            at_most("uniformity", apart, 0.1, "uniformity less that of the uniform law"),
            noted("alignment_before", before, "mean squared distance before training"),
        ],
        f"The loss is NT-Xent to {float(value):.0e}, its gradient to {float(slope):.0e}. Training "
        f"brings the squared distance of two views from {before:.2f} to {after:.2f}, and the "
        f"uniformity to within {math.ceil(1e4 * abs(apart)) / 1e4:g} of that of the uniform law on "
        "the circle.",
        Picture(
            draw,
            "Views on the circle, radii jittered, the color their thing's angle. Training orders "
            "the things by angle and spreads them evenly: aligned and uniform.",
        ),
    )


CLAIM = Claim(
    id="simclr",
    title="SimCLR",
    statement=(
        "NT-Xent, with its 2N views, each of them left out of its own normalizer, is the "
        "likelihood of the tilted family on the sphere. It pulls views of one thing together and "
        "spreads things evenly."
    ),
    source="main draft, section 1; exponential family draft, after eq. (7); Chen et al. (2020)",
    formula=r"\ell_{ij} = -\log \frac{\exp\left(\operatorname{sim}(z_i, z_j)/\tau\right)}"
    r"{\sum_{k \ne i} \exp\left(\operatorname{sim}(z_i, z_k)/\tau\right)}",
    recorded=HOLDS,
    experiment=experiment,
    systems=("SimCLR",),
    tests=("tests/contrastive/test_info_nce.py",),
)

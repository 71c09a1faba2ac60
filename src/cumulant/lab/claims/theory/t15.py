"""T15: normalization pulls each token back to a sphere, and does nothing to the set as a whole."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cumulant import dynamics
from cumulant.figures import INK, series_color
from cumulant.lab.claims.claim import CORRECTED, Claim, Evidence, Picture, Trial, at_most


def singular_values(contraction: dynamics.Contraction, x: Tensor) -> Tensor:
    """Of the differential at each of the points."""

    def alone(z: Tensor) -> Tensor:
        return contraction(z[None])[0]

    return torch.stack([torch.linalg.svdvals(torch.func.jacrev(alone)(z)) for z in x])


def expected(size: Tensor, d: int, zeros: int) -> Tensor:
    """The same number d - zeros times, and as many zeros."""
    return torch.cat([size[:, None].expand(-1, d - zeros), size.new_zeros(len(size), zeros)], -1)


def pair_ratio(contraction: dynamics.Contraction, x: Tensor) -> Tensor:
    """The largest ratio of distances after and before."""
    i, j = torch.triu_indices(len(x), len(x), 1)
    y = contraction(x)
    return ((y[i] - y[j]).norm(dim=-1) / (x[i] - x[j]).norm(dim=-1)).max()


def experiment(trial: Trial) -> Evidence:
    """Gaussian clouds under layer norm: what becomes of the set, and what of each token."""
    clouds, n, draws = trial.size(40, 20), trial.size(256, 128), trial.size(199, 99)
    gain, bias = 0.5 + trial.uniform(3), trial.normal(3)
    # Sets of tokens as they come: Gaussian, with some mean and covariance.
    sets = trial.normal(clouds, n, 3) @ trial.normal(clouds, 3, 3) + trial.normal(clouds, 1, 3)
    out = dynamics.LayerNorm(gain, bias)(sets)
    theirs = F.layer_norm(sets, (3,), gain, bias, eps=0)
    away = out - out.mean(-2, keepdim=True)
    covariance = away.mT @ away / n
    off = (covariance - torch.diag(gain.square())).norm(dim=(-2, -1)) / gain.square().norm()
    # Normalized tokens lie in a plane: two coordinates say all.
    before, after = (
        float((dynamics.gaussianity(z[..., :2], draws=draws).p_value <= 0.05).double().mean())
        for z in (sets, out)
    )
    white = dynamics.Whiten()(sets)
    white_gap = (white.mT @ white / n - torch.eye(3, dtype=torch.float64)).abs().max()

    d = 5
    away_from_zero = F.normalize(trial.normal(24, d), dim=-1)
    radii = torch.linspace(0.3, 6, 24, dtype=torch.float64)
    x = radii[:, None] * away_from_zero
    centered = (x - x.mean(-1, keepdim=True)).norm(dim=-1)
    cases = (
        (dynamics.Sphere(), 1 / radii, 1),
        (dynamics.RMSNorm(), d**0.5 / radii, 1),
        (dynamics.LayerNorm(), d**0.5 / centered, 2),
    )
    gaps = [(singular_values(c, x) - expected(s, d, z)).abs().max() for c, s, z in cases]
    directions = trial.normal(60, d)
    directions = directions - directions.mean(-1, keepdim=True)  # as layer norm sees them
    shell = F.normalize(directions, dim=-1) * d**0.5
    inner = pair_ratio(dynamics.LayerNorm(), 0.3 * shell)
    outer = pair_ratio(dynamics.LayerNorm(), (1 + 2 * trial.uniform(60, 1)) * shell)

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        named = (("sphere", dynamics.Sphere(), 1.0), ("layer norm", dynamics.LayerNorm(), d**0.5))
        for i, (name, contraction, radius) in enumerate(named):
            top = singular_values(contraction, radii[:, None] * shell[:1] / d**0.5)[:, 0]
            left.plot(radii, radius / radii, color=series_color(i), label=name)
            left.scatter(radii, top, s=12, color=series_color(i), zorder=3)
        left.axhline(1, color=INK, linewidth=0.8)
        left.set(xlabel="distance from the center", ylabel="largest singular value")
        left.set(yscale="log", title="Contraction outside the radius only")
        left.set_yticks((0.2, 0.5, 1, 2, 5), ("0.2", "0.5", "1", "2", "5"))
        left.minorticks_off()
        left.legend()
        for i, (part, label) in enumerate(((sets[0], "before"), (out[0], "after"))):
            right.scatter(*part[:, :2].mT, s=6, color=series_color(i), label=label, zorder=3)
        right.set(xlabel="first coordinate", ylabel="second", title="What becomes of a set")
        right.legend(markerscale=2)

    return Evidence(
        [
            at_most(
                "set_covariance_gap",
                off.median(),
                0.1,
                "median relative distance of the set's covariance from the learned diagonal one",
            ),
            at_most(
                "rejected",
                after,
                0.15,
                "share of Gaussian sets that a 5% test no longer takes for Gaussian",
                error=(max(after * (1 - after), 1 / clouds) / clouds) ** 0.5,
            ),
            at_most("inside_ratio", inner, 1, "largest ratio of distances inside the radius"),
            at_most(
                "singular_gap",
                torch.stack(gaps).max(),
                1e-9,
                "singular values of sphere, RMS and layer norm against 1/‖x‖, √d/‖x‖, √d/‖x−x̄‖",
                form="correction",
            ),
            at_most(
                "token_gap",
                (out - theirs).abs().max(),
                1e-9,
                "layer norm of the set against torch's, token by token",
                form="correction",
            ),
            at_most(
                "outside_ratio",
                outer,
                1 + 1e-9,
                "largest ratio of distances outside the radius",
                form="correction",
            ),
            at_most(
                "whiten_gap",
                white_gap,
                1e-6,
                "whitening, which does act on the set: its covariance against the identity",
                form="correction",
            ),
            at_most(
                "false_alarms",
                before,
                0.25,
                "share of the same sets that the test rejects before layer norm",
                form="control",
                error=(max(before * (1 - before), 1 / clouds) / clouds) ** 0.5,
            ),
        ],
        f"After layer norm a Gaussian set is Gaussian no more ({after:.0%} rejected), "
        f"and its covariance is off the learned one by {float(off.median()):.0%}. Per token the "
        f"singular values are √d/‖x−x̄‖: distances shrink outside the radius and grow inside, "
        f"here by up to {float(inner):.1f}.",
        Picture(
            draw,
            "Left: what the contractions do to small distances (dots) is their radius over the "
            "distance from the center (lines), above 1 inside. Right: layer norm puts each token "
            "of a Gaussian set on one ellipse around the learned mean; the set has neither the "
            "learned covariance nor a Gaussian law.",
        ),
    )


CLAIM = Claim(
    id="T15",
    title="Contraction",
    statement=(
        "Attention's expansion is balanced by a contraction: projection to the sphere, or layer "
        "normalization, which turns the set of hidden states into a Gaussian with learned mean and "
        "diagonal covariance."
    ),
    source="abstract; exponential family draft, §3.1",
    formula=r"\sigma(D\,\mathrm{sphere}) = \frac{1}{\|x\|}, \qquad "
    r"\sigma(D\,\mathrm{layernorm}) = \frac{\sqrt{d}}{\|x - \bar{x}\|}",
    recorded=CORRECTED,
    experiment=experiment,
    correction=(
        "Layer normalization acts on each token, not on the set, and makes no Gaussian of it. Like "
        "projection to the sphere it contracts only outside its own radius."
    ),
    tests=("tests/dynamics/test_step.py",),
)

"""T15: normalization pulls each token back to a sphere, but does not act on the set as a whole."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cumulant import dynamics
from cumulant.core.typed import linalg
from cumulant.figures import INK, series_color
from cumulant.lab.claims.claim import Claim, Found, Trial, table
from cumulant.lab.claims.measuring import gap, median, pair_ratios

CLAIM = Claim(
    id="T15",
    title="Contraction",
    evidence="identity",
    statement="Attention's expansion is balanced by a contraction: projection to the sphere, or "
    "layer normalization, which turns the set of hidden states into a Gaussian with learned mean "
    "and diagonal covariance.",
    correction="Layer normalization acts on each token, not on the set, and does not make the set "
    "Gaussian. Like projection to the sphere, it contracts only outside its own radius.",
    source="abstract; exponential family draft, §3.1",
    formula=r"\sigma(D\,\mathrm{sphere}) = \frac{1}{\|x\|}, \qquad "
    r"\sigma(D\,\mathrm{layernorm}) = \frac{\sqrt{d}}{\|x - \bar{x}\|}",
    bounds="A 5% test rejects one Gaussian set in twenty; with 40 sets 0.15 is three standard "
    "errors above that and 0.25, for the control, six. If normalization acted on the set, "
    "its covariance would be the learned one to rounding, as whitening's is: a tenth is "
    "generous.",
    recorded="holds with a correction",
    tests=("tests/dynamics/test_step.py",),
    rules=table("""
      statement:
        set_covariance_gap ≤ 0.1: median relative distance of the set's covariance from the learned
            diagonal one
        rejected ≤ 0.15: share of Gaussian sets that a 5% normality test rejects after layer norm
        inside_ratio ≤ 1: largest ratio of distances inside the radius
      correction:
        singular_gap ≤ 1e-9: singular values of sphere, RMS and layer norm against 1/‖x‖, √d/‖x‖,
            √d/‖x−x̄‖
        token_gap ≤ 1e-9: layer norm of the set against torch's, token by token
        outside_ratio ≤ 1.000000001: largest ratio of distances outside the radius
        whiten_gap ≤ 1e-6: whitening, which does act on the set: its covariance against the identity
      control:
        false_alarms ≤ 0.25: share of the same sets that the test rejects before layer norm
    """),
    finding="After layer norm a Gaussian set is no longer Gaussian ({rejected:.0%} rejected), and "
    "its covariance differs from the learned one by {set_covariance_gap:.0%}. Per token the "
    "singular values are √d/‖x−x̄‖: distances shrink outside the radius and grow inside, here by "
    "up to {inside_ratio:.1f}.",
    caption="Left: the contractions scale small distances (dots) by their radius over the distance "
    "from the center (lines), above 1 inside. Right: layer norm puts each token of a Gaussian set "
    "on one ellipse around the learned mean; the set has neither the learned covariance nor a "
    "Gaussian law.",
)


WIDTH = 5
RADII = torch.linspace(0.3, 6, 24, dtype=torch.float64)


def singular_values(contraction: dynamics.Contraction, x: Tensor) -> Tensor:
    """Of the differential at each of the points."""

    def alone(z: Tensor) -> Tensor:
        return contraction(z[None])[0]

    return torch.stack([linalg.svdvals(torch.func.jacrev(alone)(z)) for z in x])


def expected(size: Tensor, d: int, zeros: int) -> Tensor:
    """The same number d - zeros times, and as many zeros."""
    return torch.cat([size[:, None].expand(-1, d - zeros), size.new_zeros(len(size), zeros)], -1)


def rejected(x: Tensor, draws: int) -> tuple[float, float]:
    """The share of sets that a 5% test takes for not Gaussian, and its standard error."""
    share = float((dynamics.gaussianity(x, draws=draws).p_value <= 0.05).double().mean())
    return share, (max(share * (1 - share), 1 / len(x)) / len(x)) ** 0.5


def singular_gap(trial: Trial) -> float:
    """Singular values of sphere, RMS norm and layer norm, against closed forms."""
    x = RADII[:, None] * F.normalize(trial.normal(24, WIDTH), dim=-1)
    centered = linalg.vector_norm(x - x.mean(-1, keepdim=True), dim=-1)
    cases = (
        (dynamics.Sphere(), 1 / RADII, 1),
        (dynamics.RMSNorm(), WIDTH**0.5 / RADII, 1),
        (dynamics.LayerNorm(), WIDTH**0.5 / centered, 2),
    )
    return max(gap(singular_values(c, x), expected(s, WIDTH, zeros)) for c, s, zeros in cases)


def measure(trial: Trial) -> Found:
    """Gaussian clouds under layer norm: what becomes of the set, and what of each token."""
    clouds, n, draws = trial.size(40, 20), trial.size(256, 128), trial.size(199, 99)
    gain, bias = 0.5 + trial.uniform(3), trial.normal(3)
    # Sets of tokens as they come: Gaussian, with some mean and covariance.
    sets = trial.normal(clouds, n, 3) @ trial.normal(clouds, 3, 3) + trial.normal(clouds, 1, 3)
    out = dynamics.LayerNorm(gain, bias)(sets)
    away = out - out.mean(-2, keepdim=True)
    covariance = away.mT @ away / n
    off = linalg.vector_norm(
        covariance - torch.diag(gain.square()), dim=(-2, -1)
    ) / linalg.vector_norm(gain.square())
    white = dynamics.Whiten()(sets)
    singular = singular_gap(trial)
    directions = trial.normal(60, WIDTH)
    directions = directions - directions.mean(-1, keepdim=True)  # as layer norm sees them
    shell, norm = F.normalize(directions, dim=-1) * WIDTH**0.5, dynamics.LayerNorm()
    inner, outer = 0.3 * shell, (1 + 2 * trial.uniform(60, 1)) * shell
    numbers = {
        "set_covariance_gap": median(off),
        # Normalized tokens lie in a plane: two coordinates say all.
        "rejected": rejected(out[..., :2], draws),
        "inside_ratio": pair_ratios(inner, norm(inner)).max(),
        "singular_gap": singular,
        "token_gap": gap(out, F.layer_norm(sets, (3,), gain, bias, eps=0)),
        "outside_ratio": pair_ratios(outer, norm(outer)).max(),
        "whiten_gap": gap(white.mT @ white / n, torch.eye(3, dtype=torch.float64)),
        "false_alarms": rejected(sets[..., :2], draws),
    }
    return Found(numbers, out=out, sets=sets, shell=shell)


def draw(figure: Any, seen: Any) -> None:
    """What contractions do to small distances; what layer norm makes of a set."""
    left, right = figure.subplots(1, 2)
    named = (("sphere", dynamics.Sphere(), 1.0), ("layer norm", dynamics.LayerNorm(), WIDTH**0.5))
    for i, (name, contraction, radius) in enumerate(named):
        top = singular_values(contraction, RADII[:, None] * seen.shell[:1] / WIDTH**0.5)[:, 0]
        left.plot(RADII, radius / RADII, color=series_color(i), label=name)
        left.scatter(RADII, top, s=12, color=series_color(i), zorder=3)
    left.axhline(1, color=INK, linewidth=0.8)
    left.set(xlabel="distance from the center", ylabel="largest singular value")
    left.set(yscale="log", title="Contraction outside the radius only")
    left.set_yticks((0.2, 0.5, 1, 2, 5), ("0.2", "0.5", "1", "2", "5"))
    left.minorticks_off()
    left.legend()
    for i, (part, label) in enumerate(((seen.sets[0], "before"), (seen.out[0], "after"))):
        right.scatter(*part[:, :2].mT, s=6, color=series_color(i), label=label, zorder=3)
    right.set(xlabel="first coordinate", ylabel="second", title="What becomes of a set")
    right.legend(markerscale=2)

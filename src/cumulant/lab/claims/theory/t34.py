"""T34: how the Gaussian and the uniform law are lost, and how many clusters form first."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from cumulant import dynamics
from cumulant.figures import MUTED, series_color
from cumulant.lab.claims.claim import Claim, Found, Trial, table
from cumulant.lab.claims.measuring import interval, standard_error
from cumulant.lab.fixed_points import rates

CLAIM = Claim(
    id="T34",
    title="How the Gaussian is lost",
    evidence="simulation",
    statement="Whitened attention leaves a Gaussian where it is but does not hold it: the n-th "
    "cumulant grows at rate nβⁿ⁻¹. On the sphere the uniform law is lost the same way, the "
    "harmonics near degree √(2β) first, so that of the order of β^((d−1)/2) clusters form.",
    source="exponential family draft, §3.1: what is the fixed point? is it Gaussian?",
    formula=r"\dot\kappa_n = n\beta^{n-1}\kappa_n, \qquad "
    r"\dot a_k = \frac{k^2 I_k(\beta)}{\beta I_0(\beta)}\, a_k, \qquad "
    r"\text{clusters} \sim \beta^{(d-1)/2}",
    recorded="holds",
    tests=("tests/laws/test_growth.py",),
    rules=table("""
      statement:
        gaussian_error ≤ 0.02: largest relative error of nβⁿ⁻¹ for n = 3 to 6 and β from 0.25 to
            1.5, by quadrature
        gaussian_particles ≤ 0.02 (refuted at 0.1): the same for n = 3, 4 and β ≤ 0.75, by
            particles weighted to reach the tails (largest mean error over draws)
        sphere_error ≤ 0.02: largest relative error of the harmonics' rates in d = 2, 3, 4 for β
            from 1 to 64, by quadrature
        circle_particles ≤ 0.02 (refuted at 0.1): the same on the circle for β from 2 to 16, by
            particles
        first_count ≤ 0.15 (refuted at 0.5): mean number of first clusters on the circle over the
            fastest mode, minus 1 (absolute value)
        exponent_2_off ≤ 0.125 (refuted at 0.25): exponent of the number of clusters in β, d = 2,
            minus 1/2 (absolute value)
        exponent_3_off ≤ 0.125 (refuted at 0.25): d = 3, minus 1
        exponent_4_off ≤ 0.125 (refuted at 0.25): d = 4, minus 3/2
      noted:
        exponent_2: the exponent itself, d = 2
        exponent_3: d = 3
        exponent_4: d = 4
        equal_share: measured over predicted rate for n = 4, β = 0.75 with equal weights
        exponent_spread: largest difference of an exponent between N points and half of them
    """),
    bounds="Rates: 2 % is far above the quadrature's own error and below the 4 % between the "
    "two closest rates tested. Exponents of neighboring dimensions are 1/2 apart: a quarter of "
    "that is the bound, half of it refutes. On the circle four to eleven clusters are expected, "
    "seven on average: 0.15 is about one of them, and half refutes. The rule for particles was "
    "changed after numbers were seen: equal particles have no tails, and miss the rate of n = 4 "
    "by half (noted), so that they are weighted now.",
    finding="Rates agree with theory within {gaussian_error:.0e} (Gaussian) and "
    "{sphere_error:.0e} (sphere) by quadrature, within {gaussian_particles:.2%} and "
    "{circle_particles:.2%} by particles. (A cloud of {points} equal particles has no tails: its "
    "fourth cumulant grows at {equal_share:.2f} of the population's rate at β = 0.75.) The first "
    "clusters grow as β to the power {exponent_2:.2f} ± {error_2:.2f}, {exponent_3:.2f} ± "
    "{error_3:.2f} and "
    "{exponent_4:.2f} ± {error_4:.2f} in d = 2, 3, 4 (95 % intervals over {draws} starts of "
    "{points} points, β from 8 to 64).",
    caption="Left: growth rates of the modes on the circle, theory (lines) and quadrature (dots). "
    "Right: the number of first clusters against β for {points} points, mean and range over "
    "{draws} starts; lines have the slopes 1/2, 1, 3/2.",
    size=(7.4, 3.2),
)

BETAS = (8.0, 16.0, 32.0, 64.0)
LINE = ((3, 0.25), (3, 0.5), (4, 0.5), (3, 0.75), (4, 0.75))
CIRCLE = ((2, 2.0), (2, 4.0), (3, 4.0), (4, 8.0), (5, 16.0))

Counts: TypeAlias = dict[tuple[int, float], Tensor]  # by dimension and β, one for each start


def by_particles(trial: Trial) -> tuple[float, float, float]:
    """The largest relative errors on the line and on the circle, and the share of equal weights."""
    some: dict[str, Any] = {"draws": trial.size(8, 4), "generator": trial.generator}
    line, circle = trial.size(1000, 600), trial.size(1000, 300)
    on_line = [
        rates.gaussian_particle_rate(n, beta, points=line, **some).mean()
        / dynamics.gaussian_growth_rate(n, beta)
        for n, beta in LINE
    ]
    on_circle = [
        rates.circle_particle_rate(k, beta, points=circle, **some).mean()
        / dynamics.circle_growth_rate(k, beta)
        for k, beta in CIRCLE
    ]
    equal = rates.equal_particle_rate(4, 0.75, points=trial.size(2000, 500), **some).mean()
    line_error, circle_error = (
        max(abs(float(x) - 1) for x in found) for found in (on_line, on_circle)
    )
    return line_error, circle_error, float(equal) / dynamics.gaussian_growth_rate(4, 0.75)


def by_quadrature() -> tuple[float, dict[tuple[int, int, float], float], float]:
    """The largest relative error on the line; rates by (d, degree, β), and their largest error."""
    line = [
        rates.gaussian_rate(n, beta) / dynamics.gaussian_growth_rate(n, beta) - 1
        for n in (3, 4, 5, 6)
        for beta in (0.25, 0.5, 0.75, 1.0, 1.5)
    ]
    cases = [(2, k, b) for b in (1.0, 4.0, 16.0, 64.0) for k in (1, 2, 3, 4, 5, 6)]
    cases += [(2, k, b) for b in (16.0, 64.0) for k in (8, 10, 12, 15)]
    cases += [(d, k, b) for d in (3, 4) for k in (1, 3, 6) for b in (2.0, 16.0, 64.0)]
    found = {(d, k, b): rates.sphere_rate(k, b, d) for d, k, b in cases}
    off = [r / dynamics.sphere_growth_rate(k, b, dimension=d) - 1 for (d, k, b), r in found.items()]
    return max(map(abs, line)), found, max(map(abs, off))


def measure(trial: Trial) -> Found:
    """Rates by quadrature and by particles, then the clusters of random clouds."""
    line, found, sphere = by_quadrature()
    line_particles, circle_particles, equal = by_particles(trial)
    n, draws = trial.size(2000, 500), trial.size(10, 4)
    betas = BETAS[::3] if trial.quick else BETAS
    counts, small = (
        {
            (d, b): rates.first_clusters(trial.normal(draws, size, d), b)
            for d in (2, 3, 4)
            for b in betas
        }
        for size in (n, n // 2)
    )
    first = sum(float(counts[2, b].mean()) / dynamics.fastest_degree(b) for b in betas) / len(betas)
    numbers: dict[str, Any] = {
        "gaussian_error": line,
        "gaussian_particles": line_particles,
        "sphere_error": sphere,
        "circle_particles": circle_particles,
        "first_count": abs(first - 1),
        "equal_share": equal,
    }
    bars, spread = dict[str, float](), list[float]()
    for d in (2, 3, 4):
        each, other = _slopes(counts, d, betas), _slopes(small, d, betas)
        slope, error = float(each.mean()), standard_error(each)
        numbers[f"exponent_{d}"] = (slope, error)
        numbers[f"exponent_{d}_off"] = (abs(slope - (d - 1) / 2), error)
        bars[f"error_{d}"] = interval(each)
        spread.append(float((each.mean() - other.mean()).abs()))
    numbers["exponent_spread"] = max(spread)
    circle = {(k, b): r for (d, k, b), r in found.items() if d == 2}
    return Found(numbers, counts=counts, circle=circle, points=n, draws=draws, betas=betas, **bars)


def _slopes(counts: Counts, d: int, betas: tuple[float, ...]) -> Tensor:
    """The exponent of β in the number of clusters, one for each start."""
    y = torch.stack([counts[d, b] for b in betas]).log()
    x = torch.tensor(betas, dtype=torch.float64).log()
    away = x - x.mean()
    return away @ y / away.square().sum()


def draw(figure: Any, seen: Any) -> None:
    """Rates of the circle's modes, and the number of first clusters."""
    left, right = figure.subplots(1, 2)
    modes = range(1, 17)
    for i, beta in enumerate((4.0, 16.0, 64.0)):
        line = [dynamics.circle_growth_rate(k, beta) for k in modes]
        left.plot(modes, line, color=series_color(i), label=f"β = {beta:g}")
        dots = [(k, r) for (k, b), r in seen.circle.items() if b == beta]
        left.plot(*zip(*dots, strict=True), "o", color=series_color(i), markersize=4)
    left.axhline(2 / math.e, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
    left.annotate("2/e", (14.8, 2 / math.e), (0, 3), textcoords="offset points", color=MUTED)
    left.set(xlabel="mode k", ylabel="growth rate", ylim=(-0.03, 0.84))
    left.set_xticks((1, 4, 8, 12, 16))
    left.legend(loc="center right")
    betas = np.array(seen.betas)
    for i, d in enumerate((2, 3, 4)):
        count = torch.stack([seen.counts[d, b] for b in seen.betas])
        mean = count.mean(-1).numpy()
        low, high = mean - count.amin(-1).numpy(), count.amax(-1).numpy() - mean
        color, at = series_color(i), betas * (1 + 0.03 * (i - 1))
        right.errorbar(at, mean, (low, high), fmt="o", color=color, markersize=4, capsize=3)
        middle = np.exp(np.log(mean).mean() - (d - 1) / 2 * np.log(betas).mean())
        right.plot(betas, middle * betas ** ((d - 1) / 2), color=color, linewidth=1)
        right.annotate(f"d = {d}", (at[-1], mean[-1]), (8, -3), textcoords="offset points")
    right.set(xscale="log", yscale="log", xlabel="β", ylabel="first clusters", xlim=(7, 110))
    right.set_xticks(betas, [f"{b:g}" for b in betas])
    right.set_yticks((3, 10, 30, 100), ("3", "10", "30", "100"))
    right.minorticks_off()

"""T32: mean-field equations of vector spins, and attention as one case of their map."""

from __future__ import annotations

import math
from importlib import import_module
from itertools import product
from typing import Any

import torch
from torch import Tensor

from cumulant import Gaussian, VonMisesFisher, dynamics
from cumulant.figures import INK, series_color
from cumulant.lab.claims.claim import (
    HOLDS,
    Claim,
    Evidence,
    Picture,
    Trial,
    at_least,
    at_most,
    noted,
)


def sphere(d: int) -> VonMisesFisher:
    """The uniform law on the sphere in d dimensions; d = 1: plus and minus one."""
    return VonMisesFisher(torch.eye(d, dtype=torch.float64)[0], 0.0)


def length(d: int, kappa: float) -> float:
    """A_d(kappa), a ratio of Bessel functions: the mean of a spin in a field of that strength."""
    if kappa < 1e-8:
        return kappa / d  # where both functions underflow
    ive: Any = import_module("scipy.special").ive
    return float(ive(d / 2, kappa) / ive(d / 2 - 1, kappa))


def magnetization(d: int, strength: float, field: float) -> float:
    """The largest root of m = A_d(strength m + field), by bisection."""
    low, high = 1e-9, 1.0
    if length(d, strength * low + field) < low:
        return 0.0
    for _ in range(60):
        m = 0.5 * (low + high)
        low, high = (m, high) if length(d, strength * m + field) > m else (low, m)
    return low


def uniform(d: int, strength: float, field: float, n: int = 5) -> Tensor:
    """The library's solution for n spins that are all coupled alike, from a magnetized start."""
    J = strength / (n - 1) * (1 - torch.eye(n, dtype=torch.float64))
    along = torch.zeros(n, d, dtype=torch.float64)
    along[:, 0] = 1.0
    found = dynamics.mean_field(
        sphere(d), J, field * along[0], start=0.9 * along, solver="anderson", tol=1e-11
    )
    return found.mean


def experiment(trial: Trial) -> Evidence:
    """Spheres against Bessel functions, Ising spins against enumeration, Gaussians solved."""
    dimensions = (1, 2, 3, 5)
    gaps = [
        (uniform(d, s, 0.2)[:, 0] - magnetization(d, s, 0.2)).abs().max()
        for d in dimensions
        for s in ((2.0 * d,) if trial.quick else (0.5 * d, d, 2.0 * d))
    ]
    # Spins of plus and minus one with random couplings: all states enumerated.
    n = trial.size(10, 7)
    drawn = 0.5 * trial.normal(n, n) / n**0.5
    J = (drawn + drawn.mT) * (1 - torch.eye(n, dtype=torch.float64))
    field = trial.normal(n, 1)
    found = dynamics.mean_field(sphere(1), J, field, tol=1e-12)
    states = torch.tensor(list(product([-1.0, 1.0], repeat=n)), dtype=torch.float64)
    heights = 0.5 * ((states @ J) * states).sum(-1) + states @ field[:, 0]
    log_z = torch.logsumexp(heights, 0) - n * math.log(2)
    exact_mean = heights.softmax(0) @ states

    def free(m: Tensor) -> Tensor:
        up, down = (1 + m) / 2, (1 - m) / 2
        entropy = (up * (2 * up).log() + down * (2 * down).log()).sum()
        return entropy - 0.5 * m @ J @ m - m @ field[:, 0]

    m = found.mean[:, 0].detach()
    # Fields in all directions: each mean is A_d along the site's own field.
    for d in (2, 5) if trial.quick else dimensions:
        b = trial.normal(n, d)
        spins = dynamics.mean_field(sphere(d), J, b, solver="anderson", tol=1e-11).mean
        local = J @ spins + b
        aligned = [length(d, float(e.norm())) * e / e.norm() for e in local]
        gaps.append((spins - torch.stack(aligned)).abs().max())
    slope: Any = torch.func.grad(free)(m)

    d = 3
    normal = Gaussian(torch.zeros(d, dtype=torch.float64), torch.eye(d, dtype=torch.float64))
    pull = trial.normal(n, d)
    weak = 0.5 * J / torch.linalg.matrix_norm(J, 2)
    linear = dynamics.mean_field(normal, weak, pull, tol=1e-12).mean
    solved = torch.linalg.solve(torch.eye(n, dtype=torch.float64) - weak, pull)
    x = trial.normal(8, d)
    weights = (x @ x.mT).softmax(-1)
    attention = (normal.mean(weights @ x) - (dynamics.step(x) - x)).abs().max()
    asymmetry = (weights - weights.mT).norm() / weights.norm()

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        curve = torch.linspace(0, 10, 161).tolist()
        for i, d in enumerate(dimensions):
            axes.plot(
                curve,
                [magnetization(d, s, 0.0) for s in curve],
                color=series_color(i),
                linewidth=1.2,
            )
            spots = [0.6 * d, 1.4 * d, 2.0 * d] if d > 3 else [0.6 * d, 1.4 * d, 2.0 * d, 3.0 * d]
            ours = [float(uniform(d, s, 0.0)[0, 0]) for s in spots]
            axes.scatter(
                spots,
                ours,
                s=22,
                marker="os^D"[i],
                color=series_color(i),
                label=f"d = {d}",
                zorder=3,
            )
            axes.plot([d, d], [0, 0.04], color=INK, linewidth=1)
        axes.set(xlabel="coupling", ylabel="mean length of a spin", ylim=(-0.02, 1))
        axes.legend(loc="lower right", bbox_to_anchor=(1, 0.05))

    return Evidence(
        [
            at_most(
                "sphere_gap",
                torch.stack(gaps).max(),
                1e-7,
                "spins on spheres, d = 1, 2, 3, 5, against ratios of Bessel functions",
            ),
            at_most(
                "stationary_gap",
                slope.abs().max(),
                1e-8,
                "gradient of the free energy, written out, at the solution",
            ),
            at_least(
                "free_energy_excess",
                found.free_energy.detach() + log_z,
                0,
                "free energy above −log Z by enumeration: it is an upper bound",
            ),
            at_most(
                "free_energy_gap",
                (found.free_energy.detach() - free(m)).abs(),
                1e-9,
                "the library's free energy against the formula",
            ),
            at_most(
                "gaussian_gap",
                (linear - solved).abs().max(),
                1e-8,
                "Gaussian sites against (I − J)⁻¹ field",
            ),
            at_most(
                "attention_gap",
                attention,
                1e-12,
                "the map for Gaussian sites, J the softmax of the states, against attention",
            ),
            at_least("asymmetry", asymmetry, 0.01, "of that J, relative: there is no Hamiltonian"),
            noted(
                "mean_field_error",
                (m - exact_mean).abs().max(),
                "means against enumeration: naive mean field is an approximation",
            ),
        ],
        f"The equations m = ∇G(Jm + field) are solved to {float(torch.stack(gaps).max()):.0e} of "
        f"the Bessel functions, and attention is their map for Gaussian sites to "
        f"{float(attention):.0e}. Its couplings are asymmetric by {float(asymmetry):.0%}, so it "
        f"has no such free energy.",
        Picture(
            draw,
            "Spins on a sphere in d dimensions that are all coupled alike: the library's solutions "
            "(markers) on the curves of m = A_d(Jm). Order sets in at a coupling of d (ticks on "
            "the axis).",
        ),
    )


CLAIM = Claim(
    id="T32",
    title="Mean field of vector spins",
    statement=(
        "Vector spins with symmetric couplings have the mean-field equations m = ∇G(Jm + field), "
        "the same map as attention with the sites' own G. Attention is the case of Gaussian sites "
        "with J the softmax of the states, which is not symmetric, so that there is no Hamiltonian."
    ),
    source="proofs draft, §B, end, after McBal's mean-field reading of transformers",
    formula=r"m_i = \nabla G_{h_i}\left(\sum_j J_{ij} m_j + b_i\right), \qquad "
    r"\nabla G_{\mathrm{sphere}}(\eta) = A_d(\|\eta\|) \frac{\eta}{\|\eta\|}",
    recorded=HOLDS,
    experiment=experiment,
    systems=("mean-field vector spins (McBal)",),
    tests=("tests/laws/test_spins.py", "tests/laws/test_sphere.py"),
)

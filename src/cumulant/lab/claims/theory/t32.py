"""T32: mean-field equations of vector spins, and attention as a special case."""

from __future__ import annotations

import math
from importlib import import_module
from itertools import product
from typing import Any

import torch
from torch import Tensor

from cumulant import Gaussian, VonMisesFisher, dynamics
from cumulant.core.typed import linalg, tolist
from cumulant.figures import INK, series_color
from cumulant.lab.claims.claim import Claim, Found, Trial, table
from cumulant.lab.claims.measuring import gap

CLAIM = Claim(
    id="T32",
    title="Mean field of vector spins",
    evidence="identity",
    statement="Vector spins with symmetric couplings have the mean-field equations m = ∇G(Jm + "
    "field), the same map as attention with each site's own G. Attention is the case of Gaussian "
    "sites with J the softmax of the states, which is not symmetric, so there is no Hamiltonian.",
    source="proofs draft, §B, end, after McBal's mean-field reading of transformers",
    formula=r"m_i = \nabla G_{h_i}\left(\sum_j J_{ij} m_j + b_i\right), \qquad "
    r"\nabla G_{\mathrm{sphere}}(\eta) = A_d(\|\eta\|) \frac{\eta}{\|\eta\|}",
    bounds="Symmetric couplings would have an asymmetry of rounding, about 1e-16; 0.01 is far "
    "above that.",
    recorded="holds",
    systems=("mean-field vector spins (McBal)",),
    tests=("tests/laws/test_spins.py", "tests/laws/test_sphere.py"),
    rules=table("""
      statement:
        sphere_gap ≤ 1e-7: spins on spheres, d = 1, 2, 3, 5, against ratios of Bessel functions
        stationary_gap ≤ 1e-8: gradient of the free energy, written out, at the solution
        free_energy_excess ≥ 0: free energy above −log Z by enumeration: it is an upper bound
        free_energy_gap ≤ 1e-9: the library's free energy against the formula
        gaussian_gap ≤ 1e-8: Gaussian sites against (I − J)⁻¹ field
        attention_gap ≤ 1e-12: the map for Gaussian sites, J the softmax of the states, against
            attention
        asymmetry ≥ 0.01: of that J, relative: there is no Hamiltonian
      noted:
        mean_field_error: means against enumeration: naive mean field is an approximation
    """),
    finding="The equations m = ∇G(Jm + field) are solved to {sphere_gap:.0e} of the Bessel "
    "functions, and attention is their map for Gaussian sites to {attention_gap:.0e}. Its "
    "couplings are asymmetric by {asymmetry:.0%}, so it has no such free energy.",
    caption="Spins on a sphere in d dimensions, all coupled equally: the library's solutions "
    "(markers) on the curves of m = A_d(Jm). Order sets in at a coupling of d (ticks on the "
    "axis).",
)

DIMENSIONS = (1, 2, 3, 5)


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


def aligned_gap(J: Tensor, b: Tensor) -> float:
    """Fields in all directions: each mean is A_d along the site's own field."""
    d = b.shape[-1]
    spins = dynamics.mean_field(sphere(d), J, b, solver="anderson", tol=1e-11).mean
    aligned = [
        length(d, float(linalg.vector_norm(e))) * e / linalg.vector_norm(e) for e in J @ spins + b
    ]
    return gap(spins, torch.stack(aligned))


def enumerated(J: Tensor, field: Tensor) -> dict[str, Any]:
    """Spins of plus and minus one: mean field against its formula and all states enumerated."""
    n = len(J)
    found = dynamics.mean_field(sphere(1), J, field[:, None], tol=1e-12)
    states = torch.tensor(list(product([-1.0, 1.0], repeat=n)), dtype=torch.float64)
    heights = 0.5 * ((states @ J) * states).sum(-1) + states @ field
    log_z = torch.logsumexp(heights, 0) - n * math.log(2)

    def free(m: Tensor) -> Tensor:
        up, down = (1 + m) / 2, (1 - m) / 2
        entropy = (up * (2 * up).log() + down * (2 * down).log()).sum()
        return entropy - 0.5 * m @ J @ m - m @ field

    m, energy = found.mean[:, 0].detach(), found.free_energy.detach()
    slope: Any = torch.func.grad(free)(m)
    return {
        "stationary_gap": slope.abs().max(),
        "free_energy_excess": energy + log_z,
        "free_energy_gap": gap(energy, free(m)),
        "mean_field_error": gap(m, heights.softmax(0) @ states),
    }


def measure(trial: Trial) -> Found:
    """Spheres against Bessel functions, Ising spins against enumeration, Gaussians solved."""
    gaps = [
        gap(uniform(d, s, 0.2)[:, 0], magnetization(d, s, 0.2))
        for d in DIMENSIONS
        for s in ((2.0 * d,) if trial.quick else (0.5 * d, d, 2.0 * d))
    ]
    n, one = trial.size(10, 7), torch.eye(3, dtype=torch.float64)
    drawn = 0.5 * trial.normal(n, n) / n**0.5
    J = (drawn + drawn.mT) * (1 - torch.eye(n, dtype=torch.float64))
    numbers = enumerated(J, trial.normal(n, 1)[:, 0])
    some = (2, 5) if trial.quick else DIMENSIONS
    gaps += [aligned_gap(J, trial.normal(n, d)) for d in some]
    normal, pull = Gaussian(0 * one[0], one), trial.normal(n, 3)
    weak = 0.5 * J / linalg.matrix_norm(J, 2)
    linear = dynamics.mean_field(normal, weak, pull, tol=1e-12).mean
    solved = linalg.solve(torch.eye(n, dtype=torch.float64) - weak, pull)
    x = trial.normal(8, 3)
    weights = (x @ x.mT).softmax(-1)
    numbers |= {
        "sphere_gap": max(gaps),
        "gaussian_gap": gap(linear, solved),
        "attention_gap": gap(normal.mean(weights @ x), dynamics.step(x) - x),
        "asymmetry": linalg.vector_norm(weights - weights.mT) / linalg.vector_norm(weights),
    }
    return Found(numbers)


def draw(figure: Any, seen: Any) -> None:
    """The mean length of spins against their coupling, in each dimension."""
    axes = figure.subplots()
    curve = tolist(torch.linspace(0, 10, 161))
    for i, d in enumerate(DIMENSIONS):
        color, lengths = series_color(i), [magnetization(d, s, 0.0) for s in curve]
        axes.plot(curve, lengths, color=color, linewidth=1.2)
        spots = [0.6 * d, 1.4 * d, 2.0 * d] if d > 3 else [0.6 * d, 1.4 * d, 2.0 * d, 3.0 * d]
        ours = [float(uniform(d, s, 0.0)[0, 0]) for s in spots]
        look = {"s": 22, "marker": "os^D"[i], "label": f"d = {d}", "zorder": 3}
        axes.scatter(spots, ours, color=color, **look)
        axes.plot([d, d], [0, 0.04], color=INK, linewidth=1)
    axes.set(xlabel="coupling", ylabel="mean length of a spin", ylim=(-0.02, 1))
    axes.legend(loc="lower right", bbox_to_anchor=(1, 0.05))

"""The Laplace transform: G(y) = log L{h}(-y), and its derivatives are cumulants."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cumulant import Empirical, FixedShapeGamma, GaussianMixture, Measure
from cumulant.core.typed import tolist
from cumulant.figures import series_color
from cumulant.lab.claims.claim import Claim, Found, Trial, table
from cumulant.lab.claims.measuring import gap

CLAIM = Claim(
    id="laplace",
    title="The log Laplace transform",
    evidence="identity",
    statement="With x itself as the statistic, a measure h generates an exponential family whose "
    "log-normalizer is the log of its Laplace transform at −y. So G generates cumulants: its "
    "derivatives are those of the tilted law.",
    theory="T1",
    source="exponential family draft, eq. (3) and (6)",
    formula=r"G(y) = \log \mathcal{L}\{h\}(-y) = \log \int e^{\langle y, x\rangle} h(x)\, dx, "
    r"\qquad G^{(k)}(y) = \kappa_k\left[p(\cdot \mid y)\right]",
    recorded="holds",
    systems=("Laplace transform",),
    tests=("tests/laws/test_tilted_measures.py", "tests/laws/test_attention_calculus.py"),
    rules=table("""
      statement:
        transform_gap ≤ 1e-9: G against log L{h}(−y) by quadrature
        closed_gap ≤ 1e-9: G of Gumbel's law against log Γ(1 − y)
        mean_gap ≤ 1e-9: first derivative against the mean
        variance_gap ≤ 1e-9: second against the variance
        third_gap ≤ 1e-8: third against the third cumulant
        fourth_gap ≤ 1e-7: fourth against the fourth cumulant
      noted:
        mirrored_gap: error of G with L{h}(y) instead: the sign matters
    """),
    finding="For three densities G is the log Laplace transform at −y to {transform_gap:.0e}, and "
    "its first four derivatives are the cumulants to {worst:.0e}.",
    caption="Three densities, and the third derivative of their G (lines) on the third cumulant "
    "of the tilted law by quadrature (dots).",
)


quad: Any = import_module("scipy.integrate").quad


def gaussians(x: float) -> float:
    """0.3 N(-1.5, 0.3) + 0.7 N(1, 0.7)."""
    bells = (0.3, -1.5, 0.3), (0.7, 1.0, 0.7)
    return sum(
        p * math.exp(-((x - a) ** 2) / (2 * v)) / math.sqrt(2 * math.pi * v) for p, a, v in bells
    )


def gamma(x: float) -> float:
    """Shape 2.5, rate 2."""
    return 2**2.5 * x**1.5 * math.exp(-2 * x) / math.gamma(2.5)


def gumbel(x: float) -> float:
    """The law of the largest of many."""
    return math.exp(-x - math.exp(-x))


def laws() -> dict[str, tuple[Measure, Callable[[float], float], tuple[float, ...]]]:
    """By name: the library's measure, its density, and where quadrature is cut."""
    m, s = torch.tensor([[-1.5, 1.0], [0.3, 0.7]], dtype=torch.float64)
    w = torch.tensor([0.3, 0.7], dtype=torch.float64)
    shape, rate = torch.tensor([2.5, 2.0], dtype=torch.float64)
    # A density without a family is nodes with masses, as attention has keys with weights.
    nodes = torch.linspace(-5, 60, 6501, dtype=torch.float64)
    log_masses = math.log(0.01) - nodes - torch.exp(-nodes)
    return {
        "two Gaussians": (GaussianMixture(m[:, None], s, w.log()), gaussians, (-12, -1.5, 1, 14)),
        "gamma": (FixedShapeGamma(shape, rate), gamma, (0, 1, 8, 60)),
        "Gumbel, as nodes": (Empirical(nodes[:, None], log_masses), gumbel, (-5, 0, 8, 60)),
    }


def cumulants(h: Callable[[float], float], ends: tuple[float, ...], at: float) -> list[float]:
    """log L{h}(-y) at y, and the first four cumulants of the tilted law, by quadrature."""

    def moment(power: int, center: float) -> float:
        """∫ e^{yx} (x - center)^power h(x) dx: for power 0, L{h}(-y)."""

        def integrand(x: float) -> float:
            return math.exp(at * x) * (x - center) ** power * h(x)

        return sum(quad(integrand, *piece, epsabs=1e-13)[0] for piece in pairwise(ends))

    total = moment(0, 0.0)
    center = moment(1, 0.0) / total
    two, three, four = (moment(k, center) / total for k in (2, 3, 4))
    return [math.log(total), center, two, three, four - 3 * two**2]


def derivatives(measure: Measure, y: Tensor) -> Tensor:
    """G and four derivatives at each y, one column each, by autograd."""
    at = y.clone().requires_grad_()
    columns = [measure.log_normalizer(at[:, None])]
    for _ in range(4):
        (slope,) = torch.autograd.grad(columns[-1].sum(), at, create_graph=True)
        columns.append(slope)
    return torch.stack(columns, -1).detach()


def measure(trial: Trial) -> Found:
    """Three densities on a line: the library's G and four derivatives against scipy's quad."""
    y = torch.linspace(-0.9, 0.5, trial.size(15, 5), dtype=torch.float64)
    off, mirrored = list[Tensor](), list[float]()
    skew: dict[str, tuple[Tensor, Tensor]] = {}
    for name, (h, density, ends) in laws().items():
        ours = derivatives(h, y)
        truth = torch.tensor([cumulants(density, ends, at) for at in tolist(y)], dtype=y.dtype)
        off.append((ours - truth).abs().amax(0))
        mirrored.append(gap(h.log_normalizer(-y[:, None]), ours[:, 0]))
        skew[name] = ours[:, 3], truth[:, 3]
    gaps = torch.stack(off).amax(0)
    # For Gumbel's law the transform is known: L{h}(-y) = Γ(1 - y).
    known = import_module("scipy.special").gammaln(1 - y.numpy())
    numbers = {
        "transform_gap": gaps[0],
        "closed_gap": gap(laws()["Gumbel, as nodes"][0].log_normalizer(y[:, None]), known),
        "mean_gap": gaps[1],
        "variance_gap": gaps[2],
        "third_gap": gaps[3],
        "fourth_gap": gaps[4],
        "mirrored_gap": max(mirrored),
    }
    return Found(numbers, worst=float(gaps[1:].max()), skew=skew, y=y)


def draw(figure: Any, seen: Any) -> None:
    """The densities, and the third derivative of their G."""
    left, right = figure.subplots(1, 2)
    grid = np.linspace(-4, 9, 300)
    for i, (name, (_, h, ends)) in enumerate(laws().items()):
        density = [h(x) if x > ends[0] else 0.0 for x in grid]
        left.plot(grid, density, color=series_color(i), label=name)
        curve, dots = seen.skew[name]
        right.plot(seen.y, curve, color=series_color(i))
        right.plot(seen.y, dots, "o", ms=4, color=series_color(i))
    left.set(xlabel="x", ylabel="h(x)", ylim=(0, 0.72))
    left.legend(loc="upper right")
    right.set(xlabel="y", ylabel="third derivative of G")

"""The Laplace transform: G(y) = log L{h}(-y), and its derivatives are cumulants."""

from __future__ import annotations

import math
from importlib import import_module
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cumulant import Empirical, FixedShapeGamma, GaussianMixture, Measure
from cumulant.figures import series_color
from cumulant.lab.claims.claim import HOLDS, Claim, Evidence, Picture, Trial, at_most, noted


def experiment(trial: Trial) -> Evidence:
    """Three densities on a line: the library's G and four derivatives against scipy's quad."""
    quad: Any = import_module("scipy.integrate").quad
    special: Any = import_module("scipy.special")
    m, s = torch.tensor([[-1.5, 1.0], [0.3, 0.7]], dtype=torch.float64)
    w = torch.tensor([0.3, 0.7], dtype=torch.float64)
    shape, rate = torch.tensor([2.5, 2.0], dtype=torch.float64)

    def gaussians(x: float) -> float:
        bells = (0.3, -1.5, 0.3), (0.7, 1.0, 0.7)
        return sum(
            p * math.exp(-((x - a) ** 2) / (2 * v)) / math.sqrt(2 * math.pi * v)
            for p, a, v in bells
        )

    def gamma(x: float) -> float:
        return 2**2.5 * x**1.5 * math.exp(-2 * x) / math.gamma(2.5)

    def gumbel(x: float) -> float:
        return math.exp(-x - math.exp(-x))

    # A density without a family is nodes with masses, as attention has keys with weights.
    nodes = torch.linspace(-5, 60, 6501, dtype=torch.float64)
    log_masses = math.log(0.01) - nodes - torch.exp(-nodes)
    laws: dict[str, tuple[Measure, Any, tuple[float, ...]]] = {
        "two Gaussians": (GaussianMixture(m[:, None], s, w.log()), gaussians, (-12, -1.5, 1, 14)),
        "gamma": (FixedShapeGamma(shape, rate), gamma, (0, 1, 8, 60)),
        "Gumbel, as nodes": (Empirical(nodes[:, None], log_masses), gumbel, (-5, 0, 8, 60)),
    }
    y = torch.linspace(-0.9, 0.5, trial.size(15, 5), dtype=torch.float64)

    def transform(h: Any, ends: tuple[float, ...], at: float, power: int, center: float) -> float:
        """∫ e^{yx} (x - center)^power h(x) dx: for power 0, L{h}(-y)."""

        def integrand(x: float) -> float:
            return math.exp(at * x) * (x - center) ** power * h(x)

        return sum(quad(integrand, *piece, epsabs=1e-13)[0] for piece in pairwise(ends))

    normalizer, gaps, mirrored = 0.0, [0.0] * 4, 0.0
    skew: dict[str, tuple[Tensor, list[float]]] = {}
    for name, (measure, h, ends) in laws.items():
        derivatives = _derivatives(measure, y)
        truth: list[list[float]] = []
        for at in y.tolist():
            total = transform(h, ends, at, 0, 0.0)
            center = transform(h, ends, at, 1, 0.0) / total
            two, three, four = (transform(h, ends, at, k, center) / total for k in (2, 3, 4))
            truth.append([math.log(total), center, two, three, four - 3 * two**2])
        off = (derivatives - torch.tensor(truth, dtype=torch.float64)).abs().amax(0).tolist()
        normalizer = max(normalizer, off[0])
        gaps = [max(a, b) for a, b in zip(gaps, off[1:], strict=True)]
        other = measure.log_normalizer(-y[:, None])
        mirrored = max(mirrored, float((other - derivatives[:, 0]).abs().max()))
        skew[name] = derivatives[:, 3], [row[3] for row in truth]
    # For Gumbel's law the transform is known: L{h}(-y) = Γ(1 - y).
    known = torch.tensor(special.gammaln(1 - y.numpy()))
    closed = (laws["Gumbel, as nodes"][0].log_normalizer(y[:, None]) - known).abs().max()

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        grid = np.linspace(-4, 9, 300)
        for i, (name, (_, h, ends)) in enumerate(laws.items()):
            left.plot(
                grid,
                [h(x) if x > ends[0] else 0.0 for x in grid],
                color=series_color(i),
                label=name,
            )
            curve, dots = skew[name]
            right.plot(y, curve, color=series_color(i))
            right.plot(y, dots, "o", ms=4, color=series_color(i))
        left.set(xlabel="x", ylabel="h(x)", ylim=(0, 0.72))
        left.legend(loc="upper right")
        right.set(xlabel="y", ylabel="third derivative of G")

    return Evidence(
        [
            at_most("transform_gap", normalizer, 1e-9, "G against log L{h}(−y) by quadrature"),
            at_most("closed_gap", closed, 1e-9, "G of Gumbel's law against log Γ(1 − y)"),
            at_most("mean_gap", gaps[0], 1e-9, "first derivative against the mean"),
            at_most("variance_gap", gaps[1], 1e-9, "second against the variance"),
            at_most("third_gap", gaps[2], 1e-8, "third against the third cumulant"),
            at_most("fourth_gap", gaps[3], 1e-7, "fourth against the fourth cumulant"),
            noted("mirrored_gap", mirrored, "error of G with L{h}(y) instead: the sign matters"),
        ],
        f"For three densities G is the log Laplace transform at −y to {normalizer:.0e}, and its "
        f"first four derivatives are the cumulants to {max(gaps):.0e}.",
        Picture(
            draw,
            "Three densities, and the third derivative of their G (lines) on the third cumulant of "
            "the tilted law by quadrature (dots).",
        ),
    )


def _derivatives(measure: Measure, y: Tensor) -> Tensor:
    """G and four derivatives at each y, one column each, by autograd."""
    at = y.clone().requires_grad_()
    columns = [measure.log_normalizer(at[:, None])]
    for _ in range(4):
        (slope,) = torch.autograd.grad(columns[-1].sum(), at, create_graph=True)
        columns.append(slope)
    return torch.stack(columns, -1).detach()


CLAIM = Claim(
    id="laplace",
    title="The log Laplace transform",
    statement=(
        "Where the statistic is x itself, a measure h generates an exponential family whose "
        "log-normalizer is the log of its Laplace transform at −y. So G generates cumulants: its "
        "derivatives are those of the tilted law."
    ),
    source="exponential family draft, eq. (3) and (6)",
    formula=r"G(y) = \log \mathcal{L}\{h\}(-y) = \log \int e^{\langle y, x\rangle} h(x)\, dx, "
    r"\qquad G^{(k)}(y) = \kappa_k\left[p(\cdot \mid y)\right]",
    recorded=HOLDS,
    experiment=experiment,
    systems=("Laplace transform",),
    tests=("tests/laws/test_tilted_measures.py", "tests/laws/test_attention_calculus.py"),
)

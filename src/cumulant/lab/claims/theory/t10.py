"""T10: the KL between two tilted laws is a Bregman divergence, of G and of its dual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import distributions as td

import cumulant as cm
from cumulant.figures import INK, MUTED, series_color
from cumulant.lab.claims.claim import Claim, Found, Trial, table
from cumulant.lab.claims.measuring import gap

CLAIM = Claim(
    id="T10",
    title="KL is a Bregman divergence, twice",
    evidence="identity",
    statement="The KL between two tilted laws is the Bregman divergence of G between their "
    "natural parameters and, in reverse order, that of G* between their means: natural "
    "parameter and expected statistic are dual descriptions of one law.",
    source="message passing draft, section 4; main draft, section 2.3",
    formula=r"\operatorname{KL}(p_\eta \| p_{\eta'}) = B_G(\eta', \eta) = B_{G^*}(\mu, \mu'), "
    r"\qquad B_F(a, b) = F(a) - F(b) - \langle\nabla F(b), a - b\rangle",
    recorded="holds",
    tests=("tests/laws/test_duality.py",),
    rules=table("""
      statement:
        natural_gap ≤ 1e-10: KL and the divergence of G, against torch's KL
        dual_gap ≤ 1e-7: the divergence of G*, against torch's KL
        mixture_gap ≤ 1e-7: both, for a mixture, against quadrature
      noted:
        asymmetry: largest |KL(p‖p') − KL(p'‖p)| of that mixture
    """),
    finding="For six families the divergences of G and G* are torch's KL to {natural_gap:.0e} and "
    "{dual_gap:.0e}, for a mixture the KL by quadrature to {mixture_gap:.0e}.",
    caption="One divergence in two coordinates, for a mixture of three Gaussians: the gap between "
    "G and its tangent, and between G* and its tangent with the roles exchanged, are the same KL.",
)


Law = Callable[[Tensor], td.Distribution]
CENTERS, SPREADS = torch.tensor([[-2.0, 0.5, 2.0], [0.3, 0.8, 1.5]], dtype=torch.float64)
MIXTURE = cm.GaussianMixture(CENTERS[:, None], SPREADS)


def families(trial: Trial) -> list[tuple[cm.Measure, Tensor, Tensor, Law]]:
    """Measure, two sets of natural parameters, and the tilted law as textbooks have it."""
    n = trial.size(200, 30)
    a, b = (trial.uniform(2, n, 1) - 0.5).unbind()
    p, rate = torch.tensor([0.3, 2.0], dtype=torch.float64)
    spread = torch.tensor([[1.0, 0.3], [0.3, 2.0]], dtype=torch.float64)
    pushed, aside = trial.normal(2, n, 2).unbind()
    x = trial.normal(15, 3)
    at, other = trial.normal(2, n, 3).unbind()
    gaussian = cm.Gaussian(spread.new_zeros(2), spread)
    return [
        (cm.Poisson(rate), a, b, lambda e: td.Poisson(2 * e[:, 0].exp())),
        (cm.Bernoulli(p), a, b, lambda e: td.Bernoulli(logits=p.logit() + e[:, 0])),
        (cm.Exponential(rate), a, b, lambda e: td.Exponential(2 - e[:, 0])),
        (cm.Geometric(1 - p), a, b, lambda e: td.Geometric(1 - 0.3 * e[:, 0].exp())),
        (gaussian, pushed, aside, lambda e: td.MultivariateNormal(e @ spread, spread)),
        (cm.Empirical(x), at, other, lambda e: td.Categorical(logits=e @ x.T)),
    ]


def quadrature(first: Tensor, second: Tensor) -> Tensor:
    """KL between two tilts of the mixture, on a grid."""
    line = torch.linspace(-20, 20, 8001, dtype=torch.float64)
    bells = torch.exp(-((line - CENTERS[:, None]) ** 2) / (2 * SPREADS[:, None]))
    base = (bells / SPREADS[:, None].sqrt()).sum(0)
    tilted = [base * torch.exp(e * line) for e in (first, second)]
    one, two = (t / torch.trapezoid(t, line)[:, None] for t in tilted)
    return torch.trapezoid(one * (one / two).log(), line)


def bregman(h: cm.Measure, first: Tensor, second: Tensor) -> Tensor:
    """G(η') - G(η) - <η' - η, ∇G(η)>."""
    slope = ((second - first) * h.mean(first)).sum(-1)
    return h.log_normalizer(second) - h.log_normalizer(first) - slope


def dual_bregman(h: cm.Measure, first: Tensor, second: Tensor) -> Tensor:
    """G*(μ) - G*(μ') - <μ - μ', link(μ')>."""
    mean, other = h.mean(first), h.mean(second)
    return h.dual(mean) - h.dual(other) - ((mean - other) * h.link(other)).sum(-1)


def measure(trial: Trial) -> Found:
    """Families with torch's own KL, points by sums, a mixture by quadrature."""
    natural, dual = list[float](), list[float]()
    known = families(trial)
    for h, first, second, law in known:
        truth = td.kl_divergence(law(first), law(second))
        natural += [gap(h.kl(first, second), truth), gap(bregman(h, first, second), truth)]
        dual.append(gap(dual_bregman(h, first, second), truth))
    a, b = (2 * x[:20] for x in known[0][1:3])
    truth = quadrature(a, b)
    ours = torch.stack([MIXTURE.kl(a, b), dual_bregman(MIXTURE, a, b)])
    numbers = {
        "natural_gap": max(natural),
        "dual_gap": max(dual),
        "mixture_gap": gap(ours, truth),
        "asymmetry": gap(truth, quadrature(b, a)),
    }
    return Found(numbers)


def draw(figure: Any, seen: Any) -> None:
    """G and G* of a mixture with the tangents whose gaps are one KL."""
    left, right = figure.subplots(1, 2)
    h, e = MIXTURE, torch.tensor([[-0.5], [1.0]], dtype=torch.float64)  # η and η'
    mean, kl = h.mean(e)[:, 0], float(quadrature(e[:1], e[1:])[0])
    grid = torch.linspace(-1.4, 1.4, 141, dtype=torch.float64)[:, None]
    means = h.mean(grid)
    tangent = h.log_normalizer(e[:1]) + mean[0] * (grid[:, 0] - e[0])
    other = h.dual(mean[1:, None]) + e[1] * (means[:, 0] - mean[1])
    chart = (
        (left, grid[:, 0], h.log_normalizer(grid), tangent, e[:, 0], "η", "G"),
        (right, means[:, 0], h.dual(means), other, mean.flip(0), "μ", "G*"),
    )
    for axes, where, curve, line, (touch, far), name, label in chart:
        axes.plot(where, curve, color=series_color(0), label=label)
        axes.plot(where, line, color=MUTED, linewidth=1.2, label="tangent")
        nearest = int((where - far).abs().argmin())
        ends = [float(line[nearest]), float(curve[nearest])]
        label = f"gap {ends[1] - ends[0]:.3f}"
        axes.plot([far, far], ends, "o-", ms=4, color=series_color(1), label=label)
        axes.plot([touch], [curve[int((where - touch).abs().argmin())]], "o", ms=4, color=INK)
        axes.set(xlabel=name, title=f"KL by quadrature {kl:.3f}")
        axes.legend(loc="upper center")

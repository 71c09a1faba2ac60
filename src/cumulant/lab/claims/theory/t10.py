"""T10: the KL between two tilted laws is a Bregman divergence, of G and of its dual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import distributions as td

import cumulant as cm
from cumulant.figures import INK, MUTED, series_color
from cumulant.lab.claims.claim import HOLDS, Claim, Evidence, Picture, Trial, at_most, noted


def experiment(trial: Trial) -> Evidence:
    """Families with torch's own KL, points by sums, a mixture by quadrature."""
    n = trial.size(200, 30)
    a, b = (trial.uniform(2, n, 1) - 0.5).unbind()
    p, rate = torch.tensor([0.3, 2.0], dtype=torch.float64)
    spread = torch.tensor([[1.0, 0.3], [0.3, 2.0]], dtype=torch.float64)
    pushed_a, pushed_b = trial.normal(2, n, 2).unbind()
    # cm.Measure, natural parameters, and the tilted law as textbooks have it.
    families: list[tuple[cm.Measure, Tensor, Tensor, Callable[[Tensor], td.Distribution]]] = [
        (cm.Poisson(rate), a, b, lambda e: td.Poisson(2 * e[:, 0].exp())),
        (cm.Bernoulli(p), a, b, lambda e: td.Bernoulli(logits=p.logit() + e[:, 0])),
        (cm.Exponential(rate), a, b, lambda e: td.Exponential(2 - e[:, 0])),
        (cm.Geometric(1 - p), a, b, lambda e: td.Geometric(1 - 0.3 * e[:, 0].exp())),
        (
            cm.Gaussian(torch.zeros_like(pushed_a[0]), spread),
            pushed_a,
            pushed_b,
            lambda e: td.MultivariateNormal(e @ spread, spread),
        ),
    ]
    x = trial.normal(15, 3)
    at, other = trial.normal(2, n, 3).unbind()
    families.append((cm.Empirical(x), at, other, lambda e: td.Categorical(logits=e @ x.T)))
    natural, dual = 0.0, 0.0
    for h, first, second, law in families:
        truth = td.kl_divergence(law(first), law(second))
        natural = max(natural, float((h.kl(first, second) - truth).abs().max()))
        natural = max(natural, float((_bregman(h, first, second) - truth).abs().max()))
        dual = max(dual, float((_dual_bregman(h, first, second) - truth).abs().max()))

    centers, spreads = torch.tensor([[-2.0, 0.5, 2.0], [0.3, 0.8, 1.5]], dtype=torch.float64)
    h = cm.GaussianMixture(centers[:, None], spreads)
    line = torch.linspace(-20, 20, 8001, dtype=torch.float64)
    bells = torch.exp(-((line - centers[:, None]) ** 2) / (2 * spreads[:, None]))
    base = (bells / spreads[:, None].sqrt()).sum(0)

    def quadrature(first: Tensor, second: Tensor) -> Tensor:
        tilted = [base * torch.exp(e * line) for e in (first, second)]
        one, two = (t / torch.trapezoid(t, line)[:, None] for t in tilted)
        return torch.trapezoid(one * (one / two).log(), line)

    some_a, some_b = 2 * a[:20], 2 * b[:20]
    truth, back = quadrature(some_a, some_b), quadrature(some_b, some_a)
    ours = torch.stack([h.kl(some_a, some_b), _dual_bregman(h, some_a, some_b)])
    mixture = (ours - truth).abs().max()
    lopsided = (truth - back).abs().max()

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        e = torch.tensor([[-0.5], [1.0]], dtype=torch.float64)  # η and η'
        mean, gap = h.mean(e)[:, 0], float(quadrature(e[:1], e[1:])[0])
        grid = torch.linspace(-1.4, 1.4, 141, dtype=torch.float64)[:, None]
        means = h.mean(grid)
        tangent = h.log_normalizer(e[:1]) + mean[0] * (grid[:, 0] - e[0])
        chart = (
            (left, grid[:, 0], h.log_normalizer(grid), tangent, e[:, 0], "η", "G"),
            (
                right,
                means[:, 0],
                h.dual(means),
                h.dual(mean[1:, None]) + e[1] * (means[:, 0] - mean[1]),
                mean.flip(0),
                "μ",
                "G*",
            ),
        )
        for axes, where, curve, line, (touch, far), name, label in chart:
            axes.plot(where, curve, color=series_color(0), label=label)
            axes.plot(where, line, color=MUTED, linewidth=1.2, label="tangent")
            nearest = int((where - far).abs().argmin())
            ends = [float(line[nearest]), float(curve[nearest])]
            axes.plot(
                [far, far],
                ends,
                "o-",
                ms=4,
                color=series_color(1),
                label=f"gap {ends[1] - ends[0]:.3f}",
            )
            axes.plot([touch], [curve[int((where - touch).abs().argmin())]], "o", ms=4, color=INK)
            axes.set(xlabel=name, title=f"KL by quadrature {gap:.3f}")
            axes.legend(loc="upper center")

    return Evidence(
        [
            at_most(
                "natural_gap", natural, 1e-10, "KL and the divergence of G, against torch's KL"
            ),
            at_most("dual_gap", dual, 1e-7, "the divergence of G*, against torch's KL"),
            at_most("mixture_gap", mixture, 1e-7, "both, for a mixture, against quadrature"),
            noted("asymmetry", lopsided, "largest |KL(p‖p') − KL(p'‖p)| of that mixture"),
        ],
        f"For six families the divergences of G and G* are torch's KL to {natural:.0e} and "
        f"{dual:.0e}, for a mixture the KL by quadrature to {mixture:.0e}.",
        Picture(
            draw,
            "One divergence in two coordinates, for a mixture of three Gaussians: the gap between "
            "G and its tangent, and between G* and its tangent with the roles exchanged, are the "
            "same KL.",
        ),
    )


def _bregman(h: cm.Measure, first: Tensor, second: Tensor) -> Tensor:
    """G(η') - G(η) - <η' - η, ∇G(η)>."""
    slope = ((second - first) * h.mean(first)).sum(-1)
    return h.log_normalizer(second) - h.log_normalizer(first) - slope


def _dual_bregman(h: cm.Measure, first: Tensor, second: Tensor) -> Tensor:
    """G*(μ) - G*(μ') - <μ - μ', link(μ')>."""
    mean, other = h.mean(first), h.mean(second)
    return h.dual(mean) - h.dual(other) - ((mean - other) * h.link(other)).sum(-1)


CLAIM = Claim(
    id="T10",
    title="KL is a Bregman divergence, twice",
    statement=(
        "The KL between two tilted laws is the Bregman divergence of G between their natural "
        "parameters and, with the order exchanged, that of G* between their means: natural "
        "parameter and expected statistic are dual descriptions of one law."
    ),
    source="message passing draft, section 4; main draft, section 2.3",
    formula=r"\operatorname{KL}(p_\eta \| p_{\eta'}) = B_G(\eta', \eta) = B_{G^*}(\mu, \mu'), "
    r"\qquad B_F(a, b) = F(a) - F(b) - \langle\nabla F(b), a - b\rangle",
    recorded=HOLDS,
    experiment=experiment,
    tests=("tests/laws/test_duality.py",),
)

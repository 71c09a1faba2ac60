"""CLIP: the symmetric loss as two likelihoods, and the slope of a learned temperature."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from cumulant import Empirical, attend, contrastive
from cumulant.figures import series_color
from cumulant.lab.claims.claim import Claim, Found, Trial, table
from cumulant.lab.claims.measuring import gap

CLAIM = Claim(
    id="clip",
    title="CLIP",
    evidence="identity",
    statement="CLIP's loss is the mean of two negative log-likelihoods: of the text under the "
    "texts tilted by its image, and of the image under the images tilted by its text.",
    theory="T24",
    source="exponential family draft, after eq. (7); Radford et al. (2021), Figure 3",
    formula=r"\ell = \frac{1}{2N} \sum_i \left[ G_{\mathrm{texts}}(s a_i)"
    r" + G_{\mathrm{images}}(s b_i) - 2 s \langle a_i, b_i \rangle \right], \qquad"
    r" \frac{\partial \ell}{\partial \log s} = \operatorname{E}[s\langle a, b\rangle]"
    r" - s\langle a, b^+\rangle",
    recorded="holds",
    systems=("CLIP",),
    tests=("tests/contrastive/test_info_nce.py",),
    rules=table("""
      statement:
        value_gap ≤ 1e-12: loss against the published code
        gradient_gap ≤ 1e-12: gradients in images, texts and log scale
        likelihood_gap ≤ 1e-12: loss against the mean of both families' negative log-likelihoods
        scale_gap ≤ 1e-12: slope in log scale against E[s] − s⁺
      noted:
        one_sided: how far the loss of the images alone is from it
    """),
    finding="Loss and gradients agree with the published code to {worst:.0e}. The loss is the mean "
    "of both families' negative log-likelihoods, and its slope in the learned scale is the "
    "expected score minus the score of the pairs.",
    caption="The losses of both sides against the inverse temperature, which CLIP learns: they "
    "differ, and their mean, written out, is what info_nce returns.",
)


def published(images: Tensor, texts: Tensor, log_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Radford et al. (2021), Figure 3, line by line: the losses of images and of texts."""
    logits = normalize(images, dim=-1) @ normalize(texts, dim=-1).mT * log_scale.exp()
    labels = torch.arange(len(images))
    return cross_entropy(logits, labels), cross_entropy(logits.mT, labels)


def measure(trial: Trial) -> Found:
    """Embeddings of pairs that share a part: value, gradients, both families, the temperature."""
    n = trial.size(200, 60)
    shared = trial.normal(n, 16)
    images = (shared + 0.5 * trial.normal(n, 16)).requires_grad_()
    # Captions are alike: a common part, which puts some texts near to all images.
    common = trial.normal(1, 16) * (2 * trial.uniform(n, 1))
    texts = (shared + common + 0.5 * trial.normal(n, 16)).requires_grad_()
    log_scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    leaves = (images, texts, log_scale)
    rows, columns = published(*leaves)
    written = (rows + columns) / 2
    ours = contrastive.info_nce(images, texts, temperature=(-log_scale).exp(), symmetric=True)
    slopes = [torch.autograd.grad(loss, leaves, retain_graph=True) for loss in (written, ours)]

    # The two families: texts tilted by an image, images tilted by a text.
    scale = float(log_scale.detach().exp())
    a, b = (normalize(x.detach(), dim=-1) for x in (images, texts))
    positive = scale * (a * b).sum(-1)
    sides = [
        Empirical(keys).log_normalizer(scale * queries) - positive
        for queries, keys in ((a, b), (b, a))
    ]
    # The slope in log scale: what a side expects of its scores less what the pairs have.
    expected = [attend(x, y, scale=scale).score_mean - positive for x, y in ((a, b), (b, a))]

    grid = torch.linspace(-1, 5, 61, dtype=torch.float64)
    curves = torch.tensor([[float(x) for x in published(a, b, t)] for t in grid])
    numbers = {
        "value_gap": gap(ours, written),
        "gradient_gap": max(gap(x, y) for x, y in zip(*slopes, strict=True)),
        "likelihood_gap": gap(torch.stack(sides).mean(), written),
        "scale_gap": gap(torch.stack(expected).mean(), slopes[0][2]),
        "one_sided": gap(rows, written),
    }
    worst = max(numbers["value_gap"], numbers["gradient_gap"])
    return Found(numbers, worst=worst, a=a, b=b, curves=curves, grid=grid)


def draw(figure: Any, seen: Any) -> None:
    """The losses of both sides, and their mean, against the inverse temperature."""
    axes = figure.subplots()
    grid, curves, pair = seen.grid, seen.curves, (seen.a, seen.b)
    for i, name in enumerate(("images ask for texts", "texts ask for images")):
        axes.plot(grid.exp(), curves[:, i], color=series_color(i), linewidth=1, label=name)
    axes.plot(grid.exp(), curves.mean(-1), "--", color=series_color(2), label="mean, written")
    some = grid[::6]
    dots = [contrastive.info_nce(*pair, temperature=(-t).exp(), symmetric=True) for t in some]
    axes.semilogx(some.exp(), dots, "o", color=series_color(2), label="info_nce, symmetric")
    axes.set(xlabel="inverse temperature", ylabel="loss")
    axes.legend()
